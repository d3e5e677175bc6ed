"""Symbolic operators compared with real ones: samples of PyTorch's operator database, and the rules
of `course_lib.symbolic.cpu_kernels`."""

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

# Operators that an estimate refuses on their largest sample, because their result depends on values
# (or, of the sparse ones, because a sparse tensor of the caller's cannot be made symbolic).
REFUSED = {
    "allclose",
    "argwhere",
    "combinations",
    "cov",
    "equal",
    "item",
    "linalg.lstsq",
    "linalg.lstsq.grad_oriented",
    "masked_select",
    "nn.functional.gaussian_nll_loss",
    "nonzero",
    "sparse.mm.reduce",
    "sparse.sampled_addmm",
    "unique",
    "unique_consecutive",
}
# Parts of the names that the operators of `RULES` have in the database.
WITH_RULES = (
    "functional.unfold",
    "fold",
    "glu",
    "log_softmax",
    "layer_norm",
    "embedding_bag",
    "max_unpool2d",
    "channel_shuffle",
    "pad.reflect",
    "pad.replicate",
    "to_sparse",
)
LOSSES = ("_loss", "cross_entropy", "kl_div")


def verdicts(dtype, *options, check=check_results, **more):
    """(operator, number, reason) of the samples, by their verdict."""
    found = defaultdict(list)
    for name, number, finding in findings(check, dtype, *options, **more):
        found[finding.verdict].append((name, number, finding.reason))
    assert found["equal"]
    return found


def test_symbolic_operators_take_the_bytes_of_real_ones():
    found = verdicts(torch.float32, 1)
    assert not found["different"]
    assert {name for name, *_ in found["refused"]} <= REFUSED


