"""Costs of a network as a chain of stages, given as numbers or measured.

A `Chain` has only numbers: the times and bytes from which `simulate` and the planner compute. The
memory meter and the symbolic mode are imported only when a chain is measured, so that the package
can be copied without them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from course_lib._check import kind, number, whole
from course_lib._torch.devices import wait_for
from course_lib._torch.generators import AllRandomState
from course_lib._torch.modes import AutocastState, disable_current_modes
from course_lib._torch.modules import attributes_of, kind_of, module_signature
from course_lib._torch.symbolic import FakeCopyMode, detect_fake_mode
from course_lib._torch.tensors import tensors_in, tree_leaves
from course_lib.checkpoint.state import ModuleState

from .stages import (
    GradientSlot,
    KeptStage,
    as_modules,
    check_constants,
    checked_value,
    main_tensor,
    trainable_parameters,
    with_main_tensor,
)


@dataclass(frozen=True)
class Stage:
    """Times and bytes of one stage: a part of a network, such as a layer, that runs as a whole.

    Attributes:
        forward_time: Time of the stage's forward, in any unit.
        backward_time: Time of the stage's backward, in the same unit.
        output_bytes: Bytes of the stage's output, and also of the output's gradient.
        saved_bytes: Bytes of everything that the forward keeps for the backward, including the
            stage's output but not its input.
        forward_overhead_bytes: Bytes that the forward needs while it runs, in addition to the
            stage's input and `saved_bytes`. They are the same whatever the forward keeps.
        backward_overhead_bytes: Bytes that the backward needs while it runs, in addition to the
            stage's input, `saved_bytes` and the gradient of the output. Examples are temporaries
            and the parameters' gradients. If the input's gradient is larger than the memory that
            the backward has already released, the difference is included too.

    Raises:
        TypeError, ValueError: A field has the wrong type or is out of range. The message names it.
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
    """Times and bytes of a network of L stages, such as layers, that run one after another.

    Stage i, for i = 0 to L-1, computes x_{i+1} from x_i.

    Attributes:
        stages: The L stages, each with its times and bytes.
        input_bytes: Bytes of x_0, the input of the chain.

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
        """Create a chain of equal stages, with the given times and bytes.

        Args:
            length: Number of stages.
            activation_bytes: Bytes of the chain's input and of each stage's output.
            saved_bytes: Bytes that each stage saves for its backward, including its output. By
                default only the output is saved.
            forward_time, backward_time: Times of each stage, in any unit.
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
        """Measure the times and bytes of stages (such as layers), and return them as a chain.

        Each stage runs by itself, in the same way as `ScheduledSequential` runs it. The bytes are
        exact, as counted by a `MemoryMeter`. A parameter's gradient counts only if it does not
        exist yet, as in the first training step. To measure a later step, create the gradients
        before this call. The call does not change buffers or random number generators.

        Args:
            stages: The stages: an `nn.Sequential`, or a list of modules and functions. Each
                receives the result of the previous one.
            x: Input of the first stage, with the shape used in training. If it requires gradients,
                the first stage's backward computes the gradient of the input.
            kwargs: Constants that each stage receives as keyword arguments.
            clock: Whether times are measured in seconds, each as the median of `repeats` runs. If
                False, the time of a forward or backward is the number of FLOPs of its matrix
                products and convolutions, which is the same in each call. Without such operators,
                the time is the number of elements of the stage's output.
            repeats: Number of timed runs per stage if `clock` is True.
            alike: Whether to measure only one of several equal stages, and to use its result for
                the others. Stages are equal if they have the same structure and settings, and
                inputs of the same shape and dtype.

        Raises:
            TypeError, ValueError: An argument has the wrong type or value.
            TypeError: A stage returns no tensor, or several tensors, if not
                exactly one of them is floating-point or complex.
        """
        modules = as_modules(stages)
        kwargs = dict(kwargs or {})
        timed_runs = whole("repeats", repeats, 1) * clock
        check_constants(kwargs)
        value = checked_value("x", x)
        tensor = main_tensor(value)
        measured = []
        results: dict[Any, tuple[Stage, Any]] = {}
        value = with_main_tensor(value, tensor.detach())
        needs_gradient = tensor.requires_grad
        random = AllRandomState([tensor.device])
        try:
            for i, stage in enumerate(modules.values()):
                key = (
                    (module_signature(stage), *map(kind_of, tensors_in(value)), needs_gradient)
                    if alike
                    else i
                )
                if key not in results:
                    # The stage runs with copies of its buffers, so that the buffers do not change.
                    before = ModuleState(stage, attributes=False, buffers=True)
                    with before.restore(last=True):
                        results[key] = _measure_stage(
                            i, stage, value, kwargs, needs_gradient, timed_runs
                        )
                costs, value = results[key]
                needs_gradient = needs_gradient or bool(trainable_parameters(stage))
                measured.append(costs)
        finally:
            random.restore()
        return cls(tuple(measured), tensor.nbytes)


