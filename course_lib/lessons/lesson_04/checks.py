"""The exercises of lesson 04."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from course_lib.offload import Store
from course_lib.simulated import SimulatedDevice
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import Refused, exercise, not_answered, right, wrong

from .simulation import clock

# explanation of a mistake -> the formula with that mistake
Thoughts = Mapping[str, Callable[..., float]]


def _differs(
    function: Any,
    wanted: Mapping[tuple, tuple[float, float]],
    thoughts: Thoughts,
    close: float,
    case_is: Callable[..., str],
    in_bytes: bool = False,
) -> tuple[Verdict | None, dict[tuple, Any]]:
    """Compare a function of numbers with the right values.

    Args:
        function: The reader's function.
        wanted: Case -> right value, and a relative tolerance.
        thoughts: Mistakes; the first one whose formula gives the same for all cases, within
            `close`, is named.
        close: Relative tolerance for `thoughts`.
        case_is: Function that describes a case.
        in_bytes: Whether bytes are expected, so that other units are named.

    Returns:
        The verdict, or None if the function is right; and its result for each case.
    """
    given = {case: function(*case) for case in wanted}
    if any(value is None or value is ... for value in given.values()):
        return not_answered(), given
    for case, (value, tolerance) in wanted.items():
        verdict = expect_number(given[case], value, tolerance=tolerance, in_bytes=in_bytes)
        if verdict.exact and not verdict:
            return verdict, given
        if not verdict:
            for message, formula in thoughts.items():
                if all(
                    expect_number(each, formula(*at), tolerance=close) for at, each in given.items()
                ):
                    return wrong(text("Not yet. {reason}", reason=message), exact=True), given
            return (
                wrong(text("{case}: {message}", case=case_is(*case), message=verdict.message)),
                given,
            )
    return None, given


# The time of a step
# --------------------------------------------------------------------------------------------------


def _step_time(layers: int, f: float, g: float, c: float, p: int) -> float:
    backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
    return layers * max(f, 2 * c) + layers * backward - f


def _one_copy(layers: int, f: float, g: float, c: float, p: int) -> float:
    return layers * max(f, c) + layers * (g + c if p == 0 else max(g, c))


def _with_backward(wrong: Mapping[int, Callable[[float, float], float]]) -> Callable[..., float]:
    """Return the step's time, with a wrong time (g, c) -> time of backward for some p."""

    def time(layers: int, f: float, g: float, c: float, p: int) -> float:
        backward = {0: g + 2 * c, 1: c + max(g, c), 2: max(g, 2 * c)}[p]
        here = wrong[p](g, c) if p in wrong else backward
        return _step_time(layers, f, g, c, p) + layers * (here - backward)

    return time


_TIMES: Thoughts = {
    "That is the step without copies.": lambda layers, f, g, c, p: layers * (f + g),
    "The longer of all products and all copies: so it is if everything is ready at once."
    " Backward waits for copies.": lambda layers, f, g, c, p: max(layers * (f + g), 4 * layers * c),
    "So it is for p = 2. With p = 0 or 1, backward waits for copies, however fast the link is.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, 2)
    ),
    "So it is for p = 0. With p = 2 both copies for the next product run beside this one.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, 0)
    ),
    "A layer saves two storages: the Linear's input and GELU's. Each goes down, and comes up.": (
        _one_copy
    ),
    "Forward does not wait for copies down: they run beside its products, and the longer counts.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, p) + layers * min(f, 2 * c)
    ),
    "Backward has a time of its own, g a layer.": lambda layers, f, g, c, p: _step_time(
        layers, f, f, c, p
    ),
    "Backward need not take twice as long as forward: it takes g.": (
        lambda layers, f, g, c, p: _step_time(layers, f, 2 * f, c, p)
    ),
    "That is backward alone.": (
        lambda layers, f, g, c, p: _step_time(layers, f, g, c, p) - layers * max(f, 2 * c)
    ),
    "With p = 1 one copy runs next to the product. Whichever of the two takes longer counts, and"
    " that may be the copy.": _with_backward({1: lambda g, c: g + c}),
    "With p = 1 only one of the two copies runs next to the product. Backward waits for the other"
    " one.": _with_backward({1: lambda g, c: max(g, 2 * c)}),
    "With p = 1 one of the two copies runs next to the product. Backward waits for the other one"
    " alone.": _with_backward({1: lambda g, c: g + 2 * c}),
    "With p = 0 nothing is fetched ahead, so backward waits for both copies.": _with_backward(
        {0: lambda g, c: c + max(g, c)}
    ),
    "In forward a layer has two copies down, too.": lambda layers, f, g, c, p: (
        _step_time(layers, f, g, c, p) + layers * (max(f, c) - max(f, 2 * c))
    ),
    "That is the time of one layer. The step has L of them.": lambda layers, f, g, c, p: (
        _step_time(layers, f, g, c, p) / layers
    ),
    "That is in milliseconds. Give seconds.": lambda layers, f, g, c, p: (
        1000 * _step_time(layers, f, g, c, p)
    ),
}


