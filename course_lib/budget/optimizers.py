"""Table of the optimizers that a recipe can name, with one row per optimizer.

Everything that depends on the optimizer is read from the table `OPTIMIZERS`. For example, a row of
the table states which variants of the update exist, which of them PyTorch chooses on CUDA, and
which names the option `--optimizer` accepts. The attributes of a row have no defaults, so a row
must state all of them.

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
        # Without arguments, PyTorch chooses the variant by the device of the parameters.
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
    """Mode in which `item()` of a symbolic tensor returns 1.0 instead of raising an error.

    Symbolic tensors have shapes but no values.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, changed so that its step can also run on symbolic tensors.

    Symbolic tensors have shapes but no values. Adafactor reads the values of norms to scale its
    updates. On symbolic tensors, each of these values is replaced by 1.0, because the memory of a
    step does not depend on them. On real tensors, nothing changes.
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
        params: Parameters, or parameter groups as in any `torch.optim.Optimizer`.
        lr: Learning rate.
        betas: Coefficients (beta1, beta2). beta1 is for the update, and beta2 for the new momentum.
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
    """Stand-in for bitsandbytes' 8-bit Adam that allocates the same state but updates nothing.

    This class runs on symbolic tensors, which have shapes but no values, to estimate the memory of
    a training step. Adam's state consists of two moments per parameter. In 8 bits, each moment has
    three parts:

    - one byte per element;
    - one fp32 scale per 256 elements;
    - a table of 256 fp32 elements, which all parameters share.

    Three kinds of parameters have fp32 moments instead:

    - parameters with fewer than 4,096 elements;
    - parameters of a group with `optim_bits=32`;
    - weights that a module has registered with bitsandbytes for fp32 state, such as those of the
      modules `StableEmbedding` and `Embedding` of bitsandbytes.

    The step allocates no temporary tensors, because bitsandbytes runs it as one operator.

    The paged variants of bitsandbytes have the same state. On a GPU, they put the state of a
    parameter with at least 100,000 elements into memory that the driver may move to the host. An
    estimate counts this state on the device. On a CPU, the paged variants do not page their state,
    according to the source code of bitsandbytes 0.50.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2. The limit of 4,096 elements and the
    registered weights are those of `bitsandbytes.optim.optimizer`.
    """

    BLOCK = 256  # elements per scale
    SMALL = 4096  # parameters with fewer elements have fp32 state
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
    """Return a dict from parameters to the optimizer settings registered for them.

    Modules such as `bitsandbytes.nn.StableEmbedding` register settings with bitsandbytes. The dict
    is empty if bitsandbytes has not been imported.
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
            "optimizer 'adam8bit' needs bitsandbytes, which is not installed. Run pip install"
            " bitsandbytes, or choose another optimizer"
        ) from error
    return AdamW8bit


class TwoOptimizers(torch.optim.Optimizer):
    """Optimizer that uses one optimizer for some parameter groups and a second one for all others.

    Args:
        params: Parameter groups, as dicts. The second optimizer updates the groups with the entry
            `"rest": True`, and the first one updates all other groups.
        lr: Learning rate of both optimizers.
        first: Function that takes a list of parameter groups and returns the first optimizer.
        second: Function that takes a list of parameter groups and returns the second optimizer.
    """

    def __init__(self, params, lr: float, first: OptimizerClass, second: OptimizerClass):
        self.parts = first, second
        super().__init__(params, {"lr": lr, "rest": False})
        for _ in self._optimizers():
            pass  # creating the optimizers checks the parameters and adds settings to the groups

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Create and yield the two optimizers, but skip an optimizer without parameters.

        Both optimizers share the state of this object, `self.state`.
        """
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
    """Return the weights that Muon updates: the matrices in the blocks of a model.

    Blocks are the repeated layers in the lists that `course_lib.checkpoint.checkpoint_blocks`
    finds. The matrices are the two-dimensional parameters that require gradients, except the
    weights of embeddings. Parameters outside of the blocks, such as the output head, are not
    included. The set is empty if the model has no list of blocks.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon. According to this source, AdamW
    updates the first and the last layer of a model, and all parameters that are not matrices.
    """
    tables = nn.Embedding, nn.EmbeddingBag
    embedded = {p for m in model.modules() if isinstance(m, tables) for p in m.parameters()}
    with suppress(ValueError):  # raised if the model has no list of blocks
        blocks = map(model.get_submodule, names_of(model, None))
        parameters = {p for block in blocks for p in block.parameters() if p.requires_grad}
        return {p for p in parameters - embedded if p.dim() == 2}
    return set()


