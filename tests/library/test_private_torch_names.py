"""Private names of PyTorch that the library uses exist: a checklist for a new version of torch."""

import ast
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

LIBRARY = Path(__file__).parents[2] / "course_lib"
X = torch.ones(2, 3, requires_grad=True)
with FakeTensorMode() as MODE:
    FAKE = nn.Parameter(torch.zeros(2))
(PRUNING,) = prune.identity(nn.Linear(1, 1), "weight")._forward_pre_hooks.values()

# Objects of torch, or their paths, that have the private names.
OWNERS = [
    *("torch", "torch.Tensor", "torch.UntypedStorage", "torch.ops.aten"),
    *("torch.ops.c10d", "torch.ops.profiler", "torch.ops.profiler._record_function_exit"),
    *("torch._C", "torch._C._autograd", "torch._C._profiler", "torch._dynamo.eval_frame"),
    *("torch.autograd", "torch.autograd.graph", "torch.cuda", "torch.distributed"),
    *("torch.distributed.Reducer", "torch.distributed.algorithms", "torch.distributed.tensor"),
    *("torch.distributed._tools", "torch.distributed.algorithms._checkpoint"),
    "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    *("torch.nn.Module", "torch.nn.init", "torch.nn.modules.batchnorm"),
    *("torch.nn.modules.instancenorm", "torch.nn.modules.module"),
    *("torch.nn.parallel.distributed", "torch.overrides", "torch.testing", "torch.utils"),
    *("torch.utils._python_dispatch", "torch.utils.checkpoint", "torch.utils.flop_counter"),
    *(FAKE, MODE, PRUNING, TorchDispatchMode, nn.Linear(1, 1), torch.ops.aten.mul.Tensor),
    *(X.square().grad_fn, torch.compile(nn.Linear(1, 1), backend="eager")),
]
# Names that the library has only in strings, for getattr or patch.
NAMES_IN_STRINGS = {
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_is_param", "_no_grad_trunc_normal_"),
    *("_orig_mod", "_post_accumulate_grad_hooks", "_propagate_tensor_meta_non_cached"),
    *("_sync_module_states", "_tensor_name", "_verify_param_shape_across_processes"),
}
# Private names that are not torch's, or that some versions and builds of torch do not have.
OTHERS = {
    *("_cuda_clearCublasWorkspaces", "_host_emptyCache"),
    *("_exit", "_getframe", "_negative_number_matcher"),  # Python
    *("_attn_implementation", "_model_mapping"),  # transformers
    *("_fields", "_replace"),  # namedtuple
    "_c10d_functional",  # torch.ops has a namespace of any name
    *("_left_title", "_right_title", "_suptitle"),  # matplotlib
}


def private(names):
    return {name for name in names if name[:1] == "_" and name[:2] != "__"}


def private_names():
    """Return the private names that the library defines, those that it uses, and its strings."""
    paths = [path for path in LIBRARY.rglob("*.py") if "fonts" not in path.parts]
    own = {name for path in paths for name in (path.stem, path.parent.name)}
    used, strings = set(), set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                used.update(name.split("."))
            case ast.Constant(value=str(text)):
                strings.add(text)
    return map(private, (own, used, strings))


def test_private_torch_names_used_by_library_exist():
    owners = [resolve_name(owner) if isinstance(owner, str) else owner for owner in OWNERS]
    own, used, strings = private_names()
    names = (used - own - OTHERS) | NAMES_IN_STRINGS
    assert sorted(n for n in names if not any(hasattr(owner, n) for owner in owners)) == []
    of_torch = {name for owner in owners for name in dir(owner)}
    assert (strings & of_torch) - used - own == NAMES_IN_STRINGS
