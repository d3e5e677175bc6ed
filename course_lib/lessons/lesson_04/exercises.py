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
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.lessons.ledger import PARAMETERS
from course_lib.lessons.work import WorkLimit
from course_lib.offload import Store
from course_lib.simulated import SimulatedDevice
from course_lib.simulated.operators import HOST_READS
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import (
    WrongAnswer,
    cases,
    draw_case,
    exercise,
    not_answered,
    right,
    wrong,
)

from .simulation import clock

#: Verdict on a mistake -> the formula with that mistake, or several such formulas.
Mistakes = Mapping[str, Callable[..., float] | tuple[Callable[..., float], ...]]


def _differs(
    function: Any,
    wanted: Mapping[tuple, tuple[float, float]],
    mistakes: Mistakes,
    close: float,
    case_is: Callable[..., str],
    in_bytes: bool = False,
) -> tuple[Verdict | None, dict[tuple, Any]]:
    """Compare a function of numbers with the right values.

    Args:
        function: The reader's function.
        wanted: Case -> right value, and a relative tolerance.
        mistakes: Mistakes to look for. The verdict is that of the first one whose formula gives the
            reader's results in all cases, within `close`.
        close: Relative tolerance for `mistakes`.
        case_is: Function that describes a case.
        in_bytes: Whether bytes are expected, so that other units are named.

    Returns:
        The verdict, or None if the function is right; and its result for each case.
    """
    given = {case: function(*case) for case in wanted}
    empty = [case for case, value in given.items() if value is None or value is ...]
    if len(empty) == len(given):
        return not_answered(), given
    if empty:
        message = text("{case}: your function returned nothing.", case=case_is(*empty[0]))
        return wrong(message, exact=True), given
    for case, (value, tolerance) in wanted.items():
        verdict = expect_number(given[case], value, tolerance=tolerance, in_bytes=in_bytes)
        if verdict.exact and not verdict:
            return verdict, given
        if not verdict:
            for message, formulas in mistakes.items():
                for formula in formulas if isinstance(formulas, tuple) else (formulas,):
                    if all(
                        expect_number(each, formula(*at), tolerance=close)
                        for at, each in given.items()
                    ):
                        return wrong(text("Not yet. {reason}", reason=message), exact=True), given
            return (
                wrong(text("{case}: {message}", case=case_is(*case), message=verdict.message)),
                given,
            )
    return None, given


# The time of a step
# --------------------------------------------------------------------------------------------------


def _backward(g: float, c: float, p: int) -> float:
    """Return the time of a layer's backward: its products take g, its two copies c each.

    With p = 0 both copies come before the products, with p = 1 one of them runs next to the
    products, and with p = 2 both do.
    """
    return {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]


def _step_time(layers: int, f: float, g: float, c: float, p: int) -> float:
    """Return the time of forward and backward.

    In forward both copies run next to the product. The first layer computes no gradient of its
    input, which saves the time of one product, f.
    """
    return layers * max(f, 2 * c) + layers * _backward(g, c, p) - f


def _one_copy(layers: int, f: float, g: float, c: float, p: int) -> float:
    """Return the time of forward and backward of layers that save only one storage."""
    return layers * max(f, c) + layers * (g + c if p == 0 else max(g, c))


def _with_backward(
    times: Mapping[int, Callable[[float, float], float]], *, short_copies: bool = False
) -> Callable[..., float]:
    """Return the formula of the step's time with a mistake in the time of a layer's backward.

    Args:
        times: p -> the wrong time, a function of g and c.
        short_copies: Whether a layer's forward takes f even if the copies take longer.
    """

    def time(layers: int, f: float, g: float, c: float, p: int) -> float:
        extra = times[p](g, c) - _backward(g, c, p) if p in times else 0.0
        extra += f - max(f, 2 * c) if short_copies else 0.0
        return _step_time(layers, f, g, c, p) + layers * extra

    return time


_PRODUCTS = {1: lambda g, c: g + c, 2: lambda g, c: g}  # as if copies never took longer

