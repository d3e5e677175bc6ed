"""The exercises of lesson 04."""

import gc
import random
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from course_lib._torch.modes import disable_current_modes
from course_lib.lessons.ledger import PARAMETERS
from course_lib.lessons.work import WorkLimit
from course_lib.offload import Store
from course_lib.simulated import SimulatedDevice
from course_lib.simulated.operators import HOST_READS
from course_lib.teaching import Verdict, text
from course_lib.teaching.exercises import (
    Messages,
    cases,
    draw_case,
    exercise,
    not_answered,
    numbers,
    throughout,
    wrong,
)
from course_lib.teaching.exercises.probes import uneven_gradient

from .simulation import clock

say = Messages(__file__)

# The time of a step

Time = Callable[..., Any]


def _step(
    forward: Time = lambda f, c: max(f, 2 * c),
    p0: Time = lambda g, c: g + 2 * c,
    p1: Time = lambda g, c: c + max(g, c),
    p2: Time = lambda g, c: max(g, 2 * c),
) -> Time:
    """Return the formula of the time of forward and backward, `function(L, f, g, c, p)`.

    L is the number of layers, and p is the number of storages that are fetched ahead. The other
    arguments are times: f of a layer's matrix product in forward, g of its matrix products in
    backward, and c of one copy.

    In forward, the two copies of a layer overlap with the layer's matrix product. In backward, the
    layer's two matrix products take g together, and its two copies take c each. With p = 0 both
    copies run before the matrix products. With p = 1 one copy overlaps with the matrix products,
    and with p = 2 both copies do. The first layer computes no gradient of its input, which saves
    the time of one matrix product, f.

    Args:
        forward: Function of f and c: the time of a layer's forward.
        p0, p1, p2: Functions of g and c: the time of a layer's backward for p = 0, 1 and 2.
    """
    return lambda L, f, g, c, p: L * (forward(f, c) + (p0, p1, p2)[p](g, c)) - f


_step_time = _step()
#: Mistake -> formula with that mistake
_TIMES: dict[str, Time] = {
    "no_copies": lambda L, f, g, c, p: L * (f + g),
    "all_at_once": lambda L, f, g, c, p: max(L * (f + g), 4 * L * c),
    "always_p2": lambda L, f, g, c, p: _step_time(L, f, g, c, 2),
    "always_p0": lambda L, f, g, c, p: _step_time(L, f, g, c, 0),
    "one_storage": lambda L, f, g, c, p: L * (max(f, c) + (max(g, c) if p else g + c)),
    "sum_in_forward": _step(forward=lambda f, c: f + 2 * c),
    "f_in_backward": lambda L, f, g, c, p: _step_time(L, f, f, c, p),
    "two_f_in_backward": lambda L, f, g, c, p: _step_time(L, f, 2 * f, c, p),
    "backward_alone": _step(forward=lambda f, c: 0),
    "product_with_p1": _step(p1=lambda g, c: g + c),
    # the formulas if copies never took longer than matrix products
    "products_alone": lambda *case: tuple(
        time(*case)
        for time in (
            _step(p1=lambda g, c: g + c, p2=lambda g, c: g),
            _step(lambda f, c: f, p1=lambda g, c: g + c, p2=lambda g, c: g),
            _step(p2=lambda g, c: g),
            _step(lambda f, c: f),
        )
    ),
    "one_copy_with_p2": _step(p2=max),
    "one_copy_in_backward": _step(p0=lambda g, c: g + c, p1=max, p2=max),
    "both_copies_with_p1": _step(p1=lambda g, c: max(g, 2 * c)),
    "waits_twice_with_p1": _step(p1=lambda g, c: g + 2 * c),
    "fetches_ahead_with_p0": _step(p0=lambda g, c: c + max(g, c)),
    "one_copy_in_forward": _step(forward=max),
    "one_layer": lambda L, f, g, c, p: _step_time(L, f, g, c, p) / L,
    "milliseconds": lambda L, f, g, c, p: 1000 * _step_time(L, f, g, c, p),
}


def _draw_times(rng: random.Random) -> tuple[int, float, float, float]:
    f, g, c = (rng.randint(1, 18) / 2 for _ in range(3))
    return rng.randint(900, 1100), f, g, c


def _time_cases() -> list[tuple]:
    """Return test cases for `step_time`: times from the simulated clock, and 999 layers.

    With 999 layers the start and the end of the step hardly matter. Each of f, g and c is the
    longest time in at least one of these cases, and g is never 2 f.
    """
    lengths = ((2.0, 7.0, 0.5), (2.0, 7.0, 2.5), (2.0, 7.0, 6.0), (2.0, 7.0, 9.0), (9.0, 4.0, 1.5))
    links = [(16, 1.0, 2.0, c) for c in (0.25, 0.5, 1.0, 2.0)]
    sizes = cases([(999, *times) for times in lengths], _draw_times)
    return [(*case, p) for case in (*links, *sizes) for p in (0, 1, 2)]


