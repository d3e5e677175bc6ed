// A CUDA runtime without a device: memory is a count of bytes. As much of it as PyTorch's caching allocator calls
// when one thread allocates and frees on one stream; what is not here is never called.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>
#include <string>

namespace {
const size_t kPage = size_t(2) << 20;
size_t used = 0;
size_t next_address = size_t(1) << 40;  // rises: each segment lies above all before it
std::map<size_t, size_t> segments;      // address -> bytes
std::map<CUmemGenericAllocationHandle, size_t> pages;

size_t capacity() {
  static const size_t bytes = strtoull(getenv("CAPACITY_BYTES"), nullptr, 10);
  return bytes;
}

bool take(size_t bytes) {
  const bool fits = bytes <= capacity() - used;
  used += fits ? bytes : 0;
  return fits;
}

size_t place(size_t bytes) {
  const size_t address = next_address;
  next_address += (bytes + kPage - 1) / kPage * kPage;
  return address;
}

// ---- of the driver, which expandable segments use

CUresult nothing() { return CUDA_SUCCESS; }

CUresult reserve_addresses(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = place(bytes);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  static CUmemGenericAllocationHandle made = 0;
  pages[*handle = ++made] = bytes;
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  used -= pages.at(handle);
  pages.erase(handle);
  return CUDA_SUCCESS;
}

CUresult no_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult error_text(CUresult, const char** text) {
  *text = "an error of the driver";
  return CUDA_SUCCESS;
}
}  // namespace

extern "C" {
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (!take(bytes)) return cudaErrorMemoryAllocation;
  const size_t address = place(bytes);
  segments[address] = bytes;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  used -= segments.at(reinterpret_cast<size_t>(pointer));
  segments.erase(reinterpret_cast<size_t>(pointer));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity();
  *free = capacity() - used;
  return cudaSuccess;
}

// Triton's headers may be of another CUDA than torch is built with. CUDA 12 calls this function _v2, and its properties
// are longer than those of CUDA 13, so only the one that the allocator reads is written.
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int) {
  of->totalGlobalMem = capacity();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* of, int device) { return cudaGetDeviceProperties(of, device); }

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = *most = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", (void*)reserve_addresses}, {"cuMemCreate", (void*)create},
      {"cuMemRelease", (void*)release},                  {"cuDeviceGetAttribute", (void*)no_attribute},
      {"cuGetErrorString", (void*)error_text},
  };
  const auto found = known.find(name);
  *function = found == known.end() ? (void*)nothing : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