def _time_case(L: int, f: float, g: float, c: float, p: int) -> str:
    return text("L = {L}, f = {f}, g = {g}, c = {c}, p = {p}", L=L, f=f, g=g, c=c, p=p)


@exercise(
    hint=(
        (
            "Forward and backward apart, a layer at a time: what runs side by side, and what is"
            " waited for?"
        ),
        (
            "Forward: `max(f, 2 * c)` a layer. Backward: with p = 0 two copies are waited for, then"
            " g; with p = 1 one of the two runs beside the product; with p = 2 both do."
        ),
    )
)
def check_step_time(function: Any) -> Verdict:
    """Check `step_time(L, f, g, c, p)`, the seconds of forward and backward.

    It must be within 8% of the simulated clock for p = 0, 1, 2.
    """
    on_the_clock = {
        (16, 1.0, 2.0, c, p): clock(16, c, p) for c in (0.25, 0.5, 1.0, 2.0) for p in (0, 1, 2)
    }
    # With 999 layers the ends of the step hardly count. Each of f, g and c is the longest of the
    # three in one case, and backward does not take twice as long as forward.
    lengths = ((2.0, 7.0, 0.5), (2.0, 7.0, 2.5), (2.0, 7.0, 6.0), (2.0, 7.0, 9.0), (9.0, 4.0, 1.5))
    long = {(999, *times, p): _step_time(999, *times, p) for times in lengths for p in (0, 1, 2)}
    wanted = {case: (seconds, 0.08) for case, seconds in on_the_clock.items()}
    wanted |= {case: (seconds, 0.01) for case, seconds in long.items()}
    problem, given = _differs(function, wanted, _TIMES, 0.04, _time_case)
    if problem is not None:
        return problem
    worst = max(abs(float(given[case]) / seconds - 1) for case, seconds in on_the_clock.items())
    return right(
        text(
            "Right: at most {worst:.1%} from the clock, on four links, for p = 0, 1 and 2.",
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
            "`pack` gives a room and how the tensor lies in its storage; `unpack` makes that view"
            " of what comes up."
        ),
        (
            "`rooms[storage] = tensor._version, store.put(whole(tensor))` where `rooms` does not"
            " have this version of `storage` yet; return the room with the shape, the stride and"
            " the offset. Back: `room.get()().as_strided(shape, stride, offset)`."
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
    if context is None or context is ...:
        return not_answered()
    out = _program(linear, x, seen, _at_one_address(), context)
    if any(each() is not None for each in seen):
        gc.collect()  # the answer's own objects may refer to each other
    held = sum(each() is not None for each in seen)
    moved = len(store.addresses)
    if not moved and held == len(seen):  # the cell is unchanged
        return not_answered()
    if not moved:
        return wrong("Nothing has moved into the store.")
    if parameters & set(store.addresses):
        return wrong(
            "A parameter has moved. It stays with the model anyway, so that moving it frees"
            " nothing.",
            exact=True,
        )
    if held:
        message = (
            "{held} of {count} storages are still held after forward, so their memory is not freed."
        )
        return wrong(text(message, held=held, count=len(seen)), hint=_RETURN_THE_ROOM)
    out.backward(uneven)
    found = (x.grad, *(each.grad for each in linear.parameters()))
    equal = all(a is not None and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if not equal and store.stats.bytes_down < least:
        raise Refused(
            "Gradients are wrong, and too little has moved. Once a storage is gone, its address is"
            " given to another one, which you took for the first. Use the storage itself as the"
            " key.",
            exact=True,
        )
    if not equal:
        raise Refused("Gradients are wrong. A view has a shape, a stride and an offset of its own.")
    if store.stats.bytes_down > least + 64:
        message = (
            "Right gradients, but {moved} copies went down of {large} storages: one that is saved"
            " twice moves once."
        )
        return wrong(text(message, moved=moved, large=large), exact=True)
    del out
    if store.used_bytes:
        gc.collect()
    if store.used_bytes:
        message = (
            "After backward {count:,} bytes are still below: the rooms are held by something of"
            " yours."
        )
        return wrong(text(message, count=store.used_bytes), exact=True)
    if not _equal_after_a_change(function):
        return wrong(
            "A tensor was changed in place after its storage had gone down, and your hooks bring"
            " back what it was before. Move a storage again where `tensor._version` has changed.",
            exact=True,
        )
    return right(
        text(
            "Right: {large} storages moved, once each; equal gradients; all was let go.",
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
    """Return a function that copies a tensor to a new storage, always at the same address.

    An allocator does the same once the previous storage has been freed.
    """
    memory = numpy.empty((128, 128), dtype=numpy.float32)

    def placed(tensor: Tensor) -> Tensor:
        memory[:] = tensor.numpy()
        return torch.from_numpy(memory)

    return placed


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
    "What `pack` returns stays in the graph: return the room and three things about the view, and"
    " keep the tensor, or its storage, nowhere else."
)


# Waits
# --------------------------------------------------------------------------------------------------


class _Watched(SimulatedDevice):
    """A device that records what the host has waited for, and what was copied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.finished = self.copied = 0

    def finish(self, event: Any) -> None:
        self.finished += 1
        super().finish(event)

    def transfer(self, target: Tensor, source: Tensor) -> None:
        self.copied += 1
        super().transfer(target, source)


#: Program -> its error without the wait, and how often the host may wait, `tolist` included.
_PROGRAMS = {
    "read": ("The host reads while the copy is still on its way.", 2),
    "use": ("The product reads memory that the copy has not reached yet.", 0),
    "let_go": ("The memory is used again while the copy still reads it.", 2),
}


@exercise(
    hint=(
        (
            "Who uses something before it is complete: the host, the compute stream, or what gets"
            " the memory next?"
        ),
        (
            "The host waits by `device.finish(copied)`, the current stream by"
            " `device.wait(copied)`. Before which line?"
        ),
    )
)
def check_waits(functions: Any) -> Verdict:
    """Check three programs, each with the wait that it lacked.

    There must be no race, numbers must be right, and the host must not wait more often than needed.
    """
    if not isinstance(functions, tuple | list) or len(functions) != len(_PROGRAMS):
        return wrong("Give the three functions: `(read, use, let_go)`.", exact=True)
    found = {
        name: _in_all_modes(name, each) for name, each in zip(_PROGRAMS, functions, strict=True)
    }
    if all(
        problem == unordered
        for problem, (unordered, _) in zip(found.values(), _PROGRAMS.values(), strict=True)
    ):
        return not_answered()
    for name, problem in found.items():
        if problem is not None:
            message = text("{name}: {problem}", name=f"`{name}`", problem=problem)
            return wrong(message, exact=problem == _HOST_WAITS)
    return right(
        "Right: no race and right numbers, whatever runs late or early; and the host waits only to"
        " read."
    )


def _in_all_modes(name: str, function: Any) -> str | None:
    problems = (_problem(name, function, mode) for mode in ({}, {"late": True}, {"early": True}))
    return next((problem for problem in problems if problem is not None), None)


_HOST_WAITS = (
    "Right numbers, but the host waits, and can give no more work meanwhile. Let the stream wait."
)


def _problem(name: str, function: Any, mode: Mapping[str, bool]) -> str | None:
    """Return what is wrong with a program in a mode of the device, or None."""
    unordered, waits = _PROGRAMS[name]
    numbers = torch.linspace(-1, 2, 1000)
    with _Watched(**mode) as device:
        if name == "use":
            given = device.pinned(numbers.shape, numbers.dtype).copy_(numbers)
        else:
            given = device.move(numbers)
        device.finished = device.copied = 0
        before, made = device.live_bytes, len(device.samples)
        try:
            found = function(device, given)
            finished, copied, made = device.finished, device.copied, len(device.samples) - made
            above = device.peak_bytes - before
            if isinstance(found, Tensor) and name == "use":
                host = device.pinned(found.shape, found.dtype)
                device.finish(device.copy(host, found, "down"))
                found = host.tolist()
            races = list(device.races)
        finally:
            device.races.clear()
    if found is None or found is ...:
        raise NotImplementedError
    if not copied:
        return "nothing is copied."
    if name == "let_go" and (made < 2 or above >= 2 * numbers.nbytes):
        return "y goes, and what comes next takes its memory: so it was, and so it stays."
    if races:
        return unordered
    if not isinstance(found, list) or found != (numbers * 2).tolist():
        return "the numbers are wrong."
    return _HOST_WAITS if finished > waits else None


# The decoder
# --------------------------------------------------------------------------------------------------

INPUT = 1_048_576  # bytes, 8 * 128 * 256 numbers


def _moved(p: int, checkpointed: bool, more: int = 2) -> int:
    return ((8 if checkpointed else 160) + more - p) * INPUT


_MOVED: Thoughts = {
    "The more is fetched ahead, the more stays: p + 1 storages, not one.": lambda p, k: _moved(
        0, k
    ),
    "The last p + 1 storages stay: backward needs them first.": lambda p, k: _moved(0, k, 10),
    "The log-probabilities are saved last, so they are the first to stay.": lambda p, k: _moved(
        p, k, 10
    ),
    "Storages stay, not megabytes: the log-probabilities are one of the p + 1.": lambda p, k: (
        _moved(p, k, 9)
    ),
    "p + 1 stay, and the log-probabilities are one of them.": lambda p, k: _moved(p, k, 1),
    "Two storages behind the layers are saved too, and p of them stay.": lambda p, k: _moved(
        0, k, 0
    ),
    "Behind the layers two are saved too: the last norm's and the head's.": lambda p, k: _moved(
        p, k, 0
    ),
    "Downward only: what comes up is the same once more.": lambda p, k: 2 * _moved(p, k),
    "A checkpoint keeps its layer's input alone: 1 in place of 20.": lambda p, k: _moved(p, False),
    "Without checkpoints a layer has 20 such storages' bytes.": lambda p, k: _moved(p, True),
    "The statistics of the two norms, 16,384 bytes a layer, are too small to be moved.": (
        lambda p, k: _moved(p, k) + (0 if k else 8 * 16_384)
    ),
}


@exercise(
    hint=(
        (
            "Count in storages of the size of a layer's input. Which of them are there when forward"
            " ends?"
        ),
        (
            "Plain: 8 · 20 and two behind the layers, and the log-probabilities; the last p + 1"
            " storages stay. With checkpoints: 8 in place of 8 · 20."
        ),
    )
)
def check_moved(function: Any) -> Verdict:
    """Check `moved(p, checkpointed)`: bytes that the course's decoder copies down per step.

    It is checked for p = 0, 1, 2.
    """

    def case_is(p: int, checkpointed: bool) -> str:
        return text(
            "p = {p}, {how}",
            p=p,
            how=text("with checkpoints" if checkpointed else "without checkpoints"),
        )

    wanted = {
        (p, checkpointed): (_moved(p, checkpointed), 0.0)
        for checkpointed in (False, True)
        for p in (0, 1, 2)
    }
    problem, _ = _differs(function, wanted, _MOVED, 0.0, case_is, in_bytes=True)
    if problem is not None:
        return problem
    return right("Right, for p = 0, 1 and 2, with checkpoints and without.")


# Pages of the optimizer's state
# ---------------------------------------------------------------------------------------

#: Page in MiB -> the peak of `step()` for the course's decoder; a test measures it again.
STEP_PEAKS = {32: 114_205_072, 16: 103_682_448, 8: 76_304_784, 4: 67_108_240}
_PAGES: Thoughts = {
    "One page is updated; meanwhile the next one is read and the last one written.": (
        lambda n, page: 8 * n + page
    ),
    "Three pages: one is read, one updated, one written.": lambda n, page: 8 * n + 2 * page,
    "There is no more state than 8 bytes a parameter, however large the page.": lambda n, page: (
        8 * n + 3 * page
    ),
    "The gradients are there too: 4 bytes a parameter.": lambda n, page: (
        4 * n + min(3 * page, 8 * n)
    ),
    "Weights and gradients are there, 8 bytes a parameter.": lambda n, page: min(3 * page, 8 * n),
    "The state is below, but for its pages.": lambda n, page: 16 * n,
    "Not one of the two moments comes back at a time: pages hold both.": lambda n, page: (
        8 * n + min(3 * page, 4 * n)
    ),
    "State comes back to be updated, in pages.": lambda n, page: 8 * n,
}


@exercise(
    hint=(
        (
            "What is there whatever the page is? And how many pages are there at once, in a step"
            " that reads ahead?"
        ),
        (
            "4 bytes of weight and 4 of gradient a parameter; three pages, one read, one updated,"
            " one written; and there is no more state than 8 bytes a parameter."
        ),
    )
)
def check_peak_in_step(function: Any) -> Verdict:
    """Check `peak_in_step(parameters, page_bytes)` with all state offloaded; it may be 6% off."""
    pages = ((50_000_000, 16 << 20), (50_000_000, 1 << 30), (7_000_000_000, 1 << 30))
    wanted = {(n, page): (8 * n + min(3 * page, 8 * n), 0.001) for n, page in pages}
    wanted |= {(6_875_648, mib << 20): (peak, 0.06) for mib, peak in STEP_PEAKS.items()}

    def case_is(n: int, page: int) -> str:
        return text("{n:,} parameters, pages of {page:,} bytes", n=n, page=page)

    problem, _ = _differs(function, wanted, _PAGES, 0.001, case_is, in_bytes=True)
    if problem is not None:
        return problem
    return right(
        "Right: weights, gradients and three pages, or all the state where pages are large."
    )