@numbers(
    {name: throughout(time, tolerance=0.04) for name, time in _TIMES.items()},
    cases=_time_cases,
    tolerance=lambda L, *_: 0.09 if L == 16 else 0.01,
    within=lambda: WorkLimit(10_000, say("step_time.slow", limit=10_000)),
    right_values=lambda answers: {
        "worst": max(
            abs(float(seconds) / clock(16, c, p) - 1)
            for (L, _, _, c, p), seconds in answers
            if L == 16
        )
    },
)
def check_step_time(L: int, f: float, g: float, c: float, p: int) -> float:
    """Check the learner's formula for the time of forward and backward with offloaded activations.

    The decorated function returns the right time, and the decorator `numbers` turns it into a
    check. For 16 layers, the learner's `step_time(L, f, g, c, p)` is compared with a simulation,
    with a tolerance of 9%. For about 1000 layers, it is compared with the right formula, with a
    tolerance of 1%, because the start and the end of the step hardly matter there.

    Args:
        L: Number of layers.
        f, g: Seconds of a layer's matrix products in forward and in backward.
        c: Seconds of copying one storage. Each layer copies two storages in each direction.
        p: Number of storages that are fetched ahead: 0, 1 or 2.
    """
    return clock(16, c, p) if L == 16 else _step_time(L, f, g, c, p)


class _RecordingStore(Store):
    """A lower tier that copies at once and records the address of each tensor that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def write(self, room: Any, data: Tensor) -> Callable[[], None]:
        self.addresses.append(data.data_ptr())
        with disable_current_modes():
            room.place = data.clone()
        return lambda: None

    def read(self, room: Any, data: Tensor) -> Callable[[], None]:
        data.copy_(room.place)
        return lambda: None


@exercise()
def check_offloading(function: Any) -> Verdict:
    """Check the learner's saved-tensor hooks that offload activations.

    The hooks must copy each version of a storage only once, although several saved tensors may
    share it. A storage gets a new version when it is changed in place. The hooks must not copy
    parameters, and must release each copy as soon as backward no longer needs it.

    Args:
        function: Function that is called as `function(store, stay)`, and returns the hooks as a
            context manager. `store` receives the copies, and `stay` is the set of the parameters'
            storages.
    """
    linear = nn.Linear(128, 128)
    x = torch.linspace(-1, 1, 128 * 128).view(128, 128).requires_grad_()
    uneven, seen = uneven_gradient(x), []
    run = partial(_program, linear, x, seen, torch.Tensor.clone)
    parameters = {each.untyped_storage().data_ptr() for each in linear.parameters()}
    large, least = _count_saved_storages(run, parameters)
    wanted = torch.autograd.grad(run(torch.enable_grad()), (x, *linear.parameters()), uneven)
    store, stay = _RecordingStore(), {each.untyped_storage() for each in linear.parameters()}
    context = function(store, stay)
    if context is ...:
        return not_answered()
    is_context = hasattr(context, "__enter__")
    say.reject_if(not is_context, "offloading.no_hooks", kind=type(context).__name__)
    out = _program(linear, x, seen, _at_one_address(), context)
    if any(each() is not None for each in seen):
        gc.collect()  # the answer's own objects may refer to each other
    held = sum(each() is not None for each in seen)
    moved = len(store.addresses)
    if not moved and getattr(context, "pack_hook", lambda tensor: None)(x) is x:  # unchanged
        return not_answered()
    if not moved:
        say.wrong("offloading.nothing_moved")
    say.reject_if(parameters & set(store.addresses), "offloading.parameter")
    if held:
        say.wrong("offloading.held", hint="offloading.return_room", held=held, count=len(seen))
    say.reject_if(store.stats.bytes_up, "offloading.copied_back_at_once")
    out.backward(uneven)
    found = (x.grad, *(each.grad for each in linear.parameters()))
    moved_bytes = store.stats.bytes_down
    if not all(a is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)):
        say.reject_if(moved_bytes < least, "offloading.address_used_again")
        say.wrong("offloading.another_view")
    twice = moved_bytes > least + 64
    say.reject_if(twice, "offloading.moved_twice", moved=moved, large=large)
    del out
    if store.used_bytes:
        gc.collect()
    say.reject_if(store.used_bytes, "offloading.rooms_kept", count=store.used_bytes)
    say.reject_if(not _is_right_after_change(function), "offloading.old_version")
    return say.right("offloading.right", large=large)


def _program(
    linear: nn.Module,
    x: Tensor,
    seen: list[weakref.ref],
    placed: Callable[[Tensor], Tensor],
    context: Any,
) -> Tensor:
    """Run a program that saves different kinds of tensors; return its output.

    The program saves two views of one storage, a weight, and a part of a storage. Then it saves
    several storages that `placed` creates, one after the other.
    """
    with context:
        y = x * 2
        sine, turned = y.sin(), y.t().exp()  # y is saved again, transposed
        z = linear(sine)
        for _ in range(3):
            z = z.tanh()
        part = turned[1:, ::2].square().sum()
        factors_seen = []
        for row in range(5):
            factors = placed(sine.detach().roll(row, 0))
            part = part + (y * factors).sum()
            factors_seen.append(weakref.ref(factors.untyped_storage()))
            del factors  # the next storage may reuse its memory
        seen[:] = [
            *factors_seen,
            *(weakref.ref(each.untyped_storage()) for each in (y, sine, turned)),
        ]
        return z.cos() * part


def _count_saved_storages(run: Callable[[Any], Tensor], parameters: set[int]) -> tuple[int, int]:
    """Return the number of the storages that autograd saves in `run`, and their bytes.

    Parameters and scalars are not counted.
    """
    kept: list[Tensor] = []  # keeps all tensors alive, so no address is reused
    run(saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    large = [
        each
        for address, each in storages.items()
        if address not in parameters and each.nbytes() > 4
    ]
    return len(large), sum(each.nbytes() for each in large)


def _at_one_address() -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to a new storage at the address of the previous one.

    Like an allocator, the function uses another address if the previous storage has not been freed.
    """
    memory, previous = numpy.empty((128, 128), dtype=numpy.float32), lambda: None

    def move(tensor: Tensor) -> Tensor:
        nonlocal memory, previous
        if previous() is not None:
            memory = numpy.empty_like(memory)
        memory[:] = tensor.numpy()
        moved = torch.from_numpy(memory)
        previous = weakref.ref(moved.untyped_storage())
        return moved

    return move


