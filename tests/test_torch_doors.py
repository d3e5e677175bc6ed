"""What the library uses of PyTorch that is private or undocumented: each door stands in a `door`
below, over a test of what the library relies on there.

This is the checklist for a new torch. `python tests/test_torch_doors.py` prints the doors, the
modules that use each, and the test.
"""

import ast
import copy
import sys
import warnings
from collections import defaultdict
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

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
    "_attn_implementation": "transformers",
    "_model_mapping": "transformers",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
    "_left_title": "matplotlib",
    "_right_title": "matplotlib",
    "_suptitle": "matplotlib",
}
# Found by their beginning, on objects of which no sample is in `samples`, or under another build.
ELSEWHERE = {"_saved_", "_raw_saved_", "_is_param", "_orig_mod", "_tensor_name", "_rebuild_buckets"}
# Methods by which the library stands in for one of torch's.
OVERRIDDEN = {"_should_skip_dynamo", "_rebuild_buckets", "ignore_compile_internals"}
# The library's own, of names that torch's objects have too: (file, name).
OURS = {("budget/techniques/head.py", "_to"), ("accumulation/step.py", "_values")}

DOORS = {}  # a door -> the test of what the library relies on


def door(*names):
    def listed(test):
        assert not DOORS.keys() & set(names)
        DOORS.update(dict.fromkeys(names, test.__name__))
        return test

    return listed


# ---- what the library uses


@cache
def names_of_torch():
    """The private names of objects that the library meets, and of modules that it patches."""
    leaf = torch.zeros(2, requires_grad=True)
    with FakeTensorMode() as mode:
        fake = torch.zeros(2)
    samples = [
        leaf,
        leaf.untyped_storage(),
        (leaf * leaf).grad_fn,
        fake,
        mode,
        nn.Linear(1, 1),
        torch.optim.SGD([leaf]),
        torch.ops.aten.mul.Tensor,
        TorchDispatchMode,
        torch.cuda,
        nn.init,
        nn.modules.module,
        nn.parallel.distributed,
    ]
    return {name for each in samples for name in dir(each) if is_private(name)} | ELSEWHERE


def is_private(name):
    return name[:1] == "_" and name[:2] != "__"


class Doors(ast.NodeVisitor):
    """The doors in one file: imports, attributes, overridden methods, names in strings.

    Args:
        own: the private names that the library itself gives to something.
    """

    def __init__(self, path, own):
        self.path = path
        self.own = own
        self.found = set()
        self.known = {}  # a name in the file -> what of torch it stands for

    def add(self, name):
        """`name` begins with `torch`, or is that of an attribute."""
        parts = name.split(".")
        private = any(map(is_private, parts)) and name != "torch._C"
        if name in UNDOCUMENTED or (private and parts[0] in ("torch", "")):
            self.found.add(name)

    def add_attribute(self, name, sure):
        of_torch = sure or name in names_of_torch() or name not in self.own
        if is_private(name) and of_torch and name not in OTHERS:
            if (self.path, name) not in OURS:
                self.found.add(f".{name}")
        elif f".{name}" in UNDOCUMENTED:
            self.found.add(f".{name}")

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
        for alias in node.names:
            name = f"{node.module}.{alias.name}" if not node.level else f"course_lib.{alias.name}"
            self.known[alias.asname or alias.name] = name
            self.add(name)

    def visit_Assign(self, node):  # _aten = torch.ops.aten
        name = self.named(node.value)
        if name is not None and isinstance(node.targets[0], ast.Name):
            self.known[node.targets[0].id] = name
        self.generic_visit(node)

    def visit_Attribute(self, node):
        name = self.named(node)
        if name is not None:
            self.add(name)
            return
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            self.add_attribute(node.attr, sure=False)
        elif node.attr not in self.own:
            self.add_attribute(node.attr, sure=True)
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in OVERRIDDEN:
                self.add_attribute(method.name, sure=False)
        self.generic_visit(node)

    def visit_Call(self, node):
        text = node.args[1].value if len(node.args) > 1 and is_text(node.args[1]) else None
        start = self.named(node.args[0]) if text else None
        if start and is_private(text):  # getattr(torch._C, "_name", None)
            self.add(f"{start}.{text}")
            node.args[1].value = ""
        self.generic_visit(node)

    def visit_Constant(self, node):
        if is_text(node) and is_private(node.value) and node.value in names_of_torch():
            self.add_attribute(node.value, sure=True)


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def given_names(tree):
    """What a file itself defines or sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def doors_in(files):
    """A door -> the files, of the sources {path: text}, that use it."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    own = {name for tree in trees.values() for name in given_names(tree)}
    used = defaultdict(set)
    for path, tree in trees.items():
        doors = Doors(path, own)
        doors.visit(tree)
        for name in doors.found:
            used[name].add(path)
    return dict(used)


@cache
def used_doors():
    return doors_in(
        {
            path.relative_to(LIBRARY).as_posix(): path.read_text("utf-8")
            for path in sorted(LIBRARY.rglob("*.py"))
            if "fonts" not in path.parts
        }
    )


