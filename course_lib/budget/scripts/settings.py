"""Lines of a script that set the attention and the checkpoints of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from torch import nn

from course_lib._check import any_of, describe
from course_lib.budget.hugging_face import configs_of
from course_lib.budget.stages import may_draw, runs_stages
from course_lib.budget.techniques.attention import HUGGING_FACE_ATTENTIONS, attentions_of
from course_lib.budget.techniques.checkpoints import block_names
from course_lib.checkpoint.blocks import names_of
from course_lib.checkpoint.state import statistics_of

from .lines import Lines

MATRIX_PRODUCTS_CODE = "[torch.ops.aten.addmm.default, torch.ops.aten.mm.default]"


def setting_lines(lines: Lines) -> list[str]:
    """Return script lines that turn off the key-value cache and set the attention of the model.

    Args:
        lines: Builder of the script, with the model and the recipe.
    """
    return [*cache_lines(lines.model), *_attention(lines)]


def cache_lines(model: nn.Module) -> list[str]:
    """Return script lines that turn off the key-value cache of a Hugging Face model.

    The list is empty if the model has no such cache.
    """
    found = configs_of(model, "use_cache")
    if not found:
        return []
    if found == [getattr(model, "config", None)]:
        return ["model.config.use_cache = False  # training reads no cache"]
    return [
        "for module in model.modules():",
        '    if hasattr(getattr(module, "config", None), "use_cache"):',
        "        module.config.use_cache = False  # training reads no cache",
    ]


def _attention(lines: Lines) -> list[str]:
    """Return script lines that set the attention of the model; empty if it stays unchanged."""
    wanted, own = lines.recipe.attention, attentions_of(lines.model)
    allowed = settable_attentions(lines.model)
    if wanted not in allowed:
        raise ValueError(
            f"attention must be {any_of(map(repr, allowed))} in a script for"
            f" {describe(lines.model)}, got {wanted!r}. Other models support other values: 'flash'"
            " needs course_lib.models.Attention, and 'sdpa' and 'eager' need the method"
            " set_attn_implementation"
        )
    if wanted in HUGGING_FACE_ATTENTIONS:
        return [f'model.set_attn_implementation("{wanted}")']
    changes = ["module.fused = False"] if any(module.fused for module in own) else []
    if wanted == "flash":
        lines.use("functools", "partial")
        lines.use("course_lib.attention", "flash_attention")
        changes.append("module.standard = partial(flash_attention, causal=module.causal)")
    if wanted is None or not (own and changes):
        return []
    lines.use("course_lib.models", "Attention")
    return [
        "for module in model.modules():",
        "    if isinstance(module, Attention):",
        *(f"        {change}" for change in changes),
    ]


def settable_attentions(model: nn.Module) -> tuple[str | None, ...]:
    """Return the values of `Recipe.attention` that a script can set in a model.

    The result always contains "standard" and the value None, which leaves the model unchanged.
    """
    if attentions_of(model):
        return (None, "standard", "flash")
    switches = callable(getattr(model, "set_attn_implementation", None))
    return (None, "standard", *(HUGGING_FACE_ATTENTIONS if switches else ()))


# ---- blocks


def block_list_names(lines: Lines) -> list[str]:
    """Return the names of the module lists that contain the blocks to checkpoint.

    The lists are `nn.ModuleList` or `nn.Sequential`, and together contain exactly these blocks. The
    result is empty if there are no such lists.

    Args:
        lines: Builder of the script, with the model and the recipe.
    """
    names = selected_block_names(lines)
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    modules = [lines.model.get_submodule(parent) for parent in parents]
    if not all(isinstance(module, (nn.ModuleList, nn.Sequential)) for module in modules):
        return []
    inside = [
        f"{parent}.{child}" if parent else child
        for parent, module in zip(parents, modules, strict=True)
        for child, _ in module.named_children()
    ]
    return parents if sorted(inside) == sorted(names) else []


def selected_block_names(lines: Lines) -> list[str]:
    """Return the names of the modules that `recipe.blocks` selects in the script's model.

    Args:
        lines: Builder of the script, with the model and the recipe.
    """
    return names_of(lines.model, block_names(lines.recipe))


def checkpoint_lines(lines: Lines, sharded: bool = False) -> list[str]:
    """Return script lines that checkpoint the blocks of the model.

    The list is empty if the recipe has no checkpoints, or if the script already checkpoints the
    model in the lines that compute the loss.

    Args:
        lines: Builder of the script, with the model and the recipe.
        sharded: Whether FSDP2 has sharded the blocks. If so, the checkpoints always restore the
            state of the random generators. If not, the checkpoints restore this state only if
            `may_draw(model)` is True.
    """
    recipe, model = lines.recipe, lines.model
    if recipe.checkpoint == "none" or runs_stages(model, recipe):
        return []
    reject_statistics(map(model.get_submodule, selected_block_names(lines)), recipe.checkpoint)
    blocks = _pattern(lines)
    if recipe.checkpoint == "segments":
        lines.use("course_lib.schedule", "Chain", "schedule_blocks", "segments")
        chain = f"Chain.uniform({len(selected_block_names(lines))})"
        return [f"schedule_blocks(model, {blocks}, schedule=segments({chain}, {recipe.segments}))"]
    lines.use("course_lib.checkpoint", "checkpoint_blocks")
    before, options = [], [blocks]
    if recipe.first_blocks is not None:
        options.append(f"first={recipe.first_blocks}")
    if recipe.checkpoint == "selective":
        before = [f"products = {MATRIX_PRODUCTS_CODE}"]
        options.append("policy=products")
    if not sharded and not may_draw(model):
        options.append("preserve_rng_state=False")
    options.append("preserve_module_state=True")
    return [*before, f"checkpoint_blocks(model, {', '.join(options)})"]


def _pattern(lines: Lines) -> str:
    """Return, as Python source, the names of the checkpointed blocks, such as `"model.layers.*"`.

    The source is a string, or a list of strings.
    """
    if lines.recipe.blocks is not None:
        return string_code(block_names(lines.recipe))
    lists = block_list_names(lines)
    found = [f"{name}.*" if name else "*" for name in lists] or selected_block_names(lines)
    return string_code(found[0] if len(found) == 1 else found)


def string_code(names: str | Sequence[str]) -> str:
    """Return a string, or a list of strings, as Python source with double quotes."""
    if isinstance(names, str):
        return f'"{names}"'
    return f"[{', '.join(map(string_code, names))}]"


def has_statistics(model: nn.Module) -> bool:
    """Return whether a block of a model updates running statistics, as BatchNorm does."""
    with suppress(ValueError):  # raised if the model has no list of blocks
        return any(statistics_of(model.get_submodule(name)) for name in names_of(model, None))
    return False


def reject_statistics(blocks: Iterable[nn.Module], checkpoint: str) -> None:
    """Raise ValueError if a block updates running statistics, as BatchNorm does.

    A script cannot checkpoint such a block, because the recomputation would update the statistics a
    second time.

    Args:
        blocks: Blocks to be checkpointed.
        checkpoint: Value of `Recipe.checkpoint` for the error message.
    """
    if any(statistics_of(block) for block in blocks):
        raise ValueError(
            "to write a script for a model with BatchNorm in its blocks, checkpoint must be 'none',"
            f" got {checkpoint!r}. In the script, a checkpoint would update the running statistics"
            " twice. Use course_lib.budget.train_step instead, which undoes the second update"
        )