_TIMES: Mistakes = {
    "You left out the copies.": lambda layers, f, g, c, p: layers * (f + g),
    "You took the longer of all products and all copies. That holds only if every copy is"
    " ready at once. In backward, the products wait for copies.": lambda layers, f, g, c, p: max(
        layers * (f + g), 4 * layers * c
    ),
    "You used the time of p = 2 for every p. With p = 0 or 1, backward waits for copies,"
    " however fast the link is.": (lambda layers, f, g, c, p: _step_time(layers, f, g, c, 2)),
    "You used the time of p = 0 for every p. With p = 2, both copies for the next product run"
    " at the same time as this product.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, 0)
    ),
    "You counted one storage per layer. A layer saves two, the inputs of Linear and of GELU,"
    " and each is copied to the host and back.": _one_copy,
    "In forward you added the copies to the products. They run at the same time, so take the"
    " longer of the two.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, p) + layers * min(f, 2 * c)
    ),
    "You took f for a layer's backward. It has its own time, g.": lambda layers, f, g, c, p: (
        _step_time(layers, f, f, c, p)
    ),
    "You took 2 f for a layer's backward. Use g, because backward does not always take twice"
    " as long as forward.": (lambda layers, f, g, c, p: _step_time(layers, f, 2 * f, c, p)),
    "You gave the time of backward alone. Add that of forward.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, p) - layers * max(f, 2 * c)
    ),
    "With p = 1 one copy runs next to the product, so take the longer of the two. You always"
    " took the product, but that may be the shorter one.": _with_backward({1: lambda g, c: g + c}),
    "You took the time of the products wherever copies run next to them. On a slow link the"
    " copies take longer.": (
        _with_backward(_PRODUCTS),
        _with_backward(_PRODUCTS, short_copies=True),
        _with_backward({2: lambda g, c: g}),
        _with_backward({}, short_copies=True),
    ),
    "With p = 2 you took the longer of the product and one copy. Both copies run next to the"
    " product, one after the other.": _with_backward({2: lambda g, c: max(g, c)}),
    "In backward you counted one copy per layer. There are two.": _with_backward(
        {0: lambda g, c: g + c, 1: lambda g, c: max(g, c), 2: lambda g, c: max(g, c)}
    ),
    "With p = 1 you let both copies run next to the product. Only one of them does, and"
    " backward waits for the other one.": _with_backward({1: lambda g, c: max(g, 2 * c)}),
    "With p = 1 you let backward wait for both copies. One of them runs next to the product,"
    " so backward waits only for the other one.": _with_backward({1: lambda g, c: g + 2 * c}),
    "With p = 0 you let one copy run next to the product. Nothing is fetched ahead, so"
    " backward waits for both copies.": _with_backward({0: lambda g, c: c + max(g, c)}),
    "In forward you counted one copy per layer. There are two.": lambda layers, f, g, c, p: (
        _step_time(layers, f, g, c, p) + layers * (max(f, c) - max(f, 2 * c))
    ),
    "You gave the time of one layer. The step has L layers.": lambda layers, f, g, c, p: (
        _step_time(layers, f, g, c, p) / layers
    ),
    "You gave milliseconds. Give seconds.": lambda layers, f, g, c, p: (
        1000 * _step_time(layers, f, g, c, p)
    ),
}


def _draw_times(rng: random.Random) -> tuple[int, float, float, float]:
    f, g, c = (rng.randint(1, 18) / 2 for _ in range(3))
    return rng.randint(900, 1100), f, g, c


def _time_case(L: int, f: float, g: float, c: float, p: int) -> str:
    return text("L = {L}, f = {f}, g = {g}, c = {c}, p = {p}", L=L, f=f, g=g, c=c, p=p)


