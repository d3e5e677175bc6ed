"""Technique that computes the logits and the loss of any model for a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib._check import describe
from course_lib._torch.modes import AutocastState, DisableTorchFunctionSubclass, autocast_of
from course_lib._torch.tensors import tensors_in
from course_lib.checkpoint import checkpointed_loss
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import text

from .technique import ForwardCheck, Recipe, RecipeSearch, Technique, at_least_or_none, fields_of

# Number of tokens per chunk that the search tries, or a sixteenth of the batch's tokens if that is
# more. Smaller chunks save little additional memory.
HEAD_CHUNK = 512


class ChunkedHead(Technique):
    """Technique that computes the logits and the loss for `head_chunk` tokens at a time."""

    fields = fields_of(head_chunk=at_least_or_none(1))
    after = ("attention",)
    composable = True
    acts_on = frozenset({"activation", "temporary"})

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        if recipe.head_chunk:
            head_of(model, recipe.head_chunk)
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[ForwardCheck]:
        return chunked_head(model, recipe.head_chunk)

    def labels(self, recipe: Recipe) -> list[str]:
        if not recipe.head_chunk:
            return []
        return [text("head in chunks of {tokens}", tokens=recipe.head_chunk)]

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        first = next(tensors_in(search.cache.batch), None)
        tokens = 0 if first is None or first.is_floating_point() else first.numel()
        chunk = max(HEAD_CHUNK, tokens // 16)
        found: list[Mapping[str, Any]] = [{self.field: None}]
        return [*found, {self.field: chunk}] if search.cache.supports(head_chunk=chunk) else found


@contextmanager
def chunked_head(model: nn.Module, chunk: int | None) -> Iterator[Callable[[], None]]:
    """Context manager in which a model computes its logits and its loss in chunks of tokens.

    The logits of all tokens then never exist at once. Inside the `with` block, the output head
    returns a placeholder (`Logits`), and `F.cross_entropy` of the placeholder computes logits and
    loss chunk by chunk. Loss and gradients equal those of the unchanged model. Before it calls
    `F.cross_entropy`, the model may only reshape, select or convert the logits of each token. Any
    other operation on them raises ValueError.

    The context manager yields a function without arguments, to be called after the forward pass.
    This function raises ValueError if the model has not passed its logits to `F.cross_entropy`.

    Args:
        model: Model whose output head is changed (see `head_of`).
        chunk: Number of tokens per chunk. None leaves the model unchanged.

    Raises:
        ValueError: The model has no output head.
    """
    if chunk is None:
        yield lambda: None
        return
    head = head_of(model, chunk)
    used: list[bool] = []
    own = vars(head).get("forward")
    about = f"got {chunk} for {describe(model)}"

    def check() -> None:
        if not used:
            raise ValueError(
                "head_chunk must be None for a model that does not pass its logits to"
                f" F.cross_entropy, {about}"
            )

    try:
        head.forward = _ForwardInChunks(head, chunk, about, used)
        yield check
    finally:
        del head.forward
        if own is not None:
            head.forward = own


class _ForwardInChunks:
    """Replacement for the method `forward` of the output head, which returns `Logits` instead.

    The replacement is a class and not a closure, so that a copy of the head has its own copy of the
    replacement. With checkpoint="optimal", the head is copied to measure its FLOPs and bytes.

    Args:
        head: Output head of the model, which computes the logits.
        chunk: Number of tokens per chunk.
        about: Part of error messages that names the chunk and the class of the model.
        used: List to which True is appended when the loss is computed from the `Logits`.
    """

    def __init__(self, head: nn.Module, chunk: int, about: str, used: list[bool]):
        self.head = head
        self.forward = head.forward
        self.about = about
        self.used = used
        # A head with an adapter may use dropout, and a recomputation must draw the same random
        # numbers.
        random = type(head) is not nn.Linear
        self.options = {"chunk": chunk, "preserve_rng_state": random}

    def __call__(self, hidden: Tensor) -> Logits:
        width = self.head.weight.shape[0]
        # The loss may be computed after the autocast context of the head's call has ended.
        autocast = AutocastState([hidden.device.type])

        def forward(hidden: Tensor) -> Tensor:
            with autocast.restore():
                return self.forward(hidden)

        return Logits(hidden, (), forward, width, self.about, self.used, self.options)


def head_of(model: nn.Module, chunk: int) -> nn.Module:
    """Return the output head of a model, that is, the module that computes its logits.

    If the model or a module inside it has the method `get_output_embeddings`, the output head is
    the result of this method. Otherwise it is the `nn.Linear` with the most output features among
    those outside the model's blocks. If several have the same number of output features, the last
    of them is taken.

    Args:
        model: Model to search.
        chunk: Value of `Recipe.head_chunk` for the error message.

    Raises:
        ValueError: The model has neither the method `get_output_embeddings` nor an `nn.Linear`
            outside its blocks.
    """
    # A module with the method `get_output_embeddings` may be wrapped in other modules.
    for module in model.modules():
        found = getattr(module, "get_output_embeddings", lambda: None)()
        if isinstance(found, nn.Module) and isinstance(getattr(found, "weight", None), Tensor):
            return found
    blocks: tuple[str, ...] = ()
    with suppress(ValueError):  # raised if the model has no list of blocks
        blocks = tuple(f"{name}." for name in names_of(model, None))
    linear = [
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and not name.startswith(blocks)
    ]
    if not linear:
        raise ValueError(
            f"head_chunk must be None for {describe(model)}, which has no output head, got {chunk}."
            " An output head is an nn.Linear outside the model's blocks, or the result of"
            " get_output_embeddings()"
        )
    return max(reversed(linear), key=lambda module: module.out_features)


# Functions that read only shape, dtype, device and similar properties of the logits.
METADATA_FUNCTIONS = {"__get__", "size", "dim", "numel", "__len__", "is_floating_point"}
ALLOWED_OPERATIONS = {"float", "to", "contiguous", "view", "reshape", "flatten", "getitem"}


class Logits(Tensor):
    """Placeholder for logits, whose loss is computed in chunks of tokens.

    The tensor has the shape and dtype of the logits but no values. When `F.cross_entropy` gets this
    tensor, it computes logits and loss together, for a few tokens at a time. Hugging Face models
    need such a placeholder, because they compute the loss inside their own `forward` method.

    Attributes:
        hidden: Input of the output head. If the model reshapes the logits, `hidden` is reshaped in
            the same way, except for its last dimension.
        casts: Dtypes to which the model has converted the logits, in order; empty if there was no
            conversion.
    """

    @staticmethod
    def __new__(cls, hidden, casts, forward, width, *_):
        dtype = casts[-1] if casts else autocast_of(hidden) or hidden.dtype
        return Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], width), dtype=dtype, device=hidden.device
        )

    def __init__(self, hidden, casts, *rest):
        self.hidden, self.casts, self.rest = hidden, casts, rest
        self.forward, self.width, self.about, self.used, self.options = rest

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        kwargs = kwargs or {}
        if name in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = next(x for x in (*args, *kwargs.values()) if isinstance(x, Logits))
        if func is F.cross_entropy:
            return logits.loss(
                *args[1:], **{key: value for key, value in kwargs.items() if value is not logits}
            )
        allowed = name.strip("_") in ALLOWED_OPERATIONS and args and args[0] is logits
        found = getattr(logits, f"_{name.strip('_')}")(*args[1:], **kwargs) if allowed else None
        if found is None:
            raise ValueError(
                f"head_chunk must be None for a model that applies {name} to its logits before"
                f" F.cross_entropy, {logits.about}; with head_chunk, a model may only reshape,"
                " index or convert its logits"
            )
        return found

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(
            f"head_chunk must be None for a model that calls {func} on its logits, because"
            " head_chunk replaces the logits by a placeholder without values"
        )

    def loss(
        self,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ) -> Tensor:
        """Return `F.cross_entropy` of the logits, computed in chunks of tokens.

        The logits must have the shape (tokens, vocabulary). Only the arguments `target` and
        `ignore_index`, and the reductions "mean" and "sum", are supported. All other shapes and
        arguments raise ValueError.
        """
        options = {"weight": weight, "size_average": size_average, "reduce": reduce}
        others = [name for name, value in options.items() if value is not None]
        others += ["label_smoothing"] if label_smoothing else []
        if others:
            raise ValueError(
                f"head_chunk must be None for a loss that sets {others[0]}, {self.about};"
                " head_chunk supports only the options ignore_index and reduction of"
                " F.cross_entropy"
            )
        if reduction == "none":
            raise ValueError(
                f"head_chunk must be None for a loss with reduction='none', {self.about}"
            )
        if self.hidden.dim() != 2:
            raise ValueError(
                f"head_chunk must be None for a loss that passes logits with {self.hidden.dim()}"
                f" dimensions to F.cross_entropy, {self.about}. To use head_chunk, reshape the"
                " logits to (tokens, vocabulary)"
            )
        self.used.append(True)

        def logits_of(hidden: Tensor) -> Tensor:
            logits = forward(hidden)
            for dtype in casts:
                logits = logits.to(dtype)
            return logits

        forward, casts = self.forward, self.casts
        options = {"ignore_index": ignore_index, "reduction": reduction, **self.options}
        return checkpointed_loss(self.hidden, logits_of, target, **options)

    # ---- Allowed operations on logits. They return None if the arguments are not allowed.

    def _with_hidden(self, hidden: Tensor, *dtypes: torch.dtype) -> Logits:
        """Return a placeholder for another input of the head, with further conversions of dtype."""
        return Logits(hidden, (*self.casts, *dtypes), *self.rest)

    def _float(self) -> Logits:
        return self._with_hidden(self.hidden, torch.float32)

    def _to(self, *args, **kwargs) -> Logits | None:
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            return None
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        # A device among the arguments is ignored, because the logits stay on their device.
        return self._with_hidden(self.hidden, *named)

    def _contiguous(self, **_) -> Logits:
        return self

    def _reshape(self, *shape) -> Logits | None:
        *rest, last = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if last != self.width and not (last == -1 and -1 not in rest):
            return None
        return self._with_hidden(self.hidden.reshape(*rest, self.hidden.shape[-1]))

    _view = _reshape

    def _flatten(self, start_dim: int = 0, end_dim: int = -1) -> Logits | None:
        if end_dim in (-1, self.hidden.dim() - 1):
            return None
        return self._with_hidden(self.hidden.flatten(start_dim, end_dim))

    def _getitem(self, index: Any) -> Logits | None:
        index = index if isinstance(index, tuple) else (index,)
        used = sum(
            x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1
            for x in index
            if x is not None
        )
        whole = isinstance(index[-1], slice) and index[-1] == slice(None)
        if any(x is Ellipsis for x in index):
            return self._with_hidden(self.hidden[index]) if whole else None
        return self._with_hidden(self.hidden[index]) if whole or used < self.hidden.dim() else None
