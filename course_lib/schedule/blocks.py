"""Run the blocks of any model by a schedule, in place: `schedule_blocks`.

When the model calls a block, this module lets the module `executor` run the next actions of the
schedule. The blocks must form a chain: each block receives the output of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._check import describe, function, kind
from course_lib._torch.modes import autocast_of, graph_break
from course_lib._torch.modules import kind_of, module_signature
from course_lib._torch.tensors import tensors_in
from course_lib.checkpoint.blocks import BlocksInPlace, names_of

from .actions import Backward, Schedule, simulate
from .chain import Chain, symbolic_chain
from .executor import ChainRun, states_of
from .stages import check_constants, differentiable, main_tensor, with_main_tensor

CHAIN_RULE = (
    "the blocks of a schedule must form a chain, in which each block is called once, with the"
    " result of the previous block. For other blocks, call checkpoint_blocks instead (in a recipe,"
    " choose checkpoint='layers')"
)


def schedule_blocks(
    model: nn.Module,
    blocks: str | Sequence[str] | None = None,
    *,
    schedule: Schedule | Callable[[Chain], Schedule],
) -> ScheduledBlocks:
    """Run the blocks of a model by a schedule, in place, until the returned handle is removed.

    A schedule determines which activations are kept for backward, and which blocks run again to
    compute the activations that were not kept.

    The blocks must form a chain. In a forward pass each block is called once, in the order of
    `model.named_modules()`. Its first argument is the result of the previous block: a tensor, or a
    container with exactly one floating-point tensor. The output of a block may be used only by the
    next block, except for the output of the last block. All further arguments of a block must be
    constants, which need no gradients.

    A block that runs again draws the same random numbers and starts with the same buffers and
    attributes as in its first run (see `ScheduledSequential`). Hooks on a block run once per
    forward pass; hooks on modules inside it run each time the block runs. Blocks that were compiled
    one by one with `torch.compile` run compiled. If the whole model was compiled instead, it has a
    graph break at each block, and its blocks run uncompiled.

    Args:
        model: Model to change in place. Its blocks get a new `forward`.
        blocks: Names of the blocks, such as "layers.*", or None to search the model for lists of
            blocks (see `checkpoint_blocks`). If a model has several lists that do not form one
            chain, such as an encoder and a decoder, pass the names of the blocks in one list.
        schedule: A schedule with one stage per block, or a function that returns a schedule for a
            `Chain`, such as `lambda chain: optimal(chain, budget_bytes)`. The chain has the bytes
            of the blocks, and their FLOPs as times. It is measured in the first forward pass, on
            copies of the blocks whose tensors have shapes but no values. It is measured again when
            the blocks, or the shapes or dtypes of their arguments, change.

    Returns:
        A handle with the `names` of the blocks. `handle.remove()` undoes the change, as does the
        end of a `with schedule_blocks(...)` block.

    Raises:
        ValueError: `blocks` matches no module that has a forward method, a block is checkpointed
            already, or the schedule runs a block twice before the first backward. In a forward or
            backward pass, the error is also raised if the blocks do not form a chain.
        TypeError: An argument has the wrong type.
        IllegalSchedule: The schedule is not legal for this number of blocks.
        RuntimeError: (In a forward or backward pass) a block cannot run by a schedule, for example
            because it changes its input in place. `ScheduledSequential` lists the reasons.
    """
    kind("model", model, nn.Module, "an nn.Module")
    if not isinstance(schedule, Schedule):
        function(
            "schedule",
            schedule,
            "a Schedule or a function that takes a Chain and returns a Schedule",
        )
    return ScheduledBlocks(model, names_of(model, blocks), schedule)


class ScheduledBlocks(BlocksInPlace):
    """Handle that `schedule_blocks` returns. Its method `remove` restores the original blocks.

    Args:
        model, names: The model, and the names of its blocks.
        schedule: A schedule, or a function that returns a schedule for a `Chain`, as in
            `schedule_blocks`.
        chain_cache: Dictionary in which measured chains are stored and looked up, if `schedule` is
            a function. By default a new one.

    Attributes:
        run: State of the present forward pass, a `ChainRun`. None before the first block is called
            and after the last block has been called.
        complete: Whether all blocks have been called in the last forward pass.
        advice: Text at the end of the error that is raised if a later run of a block differs from
            its first run. If None, the runs are not compared, and this error is never raised.
    """

    advice: str | None = None

    def __init__(
        self, model: nn.Module, names: Sequence[str], schedule, chain_cache: dict | None = None
    ):
        self.schedule = schedule
        self.chain_cache = {} if chain_cache is None else chain_cache
        self.run: ChainRun | None = None
        self.complete = False
        if isinstance(schedule, Schedule):
            _check_schedule(schedule, len(names))
        super().__init__(model, names)

    def check(self) -> None:
        """Raise an error if the last forward pass has not called all blocks.

        Raises:
            ValueError: A block was not called. The message has its name.
        """
        if not self.complete:
            missing = self.names[self.run.next_stage if self.run else 0]
            raise ValueError(f"{missing} was not called; {CHAIN_RULE}")

    def _call(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            # With fullgraph=True the compiler raises an error here. Otherwise the blocks run
            # outside the compiled graph.
            graph_break(
                "schedule_blocks runs blocks in the order of the schedule, also during"
                " backward, which a single compiled graph cannot do; compile the blocks instead"
                " of the model, or leave out fullgraph=True"
            )
        return self._run_scheduled(i, forward, args, kwargs)

    @torch._disable_dynamo
    def _run_scheduled(self, i: int, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run actions of the schedule until block i has run, and return the result of its call.

        The call of the last block returns the block's output. The call of any other block returns
        a placeholder for the output.
        """
        # The order of calls is checked first, so that there is a clear error if the blocks are in
        # two lists, such as an encoder and a decoder.
        input_placeholder = self._checked_input(i, args) if i else None
        check_constants(
            {f"argument {i + 1}": value for i, value in enumerate(args[1:], 1)} | kwargs
        )
        x = input_placeholder if i else self._start(args, kwargs)
        run = self.run
        self.complete = False
        run.stages[i].arguments = with_main_tensor(args[0], x.new_empty(0)), args[1:], kwargs
        self.link = run.run_next_stage(self.link if i else x)
        result = run.stages[i].result
        if run.next_stage < len(self.names):
            self.placeholder = _PlaceholderOutput.apply(run.output(i), self.link, self.names[i])
            return with_main_tensor(result, self.placeholder)
        output = run.finish_forward(self.link)
        self.run = self.link = self.placeholder = None
        self.complete = True
        return with_main_tensor(result, output)

    def _start(self, args: tuple, kwargs: dict) -> Tensor:
        """Start a forward pass with the first block's arguments, and return the chain's input."""
        stages = [_Stage(forward.block(), forward.original_forward()) for forward in self._forwards]
        x = _only_tensor(f"the first argument of {self.names[0]}", args[0] if args else None)
        schedule = self.schedule
        if not isinstance(schedule, Schedule):
            schedule = schedule(self._chain(stages, args, kwargs))
            _check_schedule(schedule, len(stages))
        states = states_of([stage.block for stage in stages], self.names, self.advice)
        self.run = ChainRun(stages, schedule, x, {}, states)
        return x

    def _checked_input(self, i: int, args: tuple) -> Tensor:
        """Return the input tensor of block i, which must be the result of the previous block.

        Raises:
            ValueError: The block is called with another tensor, or out of order.
        """
        name, previous = self.names[i], self.names[i - 1]
        if self.run is None or self.run.next_stage != i:
            raise ValueError(
                f"{name} must be called once, directly after {previous}, got another order of"
                f" calls; {CHAIN_RULE}"
            )
        x = _only_tensor(f"the first argument of {name}", args[0] if args else None)
        if x is not self.placeholder:
            raise ValueError(
                f"the first argument of {name} must be the result of {previous}, got another"
                f" tensor; {CHAIN_RULE}"
            )
        return x

    def _chain(self, stages: list[_Stage], args: tuple, kwargs: dict) -> Chain:
        """Return the FLOPs and bytes of the blocks as a chain.

        They are measured on copies of the blocks whose tensors have shapes but no values. If the
        cache has the chain already, they are not measured again.
        """
        from course_lib.memory.storages import hooks_active

        if hooks_active():  # the hooks would also receive tensors of the copies
            raise ValueError(
                f"schedule must be a Schedule, got a function: {self.names[0]} runs inside"
                " saved-tensor hooks, such as those of a checkpoint around it, where a function"
                " cannot plan a schedule. Remove these hooks, or pass a Schedule, such as the"
                " result of optimal(chain, budget_bytes) (in a recipe, choose checkpoint='layers')"
            )
        x = main_tensor(args[0])
        input_kinds = tuple(map(kind_of, tensors_in([args, kwargs])))
        key = self.names, tuple(map(module_signature, stages)), input_kinds, autocast_of(x)
        if key not in self.chain_cache:
            for stage in stages:
                stage.arguments = with_main_tensor(args[0], x.new_empty(0)), args[1:], kwargs
            probe = nn.ModuleList(stages), x.detach().requires_grad_(x.requires_grad)
            self.chain_cache[key] = symbolic_chain(self.names[0], probe, lambda copied: copied)
        return self.chain_cache[key]