def test_losses_take_the_bytes_of_real_ones_with_every_reduction():
    seen = Counter()

    def check_two(operator, sample):
        """Check the first two samples of a reduction."""
        kind = operator.formatted_name, sample.kwargs.get("reduction")
        seen[kind] += 1
        return check_results(operator, sample) if seen[kind] <= 2 else Finding("left out")

    found = verdicts(torch.float32, None, LOSSES, check=check_two)
    assert not found["different"]
    refused = {name.partition("functional.")[2] for name, *_ in found["refused"]}
    assert refused == {"gaussian_nll_loss"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_with_rules_take_the_bytes_of_real_ones(dtype, layout):
    found = verdicts(dtype, 2, WITH_RULES, layout=layout)
    assert not found["different"] and not found["refused"]


def test_operators_with_rules_have_the_strides_of_real_ones_with_dimensions_of_size_one():
    found = verdicts(torch.float32, 1, WITH_RULES, ones=True)
    assert not found["different"] and not found["refused"]


class Sparse(nn.Linear):
    def loss_sum(self, batch):
        return torch.sparse.mm(batch.to_sparse(), self.weight).sum(), len(batch)


def test_an_estimate_refuses_an_inexact_operator_by_name():
    step = partial(Sparse, 8, 8), partial(torch.ones, 5, 8), Recipe(optimizer="sgd")
    assert run(*step).result.stepped
    with pytest.raises(ValueError, match=r"^the step runs aten\._to_sparse.*; keep the tensor"):
        estimate(*step)


@pytest.mark.parametrize("options", [{}, {"sparse_dim": 1}])
def test_sparse_bytes_are_an_upper_bound_and_symbolic_says_so(options):
    with symbolic(), pytest.warns(UserWarning, match=r"_to_sparse.* as if none were zero"):
        sparse = torch.eye(4).to_sparse(**options)
    assert sparse._values().numel() == 16


def look(tensor):
    """Shape, strides, dtype, and bytes of the storage."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def assert_same_look(make, *case):
    """Assert that results with symbolic tensors look as real ones do."""
    real = make(*case)
    with symbolic():
        made = make(*case)
    assert list(map(look, tensors_in(made))) == list(map(look, tensors_in(real))), case


def laid_out(shape, order, kept, dtype):
    """Halves with the dimensions in this order in memory, expanded along those that are not
    kept."""
    sizes = [size if keep else 1 for size, keep in zip(shape, kept, strict=True)]
    inverse = [order.index(i) for i in range(len(order))]
    made = torch.full([sizes[i] for i in order], 0.5, dtype=dtype)
    return made.permute(inverse).expand(shape)


HALVES = {
    "contiguous": partial(laid_out, (4, 3, 2, 5), (0, 1, 2, 3), (True,) * 4),
    "reversed": partial(laid_out, (4, 3, 2, 5), (3, 2, 1, 0), (True,) * 4),
    "channels_last": partial(laid_out, (4, 3, 2, 5), (0, 2, 3, 1), (True,) * 4),
    "expanded": partial(laid_out, (4, 3, 2, 5), (0, 1, 2, 3), (True, True, False, True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        ("mse_loss", ()),
        ("smooth_l1_loss", (1.0,)),
        ("huber_loss", (1.0,)),
        ("soft_margin_loss", ()),
        ("binary_cross_entropy", ()),
    ],
)
def test_losses_have_the_storages_and_strides_of_real_ones(loss, arguments, dtype):
    weight = (None,) if loss == "binary_cross_entropy" else ()

    def results(one, other, grad):
        of = HALVES[one](dtype), HALVES[other](dtype), *weight, int(not grad), *arguments
        given = HALVES[grad](dtype) if grad else torch.ones((), dtype=dtype)
        return getattr(aten, loss)(*of), getattr(aten, f"{loss}_backward")(given, *of)

    grads = None, "reversed", "expanded"  # None: the gradient of a mean, which is a scalar
    for case, grad in zip(itertools.product(HALVES, HALVES), itertools.cycle(grads), strict=False):
        assert_same_look(results, *case, grad)


@pytest.mark.parametrize("operator", [aten._embedding_bag, aten._embedding_bag_forward_only])
def test_symbolic_bags_have_the_storages_of_real_ones(operator):
    def bags(dtype, mode, last, padding, weighted, by_columns):
        table = torch.ones(5, 7, dtype=dtype).t() if by_columns else torch.ones(7, 5).to(dtype)
        weights = torch.ones(6, dtype=dtype) if weighted else None
        rows, starts = torch.tensor([0, 1, 4, 2, 1, 6]), torch.tensor([0, 3, 5, 6])
        return operator(table, rows, starts, False, mode, False, weights, last, padding)

    yes_or_no = False, True
    for case in itertools.product(
        (torch.float32, torch.bfloat16), (0, 1, 2), yes_or_no, (-1, 1), yes_or_no, yes_or_no
    ):
        if not (case[4] and case[1]):  # weights are for sums only
            assert_same_look(bags, *case)


@pytest.mark.parametrize("seed", range(40))
def test_views_have_the_strides_of_real_ones(seed):
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

    assert_same_look(views)


# Shapes and strides of images of which some dimensions have size 1, as views have them.
ODD = [
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
    "number": lambda x: x * 2,
    "function": torch.sin,
    "power": lambda x: 2**x,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
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
def test_results_of_images_have_the_strides_of_real_ones(name):
    def results(shape, strides):
        x = torch.empty_strided(shape, strides).fill_(0.5).requires_grad_()
        made = [each for each in tensors_in(ON_IMAGES[name](x)) if each.is_floating_point()]
        if made[0].requires_grad:
            torch.autograd.backward(made[0], torch.ones_like(made[0]))
        return *made, x.grad

    for case in ODD:
        assert_same_look(results, *case)


ELEMENTWISE = {
    torch.add: 2,
    torch.mul: 2,
    torch.lerp: 3,
    torch.addcmul: 3,
    torch.sigmoid: 1,
    torch.nn.functional.gelu: 1,
    aten.gelu_backward: 2,
    aten.silu_backward: 2,
    aten.tanh_backward: 2,
    aten.threshold_backward: 2,
}


@pytest.mark.parametrize("operator", ELEMENTWISE)
def test_elementwise_results_have_the_strides_of_real_ones(operator):
    draw = random.Random(0)

    def result(shape, orders, kept, dtype):
        operands = [laid_out(shape, *each, dtype) for each in zip(orders, kept, strict=True)]
        return operator(*operands, *(0,) * (operator is aten.threshold_backward))

    for i in range(24):
        shape = [draw.choice((1, 2, 3)) for _ in range(draw.choice((2, 3, 4)))]
        count = range(ELEMENTWISE[operator])
        orders = [draw.sample(range(len(shape)), len(shape)) for _ in count]
        kept = [[draw.random() < 0.7 for _ in shape] for _ in count]
        assert_same_look(result, shape, orders, kept, (torch.float32, torch.bfloat16)[i % 2])
