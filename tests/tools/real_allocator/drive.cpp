// Reads one command a line, "a NAME BYTES" (allocate), "f NAME" (free) or "e" (empty the cache), and prints after each
// what PyTorch's caching allocator says: its error, its statistics, its segments with their blocks. The last line is its
// history: the size and the number of each action.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <map>
#include <string>

namespace {
using c10::CachingAllocator::Stat;

void print(const char* name, const char* pool, const Stat& of) {
  const long parts[] = {of.current, of.peak, of.allocated, of.freed};
  const char* names[] = {"current", "peak", "allocated", "freed"};
  for (int i = 0; i < 4; ++i) printf("%s%s.%s=%ld ", name, pool, names[i], parts[i]);
}

void print(const char* name, const c10::CachingAllocator::StatArray& of) {
  const char* pools[] = {".all", ".small_pool", ".large_pool"};
  for (int i = 0; i < 3; ++i) print(name, pools[i], of[i]);
}
}  // namespace

int main() {
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  // Expandable segments: without the first, PyTorch asks NVML; without the second, 2.13 refuses them.
  using namespace c10::cuda::CUDACachingAllocator;
  CUDAAllocatorConfig::set_expandable_segments_handle_type(Expandable_Segments_Handle_Type::POSIX_FD);
#ifdef HAS_P2P_CACHE
  c10::cuda::detail::init_p2p_access_cache(1);
#endif
  allocator->recordHistory(true, nullptr, 1 << 20, RecordContext::NEVER, true, {});
  std::map<long, void*> blocks;
  char command = 0;
  while (scanf(" %c", &command) == 1) {
    std::string error;
    long name = 0;
    size_t bytes = 0;
    if (command == 'a' && scanf("%ld %zu", &name, &bytes) == 2) {
      try {
        blocks[name] = allocator->raw_alloc(bytes);
      } catch (const c10::OutOfMemoryError& problem) {
        error = problem.what_without_backtrace();
      }
    } else if (command == 'f' && scanf("%ld", &name) == 1) {
      allocator->raw_delete(blocks.at(name));
      blocks.erase(name);
    } else if (command == 'e') {
      allocator->emptyCache();
    } else {
      return 2;
    }
    const auto stats = allocator->getDeviceStats(0);
    printf("%s\t", error.c_str());
    print("allocation", stats.allocation);
    print("segment", stats.segment);
    print("active", stats.active);
    print("inactive_split", stats.inactive_split);
    print("allocated_bytes", stats.allocated_bytes);
    print("reserved_bytes", stats.reserved_bytes);
    print("active_bytes", stats.active_bytes);
    print("inactive_split_bytes", stats.inactive_split_bytes);
    print("requested_bytes", stats.requested_bytes);
    print("oversize_allocations", "", stats.oversize_allocations);
    print("oversize_segments", "", stats.oversize_segments);
    printf("num_alloc_retries=%ld num_ooms=%ld num_sync_all_streams=%ld num_device_alloc=%ld num_device_free=%ld\t",
           stats.num_alloc_retries, stats.num_ooms, stats.num_sync_all_streams, stats.num_device_alloc,
           stats.num_device_free);
    for (const auto& segment : allocator->snapshot({0, 0}, false).segments) {
      printf("%s", segment.is_large ? "large" : "small");
      for (const auto& block : segment.blocks) printf(" %s%zu", block.allocated ? "+" : "-", block.size);
      printf(";");
    }
    printf("\n");
  }
  const auto snapshot = allocator->snapshot();
  for (const auto& entry : snapshot.device_traces.at(0)) {
    if (entry.action_ != TraceEntry::SNAPSHOT) printf("%zu %d;", entry.size_, int(entry.action_));
  }
  printf("\n");
}
