"""What the library uses of PyTorch that is private or undocumented: torch has each of these names,
and where a new version could change what it does without an error, that is tested.

This is the checklist for a new torch. Its private modules are named only in `course_lib/_torch/`.
"""

import ast
import copy
import operator
import sys
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

LIBRARY = Path(__file__).parents[1] / "course_lib"
X = torch.ones(2, 3, requires_grad=True)
with FakeTensorMode() as MODE:
    FAKE = nn.Parameter(torch.zeros(2))
(PRUNING,) = prune.identity(nn.Linear(1, 1), "weight")._forward_pre_hooks.values()

# An object of torch, or its path -> the names that the library uses of it.
DOORS = [
    ("torch", "_conj _disable_dynamo _foreach_mul_ _neg_view"),
    ("torch.Tensor", "_backward_hooks _base _indices _is_view _make_subclass"),
    ("torch.Tensor", "_make_wrapper_subclass _nnz _post_accumulate_grad_hooks _values"),
    ("torch.Tensor", "_nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides"),
    ("torch.Tensor", "_version"),
    ("torch.UntypedStorage", "_cdata"),
    ("torch._C", "DisableTorchFunctionSubclass _DisableTorchDispatch _SetExcludeDispatchKeyGuard"),
    ("torch._C", "_are_functorch_transforms_active _current_autograd_node _current_graph_task_id"),
    ("torch._C", "_disabled_torch_dispatch_impl _get_dispatch_mode _len_torch_dispatch_stack"),
    ("torch._C", "_set_throw_on_mutable_data_ptr _set_warn_deprecated_on_mutable_data_ptr"),
    ("torch._C", "_storage_Use_Count"),
    ("torch._C.DispatchKey", "ADInplaceOrView BackendSelect"),
    ("torch._C._TorchDispatchModeKey", "FAKE"),
    ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
    ("torch._C._dynamo", "guards"),
    ("torch._C._functions", "AccumulateGrad"),
    ("torch._C._profiler._EventType", "Allocation"),
    ("torch._dynamo", "graph_break"),
    ("torch._dynamo.eval_frame", "_callback_from_stance"),
    ("torch._functorch.config", "patch"),
    ("torch._guards", "detect_fake_mode"),
    ("torch._ops", "HigherOrderOperator OpOverload"),
    ("torch._prims.rng_prims", "run_and_save_rng_state"),
    ("torch._prims_common", "is_non_overlapping_and_dense_or_false make_channels_last_strides_for"),
    ("torch._prims_common", "make_contiguous_strides_for suggest_memory_format"),
    ("torch._subclasses.fake_tensor", "DataDependentOutputException FakeCopyMode FakeTensor"),
    ("torch._subclasses.fake_tensor", "DynamicOutputShapeException FakeTensorMode"),
    ("torch._subclasses.fake_tensor", "UnsupportedOperatorException"),
    (FAKE, "_is_param constant fake_device fake_mode"),
    (MODE, "_allow_unsafe_data_ptr_access fake_tensor_converter.add_constant_storage_mapping"),
    (MODE, "fake_tensor_converter.from_real_tensor"),
    ("torch.autograd", "_get_sequence_nr _is_checkpoint_valid _profiler_enabled"),
    ("torch.autograd.function", "BackwardCFunction"),
    ("torch.autograd.graph", "_engine_run_backward"),
    (X.square().grad_fn, "_raw_saved_self _saved_self _sequence_nr"),
    ("torch.cuda", "_sleep"),
    ("torch.distributed._tools", "fake_collectives"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper"),
    ("torch.distributed.Reducer", "_rebuild_buckets"),
    (
        "torch.distributed.tensor._sharding_prop.ShardingPropagator",
        "_propagate_tensor_meta_non_cached",
    ),
    ("torch.nn.Module", "_apply _call_impl _compiled_call_impl"),
    (nn.Linear(1, 1), "_buffers _forward_hooks _forward_pre_hooks _modules _parameters"),
    (torch.compile(nn.Linear(1, 1), backend="eager"), "_orig_mod"),
    (PRUNING, "_tensor_name"),
    ("torch.nn.init", "_no_grad_trunc_normal_"),
    ("torch.nn.modules.batchnorm", "_BatchNorm _NormBase"),
    ("torch.nn.modules.instancenorm", "_InstanceNorm"),
    ("torch.nn.modules.module", "_global_forward_hooks _global_forward_pre_hooks"),
    (
        "torch.nn.parallel.distributed",
        "_sync_module_states _verify_param_shape_across_processes",
    ),
    ("torch.ops.aten", "_batch_norm_with_update _conj_physical _log_softmax _prelu_kernel"),
    ("torch.ops.aten", "_native_batch_norm_legit _prelu_kernel_backward _weight_norm_interface"),
    ("torch.ops.aten", "_weight_norm_interface_backward"),
    ("torch.ops.aten", "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention"),
    ("torch.ops.aten", "_scaled_dot_product_cudnn_attention_backward _ctc_loss"),
    ("torch.ops.aten", "_scaled_dot_product_flash_attention_backward"),
    ("torch.ops.aten", "_scaled_dot_product_efficient_attention"),
    ("torch.ops.aten", "_scaled_dot_product_efficient_attention_backward"),
    (torch.ops.aten.mul.Tensor, "_overloadname _schema"),
    ("torch.overrides", "_get_current_function_mode_stack"),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    ("torch.utils._python_dispatch", "_disable_current_modes _get_current_dispatch_mode_stack"),
    (TorchDispatchMode, "_should_skip_dynamo ignore_compile_internals"),
    ("torch.utils._pytree", "tree_flatten tree_leaves tree_map tree_unflatten"),
    ("torch.utils.checkpoint", "_StopRecomputationError"),
    ("torch.utils.flop_counter", "_FlopCounterMode flop_registry"),
    ("torch.utils.weak", "WeakIdKeyDictionary WeakTensorKeyDictionary"),
]
# Other versions and builds of torch do not have them.
NOT_ALWAYS = {"_cuda_clearCublasWorkspaces", "_host_emptyCache"}
# Private names that others than torch give their objects.
OTHERS = {
    *("_exit", "_getframe", "_negative_number_matcher"),  # Python
    *("_attn_implementation", "_model_mapping"),  # transformers
    *("_fields", "_replace"),  # namedtuple
    *("_left_title", "_right_title", "_suptitle"),  # matplotlib
    # the library
    *("_", "_CachingTorchDispatchMode", "_backward", "_check", "_dispatch", "_to", "_unsafe_view"),
}

# ---- the names


def owner_of(place):
    return resolve_name(place) if isinstance(place, str) else place


def private(names):
    return {name for name in names if name[:1] == "_" and name[:2] != "__"}


def private_names():
    """Private names that the library defines, those that it uses, and those in its strings."""
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


@pytest.mark.parametrize(("place", "names"), DOORS)
def test_torch_has_the_names_of_the_table(place, names):
    operator.attrgetter(*names.split())(owner_of(place))


def test_the_table_lists_the_private_names_that_the_library_uses():
    paths = [name for _, names in DOORS for name in names.split()]
    paths += [*NOT_ALWAYS, *OPERATORS, *(place for place, _ in DOORS if isinstance(place, str))]
    listed = private(part for path in paths for part in path.split("."))
    of_torch = {name for place, _ in DOORS for name in dir(owner_of(place))}
    own, used, strings = private_names()
    found = (used - own) | ((used | strings) & of_torch)
    assert sorted(found - listed - OTHERS) == []
    # of the names of saved tensors the library has the beginnings
    assert sorted(listed - own - used - strings) == ["_raw_saved_self", "_saved_self"]


# ---- the modules


def private_module(path):
    """The first private module on a path, or None. Namespaces of operators do not count."""
    parts = path.split(".")
    for count, part in enumerate(parts, 1):
        place = ".".join(parts[:count])
        if private([part]) and not place.startswith("torch.ops."):
            try:
                if isinstance(resolve_name(place), ModuleType):
                    return place
            except (ImportError, AttributeError):  # a word of a sentence, or another version's name
                return None
    return None


def private_modules(source):
    """Private modules of torch that code imports, reaches through attributes, or has as strings."""
    nodes = [*ast.walk(ast.parse(source))]
    imported = [("torch", "torch")]
    for node in nodes:
        if isinstance(node, ast.Import):
            imported += [(alias.asname or "torch", alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            aliases = node.names
            imported += [
                (each.asname or each.name, f"{node.module}.{each.name}") for each in aliases
            ]
    paths = [path for _, path in imported]
    of_name = {name: path for name, path in imported if name != "torch"} | {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths.append(node.value)
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            paths.append(f"{of_name.get(first)}.{rest}")
    return {private_module(path) for path in paths if path.startswith("torch.")} - {None}


# It imports only torch, so that it can be copied alone.
ALONE = LIBRARY / "checkpoint" / "readable.py"


def test_one_package_names_the_private_modules_of_torch():
    paths = [path for path in LIBRARY.rglob("*.py") if path.parent.name != "_torch"]
    found = {path: private_modules(path.read_text("utf-8")) for path in paths}
    assert found.pop(ALONE)
    assert {path: modules for path, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch._dynamo as dynamo", "torch._dynamo"),
        ("from torch import _C", "torch._C"),
        ("def f():\n    from torch.utils._pytree import tree_map", "torch.utils._pytree"),
        ("hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)", "torch._C"),
        ("import torch.distributed as dist\ndist._tools.mod_tracker", "torch.distributed._tools"),
        ("from torch import testing as t\nt._internal", "torch.testing._internal"),
        ("sys.modules.get('torch._inductor.codecache')", "torch._inductor"),
        ("from torch.overrides import _get_current_function_mode_stack", None),
        ("torch._foreach_mul_(x, 2), torch.autograd._profiler_enabled()", None),
        ("torch.ops._c10d_functional.all_reduce, torch.ops.aten._to_copy.default", None),
    ],
)
def test_a_private_module_is_found(source, module):
    assert private_modules(source) == {module} - {None}


# ---- operators


class Hearing(TorchDispatchMode):
    """Calls a function with each operator and its result."""

    def __init__(self, hear):
        super().__init__()
        self.hear = hear

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.hear(func, out)
        return out


@contextmanager
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


Q = torch.ones(1, 2, 4, 8, requires_grad=True)
INDICES, PART = torch.tensor([[0, 1]]), torch.zeros(4)
ROWS, ENDS = torch.ones(2, 16).bfloat16(), torch.tensor([1, 2], dtype=torch.int32)
EXPERTS = torch.ones(2, 16, 16).bfloat16()


def attend():
    F.scaled_dot_product_attention(Q, Q, Q).sum().backward()


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
OPERATORS = {  # an operator -> what calls it
    "aten._local_scalar_dense": lambda: torch.ones(()).item(),
    "aten._to_copy": lambda: torch.ones(2).to(torch.float64),
    "aten._embedding_bag": lambda: F.embedding_bag(INDICES, X),
    "aten._embedding_bag_forward_only": lambda: F.embedding_bag(INDICES, X.detach()),
    "aten._grouped_mm": lambda: F.grouped_mm(ROWS, EXPERTS, offs=ENDS),
    "aten._log_softmax_backward_data": lambda: F.log_softmax(X, 1).sum().backward(),
    "aten._to_sparse": lambda: torch.eye(3).to_sparse(),
    "aten._to_sparse.sparse_dim": lambda: torch.eye(3).to_sparse(1),
    "aten._sparse_coo_tensor_with_dims_and_tensors": (
        lambda: torch.sparse_coo_tensor([[0]], torch.ones(1), (3,))
    ),
    "aten._index_put_impl_": (
        lambda: torch.ops.aten._index_put_impl_(torch.zeros(3), [INDICES], torch.ones(2))
    ),
    FLASH: attend,
    f"{FLASH}_backward": attend,
    "profiler._record_function_enter_new": torch.profiler.record_function("a part")(attend),
    "profiler._record_function_exit._RecordFunction": torch.profiler.record_function("a part")(
        attend
    ),
    "c10d._allgather_base_": lambda: dist.all_gather_into_tensor(torch.zeros(8), PART),
    "c10d._reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(torch.zeros(2), PART),
    "_c10d_functional.all_reduce": lambda: functional.all_reduce(PART, "sum", [0, 1]),
    "_c10d_functional.all_gather_into_tensor": (
        lambda: functional.all_gather_tensor(PART, 0, [0, 1])
    ),
    "_c10d_functional.reduce_scatter_tensor": (
        lambda: functional.reduce_scatter_tensor(PART, "sum", 0, [0, 1])
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_public_functions_and_collectives_of_a_fake_group_are_these_operators(name):
    heard = set()
    with fake_group(), Hearing(lambda func, _: heard.update([func, func.overloadpacket])):
        OPERATORS[name]()
    assert operator.attrgetter(name)(torch.ops) in heard


@pytest.mark.parametrize(("ending", "first", "products"), [("", 0, 2), ("_backward", 1, 5)])
@pytest.mark.parametrize("kind", ["cudnn", "efficient", "flash"])
def test_fused_attention_has_query_key_and_value_one_after_the_other(kind, ending, first, products):
    """And its formulas take shapes, as of keys with all heads."""
    shape, scores = torch.Size((1, 2, 4, 8)), 2 * (2 * 4 * 4 * 8)
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{ending}")
    names = [argument.name for argument in operator.default._schema.arguments]
    assert names[first : first + 3] == ["query", "key", "value"]
    assert flop_registry[operator](*[shape] * (first + 3), out_val=None) == products * scores


# ---- modes and autograd


@pytest.mark.parametrize("skips", [False, True])
def test_a_mode_that_does_not_skip_dynamo_keeps_its_method_as_written(skips):
    def dispatch(self, func, types, args=(), kwargs=None): ...

    method = classmethod(lambda cls: skips)
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": method}
    made = type("Mode", (TorchDispatchMode,), members).__torch_dispatch__
    assert (made is dispatch) != skips


def test_nothing_stands_between_the_engine_and_an_operator_of_backward_but_the_mode():
    def find_caller(func, _):
        if func is torch.ops.aten.cos.default:
            frame = sys._getframe(1)
            while frame.f_globals["__name__"].startswith(("torch._", "torch.utils._", __name__)):
                frame = frame.f_back
            callers.append(frame.f_code)

    callers, y = [], X.sin().sum()
    with Hearing(find_caller):
        y.backward()
    assert callers == [torch.autograd.graph._engine_run_backward.__code__]


# ---- modules


def test_a_copy_of_a_compiled_model_runs_as_written_and_may_count_as_compiled():
    model = nn.Linear(1, 1)
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None
    copied = copy.deepcopy(model)
    assert copied._compiled_call_impl is None
    copied._compiled_call_impl = copied._call_impl
    assert torch.equal(copied(torch.ones(1)), model(torch.ones(1)))


def test_hooks_on_all_modules_stand_in_dicts_that_can_be_emptied():
    heard = []
    with (
        nn_module.register_module_forward_hook(lambda *_: heard.append("after")),
        nn_module.register_module_forward_pre_hook(lambda *_: heard.append("before")),
    ):
        with (
            patch.dict(nn_module._global_forward_hooks, clear=True),
            patch.dict(nn_module._global_forward_pre_hooks, clear=True),
        ):
            nn.Identity()(1)
        assert heard == []
        nn.Identity()(1)
    assert heard == ["before", "after"]


def test_ddp_compares_shapes_and_sends_weights_by_functions_that_can_be_replaced():
    class Reducer:
        def __getattr__(self, name):
            asked.add(name)
            return (lambda: False) if name == "_rebuild_buckets" else getattr(theirs, name)

    ddp = "torch.nn.parallel.distributed"
    with (
        fake_group(),
        patch(f"{ddp}._sync_module_states") as sync,
        patch(f"{ddp}._verify_param_shape_across_processes") as verify,
    ):
        run = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        assert (sync.call_count, verify.call_count) == (1, 1)
        theirs, asked = run.reducer, set()
        run.reducer = Reducer()
        run(torch.ones(1, 1))
    assert asked >= {"_rebuild_buckets", "prepare_for_backward"}


# ---- a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU")
def test_a_gpu_sleeps_and_gives_back_workspaces_and_pinned_memory():
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    torch.cuda._sleep(1_000_000)
    ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) > 0.1  # a million cycles at less than 10 GHz
    x = torch.ones(64, 64, device="cuda")
    x @ x
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() < before
    torch._C._host_emptyCache()
