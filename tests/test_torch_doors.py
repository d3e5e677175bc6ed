"""What the library uses of PyTorch that is private or undocumented: torch has each of these names,
and where a new version could change what it does without an error, that is tested.

This is the checklist for a new torch.
"""

import ast
import copy
import operator
import pkgutil
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path
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
# Their names have no underscore, and PyTorch's documentation does not have them.
UNDOCUMENTED = {
    "torch.autograd.function.BackwardCFunction",
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    "torch.utils.checkpoint.check_backward_validity",
    "torch.utils.checkpoint.detach_variable",
    "torch.utils.checkpoint.noop_context_fn",
    "torch.utils.flop_counter.flop_registry",
    "torch.utils.weak.WeakIdKeyDictionary",
    "torch.utils.weak.WeakTensorKeyDictionary",
    ".add_constant_storage_mapping",
    ".constant",
    ".fake_device",
    ".fake_mode",
    ".fake_tensor_converter",
    ".from_real_tensor",
    ".ignore_compile_internals",
    ".reducer",
}
# Attributes that others than torch have given their objects.
OTHERS = {
    *("_attn_implementation", "_model_mapping"),  # transformers
    *("_fields", "_replace"),  # namedtuple
    *("_left_title", "_right_title", "_suptitle"),  # matplotlib
    "_to",  # the library
}
BEGINNINGS = {"_saved_", "_raw_saved_"}
# Other versions and builds of torch do not have them.
NOT_ALWAYS = {
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._get_graph_exec_group",
    "torch._C._host_emptyCache",
}
# Methods of torch that the library overrides.
OVERRIDDEN = {"_should_skip_dynamo", "_rebuild_buckets", "ignore_compile_internals"}

# ---- what the library uses


@cache
def names_of_torch():
    """The names of objects that the library meets, and of modules that it patches."""
    leaf = torch.zeros(2, requires_grad=True)
    with FakeTensorMode() as mode:
        fake = nn.Parameter(torch.zeros(2))
    pruned = prune.identity(nn.Linear(1, 1), "weight")
    samples = [
        leaf,
        leaf.untyped_storage(),
        (leaf * leaf).grad_fn,
        fake,
        mode,
        mode.fake_tensor_converter,
        pruned,
        *pruned._forward_pre_hooks.values(),
        torch.compile(pruned),
        torch.optim.SGD([leaf]),
        torch.ops.aten.mul.Tensor,
        TorchDispatchMode,
        dist.Reducer,
        torch.cuda,
        nn.init,
        nn_module,
        nn.parallel.distributed,
    ]
    return {name for each in samples for name in dir(each)} | BEGINNINGS | {"reducer"}


def is_private(name):
    return isinstance(name, str) and name[:1] == "_" and name[:2] != "__"


class Doors(ast.NodeVisitor):
    """The doors in one file: imports, attributes, overridden methods, names in strings.

    Args:
        own: the private names that the library itself gives to something.
    """

    def __init__(self, own):
        self.own = own
        self.found = set()
        self.known = {}  # a name in the file -> what of torch it stands for

    def add(self, name):
        """`name` begins with `torch`, or with a dot where it is that of an attribute."""
        private = name != "torch._C" and any(map(is_private, name.split(".")))
        if name in UNDOCUMENTED or (private and name.startswith(("torch.", "."))):
            self.found.add(name.removesuffix(".default"))

    def add_attribute(self, name, sure):
        known = sure or name in names_of_torch() or f".{name}" in UNDOCUMENTED
        if name not in OTHERS and (known or name not in self.own):
            self.add(f".{name}")

    def named(self, node):
        """`nn.init.x` -> `torch.nn.init.x`; None where the chain begins with no import."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        start = self.named(node.value) if isinstance(node, ast.Attribute) else None
        return None if start is None or node.attr[:2] == "__" else f"{start}.{node.attr}"

    def visit_Import(self, node):
        for alias in node.names:
            first = alias.name.split(".")[0]
            self.known[alias.asname or first] = alias.name if alias.asname else first
            self.add(alias.name)

    def visit_ImportFrom(self, node):
        start = "course_lib" if node.level else node.module
        for alias in node.names:
            self.known[alias.asname or alias.name] = f"{start}.{alias.name}"
            self.add(f"{start}.{alias.name}")

    def visit_Assign(self, node):  # _aten = torch.ops.aten
        name = self.named(node.value)
        if name is not None and isinstance(node.targets[0], ast.Name):
            self.known[node.targets[0].id] = name
        self.generic_visit(node)

    def visit_Attribute(self, node):
        on_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if (name := self.named(node)) is not None:
            self.add(name)
        elif not on_self or node.attr not in self.own:
            self.add_attribute(node.attr, sure=on_self)
        self.generic_visit(node)

    def visit_FunctionDef(self, node):
        if node.name in OVERRIDDEN:
            self.add_attribute(node.name, sure=True)
        self.generic_visit(node)

    def visit_Call(self, node):
        text = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
        start = self.named(node.args[0]) if is_private(text) else None
        if start:  # getattr(torch._C, "_name", None)
            self.add(f"{start}.{text}")
            node.args[1].value = ""
        self.generic_visit(node)

    def visit_Constant(self, node):
        if is_private(node.value) and node.value in names_of_torch():
            self.add_attribute(node.value, sure=True)


def given_names(tree):
    """What a file itself defines or sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield getattr(node, "attr", getattr(node, "id", None))