class _Stage(nn.Module):
    """Stage of the chain that runs one block: it takes one tensor and returns one tensor.

    The block itself may have further arguments, and a result that contains more than one tensor.

    Attributes:
        arguments: (first argument, other arguments, keyword arguments) of the block's call. In the
            first argument, an empty tensor replaces the tensor that goes through the chain.
        result: Result of the block, in which an empty tensor replaces the stage's output.
    """

    def __init__(self, block: nn.Module, original_forward: Callable):
        super().__init__()
        self.block, self.original_forward = block, original_forward
        self.arguments: tuple[Any, tuple, dict] | None = None
        self.result: Any = None

    def forward(self, x: Tensor) -> Tensor:
        first, args, kwargs = self.arguments
        result = self.original_forward(with_main_tensor(first, x), *args, **kwargs)
        output = _only_tensor("the result of a block", result)
        self.result = with_main_tensor(result, output.new_empty(0))
        return output


class _PlaceholderOutput(torch.autograd.Function):
    """Autograd function that makes a placeholder for a block's output.

    The model passes the placeholder to the next block. The next block gets the real output from the
    `ChainRun`, and passes the gradient of its input to the `ChainRun`. If a gradient arrives at the
    placeholder, the model has also used the placeholder outside the next block. This is an error.
    """

    @staticmethod
    def forward(ctx, output: Tensor, link: Tensor, name: str) -> Tensor:
        ctx.name = name
        return output.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        raise ValueError(
            f"only the next block may use the result of {ctx.name}, but the model also uses it"
            f" elsewhere; {CHAIN_RULE}"
        )