def _is_right_after_change(function: Callable) -> bool:
    """Return whether the gradient is right if a storage is saved, changed in place and saved again.

    Autograd allows this, because backward never uses the first saved version.
    """
    linear = nn.Linear(64, 64, bias=False)
    stay = {linear.weight.untyped_storage()}

    def gradient(context: AbstractContextManager) -> Tensor:
        data = torch.linspace(-1, 1, 64 * 64).view(64, 64).clone()
        with context:
            first = linear(data)  # `first` keeps a graph alive, as an earlier batch may
            data.mul_(2)
            second = linear(data).square().sum()
        (found,) = torch.autograd.grad(second, linear.weight)
        del first
        return found

    return torch.equal(gradient(function(_RecordingStore(), stay)), gradient(nullcontext()))


class _RecordingDevice(SimulatedDevice):
    """A simulated device that records all copies, and all waits of the host and of compute."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.finished = self.waited = self.copied = 0
        self.made_before: int | None = None  # samples made before the first wait of the host

    def finish(self, event: Any) -> None:
        if self.finished == 0:
            self.made_before = len(self.samples)
        self.finished += 1
        super().finish(event)

    def wait(self, event: Any) -> None:
        self.waited += self.current() is self._compute
        super().wait(event)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        self.copied += 1
        super().transfer(target, source)


#: Program -> message if its wait is missing, and how often the host may wait, including `tolist`
_PROGRAMS = {
    "read": ("waits.host_reads", 2),
    "use": ("waits.product_reads", 0),
    "let_go": ("waits.used_again", 2),
}
#: Messages that name the mistake precisely, so no hint follows
_WITHOUT_HINT = {
    f"waits.{name}" for name in ("host_waits", "stream_waits", "nothing", "no_list", "reads_device")
}


@exercise()
def check_waits(functions: Any) -> Verdict:
    """Check the waits that the learner has added to three programs, one wait per program.

    The programs copy data between host and device on several streams. They must have no race and
    return the right results, and the host must not wait more often than necessary.

    Args:
        functions: The three programs, in the order of the exercise.
    """
    three = isinstance(functions, tuple | list) and len(functions) == len(_PROGRAMS)
    say.reject_if(not three, "waits.three_functions")
    found = {}
    for name, function in zip(_PROGRAMS, functions, strict=True):
        problems = (
            _problem(name, function, mode) for mode in ({}, {"late": True}, {"early": True})
        )
        found[name] = next((problem for problem in problems if problem is not None), None)
    unchanged = [unordered for unordered, _ in _PROGRAMS.values()]
    if list(found.values()) in (unchanged, ["waits.nothing"] * len(_PROGRAMS)):
        return not_answered()
    for name, problem in found.items():
        if problem is not None:
            message = text("{name}: {message}", name=f"`{name}`", message=say(problem))
            return wrong(message, exact=problem in _WITHOUT_HINT)
    return say.right("waits.right")


class _DeviceReads(TorchFunctionMode):
    """A mode that counts how often the host reads device memory, for example by `tolist`."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in HOST_READS and self.device.holds(args[0])
        return function(*args, **(kwargs or {}))