def doors_in(sources):
    """The doors that sources use, without those that only lead to another one."""
    trees = [ast.parse(source) for source in sources]
    own = {name for tree in trees for name in given_names(tree)}
    found = set()
    for tree in trees:
        doors = Doors(own)
        doors.visit(tree)
        found |= doors.found
    return found - {name.rpartition(".")[0] for name in found}


def is_there(name):
    if name[0] == ".":
        text, names = name[1:], names_of_torch() - BEGINNINGS
        return text in names or (text in BEGINNINGS and any(n.startswith(text) for n in names))
    try:
        return name in NOT_ALWAYS or pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


def test_each_private_name_of_torch_that_the_library_uses_is_there():
    paths = [path for path in LIBRARY.rglob("*.py") if "fonts" not in path.parts]
    doors = doors_in(path.read_text("utf-8") for path in paths)
    assert len(doors) > 100
    assert {"._orig_mod", "._is_param"} <= doors  # the library names these only in strings
    assert [name for name in doors if not is_there(name)] == []
    assert not is_there("torch._C._what_nobody_has") and not is_there("._what_nobody_has")


def test_the_walk_finds_a_door_however_it_is_opened():
    source = """
        import sys, torch
        from torch._x import y
        from torch import nn
        from torch.autograd.function import BackwardCFunction
        torch._C._a()
        getattr(torch._C, "_b", None)
        nn.init._c(1)
        _aten = torch.ops.aten
        _aten._d.default
        t._version
        getattr(t, "_base")
        f(node.grad_fn._saved_weight)
        sys._getframe(1)
        self._mine = 1
        other._mine
        torch.ones(2).__dict__
        t.shape
        class M:
            def _should_skip_dynamo(cls): ...
    """
    assert doors_in(["if 1:" + source]) == {
        *("torch._x.y", "torch.autograd.function.BackwardCFunction", "torch._C._a", "torch._C._b"),
        *("torch.nn.init._c", "torch.ops.aten._d", "._version", "._base", "._saved_weight"),
        "._should_skip_dynamo",
    }


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
def seen_operators():
    calls = []
    with Hearing(lambda func, _: calls.append(func)):
        yield calls


@contextmanager
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


X = torch.ones(2, 3, requires_grad=True)
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
    with fake_group(), seen_operators() as calls:
        OPERATORS[name]()
    assert operator.attrgetter(name)(torch.ops) in {
        each for func in calls for each in (func, func.overloadpacket)
    }


@pytest.mark.parametrize(("ending", "first", "products"), [("", 0, 2), ("_backward", 1, 5)])
@pytest.mark.parametrize("kind", ["cudnn", "efficient", "flash"])
def test_fused_attention_has_query_key_and_value_one_after_the_other(kind, ending, first, products):
    """And its formulas take shapes, as of keys with all heads."""
    shape, scores = torch.Size((1, 2, 4, 8)), 2 * (2 * 4 * 4 * 8)
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{ending}")
    names = [argument.name for argument in operator.default._schema.arguments]
    assert names[first : first + 3] == ["query", "key", "value"]
    assert flop_registry[operator](*[shape] * (first + 3), out_val=None) == products * scores