def symbolic_chain(
    name: str, probe: Any, stages_of: Callable[[Any], tuple[Sequence[Callable], Any]]
) -> Chain:
    """Count the FLOPs and bytes of stages on symbolic tensors, and return them as a chain.

    Symbolic tensors have shapes but no values. The result is the same as that of `Chain.profile`
    with `clock=False` and `alike=True`, so times are FLOPs. A `MemoryMeter` that is active during
    the call does not count the symbolic tensors.

    Args:
        name: Name of the first stage or of the model, for error messages.
        probe: Tuple or list of the modules and tensors that the stages use. The function copies
            them, and all tensors of the copies are symbolic. If a symbolic mode is active already,
            nothing is copied.
        stages_of: Function that receives the copy of `probe`, or `probe` itself. It returns the
            arguments `stages` and `x` of `Chain.profile`: the stages and the input of the first
            stage.

    Raises:
        ValueError: A stage reads values of its data, or cannot be copied.
    """
    from course_lib._origin import NEEDS_DATA, error_location, needs_values, silence_operator_log
    from course_lib.symbolic import Symbolic
    from course_lib.symbolic.quantization import copy_parameter_subclasses, parameter_subclasses

    mode = detect_fake_mode()
    inside = mode is not None  # True inside an estimate, which raises its own error
    with disable_current_modes():
        if mode is None:
            modules = [each for each in tree_leaves(probe) if isinstance(each, nn.Module)]
            on_gpu = any(p.is_cuda for module in modules for p in module.parameters())
            mode = Symbolic("cuda" if on_gpu else "cpu")
            memo = copies_of_generators(probe)
            parameters = (p for module in modules for p in module.parameters())
            with FakeCopyMode(mode):
                make_symbolic = partial(mode.from_tensor, static_shapes=True)
                copy_parameter_subclasses(make_symbolic, parameters, memo)
                probe = copy.deepcopy(probe, memo)
        try:
            with mode, parameter_subclasses(), silence_operator_log():
                return Chain.profile(*stages_of(probe), alike=True)
        except (*NEEDS_DATA, RuntimeError) as error:
            if inside or not needs_values(error):
                raise
            raise ValueError(
                f"{name} or a later block reads the values of a tensor{error_location(error)}, as"
                " .item() does. To plan a schedule for a memory budget, the"
                " blocks run on symbolic tensors, which have shapes but no values. Pass a Schedule,"
                " or choose a recipe with a different `checkpoint`. PyTorch's error:"
                f" {str(error).splitlines()[0][:80]}"
            ) from error
        except AssertionError as error:
            if "FakeTensor" not in str(error):
                raise
            raise ValueError(
                f"{name} must keep the method forward of its class, but this method was replaced,"
                " for example by torch.compile(block). To plan a schedule for a memory budget, a"
                f" copy of the block runs, but the new forward would run {name} itself instead of"
                " the copy. To compile the block, call block.compile() instead. Otherwise pass a"
                " Schedule to schedule_blocks (in a recipe, choose checkpoint='layers')"
            ) from error


def copies_of_generators(probe: Any) -> dict[int, Any]:
    """Copy the PyTorch random number generators that are attributes of modules.

    `copy.deepcopy` itself cannot copy a generator while tensors are symbolic.

    Args:
        probe: Tuple or list of modules and other objects. Only the modules are searched.

    Returns:
        A dict from the `id` of each generator to its copy, for the argument `memo` of
        `copy.deepcopy`.
    """
    modules = (m for item in probe if isinstance(item, nn.Module) for m in item.modules())
    leaves = (leaf for m in modules for leaf in tree_leaves(attributes_of(m)))
    return {id(leaf): copy.deepcopy(leaf) for leaf in leaves if isinstance(leaf, torch.Generator)}


def _measure_stage(
    i: int, stage: nn.Module, value: Any, kwargs: dict, needs_gradient: bool, timed_runs: int
) -> tuple[Stage, Any]:
    """Measure stage i, and return its times and bytes, and its output for the next stage.

    Args:
        i: Number of the stage, for error messages.
        stage: The stage.
        value: Input of the stage.
        kwargs: Constants that the stage receives as keyword arguments.
        needs_gradient: Whether the gradient of the input is computed.
        timed_runs: Number of runs in which seconds are measured. With 0, the times are numbers of
            FLOPs.
    """
    from course_lib.memory import MemoryMeter
    from course_lib.memory.measurement import flop_counter

    device = main_tensor(value).device
    autocast = AutocastState([device.type])

    def forward() -> KeptStage:
        with autocast.restore(cache_enabled=False):
            return KeptStage(i, stage, value, kwargs, needs_gradient, GradientSlot())

    def backward(kept_stage: KeptStage) -> None:
        kept_stage.slot.gradient = torch.ones_like(main_tensor(kept_stage.output))
        kept_stage.backward()

    with flop_counter() as forward_flops:
        kept_stage = forward()
    result = with_main_tensor(kept_stage.output, main_tensor(kept_stage.output).detach())
    with flop_counter() as backward_flops:
        backward(kept_stage)
    output = main_tensor(result)
    times = [
        float(flops.get_total_flops() or output.numel())
        for flops in (forward_flops, backward_flops)
    ]

    # One meter counts both passes, because backward releases tensors of the forward pass.
    with MemoryMeter() as meter:
        kept_stage = forward()
        saved = max(meter.live_bytes, output.nbytes)
        operators = meter.points
        backward(kept_stage)
    live = meter.trace(events=False).live_bytes
    del kept_stage

    if timed_runs:
        runs = [_measure_seconds(device, forward, backward) for _ in range(timed_runs)]
        times = [statistics.median(seconds) for seconds in zip(*runs, strict=True)]
    measured = Stage(
        *times,
        output.nbytes,
        saved,
        int(live[:operators].max(initial=saved)) - saved,
        max(0, int(live[operators:].max(initial=0)) - saved - output.nbytes),
    )
    return measured, result


def _measure_seconds(device: torch.device, forward, backward) -> tuple[float, float]:
    """Run a stage once; return the seconds of its forward and of its backward."""
    wait_for(device)
    start = time.perf_counter()
    kept_stage = forward()
    wait_for(device)
    middle = time.perf_counter()
    backward(kept_stage)
    wait_for(device)
    return middle - start, time.perf_counter() - middle
