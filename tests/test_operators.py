"""Symbolic operators compared with real ones: samples of PyTorch's operator database, and the rules
of `course_lib.symbolic.cpu_kernels`."""

import inspect
import itertools
import random
from functools import partial

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")
from sweep_operators import LAYOUTS, check_peak, findings
from torch import nn
from torch.nn import functional as F

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
    "nn.functional.ctc_loss",
    "nn.functional.gaussian_nll_loss",
    "nonzero",
    "sparse.mm.reduce",
    "sparse.sampled_addmm",
    "unique",
    "unique_consecutive",
}
# Parts of the names that the operators of `RULES` have in the database.
WITH_RULES = (
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "functional.unfold",
    "fold",
    "glu",
    "log_softmax",
    "functional.cross_entropy",
    "layer_norm",
    "embedding_bag",
    "max_unpool2d",
    "channel_shuffle",
    "pad.reflect",
    "pad.replicate",
    "to_sparse",
)


def different(dtype, *options, layout="as_given"):
    """(operator, number, reason) of the samples whose bytes differ, and the refused operators."""
    found = list(findings(check_peak, dtype, *options, layout=LAYOUTS[layout]))
    assert found
    refused = {name for name, _, finding in found if finding.verdict == "refused"}
    return [
        (name, number, finding.reason)
        for name, number, finding in found
        if finding.verdict == "different"
    ], refused


def test_symbolic_operators_take_the_bytes_of_real_ones():
    wrong, refused = different(torch.float32, 1)
    assert not wrong
    assert refused <= REFUSED