@exercise(
    hint=(
        (
            "Look at one layer's forward, then at its backward. What runs at the same time,"
            " and what must wait?"
        ),
        (
            "Write down the time of one layer for each p. In backward, how many of the layer's"
            " two copies run next to its product, and how many come before it?"
        ),
    )
)
def check_step_time(function: Any) -> Verdict:
    """Check `step_time(L, f, g, c, p)`, the seconds of forward and backward.

    It must be within 9% of the simulated clock for p = 0, 1, 2. An event simulation that copies
    all storages, and not all but the last p + 1, differs by 8.4%.
    """
    on_the_clock = {
        (16, 1.0, 2.0, c, p): clock(16, c, p) for c in (0.25, 0.5, 1.0, 2.0) for p in (0, 1, 2)
    }
    # With 999 layers the ends of the step hardly count. Each of f, g and c is the longest of the
    # three in one case, and backward does not take twice as long as forward.
    lengths = ((2.0, 7.0, 0.5), (2.0, 7.0, 2.5), (2.0, 7.0, 6.0), (2.0, 7.0, 9.0), (9.0, 4.0, 1.5))
    sizes = cases([(999, *times) for times in lengths], _draw_times)
    long = {(*each, p): _step_time(*each, p) for each in sizes for p in (0, 1, 2)}
    wanted = {case: (seconds, 0.09) for case, seconds in on_the_clock.items()}
    wanted |= {case: (seconds, 0.01) for case, seconds in long.items()}
    slow = text("Your function ran more than {limit:,} operators. Type a formula.", limit=10_000)
    with WorkLimit(10_000, slow):
        problem, given = _differs(function, wanted, _TIMES, 0.04, _time_case)
    if problem is not None:
        return problem
    worst = max(abs(float(given[case]) / seconds - 1) for case, seconds in on_the_clock.items())
    return right(
        text(
            "Right: for p = 0, 1 and 2, on four links, your times differ from the clock by at"
            " most {worst:.1%}.",
            worst=worst,
        )
    )


# Hooks
# --------------------------------------------------------------------------------------------------


