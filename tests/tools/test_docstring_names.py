"""Names in backticks in docstrings exist: a renamed function leaves no dead reference behind."""

import ast
import builtins
import contextlib
import keyword
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.utils.flop_counter

ROOT = Path(__file__).parents[2]
FILES = sorted(p for folder in ("course_lib", "publish") for p in (ROOT / folder).rglob("*.py"))
REFERENCE = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")

#: Names of C++ functions of PyTorch and CUDA, of other packages, and placeholders.
ELSEWHERE = """
AsStridedBackward0 BlockComparatorSizeCounterAddress GraphExecGroup StableEmbedding
__cause__ _check_ accelerate.Accelerator.prepare_model alloc_found_block
areAnyTensorSubclassLike as_strided_backward
backquotes bbox can_accumulate_inplace check_NAME check_prefer_cudnn_attention computeStride
compute_elementwise_output_strides config.json cpp_wrapper ctc_loss_allocate_outputs cudaMalloc
cudaMemGetInfo emptyCache exercises.check_x f_locals fast_set_up find_expandable_block fonttools
format_size free_block get_allocation_size get_clamped_target_length get_free_block
is_fused_kernel_acceptable later_hint make_bag_size_out make_max_indices_out
make_offset2bag_out map_block max_grad_norm model.named_modules need_weights param_scalar_type
parseChosenWorkspaceSize preexec_fn priority_order release_block release_cached_blocks
reorder_dimensions rms_norm_symint setsid should_split soft_margin_loss_backward_out task_type
TrainingArguments batch_norm_per_micro_batch custom_mapping gradient_checkpointing
gradient_checkpointing_enable model.enable_input_require_grads register_step_pre_hook
register_optimizer_step_pre_hook set_attn_implementation set_requires_gradient_sync
triton.runtime.autotuner try_allocate_expandable_block try_merge_blocks unmap_block
"""
PLACES = (
    *(torch, torch.Tensor, torch.nn, torch.nn.functional, torch.autograd, torch.ops.aten),
    *(torch.autograd.graph, torch.utils.flop_counter, torch.utils.checkpoint, contextlib),
    *(torch.nn.parallel, torch.nn.parallel.DistributedDataParallel, torch._ops),
)


def identifiers(tree: ast.AST) -> set[str]:
    """Return all identifiers of a file's code, and the words of its short strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                found |= {name, *name.split(".")}
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 80 and "`" not in node.value:  # such as the keys of a dict
                found |= set(re.findall(r"\w+", node.value))
    return found


@cache
def known_names() -> frozenset[str]:
    """Return the identifiers of the library and the lessons, its modules, and Python's names."""
    found = {*dir(builtins), *keyword.kwlist, *ELSEWHERE.split()}
    for path in [*FILES, *(ROOT / "notebooks/scripts").glob("*.py")]:
        found |= {path.stem, path.parent.name, *identifiers(ast.parse(path.read_text("utf-8")))}
    return frozenset(found)


@cache
def file_names() -> frozenset[str]:
    """Return the names of all files of the library, its tools and its tests."""
    folders = (ROOT / folder for folder in ("course_lib", "publish", "tests"))
    return frozenset(path.name for folder in folders for path in folder.rglob("*.*"))


@cache
def in_torch(name: str) -> bool:
    """Return whether a dotted path can be imported, or PyTorch has a function of this name."""
    path = name.replace("nn.", "torch.nn.", 1) if name.startswith("nn.") else name
    path = path.replace("F.", "torch.nn.functional.", 1) if path.startswith("F.") else path
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return any(hasattr(place, path.rpartition(".")[2]) for place in PLACES)
    return True


def exists(name: str) -> bool:
    """Return whether a name in backticks is an identifier, a file, or a name of PyTorch."""
    if {name, name.rpartition(".")[2]} & known_names() or (ROOT / name).exists():
        return True
    return name in file_names() if name.endswith((".py", ".toml")) else in_torch(name)


def dead_references(text: str) -> list[str]:
    """Return the names in backticks in a file's docstrings that exist nowhere."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [name for node in nodes for name in REFERENCE.findall(ast.get_docstring(node) or "")]
    return [name for name in found if not exists(name)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_in_docstrings_refer_to_existing_objects(path):
    assert dead_references(path.read_text("utf-8")) == []


def test_docstring_reference_to_nonexistent_name_is_reported():
    text = '"""Use `MemoryMeter`, `torch.add`, `nn.Linear(2, 3)` and `no_such_function`."""'
    assert dead_references(text) == ["no_such_function"]
