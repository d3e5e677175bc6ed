"""Technique that sets the attention implementation of any model for one step.

Depending on the model, this module changes the model's `course_lib.models.Attention` modules, calls
its method `set_attn_implementation` (Hugging Face), or replaces its calls of
`F.scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from course_lib._check import describe
from course_lib.attention import flash_attention
from course_lib.labels import verbatim
from course_lib.models import Attention

from ..hugging_face import configs_of
from .technique import ForwardCheck, Recipe, RecipeSearch, Technique, choice, fields_of

ATTENTIONS = ("standard", "flash")
# Values that are passed to `set_attn_implementation` of a Hugging Face model.
HUGGING_FACE_ATTENTIONS = ("eager", "sdpa")


class AttentionKind(Technique):
    """Technique that chooses the attention implementation of a model, such as flash attention.

    The model must be built from `course_lib.models.Attention`, have the method
    `set_attn_implementation` (Hugging Face), or call `F.scaled_dot_product_attention`.
    """

    fields = fields_of(attention=choice(*ATTENTIONS, *HUGGING_FACE_ATTENTIONS, None))
    composable = True
    acts_on = frozenset({"activation", "temporary"})

    def is_used(self, recipe: Recipe) -> bool:
        """Return whether the recipe sets the attention implementation of the model.

        The result is True for every value of `Recipe.attention` except None, even for the default
        "standard". None leaves the model unchanged.
        """
        return recipe.attention is not None

    def unsupported_reason(self, recipe: Recipe, model: nn.Module) -> str | None:
        """Return an error message if the model does not support `recipe.attention`, or else None.

        Even if the result is None, the forward pass may raise an error, for example if it passes a
        mask to flash attention.
        """
        wanted = recipe.attention
        own = attentions_of(model)
        if wanted in HUGGING_FACE_ATTENTIONS and (own or not _modules_with_setter(model)):
            return (
                f"attention must be 'standard', 'flash' or None for {describe(model)} without"
                f" set_attn_implementation, got {wanted!r}"
            )
        if wanted == "flash" and drop_probability(own):
            return (
                f"attention must be 'standard' for {describe(model)} with dropout of attention"
                " probabilities, got 'flash'"
            )
        return None

    def apply(
        self, recipe: Recipe, model: nn.Module, store: Any = None
    ) -> AbstractContextManager[ForwardCheck]:
        return set_attention(model, recipe.attention)

    def labels(self, recipe: Recipe) -> list[str]:
        return [] if recipe.attention in ("standard", None) else [verbatim(recipe.attention)]

    def candidates(self, search: RecipeSearch) -> list[Mapping[str, Any]]:
        """Return the attention implementations that `course_lib.budget.fit` tries for a model.

        Each item is a dict such as {"attention": "flash"}. The list has the model's own
        implementation ("standard") and a fused one ("flash" or "sdpa"), sorted by the FLOPs of the
        step. If the model does not support fused attention or already uses it, the list has only
        "standard".

        Args:
            search: Object of the search that `fit` runs. `search.cache` has the model, the batch
                and the base recipe (the settings that the user has fixed).
        """
        unchanged = {"attention": "standard"}
        own = attentions_of(search.cache.model)
        if own:
            fused = {"attention": "flash"}
        elif "eager" in _implementations(search.cache.model):
            fused = {"attention": "sdpa"}
        else:
            return [unchanged]
        if drop_probability(own) or not search.cache.supports(**fused):
            return [unchanged]
        return sorted((unchanged, fused), key=lambda each: search.cache.with_base(**each).flops)


@contextmanager
def set_attention(model: nn.Module, wanted: str | None) -> Iterator[Callable[[], None]]:
    """Set the model's attention to `wanted` inside the `with` block.

    The context manager yields a function without arguments, to be called after a forward pass. With
    `wanted="flash"`, this function raises ValueError if the model has not called
    `F.scaled_dot_product_attention`. It checks only models without modules of the class
    `course_lib.models.Attention`.

    Args:
        model: Model to change.
        wanted: Value of `Recipe.attention`, such as "flash". None leaves the model unchanged.
    """
    own = attentions_of(model)
    with ExitStack() as stack:
        calls: list[bool] = []
        if own:
            stack.enter_context(_set_course_attention(own, wanted))
        elif wanted in HUGGING_FACE_ATTENTIONS:
            stack.enter_context(_set_implementation(model, wanted))
        elif wanted == "flash":
            stack.enter_context(_set_implementation(model, "sdpa", "flash"))
            stack.enter_context(_FlashAttentionMode(calls))

        def check() -> None:
            if wanted == "flash" and not own and not calls:
                raise ValueError(
                    f"attention must be 'standard' for {describe(model)}, which does not call"
                    " F.scaled_dot_product_attention, got 'flash'"
                )

        yield check


def attentions_of(model: nn.Module) -> list[Attention]:
    """Return all modules of a model that are instances of `course_lib.models.Attention`."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def drop_probability(attentions: Iterable[Attention]) -> float:
    """Return the largest dropout rate that the modules apply to their attention probabilities.

    Modules in eval mode use no dropout. The result is 0.0 if no module uses dropout.
    """
    drops = [module.drop_probabilities for module in attentions]
    return max((drop.p for drop in drops if drop.training), default=0.0)