def _problem(name: str, function: Any, mode: Mapping[str, bool]) -> str | None:
    """Return a message about the mistake of a program on a device with options `mode`, or None."""
    unordered, waits = _PROGRAMS[name]
    values = torch.linspace(-1, draw_case(2.0, lambda rng: rng.uniform(1, 2)), 1000)
    with _RecordingDevice(**mode) as device:
        if name == "use":
            given = device.pinned(values.shape, values.dtype).copy_(values)
        else:
            given = device.move(values)
        device.finished = device.waited = device.copied = 0
        before, made = device.live_bytes, len(device.samples)
        try:
            with _DeviceReads(device) as reads:
                found = function(device, given)
            finished, waited, copied = device.finished, device.waited, device.copied
            too_early = finished > 0 and device.made_before != len(device.samples)
            made = len(device.samples) - made
            above = device.peak_bytes - before
            if isinstance(found, Tensor) and name == "use":
                host = device.pinned(found.shape, found.dtype)
                device.finish(device.copy(host, found, "down"))
                found = host.tolist()
            races = list(device.races)
        finally:
            device.races.clear()
    if found is None or found is ...:
        return "waits.nothing"
    if not copied:
        return "waits.no_copy"
    if reads.count:
        return "waits.reads_device"
    if name == "let_go" and (made < 2 or above >= 2 * values.nbytes):
        return "waits.another_order"
    if races:
        host_reads = name == "let_go" and finished < waits  # the unchanged program has one `finish`
        return "waits.host_reads" if host_reads else unordered
    if name != "use" and isinstance(found, Tensor):
        return "waits.no_list"
    if not isinstance(found, list) or found != (values * 2).tolist():
        return "waits.wrong_numbers"
    if finished > waits or (name == "let_go" and too_early):
        return "waits.host_waits"
    return "waits.stream_waits" if name == "read" and waited else None


# Pages of the optimizer's state

#: Page size in MiB -> the peak of `step()` for the course's decoder; a test measures it again.
STEP_PEAKS = {32: 114_205_072, 16: 103_682_448, 8: 76_304_784, 4: 67_108_240}
#: Mistake -> formula with that mistake: a function of the number of parameters and the page's bytes
_PAGES: dict[str, Callable[[int, int], Any]] = {
    "one_page": lambda n, page: (8 * n + page, 8 * n + min(page, 8 * n)),
    "two_pages": lambda n, page: (8 * n + 2 * page, 8 * n + min(2 * page, 8 * n)),
    "more_than_the_state": lambda n, page: (
        8 * n + 3 * page,
        8 * n + min(3, -(-8 * n // page)) * page,  # rounded up to whole pages
        8 * n + 3 * min(page, 8 * n),
    ),
    "four_bytes": lambda n, page: 4 * n + min(3 * page, 8 * n),
    "state_alone": lambda n, page: min(3 * page, 8 * n),
    "all_of_the_state": lambda n, page: 16 * n,
    "one_moment": lambda n, page: 8 * n + min(3 * page, 4 * n),
    "no_state": lambda n, page: 8 * n,
}


def _page_cases() -> list[tuple[int, int]]:
    pages = ((50_000_000, 16 << 20), (50_000_000, 1 << 30), (7_000_000_000, 1 << 30))
    pages = cases(pages, lambda rng: (rng.randrange(10**8, 10**9), rng.randint(8, 64) << 20))
    return [*pages, *((PARAMETERS, mib << 20) for mib in STEP_PEAKS)]


@numbers(
    {name: throughout(peak, tolerance=0.001) for name, peak in _PAGES.items()},
    cases=_page_cases,
    tolerance=lambda n, page: 0.06 if n == PARAMETERS else 0.001,
    in_bytes=True,
    place="place",
)
def check_peak_in_step(parameters: int, page_bytes: int) -> int:
    """Check the learner's formula for the peak of an optimizer step with offloaded state.

    The whole optimizer state is offloaded, in pages of equal size. The formula must be within 6% of
    the measured peak of the course's decoder. The decorated function returns the right peak in
    bytes, and the decorator `numbers` turns it into a check.

    Args:
        parameters: Number of parameters.
        page_bytes: Bytes of a page.
    """
    if parameters == PARAMETERS:
        return STEP_PEAKS[page_bytes >> 20]
    return 8 * parameters + min(3 * page_bytes, 8 * parameters)