def test_each_private_thing_of_torch_that_the_library_uses_is_on_the_list():
    unlisted = {name: files for name, files in used_doors().items() if name not in DOORS}
    assert unlisted == {}


def test_each_thing_on_the_list_is_still_used():
    assert DOORS.keys() - used_doors().keys() == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._x import y", {"torch._x.y"}),
        ("import torch\ntorch._C._z()", {"torch._C._z"}),
        ("import torch\ngetattr(torch._C, '_z', None)", {"torch._C._z"}),
        ("from torch import nn\nnn.init._z(1)", {"torch.nn.init._z"}),
        ("import torch\n_a = torch.ops.aten\n_a._z.default", {"torch.ops.aten._z.default"}),
        ("t._version", {"._version"}),
        ("getattr(t, '_version')", {"._version"}),
        ("f(node.grad_fn._saved_weight)", {"._saved_weight"}),
        ("class M:\n    def _should_skip_dynamo(cls): ...", {"._should_skip_dynamo"}),
        (
            "from torch.autograd.function import BackwardCFunction",
            {"torch.autograd.function.BackwardCFunction"},
        ),
        ("import sys\nsys._getframe(1)\nself._mine = 1\nother._mine", set()),
        ("import torch\ntorch.ones(2).__dict__\nt.shape", set()),
    ],
)
def test_the_walk_finds_a_door_however_it_is_opened(source, found):
    assert doors_in({"a.py": source}).keys() == found


# ---- symbolic tensors


