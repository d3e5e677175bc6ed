"""Table of the optimizers that a recipe can name, with one row per optimizer.

Everything that depends on the optimizer is read from `OPTIMIZERS`: the values and conflicts of the
recipe's fields, the cost of an update on the host, the variant that PyTorch chooses on CUDA, and
the names that the command's `--optimizer` accepts. The attributes of a row have no defaults, so a
row must state all of them.

To add an optimizer, add its row. If PyTorch has no class for it, write one in this file; `Lion` is
an example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from course_lib._check import one_of, whole
from course_lib._torch.symbolic import FakeTensor, is_symbolic, tracked_device_kind
from course_lib.checkpoint.blocks import names_of

LR = 1e-3
MOMENTS = ("exp_avg", "exp_avg_sq")

OptimizerClass = Callable[..., torch.optim.Optimizer]
Settings = Mapping[str, Any]
Updates = Mapping[str | None, Settings]

# Maps each variant of the update to the arguments that choose it in a class of torch.optim.
VARIANT_ARGUMENTS: Updates = MappingProxyType(
    {
        # Without arguments, PyTorch chooses by the device of the parameters.
        None: {},
        "loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
)
UNFUSED_VARIANT_ARGUMENTS: Updates = MappingProxyType(
    {name: VARIANT_ARGUMENTS[name] for name in (None, "loop", "foreach")}
)
ONLY_LOOP: Updates = MappingProxyType({None: {}, "loop": {}})
UPDATE_VARIANTS = tuple(VARIANT_ARGUMENTS)


# ---- Classes that torch.optim lacks, or that symbolic tensors cannot run


class _ItemReturnsOne(TorchFunctionMode):
    """Mode in which `item()` of a symbolic tensor returns 1.0 instead of raising an error."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, changed so that it also runs on symbolic tensors.

    Adafactor reads the values of norms to scale its steps, and symbolic tensors have no values. The
    memory of a step does not depend on these values, so they are replaced by 1.0.
    """

    def step(self, closure=None):
        with _ItemReturnsOne():
            return super().step(closure)


class Lion(torch.optim.Optimizer):
    """Lion optimizer: each update is the sign of an interpolated momentum, with weight decay.

    With gradient g, momentum m (initially 0) and parameter p, each step computes

        p <- p - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)
        m <- beta2 * m + (1 - beta2) * g

    Apart from weight decay, every element of a parameter changes by lr in each step. The learning
    rate must therefore be smaller than Adam's (Chen et al. 2023).

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Coefficients beta1, for the update, and beta2, for the new momentum.
        weight_decay: Coefficient of the decoupled weight decay.

    Source: Chen et al. 2023, arXiv:2302.06675.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(state["momentum"].lerp(p.grad, 1 - beta1).sign_(), alpha=-lr)
                state["momentum"].lerp_(p.grad, 1 - beta2)
        return loss