# ---- Table of the optimizers


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One row of the table `OPTIMIZERS`: class, arguments and properties of an optimizer.

    Attributes:
        base: Class of the optimizer, which must be able to run on symbolic tensors (tensors with
            shapes but without values).
        select_parameters: Function that takes a model and returns the set of parameters that `base`
            updates. None if `base` updates all parameters.
        rest: Name of a second optimizer, a key of `OPTIMIZERS`, that updates the parameters that
            `select_parameters` does not return. None if `select_parameters` is None.
        load_base: Function that imports and returns the class for steps on real tensors, and raises
            ValueError if its package is not installed. None if `base` runs these steps as well.
        settings: Arguments of the class, except the learning rate and the arguments in `updates`.
        updates: Mapping from each variant of the update, such as "foreach", to the arguments that
            select it. The key None stands for the default of the class, and must exist.
        default_on_cuda: Variant that the class uses by default if the parameters are on CUDA.
        state_tensors: Number of tensors in the state of each parameter, each as large as the
            parameter. None if the tensors have other sizes; such a state cannot be offloaded.
        shares_state: Whether several parameters share a tensor of the state. An example is the
            table of 8-bit Adam.
        aliases: Other names of the optimizer that the command line accepts.

    Raises:
        TypeError: An attribute is missing, or `state_tensors` is neither a whole number nor None.
        ValueError: `updates` does not have the key None, or does not have the value of
            `default_on_cuda` as a key; `state_tensors` is negative; or only one of
            `select_parameters` and `rest` is None.
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
            raise ValueError(
                "updates must have an entry with the key None, for the default variant of the"
                f" update, got the keys {list(self.updates)}"
            )
        one_of("default_on_cuda", self.default_on_cuda, list(self.updates))
        if self.state_tensors is not None:
            whole("state_tensors", self.state_tensors, 0)
        if (self.select_parameters is None) != (self.rest is None):
            raise ValueError(
                "rest and select_parameters must be given together or not at all, got only"
                f" {'select_parameters' if self.rest is None else 'rest'}"
            )

    @property
    def can_offload_state(self) -> bool:
        """Whether the state of this optimizer can be offloaded to host memory or to a file.

        For an optimizer without state, such as SGD, the value says whether the master weights can
        be offloaded.
        """
        return self.state_tensors is not None

    @property
    def host_update_bytes(self) -> int:
        """Bytes that the host reads and writes in its memory to update one parameter element.

        The host reads the gradient, the weight and the state in fp32, and writes the weight and the
        state. With fp32 master weights, the sum is the same: the host reads the gradient in bf16,
        which is 2 bytes less, and also writes the updated parameter in bf16, which is 2 bytes more.

        Raises:
            ValueError: The state cannot be offloaded, so the host never updates parameters.
        """
        if self.state_tensors is None:
            raise ValueError(
                "state_tensors must be the number of state tensors per parameter for an optimizer"
                " that updates weights on the host, got None; pass it to OptimizerRow, such as"
                " state_tensors=2 for Adam"
            )
        read, written = 2 + self.state_tensors, 1 + self.state_tensors
        return (read + written) * torch.float32.itemsize

    @property
    def host_state_bytes(self) -> int:
        """Bytes of host memory per parameter element whose state is offloaded to the host.

        The number is the size of the weight and the state, both in fp32. Copies of gradients and of
        updated parameters are also in host memory during a step, but are not included.

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
    """Return the class of an optimizer, and a dict of its arguments without the learning rate.

    For an optimizer that leaves some parameters to a second optimizer, as Muon does, the class is
    `TwoOptimizers`.

    Args:
        optimizer: Name in `OPTIMIZERS`, such as "adam".
        update: Variant of the update, such as "foreach": a key of `OPTIMIZERS[optimizer].updates`.
            None selects the default of the class.

    Raises:
        ValueError: The class belongs to a package that is not installed.
    """
    row = OPTIMIZERS[optimizer]
    base = row.base if row.load_base is None or is_symbolic() else row.load_base()
    settings = {**row.updates[update], **row.settings}
    if row.rest is None:
        return base, settings
    # Symbolic tensors are on the CPU, so by default PyTorch would choose the variant for a CPU.
    on_cuda = OPTIMIZERS[row.rest].default_on_cuda if tracked_device_kind() == "cuda" else None
    other, others = class_and_settings(row.rest, update or on_cuda)
    return TwoOptimizers, {"first": partial(base, **settings), "second": partial(other, **others)}