def test_an_operator_repeats_random_numbers_by_a_kernel_that_calls_another_operator():
    from torch._prims.rng_prims import run_and_save_rng_state as save

    kernel = save.py_kernels[torch._C.DispatchKey.BackendSelect]
    with seen_operators() as calls:
        state, mask = kernel(torch.ops.aten.bernoulli.p, torch.ones(8), 0.5)
    assert torch.ops.aten.bernoulli.p in calls
    torch.set_rng_state(state)
    assert torch.equal(torch.bernoulli(torch.ones(8), 0.5), mask)


PATCHED = [
    (nn.Module, "_apply", lambda: nn.Linear(1, 1).to(torch.float64)),
    (nn.init, "_no_grad_trunc_normal_", lambda: nn.init.trunc_normal_(torch.zeros(1))),
]


@pytest.mark.parametrize(("owner", "name", "call"), PATCHED)
def test_a_public_function_goes_through_the_private_one(owner, name, call):
    with patch.object(owner, name, lambda *_, **__: "by the private one"):
        assert call() == "by the private one"


# ---- modes and autograd


@pytest.mark.parametrize("skips", [False, True])
def test_a_mode_that_does_not_skip_dynamo_keeps_its_method_as_written(skips):
    def dispatch(self, func, types, args=(), kwargs=None): ...

    method = classmethod(lambda cls: skips)
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": method}
    made = type("Mode", (TorchDispatchMode,), members).__torch_dispatch__
    assert (made is dispatch) != skips


@pytest.mark.parametrize("excluded", [False, True])
def test_inside_a_mode_the_guard_lets_an_alias_share_the_version(excluded):
    def keep_alias(func, out):
        key = torch._C.DispatchKey.ADInplaceOrView
        with torch._C._SetExcludeDispatchKeyGuard(key, excluded):
            kept.append(out.detach())

    kept = []
    with Hearing(keep_alias):
        made = torch.zeros(1).neg()
    made.add_(1)
    assert (made._version, kept[-1]._version) == (1, 0 if excluded else 1)


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


def test_a_storage_has_one_address_and_counts_the_tensors_on_it():
    def count():
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    tensor = torch.zeros(2)
    alone, view = count(), tensor[:1]
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert count() == alone + 1
    del view
    assert count() == alone


# ---- the compiler


@pytest.mark.parametrize("ignored", [False, True])
def test_code_runs_compiled_under_a_mode_that_the_compiler_ignores(ignored):
    import torch._dynamo.eval_frame as dynamo

    class Mode(Hearing):
        @classmethod
        def ignore_compile_internals(cls):
            return ignored

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    graphs, choose = [], dynamo._callback_from_stance
    torch.compiler.reset()
    function = torch.compile(lambda x: x.sin(), backend=backend)
    with patch.object(dynamo, "_callback_from_stance", side_effect=choose) as chosen, Mode(print):
        function(torch.ones(1))
    assert any(choose(*call.args) for call in chosen.call_args_list)
    assert len(graphs) == ignored
    torch.compiler.reset()


def test_a_copy_of_a_compiled_model_runs_as_written_and_may_count_as_compiled():
    model = nn.Linear(1, 1)
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None
    copied = copy.deepcopy(model)
    assert copied._compiled_call_impl is None
    copied._compiled_call_impl = copied._call_impl
    assert torch.equal(copied(torch.ones(1)), model(torch.ones(1)))


# ---- modules


def test_hooks_of_modules_and_optimizers_stand_in_dicts():
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    for hooks, register in (
        (module._forward_hooks, module.register_forward_hook),
        (module._forward_pre_hooks, module.register_forward_pre_hook),
        (optimizer._optimizer_step_pre_hooks, optimizer.register_step_pre_hook),
    ):
        register(print)
        assert list(hooks.values()) == [print]


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

    def reduce(_, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp = "torch.nn.parallel.distributed"
    with (
        fake_group(),
        patch(f"{ddp}._sync_module_states") as sync,
        patch(f"{ddp}._verify_param_shape_across_processes") as verify,
    ):
        run = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        assert (sync.call_count, verify.call_count) == (1, 1)
        theirs, asked = run.reducer, set()
        run.register_comm_hook(None, reduce)
        run.reducer = Reducer()
        run(torch.ones(1, 1)).sum().backward()
    assert asked >= {"_rebuild_buckets", "prepare_for_backward"}
    assert theirs._rebuild_buckets() in (True, False)


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