@pytest.mark.parametrize("layout", ["as_given", "channels_last", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_with_rules_take_the_bytes_of_real_ones_in(dtype, layout):
    wrong, refused = different(dtype, 2, WITH_RULES, layout=layout)
    assert not wrong and not refused


def class_of_each(x):
    return torch.arange(len(x)) % x.shape[1]


def sign_of_each(x):
    return torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0)


# The loss of the outputs `x` of a model, whose targets are constant: (x, reduction) -> loss.
LOSSES = {
    "nll_loss": lambda x, **r: F.nll_loss(x, class_of_each(x), **r),
    "cross_entropy": lambda x, **r: F.cross_entropy(x, class_of_each(x), **r),
    "linear_cross_entropy": lambda x, **r: F.linear_cross_entropy(
        x, torch.ones(9, x.shape[1]), class_of_each(x), **r
    ),
    "multi_margin_loss": lambda x, **r: F.multi_margin_loss(x, class_of_each(x), **r),
    "multilabel_margin_loss": lambda x, **r: F.multilabel_margin_loss(
        x, torch.zeros_like(x, dtype=torch.long), **r
    ),
    "hinge_embedding_loss": lambda x, **r: F.hinge_embedding_loss(x, torch.ones_like(x), **r),
    "margin_ranking_loss": lambda x, **r: F.margin_ranking_loss(
        x, x.square(), torch.ones_like(x), **r
    ),
    "cosine_embedding_loss": lambda x, **r: F.cosine_embedding_loss(
        x, x.square(), sign_of_each(x), **r
    ),
    "triplet_margin_loss": lambda x, **r: F.triplet_margin_loss(x, x.square(), x.sin(), **r),
    "triplet_margin_with_distance_loss": lambda x, **r: F.triplet_margin_with_distance_loss(
        x, x.square(), x.sin(), **r
    ),
    "poisson_nll_loss": lambda x, **r: F.poisson_nll_loss(x, torch.ones_like(x), **r),
    "binary_cross_entropy": lambda x, **r: F.binary_cross_entropy(
        x.sigmoid(), torch.ones_like(x), **r
    ),
} | {
    name: lambda x, name=name, **r: getattr(F, name)(x, torch.ones_like(x), **r)
    for name in (
        "binary_cross_entropy_with_logits",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "multilabel_soft_margin_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    )
}
READS_VALUES = {"ctc_loss", "gaussian_nll_loss"}  # `estimate` refuses them


class Lossy(nn.Module):
    """Its loss is one of PyTorch's, of outputs larger than its weights."""

    def __init__(self, name, reduction):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.name, self.reduction = name, reduction

    def loss_sum(self, batch):
        losses = LOSSES[self.name](self.layer(batch), reduction=self.reduction)
        return losses.sum(), len(batch)


def test_losses_of_pytorch_are_all_listed():
    functions = {name: f for name, f in vars(F).items() if inspect.isfunction(f)}
    reduced = {n for n, f in functions.items() if "reduction" in inspect.signature(f).parameters}
    assert reduced == LOSSES.keys() | READS_VALUES


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_estimate_equals_run_with_each_loss(name, reduction):
    step = partial(Lossy, name, reduction), partial(torch.ones, 500, 8), Recipe(optimizer="sgd")
    assert estimate(*step).peak_bytes == run(*step).meter.peak_bytes


HALVES = {
    "contiguous": lambda dtype: torch.full((4, 3, 2, 5), 0.5, dtype=dtype),
    "reversed": lambda dtype: torch.full((5, 2, 3, 4), 0.5, dtype=dtype).permute(3, 2, 1, 0),
    "channels_last": lambda dtype: torch.full((4, 2, 5, 3), 0.5, dtype=dtype).permute(0, 3, 1, 2),
    "expanded": lambda dtype: torch.full((4, 3, 1, 5), 0.5, dtype=dtype).expand(4, 3, 2, 5),
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
    forward, backward = getattr(aten, loss), getattr(aten, f"{loss}_backward")
    weight = (None,) if loss == "binary_cross_entropy" else ()
    grads = None, "reversed", "expanded"  # None: the gradient of a mean, which is a scalar
    for one, other, grad in itertools.product(HALVES, HALVES, grads):

        def results():
            of = *(HALVES[name](dtype) for name in (one, other)), *weight, int(not grad), *arguments  # noqa: B023
            given = HALVES[grad](dtype) if grad else torch.ones((), dtype=dtype)  # noqa: B023
            return look_of((forward(*of), backward(given, *of)))

        with symbolic():
            found = results()
        assert found == results(), (one, other, grad)


@pytest.mark.parametrize("options", [{}, {"sparse_dim": 1}])
def test_sparse_bytes_are_an_upper_bound_and_symbolic_says_so(options):
    with symbolic(), pytest.warns(UserWarning, match=r"_to_sparse.* as if none were zero"):
        sparse = torch.eye(4).to_sparse(**options)
    assert sparse._values().numel() == 16


class Sparse(Lossy):
    def loss_sum(self, batch):
        return torch.sparse.mm(batch.to_sparse(), self.layer.weight).sum(), len(batch)


def test_estimate_refuses_an_inexact_operator_and_names_it():
    step = partial(Sparse, "mse_loss", "sum"), partial(torch.ones, 500, 8), Recipe(optimizer="sgd")
    assert run(*step).result.stepped
    with pytest.raises(
        ValueError, match=r"^the step runs aten\._to_sparse.*; keep the tensor dense"
    ):
        estimate(*step)


def look_of(result):
    """Shape, strides that matter, dtype and bytes of the storage of each tensor."""
    tensors = result if isinstance(result, tuple) else (result,)
    return [
        (
            tuple(t.shape),
            [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1],
            t.dtype,
            t.untyped_storage().nbytes(),
        )
        for t in tensors
    ]


@pytest.mark.parametrize("operator", [aten._embedding_bag, aten._embedding_bag_forward_only])
def test_symbolic_bags_have_the_storages_of_real_ones(operator):
    cases = itertools.product(
        (torch.float32, torch.float64, torch.bfloat16),
        (0, 1, 2),
        (False, True),
        (-1, 1),
        (False, True),
        (False, True),
    )
    for dtype, mode, last, padding, weighted, by_columns in cases:
        if weighted and mode:
            continue

        def bags():
            table = torch.ones(5, 7, dtype=dtype).t() if by_columns else torch.ones(7, 5).to(dtype)  # noqa: B023
            weights = torch.ones(6, dtype=dtype) if weighted else None  # noqa: B023
            rows, starts = torch.tensor([0, 1, 4, 2, 1, 6]), torch.tensor([0, 3, 5, 6])
            options = (False, mode, False, weights, last, padding)  # noqa: B023
            return look_of(operator(table, rows, starts, *options))

        with symbolic():
            found = bags()
        assert found == bags(), (dtype, mode, last, padding, weighted, by_columns)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_results_have_the_strides_of_real_ones(dtype):
    draw = random.Random(0)
    for operator, count in ELEMENTWISE.items():
        for _ in range(12):
            shape = [draw.choice((1, 2, 3)) for _ in range(draw.choice((2, 3, 4)))]
            orders = [draw.sample(range(len(shape)), len(shape)) for _ in range(count)]
            kept = [[draw.random() < 0.7 for _ in shape] for _ in range(count)]

            def result():
                operands = [_laid_out(shape, *each, dtype) for each in zip(orders, kept)]  # noqa: B023,B905
                more = (0,) if operator is aten.threshold_backward else ()  # noqa: B023
                return look_of(operator(*operands, *more))  # noqa: B023

            with symbolic():
                found = result()
            assert found == result(), (operator, shape, orders, kept)


def _laid_out(shape, order, kept, dtype):
    """Ones with the dimensions in this order in memory, expanded along those that are not kept."""
    sizes = [size if keep else 1 for size, keep in zip(shape, kept, strict=True)]
    inverse = [order.index(i) for i in range(len(order))]
    return torch.ones([sizes[i] for i in order], dtype=dtype).permute(inverse).expand(shape)
