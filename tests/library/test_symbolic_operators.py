"""Bytes and strides of symbolic operators against real ones, on PyTorch's operator database."""

import itertools
import random
from collections import Counter, defaultdict
from functools import partial

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")
from sweep_operators import LAYOUTS, Finding, check_results, findings
from torch import nn
from torch.nn import functional as F

from course_lib._torch.tensors import tensors_in
from course_lib.budget import Recipe, estimate, run
from course_lib.memory import symbolic

aten = torch.ops.aten

# Operators that an estimate rejects on their largest sample, because their result depends on values
# or because a sparse tensor of the caller cannot be made symbolic.
REJECTED = """
    allclose argwhere combinations cov equal item linalg.lstsq linalg.lstsq.grad_oriented
    masked_select nn.functional.gaussian_nll_loss nonzero sparse.mm.reduce sparse.sampled_addmm
    unique unique_consecutive
"""
# Parts of the names that the operators of `RULES` have in the database.
WITH_RULES = "fold glu log_softmax layer_norm embedding_bag max_unpool2d channel_shuffle"
WITH_RULES += " pad.reflect pad.replicate to_sparse"
LOSSES = ("_loss", "cross_entropy", "kl_div")


def verdicts(dtype, *options, check=check_results, **more):
    """Return a dict from verdicts to lists of (operator, number, reason)."""
    found = defaultdict(list)
    for name, number, finding in findings(check, dtype, *options, **more):
        found[finding.verdict].append((name, number, finding.reason))
    assert found["equal"]
    return found


def test_symbolic_operators_allocate_as_many_bytes_as_real_operators():
    found = verdicts(torch.float32, 1)
    assert not found["different"]
    assert {name for name, *_ in found["rejected"]} <= set(REJECTED.split())


def test_symbolic_losses_match_real_bytes_for_every_reduction():
    counts = Counter()

    def check_two(operator, sample):
        kind = operator.formatted_name, sample.kwargs.get("reduction")
        counts[kind] += 1
        return check_results(operator, sample) if counts[kind] <= 2 else Finding("skipped")

    found = verdicts(torch.float32, None, LOSSES, check=check_two)
    assert not found["different"]
    rejected = {name.partition("functional.")[2] for name, *_ in found["rejected"]}
    assert rejected == {"gaussian_nll_loss"}


SWEEPS = [
    (dtype, 2, {"layout": layout})
    for dtype in (torch.float32, torch.bfloat16)
    for layout in LAYOUTS
]


@pytest.mark.parametrize(
    ("dtype", "most", "options"), [*SWEEPS, (torch.float32, 1, {"ones": True})]
)
def test_symbolic_operators_with_custom_rules_match_real_bytes(dtype, most, options):
    found = verdicts(dtype, most, WITH_RULES.split(), **options)
    assert not found["different"] and not found["rejected"]


class Sparse(nn.Linear):
    def loss_sum(self, batch):
        return torch.sparse.mm(batch.to_sparse(), self.weight).sum(), len(batch)


def test_estimate_rejects_operator_with_unpredictable_bytes_naming_it():
    step = partial(Sparse, 8, 8), partial(torch.ones, 5, 8), Recipe(optimizer="sgd")
    assert run(*step).result.stepped
    with pytest.raises(ValueError, match=r"^the step runs aten\._to_sparse.*; keep the tensor"):
        estimate(*step)


@pytest.mark.parametrize("options", [{}, {"sparse_dim": 1}])
def test_symbolic_sparse_tensor_warns_and_counts_all_elements(options):
    with symbolic(), pytest.warns(UserWarning, match=r"_to_sparse.* as if all values were nonzero"):
        sparse = torch.eye(4).to_sparse(**options)
    assert sparse._values().numel() == 16