class _Below(Store):
    """A lower tier whose copies are complete at once, and which records the data it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def write(self, room: Any, data: Tensor) -> Callable[[], None]:
        self.addresses.append(data.data_ptr())
        with _disable_current_modes():
            room.place = data.clone()
        return lambda: None

    def read(self, room: Any, data: Tensor) -> Callable[[], None]:
        data.copy_(room.place)
        return lambda: None


@exercise(
    hint=(
        (
            "`pack` returns a room and the position of the tensor in its storage. `unpack`"
            " copies the storage back and restores that view of it."
        ),
        (
            "In `pack`, ask two questions: is this storage in `stay`, and does `rooms` already"
            " have this version of it? In `unpack`, how does a tensor that stayed differ from a"
            " room with a view?"
        ),
    )
)
def check_offloading(function: Any) -> Verdict:
    """Check `offloading(store, stay)`, which returns saved-tensor hooks.

    They must move each version of a storage once, must not move a parameter, and must keep nothing
    longer than backward needs it.
    """
    linear = nn.Linear(128, 128)
    x = torch.linspace(-1, 1, 128 * 128).view(128, 128).requires_grad_()
    uneven, seen = torch.linspace(-1, 2, 128 * 128).view(128, 128), []

    run = partial(_program, linear, x, seen, torch.Tensor.clone)
    parameters = {each.untyped_storage().data_ptr() for each in linear.parameters()}
    large, least = _to_be_moved(run, parameters)
    wanted = torch.autograd.grad(run(torch.enable_grad()), (x, *linear.parameters()), uneven)
    store, stay = _Below(), {each.untyped_storage() for each in linear.parameters()}
    context = function(store, stay)
    if context is ...:
        return not_answered()
    if not hasattr(context, "__enter__"):
        return wrong(
            text(
                "`offloading` must return `saved_tensors_hooks(pack, unpack)`, got a `{kind}`.",
                kind=type(context).__name__,
            ),
            exact=True,
        )
    out = _program(linear, x, seen, _at_one_address(), context)
    if any(each() is not None for each in seen):
        gc.collect()  # the answer's own objects may refer to each other
    held = sum(each() is not None for each in seen)
    moved = len(store.addresses)
    if not moved and getattr(context, "pack_hook", lambda tensor: None)(x) is x:  # unchanged
        return not_answered()
    if not moved:
        return wrong("Your hooks moved nothing into the store.")
    if parameters & set(store.addresses):
        return wrong(
            "Your hooks moved a parameter. The model keeps it in any case, so moving it frees"
            " nothing. A view of a parameter is another tensor with the same storage.",
            exact=True,
        )
    if held:
        message = (
            "{held} of {count} storages are still held after forward, so their memory is not freed."
        )
        return wrong(text(message, held=held, count=len(seen)), hint=_RETURN_THE_ROOM)
    if store.stats.bytes_up:
        return wrong(
            "You copied back during forward, so the memory is in use again at once. Call"
            " `room.get()` in `unpack`, not in `pack`.",
            exact=True,
        )
    out.backward(uneven)
    found = (x.grad, *(each.grad for each in linear.parameters()))
    equal = all(a is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if not equal and store.stats.bytes_down < least:
        raise WrongAnswer(
            "The gradients are wrong, and too few bytes were moved. After a storage is freed,"
            " its address is given to another one, and you took the second for the first. Use"
            " the storage itself as the key.",
            exact=True,
        )
    if not equal:
        raise WrongAnswer(
            "The gradients are wrong. `unpack` must restore the view that was saved, with its"
            " own shape, stride and offset."
        )
    if store.stats.bytes_down > least + 64:
        message = (
            "The gradients are right, but you made {moved} copies of {large} storages. Move"
            " each storage once, even if it is saved twice."
        )
        return wrong(text(message, moved=moved, large=large), exact=True)
    del out
    if store.used_bytes:
        gc.collect()
    if store.used_bytes:
        message = (
            "After backward, {count:,} bytes are still in the store, because one of your"
            " objects still refers to their rooms."
        )
        return wrong(text(message, count=store.used_bytes), exact=True)
    if not _equal_after_a_change(function):
        return wrong(
            "A tensor was changed in place after its storage had been moved, and your hooks"
            " bring back the old values. Move the storage again if `tensor._version` has"
            " changed.",
            exact=True,
        )
    return right(
        text(
            "Right: {large} storages were moved, each once. The gradients are equal, and all"
            " copies were released.",
            large=large,
        )
    )


def _program(
    linear: nn.Module,
    x: Tensor,
    seen: list[weakref.ref],
    placed: Callable[[Tensor], Tensor],
    context: Any,
) -> Tensor:
    """Run a program with different kinds of saved tensors.

    It saves views of one storage twice, a weight, a part of a storage, and several storages one
    after the other, which `placed` creates.
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
            del factors  # the next storage may get its memory
        seen[:] = [
            *factors_seen,
            *(weakref.ref(each.untyped_storage()) for each in (y, sine, turned)),
        ]
        return z.cos() * part


