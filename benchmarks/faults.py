"""Inject faults into a step with one technique, and report the state that each fault has changed.

The faults are errors, interrupts, full disks, forks and killed processes. They are injected at
places of the step: operators, hooks or system calls. The state after a fault is compared with the
state before it: hooks and patched methods, modes of PyTorch, temporary files, reserved bytes of the
store, streams, the caller's tensors, gradients, and random numbers. Then the step runs again, and
its gradients must be those of a step without a fault.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fault_steps import STEPS, Step
from scoreboard import Row
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from course_lib.offload import DiskStore

PLACES = 3  # places of each kind that a round tries, of some thousand in all
PATIENCE_SECONDS = 600  # limit for a child process; enough on a busy machine


class Injected(Exception):
    """Error that is injected at a place."""


def random_state() -> torch.Tensor:
    """Return the state of PyTorch's random number generators, including that of the GPU."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return torch.cat(states)


@dataclass
class Places:
    """Counts the places of a step, and calls `fault` at one of them.

    Attributes:
        at: Number of the place at which `fault` is called; -1 for no place.
        fault: Function that raises an error, forks, or kills the process.
        phases: Part of the step, or kind of system call, of each place so far.
        numbers: State of the generators at each place, if they are recorded.
    """

    at: int = -1
    fault: Callable[[], object] = lambda: None
    phases: list[str] = field(default_factory=list)
    numbers: list[torch.Tensor] = field(default_factory=list)
    record: bool = False
    updating: int = 0

    def __call__(self, phase: str = "") -> None:
        self.phases.append(phase or self.part())
        if self.record:
            self.numbers.append(random_state())
        if len(self.phases) - 1 == self.at:
            self.fault()

    def part(self) -> str:
        """Return the part of the step that is running, such as "forward"."""
        if self.updating:
            return "update"
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        return "recomputation" if torch.is_grad_enabled() else "backward"

    @contextmanager
    def watching_updates(self) -> Iterator[None]:
        """Detect the start of an optimizer's step, which is the last part of a step."""
        handle = optimizers.register_optimizer_step_pre_hook(
            lambda *_: setattr(self, "updating", 1)
        )
        try:
            yield
        finally:
            handle.remove()


# ---- kinds of places: context managers that call `places()` at each place of their kind


class _Mode(TorchDispatchMode):
    def __init__(self, places: Places):
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.places()
        return func(*args, **(kwargs or {}))


@contextmanager
def operators(step: Step, places: Places) -> Iterator[None]:
    with _Mode(places):
        yield


@contextmanager
def hooks(step: Step, places: Places) -> Iterator[None]:
    """Call `places()` in hooks: before and after each module's forward, at gradients of its output,
    after gradients of parameters, and before and after an optimizer's step."""

    def after(module, args, output) -> None:
        places()
        if output.requires_grad:
            output.register_hook(lambda gradient: places())

    with ExitStack() as stack:
        handles = [
            modules.register_module_forward_pre_hook(lambda module, args: places()),
            modules.register_module_forward_hook(after),
            optimizers.register_optimizer_step_pre_hook(lambda *_: places()),
            optimizers.register_optimizer_step_post_hook(lambda *_: places()),
        ]
        handles += [
            p.register_post_accumulate_grad_hook(lambda p: places())
            for p in step.model.parameters()
        ]
        for handle in handles:
            stack.callback(handle.remove)
        yield


#: Name of a kind of system call in the rows -> its function in `os`, which any thread may call.
SYSTEM_CALLS = {"allocations": "posix_fallocate", "writes": "pwrite"}


@contextmanager
def system_calls(step: Step, places: Places) -> Iterator[None]:
    """Call `places()` at each allocation of disk space and each write to the file of a store."""
    if isinstance(step.store, DiskStore) and step.store.used_bytes == 0:
        # The store would keep its disk space; truncated, it allocates space again in the step.
        step.store._file.truncate(0)
        step.store.file_bytes = 0
    before = {name: getattr(os, name) for name in SYSTEM_CALLS.values()}

    def counted(call: Callable, phase: str) -> Callable:
        def counting(*args):
            places(phase)
            return call(*args)

        return counting

    try:
        for phase, name in SYSTEM_CALLS.items():
            setattr(os, name, counted(before[name], phase))
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


# ---- faults


def error() -> None:
    raise Injected


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # like Ctrl-C, this calls Python's handler


def disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- state that a fault may change