def outline(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def assert_same_outlines(make, *case):
    real = make(*case)
    with symbolic():
        found = make(*case)
    assert list(map(outline, tensors_in(found))) == list(map(outline, tensors_in(real))), case


def laid_out(shape, order, kept, dtype):
    """Return a tensor of 0.5 with dimensions in this order in memory, expanded if not kept."""
    sizes = [size if keep else 1 for size, keep in zip(shape, kept, strict=True)]
    inverse = [order.index(i) for i in range(len(order))]
    tensor = torch.full([sizes[i] for i in order], 0.5, dtype=dtype)
    return tensor.permute(inverse).expand(shape)


@pytest.mark.parametrize("operator", [aten._embedding_bag, aten._embedding_bag_forward_only])
def test_symbolic_embedding_bag_outputs_have_same_storages_as_real(operator):
    def bags(dtype, mode, last, padding, weighted, by_columns):
        table = torch.ones(5, 7, dtype=dtype).t() if by_columns else torch.ones(7, 5).to(dtype)
        weights = torch.ones(6, dtype=dtype) if weighted else None
        rows, starts = torch.tensor([0, 1, 4, 2, 1, 6]), torch.tensor([0, 3, 5, 6])
        return operator(table, rows, starts, False, mode, False, weights, last, padding)

    check_bool = False, True
    for case in itertools.product(
        (torch.float32, torch.bfloat16), (0, 1, 2), check_bool, (-1, 1), check_bool, check_bool
    ):
        if not (case[4] and case[1]):  # only sums have weights
            assert_same_outlines(bags, *case)


@pytest.mark.parametrize("seed", range(40))
def test_symbolic_views_have_same_strides_as_real_views(seed):
    """Compare reshaped tensors that have other strides along dimensions of size 1."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 1, 2, 3, 4)) for _ in range(draw.choice((1, 2, 3, 4)))]
    order = draw.sample(range(len(shape)), len(shape))
    odd = [draw.choice((1, 5, 77)) for _ in shape]
    factors = [factor for size in shape for factor in ((2, 2) if size == 4 else (size,))]
    ones = [draw.choice(((), (1,))) for _ in factors]
    wanted = [size for one, factor in zip(ones, factors, strict=True) for size in (*one, factor)]

    def views():
        x = laid_out(shape, order, [True] * len(shape), torch.float32)
        steps = [n if size == 1 else s for n, size, s in zip(odd, shape, x.stride(), strict=True)]
        x = x.as_strided(shape, steps)
        return x.reshape(wanted), x.reshape(-1), x.unsqueeze(0).flatten(0, 1)

    assert_same_outlines(views)


# Shapes and strides of views of images; some dimensions have size 1.
IMAGES = [
    ((2, 16, 8, 8), (1024, 64, 8, 1)),
    ((3, 16, 4, 8), (512, 32, 8, 1)),
    ((1, 16, 8, 8), (16, 1, 128, 16)),
    ((1, 16, 8, 8), (1024, 1, 128, 16)),
    ((2, 16, 8, 8), (1024, 1, 128, 16)),
    ((2, 16, 8, 8), (2048, 1, 128, 16)),
    ((1, 16, 8, 8), (99, 64, 8, 1)),
    ((2, 16, 1, 1), (16, 1, 16, 16)),
    ((1, 16, 1, 8), (16, 1, 8, 16)),
    ((4, 16, 8, 8), (1, 4, 512, 64)),
]
ON_IMAGES = {
    "like": torch.zeros_like,
    "like, in channels last": lambda x: torch.zeros_like(x, memory_format=torch.channels_last),
    "copy in channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "copy in bf16": lambda x: x.to(torch.bfloat16),
    "number": lambda x: x * 2,
    "sums": lambda x: (x + x, x[0] + x, x + x[:1]),
    "choice": lambda x: torch.where(x > 0, x, 2.0),
    "in place": lambda x: x.detach().lerp_(x.detach(), 0.1),
    "random": lambda x: x.detach().normal_(),
    "function": torch.sin,
    "power": lambda x: 2**x,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "prelu": lambda x: F.prelu(x, torch.ones(16)),
    "logsigmoid": F.logsigmoid,
    "nan_to_num": torch.nan_to_num,
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "tril": torch.tril,
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "sort": lambda x: x.sort(1),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.ones(x[0].shape)),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
    "log_softmax": lambda x: x.log_softmax(1),
    "batch_norm": lambda x: F.batch_norm(x, *(torch.ones(16) for _ in range(4)), True),
    "group_norm": lambda x: F.group_norm(x, 4, torch.ones(16)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "weight_norm": lambda x: torch._weight_norm(x, torch.ones(len(x), 1, 1, 1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "logits": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones(x.shape), reduction="none"
    ),
}


@pytest.mark.parametrize("name", ON_IMAGES)
def test_symbolic_image_operators_have_same_strides_as_real_operators(name):
    def results(shape, strides):
        x = torch.empty_strided(shape, strides).fill_(0.5).requires_grad_()
        found = [each for each in tensors_in(ON_IMAGES[name](x)) if each.is_floating_point()]
        if found[0].requires_grad:
            torch.autograd.backward(found[0], torch.ones_like(found[0]))
        return *found, x.grad

    for case in IMAGES:
        assert_same_outlines(results, *case)


def test_symbolic_sums_of_overlapping_operands_have_strides_of_real_sums():
    """Draw strides at random, so that some operands have equal strides in several dimensions."""
    draw = random.Random(0)

    def sum_of(shape, *strides):
        return [sum(torch.ones(100).as_strided(shape, each) for each in strides)]

    for _ in range(100):
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((2, 3, 4)))]
        assert_same_outlines(sum_of, shape, *([draw.randint(1, 6) for _ in shape] for _ in "ab"))


def loss(name, *options):
    """Return a function of operands (input, target, gradient) that computes a loss and slopes."""
    weight = [None] if name == "binary_cross_entropy" else []
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")

    def results(x, target, gradient):
        each = [x, target, *weight]
        scalar = torch.ones((), dtype=x.dtype)
        return [
            *(forward(*each, reduction, *options) for reduction in (0, 1)),
            *(backward(grad, *each, i, *options) for i, grad in enumerate((gradient, scalar))),
        ]

    return results


ELEMENTWISE = {  # name -> (function, number of operands)
    "add": (torch.add, 2),
    "lerp": (torch.lerp, 3),
    "sigmoid": (torch.sigmoid, 1),
    "gelu_backward": (aten.gelu_backward, 2),
    "threshold_backward": (lambda grad, x: aten.threshold_backward(grad, x, 0), 2),
    "mse_loss": (loss("mse_loss"), 3),
    "smooth_l1_loss": (loss("smooth_l1_loss", 1.0), 3),
    "huber_loss": (loss("huber_loss", 1.0), 3),
    "soft_margin_loss": (loss("soft_margin_loss"), 3),
    "binary_cross_entropy": (loss("binary_cross_entropy"), 3),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_symbolic_elementwise_operators_have_same_strides_as_real_operators(name):
    """Compare operands with dimensions in different orders, some of them expanded."""
    draw = random.Random(0)
    function, count = ELEMENTWISE[name]
    # symbolic results of this loss have other strides along dimensions of size 1
    sizes = (2, 3) if name == "soft_margin_loss" else (1, 2, 3)

    def result(shape, orders, kept, dtype):
        return function(*(laid_out(shape, *each, dtype) for each in zip(orders, kept, strict=True)))

    for i in range(12):
        shape = [draw.choice(sizes) for _ in range(draw.choice((2, 3, 4)))]
        orders = [draw.sample(range(len(shape)), len(shape)) for _ in range(count)]
        kept = [[draw.random() < 0.7 for _ in shape] for _ in range(count)]
        assert_same_outlines(result, shape, orders, kept, (torch.float32, torch.bfloat16)[i % 2])