def _to_be_moved(run: Callable[[Any], Tensor], parameters: set[int]) -> tuple[int, int]:
    """Count the storages that autograd saves in `run`, and their bytes.

    Parameters and single numbers are left out.
    """
    kept: list[Tensor] = []  # keeps all of them alive, so that no address is reused
    run(saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    large = [
        each
        for address, each in storages.items()
        if address not in parameters and each.nbytes() > 4
    ]
    return len(large), sum(each.nbytes() for each in large)


def _at_one_address() -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to a new storage, at the previous one's address.

    Like an allocator, it takes another address if the previous storage has not been freed.
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


def _equal_after_a_change(function: Callable) -> bool:
    """Return whether the gradient is right if a storage is saved, changed in place and saved again.

    Autograd allows this, because backward never uses what was saved first.
    """
    linear = nn.Linear(64, 64, bias=False)
    stay = {linear.weight.untyped_storage()}

    def gradient(context: AbstractContextManager) -> Tensor:
        data = torch.linspace(-1, 1, 64 * 64).view(64, 64).clone()
        with context:
            first = linear(data)  # its graph stays alive, like that of an earlier batch
            data.mul_(2)
            second = linear(data).square().sum()
        (found,) = torch.autograd.grad(second, linear.weight)
        del first
        return found

    return torch.equal(gradient(function(_Below(), stay)), gradient(nullcontext()))


_RETURN_THE_ROOM = (
    "The graph keeps what `pack` returns. Return the room and the view's shape, stride and"
    " offset, and do not keep the tensor or its storage anywhere."
)


# Waits
# --------------------------------------------------------------------------------------------------


class _RecordingDevice(SimulatedDevice):
    """A device that records what host and compute have waited for, and what was copied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.finished = self.waited = self.copied = 0
        self.made_before: int | None = None  # samples before the host waited for the first time

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


#: Program -> its error without the wait, and how often the host may wait, `tolist` included.
_PROGRAMS = {
    "read": ("The host reads before the copy is complete.", 2),
    "use": ("The product reads memory that the copy has not written yet.", 0),
    "let_go": ("The memory is used again while the copy still reads it.", 2),
}


@exercise(
    hint=(
        (
            "Which one must not go on before the copy is complete: the host, the compute"
            " stream, or the tensor that gets the memory next?"
        ),
        (
            "`device.finish(copied)` makes the host wait, and `device.wait(copied)` makes the"
            " current stream wait. Before which line must one of them stand?"
        ),
    )
)
def check_waits(functions: Any) -> Verdict:
    """Check three programs, each with the wait that it lacked.

    There must be no race, numbers must be right, and the host must not wait more often than needed.
    """
    if not isinstance(functions, tuple | list) or len(functions) != len(_PROGRAMS):
        return wrong("Pass the three functions as a tuple, `(read, use, let_go)`.", exact=True)
    found = {
        name: _in_all_modes(name, each) for name, each in zip(_PROGRAMS, functions, strict=True)
    }
    unchanged = [unordered for unordered, _ in _PROGRAMS.values()]
    if list(found.values()) in (unchanged, [_NOTHING] * len(_PROGRAMS)):
        return not_answered()
    for name, problem in found.items():
        if problem is not None:
            message = text("{name}: {problem}", name=f"`{name}`", problem=problem)
            return wrong(message, exact=problem in _EXACT)
    return right(
        "Right: in every mode there is no race and the numbers are right, and the host waits"
        " only before it reads."
    )


def _in_all_modes(name: str, function: Any) -> str | None:
    problems = (_problem(name, function, mode) for mode in ({}, {"late": True}, {"early": True}))
    return next((problem for problem in problems if problem is not None), None)


_HOST_WAITS = (
    "The numbers are right, but the host waits and cannot queue more work meanwhile. Make the"
    " stream wait instead."
)
_STREAM_WAITS = (
    "The numbers are right, but the compute stream waits as well, and nothing on it uses the"
    " copy. Remove `device.wait(copied)`."
)
_NOTHING = "it returns nothing."
_NO_LIST = "it must return a list of numbers, `host.tolist()`."
_READS_DEVICE = "it reads the tensor on the GPU. Read the copy, `host`."
_EXACT = (_HOST_WAITS, _STREAM_WAITS, _NOTHING, _NO_LIST, _READS_DEVICE)


class _DeviceReads(TorchFunctionMode):
    """A mode that counts how often the host reads device memory, as `tolist` does."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.device, self.count = device, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in HOST_READS and self.device.holds(args[0])
        return function(*args, **(kwargs or {}))


def _problem(name: str, function: Any, mode: Mapping[str, bool]) -> str | None:
    """Return what is wrong with a program in a mode of the device, or None."""
    unordered, waits = _PROGRAMS[name]
    numbers = torch.linspace(-1, draw_case(2.0, lambda rng: rng.uniform(1, 2)), 1000)
    with _RecordingDevice(**mode) as device:
        if name == "use":
            given = device.pinned(numbers.shape, numbers.dtype).copy_(numbers)
        else:
            given = device.move(numbers)
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
        return _NOTHING
    if not copied:
        return "nothing is copied."
    if reads.count:
        return _READS_DEVICE
    if name == "let_go" and (made < 2 or above >= 2 * numbers.nbytes):
        return (
            "keep the order of the original: first `y` is freed, then the next tensor reuses"
            " its memory."
        )
    if races:
        host_reads = name == "let_go" and finished < waits  # the original has one `finish`
        return _PROGRAMS["read"][0] if host_reads else unordered
    if name != "use" and isinstance(found, Tensor):
        return _NO_LIST
    if not isinstance(found, list) or found != (numbers * 2).tolist():
        return "the numbers are wrong."
    if finished > waits or (name == "let_go" and too_early):
        return _HOST_WAITS
    return _STREAM_WAITS if name == "read" and waited else None


# Pages of the optimizer's state
# ---------------------------------------------------------------------------------------

#: Page size in MiB -> the peak of `step()` for the course's decoder; a test measures it again.
STEP_PEAKS = {32: 114_205_072, 16: 103_682_448, 8: 76_304_784, 4: 67_108_240}
_PAGES: Mistakes = {
    "You counted one page. While it is updated, the next one is read and the previous one is"
    " written.": (
        lambda n, page: 8 * n + page,
        lambda n, page: 8 * n + min(page, 8 * n),
    ),
    "You counted two pages. One is read, one is updated and one is written.": (
        lambda n, page: 8 * n + 2 * page,
        lambda n, page: 8 * n + min(2 * page, 8 * n),
    ),
    "For large pages you counted more than all of the state. Its size is 8 bytes per"
    " parameter, however large a page is.": (
        lambda n, page: 8 * n + 3 * page,
        lambda n, page: 8 * n + min(3, -(-8 * n // page)) * page,  # rounded up to whole pages
        lambda n, page: 8 * n + 3 * min(page, 8 * n),
    ),
    "Besides the pages you counted 4 bytes per parameter. Both the weights and the gradients"
    " are in memory, with 4 bytes each.": lambda n, page: 4 * n + min(3 * page, 8 * n),
    "You counted the state alone. Weights and gradients are in memory, too, with 8 bytes per"
    " parameter.": lambda n, page: min(3 * page, 8 * n),
    "You counted all of the state. Only a few of its pages are in memory.": lambda n, page: 16 * n,
    "You counted only one of Adam's two moments. A page holds both, so all of the state is 8"
    " bytes per parameter.": lambda n, page: 8 * n + min(3 * page, 4 * n),
    "You left out the state. It returns to memory, page by page.": lambda n, page: 8 * n,
}


@exercise(
    hint=(
        (
            "Which bytes are in memory whatever the page size? And how many pages are in"
            " memory at once, if the step reads ahead and writes back?"
        ),
        (
            "Add up weights, gradients and pages. Which bound do the pages have together, if one"
            " page is larger than the whole state?"
        ),
    )
)
def check_peak_in_step(function: Any) -> Verdict:
    """Check `peak_in_step(parameters, page_bytes)` with all state offloaded; it may be 6% off."""
    pages = ((50_000_000, 16 << 20), (50_000_000, 1 << 30), (7_000_000_000, 1 << 30))
    pages = cases(pages, lambda rng: (rng.randrange(10**8, 10**9), rng.randint(8, 64) << 20))
    wanted = {(n, page): (8 * n + min(3 * page, 8 * n), 0.001) for n, page in pages}
    wanted |= {(PARAMETERS, mib << 20): (peak, 0.06) for mib, peak in STEP_PEAKS.items()}

    def case_is(n: int, page: int) -> str:
        return text("{n:,} parameters, pages of {page:,} bytes", n=n, page=page)

    problem, _ = _differs(function, wanted, _PAGES, 0.001, case_is, in_bytes=True)
    if problem is not None:
        return problem
    return right(
        "Right: weights, gradients, and three pages, or all of the state if the pages are large."
    )