@contextmanager
def seen_operators():
    """The operators that reach a dispatch mode: (operator, arguments)."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func, args))
            return func(*args, **(kwargs or {}))

    calls = []
    with Mode():
        yield calls


@door(
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    ".fake_device",
    ".fake_mode",
)
def test_tensors_made_in_a_fake_mode_are_its_own_and_have_a_device():
    with FakeTensorMode() as mode:
        tensor = torch.ones(3) + 1
    assert type(tensor) is FakeTensor
    assert tensor.fake_mode is mode
    assert tensor.fake_device == torch.device("cpu")


@door(
    "torch._guards.detect_fake_mode",
    "torch._C._get_dispatch_mode",
    "torch._C._TorchDispatchModeKey.FAKE",
)
def test_the_fake_mode_in_which_one_is_can_be_asked_for():
    def asked():
        key = torch._C._TorchDispatchModeKey.FAKE
        return torch._guards.detect_fake_mode(), torch._C._get_dispatch_mode(key)

    assert asked() == (None, None)
    with FakeTensorMode() as mode:
        assert asked() == (mode, mode)


@door("torch._subclasses.fake_tensor.FakeCopyMode")
def test_a_deep_copy_under_the_copying_mode_is_fake():
    with fake_tensor.FakeCopyMode(FakeTensorMode()):
        copied = copy.deepcopy(nn.Linear(2, 2))
    assert all(type(p) is FakeTensor or isinstance(p.data, FakeTensor) for p in copied.parameters())


@door(".constant", ".fake_tensor_converter", ".from_real_tensor", ".add_constant_storage_mapping")
def test_a_fake_tensor_may_know_its_number_until_it_is_written_to():
    mode = FakeTensorMode()
    number = torch.tensor(1.5)
    part_of_it = number.view(1)
    convert = mode.fake_tensor_converter
    whole = convert.from_real_tensor(mode, number, make_constant=True)
    assert whole.constant is not None
    with mode:
        part = whole.view(1)
        part.constant = part_of_it
        convert.add_constant_storage_mapping(part)
        assert part.item() == 1.5
        part.add_(torch.ones(1))  # of an unknown value
    assert whole.constant is part.constant is None


@door("torch.ops.aten._local_scalar_dense.default")
def test_item_and_adding_a_number_each_call_one_operator():
    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append((func, len(args), kwargs))
            return func(*args, **(kwargs or {}))

    called, number = [], torch.ones(())
    with Record():
        number.item()
        number += 1
    assert called == [
        (torch.ops.aten._local_scalar_dense.default, 1, {}),
        (torch.ops.aten.add_.Tensor, 2, {}),
    ]


@door(
    "torch._subclasses.fake_tensor",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
def test_values_that_a_fake_tensor_lacks_are_refused_by_two_errors():
    with FakeTensorMode():
        with pytest.raises(fake_tensor.DataDependentOutputException):
            torch.ones(1).item()
        with pytest.raises(fake_tensor.DynamicOutputShapeException):
            torch.ones(1).nonzero()


@door(
    "torch.Tensor._make_subclass",
    "torch._C._DisableTorchDispatch",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._set_warn_deprecated_on_mutable_data_ptr",
    "._allow_unsafe_data_ptr_access",
)
def test_a_fake_tensor_made_by_hand_is_like_torchs_own():
    with FakeTensorMode() as mode, torch._C._DisableTorchDispatch():
        bare = torch.empty(2, 3, device="meta")
    assert type(bare) is torch.Tensor
    cpu = torch.device("cpu")
    theirs = FakeTensor(mode, bare, cpu)
    ours = torch.Tensor._make_subclass(
        FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=cpu
    )
    vars(ours).update(vars(theirs))
    assert mode._allow_unsafe_data_ptr_access in (True, False)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(ours)
    torch._C._set_throw_on_mutable_data_ptr(ours)
    with pytest.raises(RuntimeError):
        ours.data_ptr()
    with mode:
        made = ours + torch.ones(2, 3)
    assert (ours.device, type(made), made.shape) == (cpu, FakeTensor, (2, 3))


@door("._is_param")
def test_a_fake_parameter_says_that_it_is_one():
    with FakeTensorMode():
        tensor = torch.ones(1)
        assert not hasattr(tensor, "_is_param")
        parameter = nn.Parameter(tensor)
    assert type(parameter) is FakeTensor
    assert parameter._is_param


@door("._apply", "torch.nn.Module._apply")
def test_a_module_is_converted_by_its_private_method():
    with patch.object(nn.Module, "_apply", lambda module, function: (module, function)):
        module, function = nn.Linear(1, 1).to(torch.float64)
    assert type(module) is nn.Linear
    assert function(torch.ones(1)).dtype is torch.float64


@door("torch.nn.init._no_grad_trunc_normal_")
def test_truncated_normal_numbers_are_drawn_by_the_private_function():
    with patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: "drawn"):
        assert nn.init.trunc_normal_(torch.zeros(1)) == "drawn"


# ---- dispatch


@door(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch._C._len_torch_dispatch_stack",
)
def test_modes_see_operators_but_where_modes_are_off():
    with seen_operators() as calls:
        torch.ones(1).neg()
        assert len(_get_current_dispatch_mode_stack()) == torch._C._len_torch_dispatch_stack() == 1
        seen = len(calls)
        with _disable_current_modes():
            torch.ones(1).neg()
            assert _get_current_dispatch_mode_stack() == []
        assert len(calls) == seen > 0
    assert torch._C._len_torch_dispatch_stack() == 0


@door("._should_skip_dynamo")
def test_a_mode_that_does_not_skip_dynamo_keeps_its_method_as_written():
    def dispatch(self, func, types, args=(), kwargs=None): ...

    def made(skips):
        method = classmethod(lambda cls: skips)
        members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": method}
        return type("Mode", (TorchDispatchMode,), members).__torch_dispatch__

    assert made(False) is dispatch
    assert made(True) is not dispatch


@door("._schema", "._overloadname")
def test_an_operator_says_which_arguments_it_writes():
    adds, out = torch.ops.aten.add_.Tensor, torch.ops.aten.add.out
    assert adds._schema.is_mutable
    assert not torch.ops.aten.add.Tensor._schema.is_mutable
    written = [bool(x.alias_info and x.alias_info.is_write) for x in adds._schema.arguments]
    assert written == [True, False, False]
    assert [x.name for x in out._schema.arguments if x.is_out] == [out._overloadname] == ["out"]


@door("torch._ops.OpOverload", "torch._ops.HigherOrderOperator")
def test_operators_are_of_two_kinds():
    from torch._higher_order_ops.wrap import wrap

    assert isinstance(torch.ops.aten.mm.default, torch._ops.OpOverload)
    assert isinstance(wrap, torch._ops.HigherOrderOperator)
    assert not isinstance(
        torch.ops.aten.mm, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    )


@door(
    "torch._prims.rng_prims.run_and_save_rng_state",
    "torch._C.DispatchKey",
    "torch._C.DispatchKey.BackendSelect",
)
def test_an_operator_repeats_random_numbers_by_a_kernel_that_calls_another_operator():
    from torch._prims.rng_prims import run_and_save_rng_state as save

    kernel = save.py_kernels[torch._C.DispatchKey.BackendSelect]
    with seen_operators() as calls:
        state, mask = kernel(torch.ops.aten.bernoulli.p, torch.ones(8), 0.5)
    assert torch.ops.aten.bernoulli.p in [operator for operator, _ in calls]
    torch.set_rng_state(state)
    assert torch.equal(torch.bernoulli(torch.ones(8), 0.5), mask)


@door("torch._functorch.config.patch")
def test_the_compilers_settings_are_patched_for_a_block():
    before = torch._functorch.config.activation_memory_budget
    with torch._functorch.config.patch(activation_memory_budget=0.25):
        assert torch._functorch.config.activation_memory_budget == 0.25
    assert torch._functorch.config.activation_memory_budget == before == 1.0


@door(
    "torch.ops.profiler._record_function_enter_new.default",
    "torch.ops.profiler._record_function_exit._RecordFunction",
)
def test_a_named_part_of_a_profile_begins_and_ends_with_these_operators():
    with seen_operators() as calls, torch.profiler.record_function("a part"):
        pass
    profiler = torch.ops.profiler
    assert [operator for operator, _ in calls] == [
        profiler._record_function_enter_new.default,
        profiler._record_function_exit._RecordFunction,
    ]


@door(
    "torch.ops.aten._to_copy",
    "torch.ops.aten._to_copy.default",
    "torch.ops.aten._embedding_bag.default",
    "torch.ops.aten._index_put_impl_",
    "torch.ops.aten._grouped_mm.default",
)
def test_public_functions_are_these_operators():
    aten = torch.ops.aten
    rows = torch.ones(2, 16, dtype=torch.bfloat16)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    with seen_operators() as calls:
        torch.ones(2).to(torch.float64)
        F.embedding_bag(torch.tensor([[0, 1]]), torch.ones(2, 3, requires_grad=True))
        F.grouped_mm(rows, torch.ones(2, 16, 16, dtype=torch.bfloat16), offs=ends)
    seen = {func for func, _ in calls}
    assert {aten._embedding_bag.default, aten._grouped_mm.default} <= seen
    assert aten._to_copy.default in seen
    assert aten._to_copy in {func.overloadpacket for func in seen}
    where = [torch.tensor([1])]
    into = aten._index_put_impl_(torch.zeros(3), where, torch.tensor([2.0]))
    assert into.tolist() == [0, 2, 0]


@door(
    "torch.ops.aten._embedding_bag_forward_only.default",
    "torch.ops.aten._log_softmax_backward_data.default",
    "torch.ops.aten._to_sparse.default",
    "torch.ops.aten._to_sparse.sparse_dim",
    "torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default",
    "._nnz",
)
def test_public_functions_run_these_operators_of_the_rules():
    aten = torch.ops.aten
    x = torch.ones(2, 3, requires_grad=True)
    with seen_operators() as calls:
        F.embedding_bag(torch.tensor([[0, 1]]), torch.ones(2, 3))
        F.log_softmax(x, 1).sum().backward()
        sparse = torch.eye(3).to_sparse()
        torch.eye(3).to_sparse(1)
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,))
    assert sparse._nnz() == 3
    assert {
        aten._embedding_bag_forward_only.default,
        aten._log_softmax_backward_data.default,
        aten._to_sparse.default,
        aten._to_sparse.sparse_dim,
        aten._sparse_coo_tensor_with_dims_and_tensors.default,
    } <= {func for func, _ in calls}


@door(
    "torch._prims_common.suggest_memory_format",
    "torch._prims_common.compute_elementwise_output_strides",
)
def test_strides_of_results_follow_the_operands():
    from torch._prims_common import compute_elementwise_output_strides, suggest_memory_format

    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert suggest_memory_format(images) is torch.channels_last
    assert compute_elementwise_output_strides(images, images) == images.stride()
    assert (images + images).stride() == images.stride()


@door("torch.ops.aten._scaled_dot_product_efficient_attention.default")
def test_memory_efficient_attention_returns_its_output_the_log_sum_exp_and_two_numbers():
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    with FakeTensorMode():
        q = torch.ones(2, 3, 40, 8)
        output, log_sum_exp, *numbers = kernel(q, q, q, None, True)
    assert kernel.default.overloadpacket is kernel
    assert (output.shape, log_sum_exp.shape) == (q.shape, (2, 3, 64))  # multiples of 32 rows
    assert [(x.shape, x.dtype) for x in numbers] == 2 * [((), torch.int64)]


@door(
    "torch.ops.aten._scaled_dot_product_flash_attention",
    "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "torch.utils.flop_counter.flop_registry",
)
def test_the_flop_formulas_take_the_arguments_of_attention_on_a_cpu():
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    with seen_operators() as calls:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    arguments = {func.overloadpacket: args for func, args in calls}
    forward = arguments[aten._scaled_dot_product_flash_attention_for_cpu]
    backward = arguments[aten._scaled_dot_product_flash_attention_for_cpu_backward]
    one = 2 * (2 * 4 * 4 * 8)  # a product of matrices, for each of two heads
    ours = flop_registry[aten._scaled_dot_product_flash_attention](*forward, out_val=q)
    theirs = flop_registry[aten._scaled_dot_product_flash_attention_backward](*backward, out_val=q)
    assert (ours, theirs) == (2 * one, 5 * one)


@door(
    "torch.ops.aten._scaled_dot_product_cudnn_attention",
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
    "torch.ops.aten._scaled_dot_product_efficient_attention",
    "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
)
def test_fused_attention_has_query_key_and_value_one_after_the_other_with_or_without_a_gradient():
    """And its formulas take shapes, as of keys with all heads."""
    from torch.utils.flop_counter import flop_registry

    shape, scores = torch.Size((1, 2, 4, 8)), 2 * (2 * 4 * 4 * 8)
    for kind in ("cudnn", "efficient"):
        for ending, first, products in (("", 0, 2), ("_backward", 1, 5)):
            operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention{ending}")
            names = [argument.name for argument in operator.default._schema.arguments]
            assert names[first : first + 3] == ["query", "key", "value"]
            formula = flop_registry[operator]
            assert formula(*[shape] * (first + 3), out_val=None) == products * scores


@door("torch.utils._pytree.tree_map")
def test_a_function_is_mapped_over_nested_containers():
    from torch.utils._pytree import tree_map

    assert tree_map(lambda x: -x, {"a": [1, (2,)]}) == {"a": [-1, (-2,)]}


@door(
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._device.DeviceContext",
)
def test_a_default_device_is_a_mode_on_the_stack():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    with torch.device("meta"):
        mode = _get_current_function_mode_stack()[-1]
        assert isinstance(mode, DeviceContext)
        assert mode.device == torch.device("meta")


@door(
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._disabled_torch_dispatch_impl",
)
def test_a_tensor_without_bytes_hears_of_functions_but_where_that_is_off():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float64)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "heard"

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None): ...

    wrapper = Wrapper()
    assert wrapper.size() == "heard"
    with torch._C.DisableTorchFunctionSubclass():
        assert (wrapper.size(), wrapper.dtype) == ((2, 3), torch.float64)
    without = torch._C._disabled_torch_dispatch_impl
    assert nn.Parameter.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ is without


@door("torch._C._SetExcludeDispatchKeyGuard", "torch._C.DispatchKey.ADInplaceOrView")
def test_inside_a_mode_the_guard_lets_an_alias_share_the_version():
    def versions(excluded):
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                key = torch._C.DispatchKey.ADInplaceOrView
                with torch._C._SetExcludeDispatchKeyGuard(key, excluded):
                    kept.append((out, out.detach()))
                return out

        kept = []
        with Mode():
            made = torch.zeros(1).neg()
        made.add_(1)
        return made._version, kept[-1][1]._version

    assert versions(excluded=False) == (1, 1)
    assert versions(excluded=True) == (1, 0)


# ---- autograd


@door("._version")
def test_a_change_in_place_is_counted_also_by_what_shares_the_memory():
    tensor = torch.zeros(2)
    view = tensor[:1]
    tensor.add_(1)
    assert (tensor._version, view._version) == (1, 1)


@door("._base", "._is_view")
def test_a_view_knows_its_base():
    tensor = torch.zeros(2)
    assert tensor[:1]._is_view()
    assert tensor[:1]._base is tensor
    assert not tensor._is_view()


@door("._saved_", "._raw_saved_")
def test_a_node_names_what_it_saves_and_gives_it_until_it_is_freed():
    x = torch.ones(2, requires_grad=True)
    node = torch.mul(x, torch.ones(2, requires_grad=True)).grad_fn
    names = {name for name in dir(type(node)) if name.startswith("_raw_saved_")}
    assert names == {"_raw_saved_self", "_raw_saved_other"}
    assert node._saved_self is x
    loss = x.exp().sum()
    exp = loss.grad_fn.next_functions[0][0]
    loss.backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = exp._saved_result


@door("torch.autograd.function.BackwardCFunction", "torch._C._functions.AccumulateGrad")
def test_functions_and_leaves_have_nodes_of_their_own_kinds():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

    leaf = torch.ones(1, requires_grad=True)
    node = Twice.apply(leaf).grad_fn
    assert isinstance(node, torch.autograd.function.BackwardCFunction)
    assert not isinstance((leaf * 2).grad_fn, torch.autograd.function.BackwardCFunction)
    assert node.saved_tensors[0] is leaf
    above = node.next_functions[0][0]
    assert isinstance(above, torch._C._functions.AccumulateGrad)
    assert above.variable is leaf


@door(
    "._sequence_nr",
    "torch.autograd._get_sequence_nr",
    "torch._C._autograd._get_sequence_nr",
)
def test_nodes_are_numbered_in_the_order_in_which_they_are_made():
    x = torch.ones(1, requires_grad=True)
    number = torch.autograd._get_sequence_nr()
    first, second = x.exp().grad_fn, x.sin().grad_fn
    assert (first._sequence_nr(), second._sequence_nr()) == (number, number + 1)
    assert torch._C._autograd._get_sequence_nr() == torch.autograd._get_sequence_nr() == number + 2


@door("torch._C._autograd._top_saved_tensors_default_hooks")
def test_hooks_on_saved_tensors_are_seen():
    asked = torch._C._autograd._top_saved_tensors_default_hooks
    assert asked(False) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert asked(False) is not None


@door("torch._C._current_autograd_node", "torch._C._current_graph_task_id")
def test_backward_tells_which_node_runs_and_which_pass_it_is():
    def heard(_):
        told.append((torch._C._current_autograd_node(), torch._C._current_graph_task_id()))

    told = []
    x = torch.ones(1, requires_grad=True)
    product = x * 2
    product.register_hook(heard)
    product.backward(retain_graph=True)
    product.backward()
    assert [node for node, _ in told] == [product.grad_fn] * 2
    assert len({task for _, task in told}) == 2
    assert (torch._C._current_autograd_node(), torch._C._current_graph_task_id()) == (None, -1)


@door("torch.autograd.graph._engine_run_backward")
def test_nothing_stands_between_the_engine_and_an_operator_of_backward_but_the_mode():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cos.default:
                frame = sys._getframe(1)
                while frame.f_globals["__name__"].startswith(("torch._", "torch.utils._")):
                    frame = frame.f_back
                callers.append(frame.f_code)
            return func(*args, **(kwargs or {}))

    callers = []
    y = torch.ones(1, requires_grad=True).sin()
    with Mode():
        y.backward()
    assert callers == [torch.autograd.graph._engine_run_backward.__code__]


@door("torch.autograd._is_checkpoint_valid")
def test_a_pass_for_some_inputs_alone_is_told_apart():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            told.append(torch.autograd._is_checkpoint_valid())
            return grad

    told = []
    x = torch.ones(1, requires_grad=True)
    Asks.apply(x).backward()
    torch.autograd.grad(Asks.apply(x), x)
    assert told == [True, False]


@door("torch.autograd._profiler_enabled", "torch._C._profiler._EventType")
@door("torch._C._profiler._EventType.Allocation")
def test_a_profile_of_memory_lists_what_was_allocated():
    from torch._C._profiler import _EventType

    cpu = torch.profiler.ProfilerActivity.CPU
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        assert torch.autograd._profiler_enabled()
        torch.empty(1000, dtype=torch.uint8)
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    sizes = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.typed[0] == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            sizes.append(event.extra_fields.alloc_size)
    assert sorted(sizes) == [-1000, 1000]


@door("torch._C._are_functorch_transforms_active")
def test_transforms_of_torch_func_are_seen():
    told = []

    def function(x):
        told.append(torch._C._are_functorch_transforms_active())
        return x * x

    torch.func.grad(function)(torch.tensor(1.0))
    function(torch.tensor(1.0))
    assert told == [True, False]


@door("torch._C._get_graph_exec_group")
def test_the_group_of_backward_passes_is_told():
    if not hasattr(checkpoint, "GraphExecGroup"):
        pytest.skip("from torch 2.10 on")
    assert torch._C._get_graph_exec_group() is None
    with checkpoint.GraphExecGroup() as group:
        assert torch._C._get_graph_exec_group() is group


@door("torch._C._storage_Use_Count", "._cdata")
def test_a_storage_has_one_address_and_counts_the_tensors_on_it():
    tensor = torch.zeros(2)

    def count():
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    alone = count()
    view = tensor[:1]
    assert view.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    assert count() == alone + 1
    del view
    assert count() == alone
    assert torch.zeros(2).untyped_storage()._cdata != tensor.untyped_storage()._cdata


@door("torch._conj", "torch._neg_view")
def test_conjugates_and_negatives_may_be_views():
    z = torch.tensor([1 + 2j])
    conjugate, negative = torch._conj(z), torch._neg_view(z)
    assert (conjugate.is_conj(), negative.is_neg()) == (True, True)
    assert {x.data_ptr() for x in (conjugate, negative)} == {z.data_ptr()}
    assert (conjugate.item(), negative.item()) == (1 - 2j, -1 - 2j)


@door("torch._foreach_mul_")
def test_a_list_is_multiplied_in_place():
    tensors = [torch.ones(1), torch.full((2,), 3.0)]
    torch._foreach_mul_(tensors, 0.5)
    assert [x.tolist() for x in tensors] == [[0.5], [1.5, 1.5]]


@door("._indices", "._values")
def test_the_parts_of_a_sparse_tensor_are_given_before_equal_places_are_merged():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    assert (sparse._indices().tolist(), sparse._values().tolist()) == ([[0, 0]], [1, 2])
    assert sparse._values().untyped_storage()._cdata == sparse._values().untyped_storage()._cdata


@door("._nested_tensor_size", "._nested_tensor_strides", "._nested_tensor_storage_offsets")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_gives_its_shapes_strides_and_offsets():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.strided)
    assert nested._nested_tensor_size().tolist() == [[2, 3], [1, 3]]
    assert nested._nested_tensor_strides().tolist() == [[3, 1], [3, 1]]
    assert nested._nested_tensor_storage_offsets().tolist() == [0, 6]


@door("torch.utils.flop_counter._FlopCounterMode")
def test_a_flop_counter_counts_through_its_mode():
    with FlopCounterMode(display=False) as counter:
        torch.ones(2, 3) @ torch.ones(3, 4)
        assert isinstance(counter.mode, _FlopCounterMode)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


# ---- checkpoints


@door("torch.utils.checkpoint.SAC_IGNORED_OPS")
def test_selective_checkpoints_look_past_detaching():
    assert torch.ops.aten.detach.default in checkpoint.SAC_IGNORED_OPS
    assert torch.ops.aten.mm.default not in checkpoint.SAC_IGNORED_OPS


@door(
    "torch.utils.checkpoint.check_backward_validity",
    "torch.utils.checkpoint.detach_variable",
    "torch.utils.checkpoint.noop_context_fn",
)
def test_torchs_parts_of_a_checkpoint_detach_warn_and_do_nothing():
    x = torch.ones(1, requires_grad=True)
    (detached,) = checkpoint.detach_variable((x * 2,))
    assert (detached.is_leaf, detached.requires_grad) == (True, True)
    with pytest.warns(UserWarning, match="requires_grad"):
        checkpoint.check_backward_validity([torch.ones(1)])
    with warnings.catch_warnings(action="error"):
        checkpoint.check_backward_validity([x])
    first, second = checkpoint.noop_context_fn()
    with first, second:
        assert torch.is_grad_enabled()


@door(
    "torch._dynamo.eval_frame",
    "torch._dynamo.eval_frame._callback_from_stance",
    ".ignore_compile_internals",
)
@pytest.mark.parametrize("ignored", [False, True])
def test_code_runs_compiled_under_a_mode_that_the_compiler_ignores(ignored):
    import torch._dynamo.eval_frame as dynamo

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

        @classmethod
        def ignore_compile_internals(cls):
            return ignored

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    graphs, calls = [], []
    choose = dynamo._callback_from_stance
    torch.compiler.reset()
    function = torch.compile(lambda x: x.sin(), backend=backend)
    with (
        patch.object(dynamo, "_callback_from_stance", lambda x: calls.append(x) or choose(x)),
        Mode(),
    ):
        function(torch.ones(1))
    assert any(map(choose, calls))
    assert len(graphs) == ignored
    torch.compiler.reset()


@door("torch._C._dynamo.guards")
def test_generated_code_allocates_with_functions_of_the_compiler():
    make = torch._C._dynamo.guards._empty_strided_cpu
    with seen_operators() as calls:
        buffer = make((2, 3), (3, 1), torch.float32)
    assert (buffer.shape, buffer.stride(), calls) == ((2, 3), (3, 1), [])


@door("torch._guards.TracingContext", "torch._guards.TracingContext.try_get")
def test_a_tracing_context_exists_while_the_compiler_runs_a_graph_on_symbols():
    from torch._guards import TracingContext

    def backend(graph, inputs):
        found.append(TracingContext.try_get() is not None)
        return graph.forward

    found = [TracingContext.try_get() is not None]
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(1))
    assert [*found, TracingContext.try_get() is not None] == [False, True, False]


@door("torch._dynamo.graph_break")
def test_a_break_in_a_full_graph_is_an_error_with_its_message():
    def function(x):
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break("the reason")
        return x + 1

    x = torch.ones(1)
    assert torch.compile(function, backend="eager")(x).item() == 2
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the reason"):
        torch.compile(function, backend="eager", fullgraph=True)(x)


@door("torch._disable_dynamo", "._orig_mod", "._compiled_call_impl", "._call_impl")
def test_a_compiled_model_knows_the_original_and_leaves_out_what_is_not_to_be_compiled():
    told = []

    @torch._disable_dynamo
    def outside(x):
        told.append(torch.compiler.is_compiling())
        return x + 1

    class Model(nn.Module):
        def forward(self, x):
            return outside(x * 2) * 3

    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert compiled._orig_mod is model
    assert compiled(torch.ones(1)).item() == 9
    assert told == [False]
    assert model._compiled_call_impl is None
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None
    copied = copy.deepcopy(model)
    assert copied._compiled_call_impl is None
    copied._compiled_call_impl = copied._call_impl  # it counts as compiled, and runs as written
    assert copied(torch.ones(1)).item() == 9


# ---- modules and optimizers


@door("torch.nn.modules.instancenorm._InstanceNorm")
def test_instance_norms_have_one_base():
    base = nn.modules.instancenorm._InstanceNorm
    for norm in nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.LazyInstanceNorm3d():
        assert isinstance(norm, base)
    assert not isinstance(nn.BatchNorm1d(2), base)


@door("torch.utils._pytree.tree_leaves")
def test_leaves_of_nested_containers_are_listed():
    from torch.utils._pytree import tree_leaves

    generator = torch.Generator()
    assert tree_leaves({"a": [generator, (1, None)], "b": "c"}) == [generator, 1, None, "c"]


@door("torch.nn.modules.batchnorm._BatchNorm", "torch.nn.modules.batchnorm._NormBase")
def test_norms_that_keep_statistics_have_common_classes():
    norms = nn.modules.batchnorm
    batch, instance = nn.BatchNorm2d(1), nn.InstanceNorm1d(1)
    assert isinstance(batch, norms._BatchNorm)
    assert not isinstance(instance, norms._BatchNorm)
    assert isinstance(batch, norms._NormBase)
    assert isinstance(instance, norms._NormBase)
    assert not isinstance(nn.LayerNorm(1), norms._NormBase)


@door(
    "._parameters",
    "._buffers",
    "._modules",
    "._forward_hooks",
    "._forward_pre_hooks",
    "._optimizer_step_pre_hooks",
)
def test_modules_and_optimizers_keep_what_is_theirs_in_dicts():
    module = nn.BatchNorm1d(2)
    assert nn.Sequential(module)._modules == {"0": module}
    assert module._parameters["weight"] is module.weight
    module._buffers["running_mean"] = replaced = torch.ones(2)
    assert module.running_mean is replaced
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    after, before = (lambda *_: None), (lambda *_: None)
    module.register_forward_hook(after)
    module.register_forward_pre_hook(before)
    assert list(module._forward_hooks.values()) == [after]
    assert list(module._forward_pre_hooks.values()) == [before]
    optimizer = torch.optim.SGD(module.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    optimizer.register_step_pre_hook(before)
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [before]


@door("._global_forward_hooks", "._global_forward_pre_hooks")
def test_hooks_on_all_modules_stand_in_dicts_that_can_be_emptied():
    from torch.nn.modules import module

    heard = []
    handles = [
        module.register_module_forward_hook(lambda *_: heard.append("after")),
        module.register_module_forward_pre_hook(lambda *_: heard.append("before")),
    ]
    try:
        with (
            patch.dict(module._global_forward_hooks, clear=True),
            patch.dict(module._global_forward_pre_hooks, clear=True),
        ):
            nn.Identity()(1)
        assert heard == []
        nn.Identity()(1)
        assert heard == ["before", "after"]
    finally:
        for handle in handles:
            handle.remove()


@door("._tensor_name")
def test_the_hook_of_a_pruned_weight_names_it():
    from torch.nn.utils import prune

    module = prune.identity(nn.Linear(1, 1), "weight")
    (hook,) = module._forward_pre_hooks.values()
    assert hook._tensor_name == "weight"
    assert "weight" in vars(module)


@door("torch.utils.weak.WeakIdKeyDictionary", "torch.utils.weak.WeakTensorKeyDictionary")
def test_tensors_and_modules_are_weak_keys_by_identity():
    from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

    for kind in (WeakIdKeyDictionary, WeakTensorKeyDictionary):
        first, second = torch.ones(1), torch.ones(1)
        known = kind({first: "first"})
        assert known[first] == "first"
        assert second not in known
        del first
        assert len(known) == 0


# ---- several ranks


@contextmanager
def fake_group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@door(
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.ops.c10d._allgather_base_",
    "torch.ops.c10d._reduce_scatter_base_",
)
def test_a_fake_group_returns_at_once_and_its_collectives_are_these_operators():
    whole, part = torch.zeros(4), torch.zeros(2)
    with fake_group(), seen_operators() as calls:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
    collectives = {func.overloadpacket: args for func, args in calls}
    assert collectives[torch.ops.c10d._allgather_base_][0] is whole
    assert collectives[torch.ops.c10d._reduce_scatter_base_][1] is whole


@door(
    "torch.ops._c10d_functional",
    "torch.ops._c10d_functional.all_gather_into_tensor",
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops._c10d_functional.reduce_scatter_tensor",
)
def test_functional_collectives_get_a_tensor_and_then_the_number_of_ranks():
    from torch.distributed import _functional_collectives as functional

    part, functions = torch.zeros(4), torch.ops._c10d_functional
    with fake_group(), seen_operators() as calls:
        functional.all_reduce(part, "sum", [0, 1])
        functional.all_gather_tensor(part, 0, [0, 1])
        functional.reduce_scatter_tensor(part, "sum", 0, [0, 1])
    collectives = {func.overloadpacket: args for func, args in calls}
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        assert collectives[getattr(functions, name)][0].shape == part.shape
    assert collectives[functions.all_gather_into_tensor][1] == 2


@door(
    "._sync_module_states",
    "._verify_param_shape_across_processes",
    "._rebuild_buckets",
    ".reducer",
)
def test_ddp_compares_shapes_and_sends_weights_by_functions_that_can_be_replaced():
    ddp = "torch.nn.parallel.distributed"
    with (
        fake_group(),
        patch(f"{ddp}._sync_module_states") as sync,
        patch(f"{ddp}._verify_param_shape_across_processes") as verify,
    ):
        run = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        assert (sync.call_count, verify.call_count) == (1, 1)
        theirs, asked = run.reducer, []

        class Reducer:
            def __getattr__(self, name):
                asked.append(name)
                return (lambda: False) if name == "_rebuild_buckets" else getattr(theirs, name)

        def reduce(_, bucket):
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        run.register_comm_hook(None, reduce)
        run.reducer = Reducer()
        run(torch.ones(1, 1)).sum().backward()
    assert {"_rebuild_buckets", "prepare_for_backward"} <= set(asked)
    assert theirs._rebuild_buckets() in (True, False)


@door("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper")
def test_the_frameworks_wrapper_checkpoints_a_module():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    calls = []
    module = nn.Linear(1, 1)
    module.register_forward_pre_hook(lambda *_: calls.append("forward"))
    checkpoint_wrapper(module)(torch.ones(1)).backward()
    assert calls == ["forward"] * 2


# ---- a GPU


@door("._initialized")
def test_a_kind_of_device_says_whether_it_is_in_use():
    assert torch.cuda._initialized == torch.cuda.is_initialized()


@door(
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._host_emptyCache",
    "torch.cuda._sleep",
)
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


if __name__ == "__main__":
    for name, test in DOORS.items():
        print(f"{name}\n    {', '.join(sorted(used_doors().get(name, [])))}\n    {test}")