def observed_state(step: Step, folder: Path) -> dict[str, object]:
    """Return the state that must be the same before and after a fault."""
    patched = [
        (name, sorted(vars(module).keys() & {"forward", "__call__"}), len(module._forward_hooks))
        for name, module in step.model.named_modules()
    ]
    each = (modules._global_forward_hooks, modules._global_forward_pre_hooks)
    each += (modules._global_backward_hooks, modules._global_backward_pre_hooks)
    each += (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    storage = {name: id(value) for name, value in vars(torch.UntypedStorage).items()}
    modes = len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    settings = torch.is_grad_enabled(), autocast, torch.get_default_dtype()
    found: dict[str, object] = {
        "hooks": (patched, [*map(len, each)], saved, storage),
        "modes": (*modes, *settings),
        "files": (sorted(folder.iterdir()), open_files(folder)),
        "the caller's tensors": [(t._version, t.detach().clone()) for t in step.batch],
    }
    if step.scaler is not None:
        found["the scaler"] = tuple(step.scaler.state_dict().items())
    if step.device is not None:
        found["streams"] = step.device.current(), len(step.device.races)
    elif torch.cuda.is_initialized():
        found["streams"] = torch.cuda.current_stream()
    return found


def open_files(folder: Path) -> int:
    """Return the number of open files in this folder, including files without a name."""
    count, listing = 0, Path("/proc/self/fd")
    for number in listing.iterdir() if listing.is_dir() else ():
        try:
            count += str(number.readlink()).startswith(str(folder))
        except OSError:  # the descriptor of the listing itself is closed
            continue
    return count


def same(a: object, b: object) -> bool:
    """Return whether two values are equal; tensors are compared by content."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@dataclass
class Bench:
    """A step, its folder, and the results of a call without a fault."""

    step: Step
    folder: Path

    def __post_init__(self):
        self.run()  # creates state that only the first run creates
        recorded = Places(record=True)
        self.gradients = self.run(operators, recorded)
        self.numbers = recorded.numbers
        self.after = [p.detach().clone() for p in self.step.model.parameters()]
        self.end = random_state()
        self.kept_bytes = self.reserved_bytes()

    def run(self, context: Callable | None = None, places: Places | None = None) -> list:
        """Reset and run the step; return the gradients or the updated parameters."""
        self.step.reset()
        with ExitStack() as stack:
            if context is not None:
                if not self.step.symbolic:  # an estimate runs more than one step
                    stack.enter_context(places.watching_updates())
                stack.enter_context(context(self.step, places))
            self.step.call()
        return [p.detach().clone() if p.grad is None else p.grad.clone()
                for p in self.step.model.parameters()]  # fmt: skip

    def changes_after(self, before: dict, at: Places, recorded: Places) -> list[str]:
        """Return the names of the kinds of state that a fault has changed."""
        gc.collect()
        after = observed_state(self.step, self.folder)
        found = [name for name, value in before.items() if not same(value, after[name])]
        step, where = self.step, at.phases[at.at]
        parameters = list(step.model.parameters())
        gradients = [p.grad for p in parameters]
        if step.restores:
            wrong = any(gradient is not None for gradient in gradients)
        else:  # each gradient must be complete or None
            pairs = zip(gradients, self.gradients, strict=True)
            wrong = any(g is not None and not torch.equal(g, whole) for g, whole in pairs)
        found += ["gradients"] if wrong else []
        triples = zip(parameters, step.before, self.after, strict=True)
        whole = all(torch.equal(p, a) or torch.equal(p, b) for p, a, b in triples)
        pairs = zip(parameters, step.before, strict=True)
        unchanged = all(torch.equal(p, a) for p, a in pairs) or where in ("update", *SYSTEM_CALLS)
        found += [] if whole and unchanged else ["parameters"]
        expected = [self.end]  # no draw is lost after the forward pass
        if "forward" in recorded.phases[at.at :]:  # a backward pass that plans the forward pass
            last = max(i for i in range(at.at + 1) if recorded.phases[i] == "forward")
            expected = [recorded.numbers[last]]
        if where in SYSTEM_CALLS:
            expected = self.numbers
        if step.restores:
            expected = self.numbers[:1]
        if not any(torch.equal(random_state(), numbers) for numbers in expected):
            found.append("random numbers")
        if not same(self.run(), self.gradients):
            found.append("the next step")
        # After a failed backward pass, PyTorch may keep its graph until the next backward pass.
        if self.reserved_bytes() != self.kept_bytes:
            found.append("bytes of the store")
        return found

    def reserved_bytes(self) -> int:
        gc.collect()
        return 0 if self.step.store is None else self.step.store.used_bytes

    def try_faults(
        self, context: Callable, fault: Callable, rounds: int
    ) -> tuple[Counter, Counter]:
        """Inject a fault at several places; count the places per phase, and each kind of loss."""
        self.step.reset()  # as before each fault, because a second reset changes the copies
        recorded = Places(record=True)
        self.run(context, recorded)
        tried, lost = Counter(), Counter()
        for number in sample_places(len(recorded.phases), rounds):
            places = Places(number, fault)
            self.step.reset()
            gc.collect()
            before = observed_state(self.step, self.folder)
            try:
                self.run(context, places)
                raised = False
            except (Injected, KeyboardInterrupt, OSError):
                raised = True
            if not raised:
                lost["the error"] += 1
                continue
            tried[places.phases[number]] += 1
            lost.update(self.changes_after(before, places, recorded))
        return tried, lost


def sample_places(count: int, rounds: int) -> list[int]:
    """Return the numbers of the places to try: all places, or a random sample."""
    return sorted(random.Random(count).sample(range(count), min(count, PLACES * rounds)))


# ---- processes: the step in a child that is forked in the middle of it, or is killed


def run_in_child(run: Callable[[], None]) -> int:
    """Run a function in a forked process, and return its exit code, or minus its signal."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            signal.alarm(PATIENCE_SECONDS)
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def try_forks(bench: Bench, rounds: int) -> tuple[Counter, Counter]:
    """Fork at operators of the step; parent and child continue, and must both get the right
    gradients. A child that uses the parent's store must get an error that says so."""
    recorded = Places()
    bench.run(operators, recorded)
    tried, lost = Counter(), Counter()
    for number in sample_places(len(recorded.phases), rounds):
        inside: list[int] = []  # the process, and 0 in the child

        def fork(inside: list[int] = inside) -> None:
            inside.append(os.fork())
            if not inside[0]:
                signal.alarm(PATIENCE_SECONDS)

        before = observed_state(bench.step, bench.folder)
        try:
            right = same(bench.run(operators, Places(number, fork)), bench.gradients)
        except ValueError as error:
            right = "forked" in str(error) and not inside[0]
        finally:
            if inside and not inside[0]:
                os._exit(0 if right else 1)
        after = observed_state(bench.step, bench.folder)
        lost.update(name for name, value in before.items() if not same(value, after[name]))
        lost.update([] if right else ["the parent's step"])
        ended = os.waitstatus_to_exitcode(os.waitpid(inside[0], 0)[1])
        lost.update([] if ended == 0 else ["the child's step"])
        tried[recorded.phases[number]] += 1
    return tried, lost


def try_kills(name: str, rounds: int) -> tuple[Counter, Counter]:
    """Kill a process when it allocates space for its offload file or writes to the file; no file
    may remain."""
    tried, lost = Counter(), Counter()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(2 * rounds):
        with tempfile.TemporaryDirectory() as folder:

            def run(folder: str = folder, number: int = number) -> None:
                step = STEPS[name](Path(folder))
                step.reset()
                with system_calls(step, Places(number, kill)):
                    step.call()

            if run_in_child(run) == -signal.SIGKILL:
                tried["system calls"] += 1
                lost.update(["files"] * any(Path(folder).iterdir()))
    return tried, lost


# ---- rows

KINDS = (
    ("error in an operator", operators, error),
    ("Ctrl-C in an operator", operators, interrupt),
    ("error in a hook", hooks, error),
    ("Ctrl-C in a hook", hooks, interrupt),
    ("disk full", system_calls, disk_full),
)


def row(name: str, what: str, tried: Counter, lost: Counter) -> Row:
    order = ("forward", "recomputation", "backward", "update", *SYSTEM_CALLS, "system calls")
    places = ", ".join(f"{part} {tried[part]}" for part in order if tried[part])
    told = ", ".join(f"{thing} ({times} times)" for thing, times in lost.most_common())
    total = sum(tried.values())
    return Row(name, what, note=f"{total} places ({places}); lost: {told or 'nothing'}")


def of_step(name: str, rounds: int, device: str = "cpu") -> Iterator[Row]:
    """Yield the rows of one technique. On "cuda" there is no row on forks, because CUDA does not
    work in a forked process."""
    gc.collect()
    gc.freeze()  # speeds up the garbage collection after each fault
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device(device):
            step = STEPS[name](Path(folder))
        forks = device == "cpu" and step.forks
        writes = isinstance(step.store, DiskStore)
        try:
            bench = Bench(step, Path(folder))
            for what, context, fault in KINDS:
                places = {operators: not step.symbolic, hooks: True, system_calls: writes}
                if places[context]:
                    yield row(name, what, *bench.try_faults(context, fault, rounds))
            if forks:
                yield row(name, "fork", *try_forks(bench, min(rounds, 4)))
        finally:
            step.close()
            gc.unfreeze()
    if writes and forks:
        yield row(name, "killed process", *try_kills(name, rounds))


def rows(rounds: int) -> Iterator[Row]:
    # A shell makes a command that it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in STEPS:
                yield from of_step(name, rounds)
    finally:
        signal.signal(signal.SIGINT, before)