class Adam8bit(torch.optim.Optimizer):
    """Optimizer that allocates the state of bitsandbytes' 8-bit Adam, to estimate its memory.

    It runs on symbolic tensors and changes no parameter. Each of the two moments has one byte per
    element, one fp32 scale per 256 elements, and a table of 256 fp32 elements, which all parameters
    share. Three kinds of parameters have fp32 moments instead: parameters with fewer than 4,096
    elements, parameters of a group with `optim_bits=32`, and weights that a module has registered
    with bitsandbytes for fp32 state, such as those of its `StableEmbedding` and `Embedding`. The
    step allocates no temporaries, because bitsandbytes runs it as one operator.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2; the limit and the registered weights
    are those of `bitsandbytes.optim.optimizer`.

    The paged variants of bitsandbytes have the same state. By the source of bitsandbytes 0.50, a
    paged optimizer is not paged on a CPU. On a GPU, the state of a parameter with at least 100,000
    elements is in memory that the driver may move to the host. An estimate counts it on the device.
    """

    BLOCK = 256  # elements per scale
    SMALL = 4096  # smallest number of elements for state in 8 bits
    LEVELS = 256  # elements of a table that all parameters share

    def __init__(self, params, lr: float = LR, **_):
        super().__init__(params, {"lr": lr, "optim_bits": 8})
        self.tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure=None):
        new = {
            p: group["optim_bits"]
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and not self.state[p]
        }
        registered = _registered_with_bitsandbytes() if new else {}
        for p, bits in new.items():
            limit = {"optim_bits": bits, "min_8bit_size": self.SMALL} | registered.get(p, {})
            if limit["optim_bits"] == 32 or p.numel() < limit["min_8bit_size"]:
                self._keep_in_fp32(p)
            else:
                self._keep_in_8_bits(p)

    def _keep_in_fp32(self, p: Tensor) -> None:
        """Allocate both moments of a parameter in fp32."""
        for moment in MOMENTS:
            self.state[p][moment] = torch.zeros_like(p, dtype=torch.float32)

    def _keep_in_8_bits(self, p: Tensor) -> None:
        """Allocate both moments of a parameter in 8 bits, with their scales and tables."""
        scales = -(-p.numel() // self.BLOCK)
        for moment in MOMENTS:
            table = p.new_zeros(self.LEVELS, dtype=torch.float32)
            self.state[p] |= {
                moment: torch.zeros_like(p, dtype=torch.uint8),
                f"{moment}_scales": p.new_zeros(scales, dtype=torch.float32),
                f"{moment}_table": self.tables.setdefault(moment, table),
            }


def _registered_with_bitsandbytes() -> dict[Tensor, dict[str, Any]]:
    """Return the settings that modules have registered with bitsandbytes for their parameters.

    The dict is empty if bitsandbytes has not been imported.
    """
    optimizers = sys.modules.get("bitsandbytes.optim")
    if optimizers is None:
        return {}
    registered = optimizers.GlobalOptimManager.get_instance().module_weight_config_triple
    return {getattr(module, name): settings for module, name, settings in registered}


def _adamw_of_bitsandbytes() -> OptimizerClass:
    """Return the class `AdamW8bit`, or raise ValueError if bitsandbytes is not installed."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            "optimizer must not be 'adam8bit' unless bitsandbytes is installed, got 'adam8bit';"
            " pip install bitsandbytes, or choose another optimizer"
        ) from error
    return AdamW8bit


class TwoOptimizers(torch.optim.Optimizer):
    """Optimizer that consists of two optimizers, each of which updates its own parameter groups.

    Args:
        params: Groups of parameters. The second optimizer updates those with the setting "rest".
        lr: Learning rate of both optimizers.
        first, second: Functions that take a list of parameter groups and return their optimizer.
    """

    def __init__(self, params, lr: float, first: OptimizerClass, second: OptimizerClass):
        self.parts = first, second
        super().__init__(params, {"lr": lr, "rest": False})
        for _ in self._optimizers():
            pass  # creating the optimizers checks the parameters and adds settings to the groups

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Create and yield the optimizers that have parameters; both share `self.state`."""
        for make, is_rest in zip(self.parts, (False, True), strict=True):
            if groups := [group for group in self.param_groups if group["rest"] is is_rest]:
                optimizer = make(groups)
                optimizer.state = self.state
                yield optimizer

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer in self._optimizers():
            optimizer.step()
        return loss


def matrices_of_blocks(model: nn.Module) -> set[Tensor]:
    """Return the weights that Muon updates: the matrices of a model's blocks.

    They are the trained parameters with two dimensions in the lists of blocks that
    `course_lib.checkpoint.checkpoint_blocks` finds, except those of an embedding. The output head
    and everything else outside of the blocks are not among them.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon, where AdamW updates the first and
    the last layer of a model, and all parameters that are not matrices.
    """
    tables = nn.Embedding, nn.EmbeddingBag
    embedded = {p for m in model.modules() if isinstance(m, tables) for p in m.parameters()}
    with suppress(ValueError):  # the model has no list of blocks
        blocks = map(model.get_submodule, names_of(model, None))
        parameters = {p for block in blocks for p in block.parameters() if p.requires_grad}
        return {p for p in parameters - embedded if p.dim() == 2}
    return set()


# ---- Table of the optimizers


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """Class, settings and properties of one optimizer.

    Attributes:
        base: Class that updates the parameters. It must also run on symbolic tensors.
        select_parameters: Function of a model that returns the parameters that `base` updates; None
            if it updates all of them.
        rest: Name of the row whose optimizer updates all other parameters; None if there are none.
        load_base: Function that imports the class for real steps, if that class belongs to another
            package and `base` only allocates its state. It raises ValueError if the package is not
            installed. None if `base` also runs real steps.
        settings: Arguments of the class, apart from the learning rate and those in `updates`.
        updates: Mapping from each variant of the update to the arguments that choose it. One of the
            keys is None, the default of the class.
        default_on_cuda: Variant that the class uses by default for parameters on CUDA.
        state_tensors: Number of tensors in the state of a parameter, each as large as the
            parameter. None if the number is not the same for all parameters, in which case the
            state cannot be offloaded.
        shares_state: Whether parameters share a tensor of the state. The state of all parameters is
            then smaller than the sum of their individual states.
        aliases: Other names that the command line accepts.

    Raises:
        TypeError: An attribute is missing, or `state_tensors` is not a whole number or None.
        ValueError: `updates` does not contain `default_on_cuda` or None, `state_tensors` is
            negative, or only one of `select_parameters` and `rest` is None.
    """

    base: OptimizerClass
    select_parameters: Callable[[nn.Module], set[Tensor]] | None
    rest: str | None
    load_base: Callable[[], OptimizerClass] | None
    settings: Settings
    updates: Updates
    default_on_cuda: str
    state_tensors: int | None
    shares_state: bool
    aliases: tuple[str, ...]

    def __post_init__(self):
        if None not in self.updates:
            raise ValueError(f"updates must contain None, got {list(self.updates)}")
        one_of("default_on_cuda", self.default_on_cuda, list(self.updates))
        if self.state_tensors is not None:
            whole("state_tensors", self.state_tensors, 0)
        if (self.select_parameters is None) != (self.rest is None):
            raise ValueError(
                f"rest must be None if and only if select_parameters is, got {self.rest!r}"
            )

    @property
    def can_offload_state(self) -> bool:
        """Whether a recipe may offload the state (or the master weights if there is no state)."""
        return self.state_tensors is not None

    @property
    def host_update_bytes(self) -> int:
        """Bytes per parameter that the host reads and writes in its memory for an update.

        The host reads the gradient, the weight and the state in fp32, and writes the weight and the
        state. With master weights the sum is the same: the gradient arrives in bf16, and the
        parameter is also written in bf16.

        Raises:
            ValueError: The state cannot be offloaded, so the host never updates parameters.
        """
        if self.state_tensors is None:
            raise ValueError(
                "state_tensors must be a whole number for an update on the host, got None"
            )
        read, written = 2 + self.state_tensors, 1 + self.state_tensors
        return (read + written) * torch.float32.itemsize

    @property
    def host_state_bytes(self) -> int:
        """Bytes per parameter that stay in host memory if its state is offloaded to the host.

        These bytes are the weight and the state, both in fp32. During a step, the host also holds
        copies of gradients and of updated parameters, which are not included.

        Raises:
            ValueError: The state cannot be offloaded.
        """
        if self.state_tensors is None:
            raise ValueError(
                "state_tensors must be a whole number to offload the state to the host, got None"
            )
        return (1 + self.state_tensors) * torch.float32.itemsize


OPTIMIZERS: Mapping[str, OptimizerRow] = MappingProxyType(
    {
        "adam": OptimizerRow(
            base=torch.optim.AdamW,
            select_parameters=None,
            rest=None,
            load_base=None,
            settings={},
            updates=VARIANT_ARGUMENTS,
            default_on_cuda="foreach",
            state_tensors=2,
            shares_state=False,
            aliases=("adamw", "adamw_torch", "paged_adamw", "paged_adamw_32bit"),
        ),
        "sgd": OptimizerRow(
            base=torch.optim.SGD,
            select_parameters=None,
            rest=None,
            load_base=None,
            settings={},
            updates=VARIANT_ARGUMENTS,
            default_on_cuda="foreach",
            state_tensors=0,
            shares_state=False,
            aliases=(),
        ),
        "momentum": OptimizerRow(
            base=torch.optim.SGD,
            select_parameters=None,
            rest=None,
            load_base=None,
            settings={"momentum": 0.9},
            updates=VARIANT_ARGUMENTS,
            default_on_cuda="foreach",
            state_tensors=1,
            shares_state=False,
            aliases=("sgd with momentum",),
        ),
        "adafactor": OptimizerRow(
            base=Adafactor,
            select_parameters=None,
            rest=None,
            load_base=None,
            settings={},
            updates=UNFUSED_VARIANT_ARGUMENTS,
            default_on_cuda="loop",
            state_tensors=None,
            shares_state=False,
            aliases=(),
        ),
        "adam8bit": OptimizerRow(
            base=Adam8bit,
            select_parameters=None,
            rest=None,
            load_base=_adamw_of_bitsandbytes,
            settings={},
            updates=ONLY_LOOP,
            default_on_cuda="loop",
            state_tensors=None,
            shares_state=True,
            aliases=("adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
        ),
        "lion": OptimizerRow(
            base=Lion,
            select_parameters=None,
            rest=None,
            load_base=None,
            settings={},
            updates=ONLY_LOOP,
            default_on_cuda="loop",
            state_tensors=1,
            shares_state=False,
            aliases=("lion_32bit",),
        ),
        "muon": OptimizerRow(
            base=torch.optim.Muon,
            select_parameters=matrices_of_blocks,
            rest="adam",
            load_base=None,
            settings={},
            updates=ONLY_LOOP,
            default_on_cuda="loop",
            state_tensors=None,
            shares_state=False,
            aliases=(),
        ),
    }
)


def class_and_settings(optimizer: str, update: str | None) -> tuple[OptimizerClass, dict[str, Any]]:
    """Return the optimizer's class and its arguments, apart from the learning rate.

    Args:
        optimizer: Name in `OPTIMIZERS`.
        update: Variant of the update, a key of `OPTIMIZERS[optimizer].updates`. None is the default
            variant.

    Raises:
        ValueError: The class belongs to a package that is not installed.
    """
    row = OPTIMIZERS[optimizer]
    base = row.base if row.load_base is None or is_symbolic() else row.load_base()
    settings = {**row.updates[update], **row.settings}
    if row.rest is None:
        return base, settings
    # Symbolic tensors are on the CPU, where PyTorch would not choose the variant for CUDA.
    on_cuda = OPTIMIZERS[row.rest].default_on_cuda if tracked_device_kind() == "cuda" else None
    other, others = class_and_settings(row.rest, update or on_cuda)
    return TwoOptimizers, {"first": partial(base, **settings), "second": partial(other, **others)}