def _only_tensor(name: str, value: Any) -> Tensor:
    """Return the only floating-point or complex tensor in a value.

    Gradients flow through this tensor.

    Args:
        name: Name of the value, for error messages.
        value: A tensor or a container.

    Raises:
        ValueError: The value does not have exactly one such tensor.
    """
    floating = [tensor for tensor in tensors_in(value) if differentiable(tensor)]
    if len(floating) != 1:
        raise ValueError(
            f"{name} must contain exactly one floating-point tensor, got {describe(value)} with"
            f" {len(floating)} of them; {CHAIN_RULE}"
        )
    return floating[0]


def _check_schedule(schedule: Any, count: int) -> None:
    """Check that a schedule is legal and runs each block once before the first backward.

    Raises:
        TypeError: `schedule` is not a `Schedule`.
        IllegalSchedule: `schedule` is not legal for `count` blocks.
        ValueError: `schedule` runs a block twice before the first backward.
    """
    kind("schedule", schedule, Schedule, "a Schedule")
    simulate(schedule, Chain.uniform(count))
    first = [action.stage for action in schedule[: count + 1]]
    if first != [*range(count), count - 1] or not isinstance(schedule[count], Backward):
        raise ValueError(
            "schedule must run each block exactly once before the first Backward action, got a"
            " schedule that does not"
        )
