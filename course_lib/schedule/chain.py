"""A network as a chain of stages, with the costs of each stage, given or measured."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeCopyMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from course_lib._check import kind, number, whole
from course_lib._origin import NEEDS_DATA, needs_values, place_of, unlogged
from course_lib._torch import (
    AllRandomState,
    AutocastState,
    attributes_of,
    kind_of,
    look_of,
    tensors_in,
    wait_for,
)
from course_lib.memory import MemoryMeter
from course_lib.memory.measurement import flop_counter
from course_lib.symbolic import Symbolic

from .stages import (
    GradientSlot,
    Kept,
    as_modules,
    check_constants,
    handed_on,
    the_tensor,
    trained,
    with_tensor,
)


@dataclass(frozen=True)
class Stage:
    """One stage of a chain.

    Attributes:
        forward_time: Time of its forward pass, in any unit.
        backward_time: Time of its backward pass, in the same unit.
        output_bytes: Bytes of its output, and also of the output's gradient.
        saved_bytes: Bytes of everything that its forward keeps for its backward, including its
            output but not its input.
        forward_overhead_bytes: Additional bytes that a forward needs while it runs, whatever it
            keeps.
        backward_overhead_bytes: Bytes that its backward needs while it runs, in addition to its
            input, `saved_bytes` and the gradient of its output. They are temporaries, gradients of
            its parameters, and the part of the input's gradient that does not fit into memory that
            the backward has already released.

    Raises:
        TypeError, ValueError: A field has the wrong type or is out of range; the message names it.
    """

    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    forward_overhead_bytes: int = 0
    backward_overhead_bytes: int = 0

    def __post_init__(self):
        number("forward_time", self.forward_time, 0)
        number("backward_time", self.backward_time, 0)
        whole("output_bytes", self.output_bytes, 1)
        # saved_bytes includes output_bytes
        whole("saved_bytes", self.saved_bytes, self.output_bytes)
        whole("forward_overhead_bytes", self.forward_overhead_bytes, 0)
        whole("backward_overhead_bytes", self.backward_overhead_bytes, 0)


@dataclass(frozen=True)
class Chain:
    """Stages 0 to L-1, one after the other; stage i turns x_i into x_{i+1}.

    Attributes:
        stages: The L stages.
        input_bytes: Bytes of x_0.

    Raises:
        TypeError, ValueError: There is no stage, an element is not a `Stage`, or `input_bytes` is
            not positive.
    """

    stages: tuple[Stage, ...]
    input_bytes: int

    def __post_init__(self):
        object.__setattr__(self, "stages", tuple(self.stages))
        whole("the number of stages", len(self.stages), 1)
        for i, stage in enumerate(self.stages):
            kind(f"stages[{i}]", stage, Stage, "a Stage")
        whole("input_bytes", self.input_bytes, 1)

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def uniform(
        cls,
        length: int,
        *,
        activation_bytes: int = 1,
        saved_bytes: int | None = None,
        forward_time: float = 1.0,
        backward_time: float = 2.0,
    ) -> Chain:
        """Create a chain of `length` equal stages.

        `saved_bytes` is by default `activation_bytes`, the output alone.
        """
        whole("length", length, 1)
        saved = activation_bytes if saved_bytes is None else saved_bytes
        return cls(
            (Stage(forward_time, backward_time, activation_bytes, saved),) * length,
            activation_bytes,
        )

    @classmethod
    def profile(
        cls,
        stages: Sequence[Callable],
        x: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        clock: bool = False,
        repeats: int = 5,
        alike: bool = False,
    ) -> Chain:
        """Measure each stage by itself, as `ScheduledSequential` runs it.

        The bytes are the meter's and exact. They do not include parameter gradients that exist
        already. To measure what a run has from the second step on, create these gradients before.
        Buffers and random number generators are afterwards as before.

        Args:
            stages: Modules and functions, as in `ScheduledSequential`.
            x: Input of the size used in training. Its `requires_grad` decides whether a gradient of
                the input is computed.
            kwargs: Constants that each stage receives as keyword arguments.
            clock: False for reproducible times: FLOPs of matrix products and convolutions, or the
                number of elements of the output for a stage without these. True for seconds, as the
                median of `repeats` runs.
            repeats: Number of timed runs per stage if `clock` is True.
            alike: Whether stages that look the same, with inputs of the same kind, are measured
                only once.

        Raises:
            TypeError, ValueError: An argument has the wrong type or value; a stage returns no
                tensor, or several through which gradients flow.
        """
        modules = as_modules(stages)
        kwargs = dict(kwargs or {})
        clocked = whole("repeats", repeats, 1) * clock
        check_constants(kwargs)
        value = handed_on("x", x)
        first = the_tensor(value)
        measured = []
        known: dict[Any, tuple[Stage, Any]] = {}
        value = with_tensor(value, first.detach())
        needs = first.requires_grad
        random = AllRandomState([first.device])
        try:
            for i, stage in enumerate(modules.values()):
                key = (look_of(stage), *map(kind_of, tensors_in(value)), needs) if alike else i
                if key not in known:
                    known[key] = _profile(i, stage, value, kwargs, needs, clocked)
                costs, value = known[key]
                needs = needs or bool(trained(stage))
                measured.append(costs)
        finally:
            random.restore()
        return cls(tuple(measured), first.nbytes)


def symbolic_chain(
    name: str, probe: Any, stages_of: Callable[[Any], tuple[Sequence[Callable], Any]]
) -> Chain:
    """Measure the chain of the stages and input that `stages_of(probe)` returns.

    The measurement runs on symbolic copies and is invisible to meters.

    Args:
        name: Name of what is measured, for errors.
        probe: Modules and tensors; they are copied, unless they are symbolic.
        stages_of: Function that returns stages and input, given the probe or its copy.
    """
    mode = detect_fake_mode()
    inside = mode is not None  # inside an estimate, which explains errors itself
    with _disable_current_modes():
        if mode is None:
            mode = Symbolic()
            generators = copies_of_generators(probe)
            with FakeCopyMode(mode):
                probe = copy.deepcopy(probe, generators)
        try:
            with mode, unlogged():
                return Chain.profile(*stages_of(probe), alike=True)
        except (*NEEDS_DATA, RuntimeError) as error:
            if inside or not needs_values(error):
                raise
            raise ValueError(
                f"{name} or a block after it reads values of its data"
                f" ({str(error).splitlines()[0][:80]}){place_of(error)}, but a schedule within a"
                " budget is planned on symbolic copies, which have shapes only. Pass a Schedule, or"
                " use a recipe with another checkpoint"
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise ValueError(
                f"{name} must run the forward of its class, got one whose copy computes with the"
                " original, as that of a compiled module does; or pass a Schedule"
            ) from error


def copies_of_generators(probe: Any) -> dict[int, torch.Generator]:
    """Copy the generators that modules hold in attributes, as a memo for `copy.deepcopy`.

    `copy.deepcopy` itself cannot copy a generator while tensors are symbolic.
    """
    modules = (m for each in probe if isinstance(each, nn.Module) for m in each.modules())
    leaves = (leaf for m in modules for leaf in tree_leaves(attributes_of(m)))
    return {id(leaf): copy.deepcopy(leaf) for leaf in leaves if isinstance(leaf, torch.Generator)}


def _profile(
    i: int, stage: nn.Module, value: Any, kwargs: dict, needs: bool, clocked: int
) -> tuple[Stage, Any]:
    """Return the costs of one stage, and its output."""
    device = the_tensor(value).device
    # copies replace the stage's own buffers, which stay unchanged
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    autocast = AutocastState([device.type])

    def forward() -> Kept:
        with autocast.restored(cache_enabled=False):
            return Kept(i, stage, value, kwargs, needs, buffers, GradientSlot())

    def backward(kept: Kept) -> None:
        kept.slot.gradient = torch.ones_like(the_tensor(kept.output))
        kept.backward()

    with flop_counter() as forward_flops:
        kept = forward()
    result = with_tensor(kept.output, the_tensor(kept.output).detach())
    with flop_counter() as backward_flops:
        backward(kept)
    output = the_tensor(result)
    times = [
        float(flops.get_total_flops() or output.numel())
        for flops in (forward_flops, backward_flops)
    ]

    with MemoryMeter() as meter:  # one meter for both, as backward releases what forward saved
        kept = forward()
        saved = max(meter.live_bytes, output.nbytes)
        operators = meter.moments
        backward(kept)
    live = meter.trace(events=False).live_bytes
    del kept

    if clocked:
        runs = [_seconds(device, forward, backward) for _ in range(clocked)]
        times = [statistics.median(seconds) for seconds in zip(*runs, strict=True)]
    measured = Stage(
        *times,
        output.nbytes,
        saved,
        int(live[:operators].max(initial=saved)) - saved,
        max(0, int(live[operators:].max(initial=0)) - saved - output.nbytes),
    )
    return measured, result


def _seconds(device: torch.device, forward, backward) -> tuple[float, float]:
    wait_for(device)
    start = time.perf_counter()
    kept = forward()
    wait_for(device)
    middle = time.perf_counter()
    backward(kept)
    wait_for(device)
    return middle - start, time.perf_counter() - middle