@contextmanager
def _set_course_attention(modules: list[Attention], wanted: str | None) -> Iterator[None]:
    """Set the attention of `course_lib.models.Attention` modules inside the `with` block."""
    before = [
        {name: module.__dict__[name] for name in ("fused", "standard") if name in vars(module)}
        for module in modules
    ]
    try:
        for module in modules if wanted is not None else ():
            module.fused = False
            if wanted == "flash":
                module.standard = partial(flash_attention, causal=module.causal)
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            module.__dict__.pop("standard", None)
            module.__dict__.update(attributes)


# ---- Hugging Face models


def _implementations(model: nn.Module) -> set[str]:
    """Return the values of `_attn_implementation` in the model's Hugging Face configurations."""
    return {config._attn_implementation for config in configs_of(model, "_attn_implementation")}


def _modules_with_setter(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have a method `set_attn_implementation`.

    The method of a module also sets the modules inside it.
    """
    if callable(getattr(model, "set_attn_implementation", None)):
        return [model]
    return [found for child in model.children() for found in _modules_with_setter(child)]


@contextmanager
def _set_implementation(
    model: nn.Module, wanted: str, recipe_value: str | None = None
) -> Iterator[None]:
    """Set a Hugging Face model's attention implementation to `wanted` inside the `with` block.

    Args:
        model: Model that contains Hugging Face modules.
        wanted: Value for `set_attn_implementation`.
        recipe_value: Value of `Recipe.attention` for error messages; None if it equals `wanted`.
    """
    configs = configs_of(model, "_attn_implementation")
    before = [config._attn_implementation for config in configs]
    try:
        for module in _modules_with_setter(model):
            problem = None
            try:
                module.set_attn_implementation(wanted)
            except (ValueError, ImportError) as error:
                problem = error
            config: Any = module.config
            if problem or config._attn_implementation != wanted:
                allowed, reason = (
                    f"{config._attn_implementation!r} or None",
                    "whose set_attn_implementation rejects other values",
                )
                if recipe_value == "flash":
                    allowed, reason = (
                        "'standard'",
                        "whose attention cannot be switched to F.scaled_dot_product_attention",
                    )
                raise ValueError(
                    f"attention must be {allowed} for {describe(module)}, {reason}, got"
                    f" {recipe_value or wanted!r}"
                ) from problem
        yield
    finally:
        # Outer configurations are restored first, because setting an outer configuration also sets
        # the configurations inside it.
        for config, value in zip(configs, before, strict=True):
            config._attn_implementation = value


# ---- Modules that call PyTorch's attention


class _FlashAttentionMode(TorchFunctionMode):
    """Mode in which `F.scaled_dot_product_attention` runs `flash_attention`.

    Calls with a mask or with dropout raise ValueError, because `flash_attention` supports neither.

    Args:
        calls: List to which each call appends True.
    """

    # The mode is not active inside `backward`. Because of this attribute, checkpoints enter the
    # mode again for each recomputation.
    when_recomputed = True

    def __init__(self, calls: list[bool]):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        # A mode is not active inside a function that it handles. Therefore this mode would miss the
        # attention inside `multi_head_attention_forward` and inside `backward`, in which
        # checkpoints run the forward pass again. While one of these two functions runs,
        # `F.scaled_dot_product_attention` itself is replaced.
        if func in (F.multi_head_attention_forward, Tensor.backward):
            before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self.attention
            try:
                return func(*args, **(kwargs or {}))
            finally:
                F.scaled_dot_product_attention = before
        return func(*args, **(kwargs or {}))

    def attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options
    ) -> Tensor:
        """Run `flash_attention` with the arguments of `F.scaled_dot_product_attention`."""
        self.calls.append(True)
        for name, actual, plain in (("attn_mask", attn_mask, None), ("dropout_p", dropout_p, 0.0)):
            if actual is not plain and not (name == "dropout_p" and actual == plain):
                raise ValueError(
                    f"{name} of F.scaled_dot_product_attention must be {plain} when attention is"
                    f" 'flash', got {describe(actual)}; flash attention supports is_causal, but no"
                    " mask and no dropout"
                )
        return flash_attention(query, key, value, is_causal=is_causal, **options)
