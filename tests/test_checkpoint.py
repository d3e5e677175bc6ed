"""Checkpointed blocks and the loss in chunks against plain autograd, and against the meter."""

import copy
import pickle
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial

import foreign_models
import pytest
import torch
from foreign_models import sentences
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy
from training_steps import no_gc

from course_lib.budget import Recipe, build, train_step
from course_lib.checkpoint import checkpoint_blocks, checkpointed_loss
from course_lib.checkpoint.blocks import names_of
from course_lib.memory import MemoryMeter
from course_lib.models import Decoder, deep_mlp, random_tokens

aten = torch.ops.aten


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


class GroupedAttention(nn.Module):
    """Attention of 4 heads; each pair of them shares its keys and values."""

    def __init__(self):
        super().__init__()
        self.queries, self.shared = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x):
        q, kv = (
            part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.queries, self.shared)
        )
        o = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
        return x + o.transpose(1, 2).flatten(2)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("checkpoint", ["layers", "selective"])
def test_blocks_whose_attention_saves_an_unset_seed_are_recomputed_on_a_gpu(precision, checkpoint):
    def weights(**fields):
        # other values in the memory that the kernels leave as it is
        torch.randint(1 << 40, (1 << 16,), device="cuda")
        torch.manual_seed(0)
        recipe = Recipe(precision=precision, optimizer="sgd", **fields)
        model, optimizer = build(
            lambda: nn.Sequential(*(GroupedAttention() for _ in range(3))).cuda(), recipe
        )
        for batch in torch.randn(2, 2, 128, 64, device="cuda", dtype=recipe.dtype):
            train_step(model, optimizer, batch, recipe, loss_sum=squares)
        return list(model.parameters())

    def squares(model, x):
        return model(x).square().sum(), x.numel()

    assert_close(weights(checkpoint=checkpoint), weights())


# ---- the loss in chunks


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize(("tokens", "chunk"), [(7, 1), (7, 3), (7, 100), (0, 2)])
def test_the_loss_in_chunks_is_cross_entropy_with_its_gradients(
    tokens, chunk, ignore_index, reduction
):
    hidden, weight, targets = leaf(tokens, 5), leaf(11, 5), torch.randint(11, (tokens,))
    targets[:3] = ignore_index  # a whole chunk of three
    options = {"ignore_index": ignore_index, "reduction": reduction}
    found = checkpointed_loss(hidden, weight, targets, chunk=chunk, **options)
    expected = F.cross_entropy(hidden @ weight.T, targets, **options)
    assert_close(found, expected, equal_nan=True)
    slopes = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    assert_close(*slopes)


def test_the_loss_in_chunks_of_low_precision_is_as_near_to_the_exact_one_as_the_precision_allows():
    hidden, weight, targets = (
        torch.randn(4000, 8).bfloat16(),
        torch.randn(50, 8).bfloat16(),
        torch.randint(50, (4000,)),
    )
    found = checkpointed_loss(hidden, weight, targets, chunk=10)
    exact = F.cross_entropy((hidden @ weight.T).double(), targets)
    assert found.dtype is torch.bfloat16
    assert_close(found.double(), exact, rtol=2**-7, atol=0)  # a unit in the last of 8 bits


# ---- the blocks of any model


def decoder():
    return Decoder(vocabulary=40, hidden=16, heads=2, layers=3, sequence=16, dropout=0.2)


TOKENS = random_tokens(4, 12, 40)


def trained(model, around=nullcontext, batch=TOKENS):
    """The loss, the gradients and the next random number; and the bytes at the peak."""
    torch.manual_seed(5)
    with around(model), MemoryMeter(model) as meter:
        loss, _ = model.loss_sum(batch)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return (loss.detach(), gradients, torch.rand(1)), meter.peak_bytes


@pytest.mark.parametrize("policy", [None, [aten.addmm.default]])
@pytest.mark.parametrize(
    ("make", "batch"),
    [(decoder, TOKENS), (partial(foreign_models.Decoder, dropout=0.1), sentences())],
    ids=["decoder", "with tuples and keywords"],
)
def test_checkpointed_blocks_give_the_gradients_of_the_plain_model_in_fewer_bytes(
    make, batch, policy
):
    model = make()
    plain, plain_peak = trained(model, batch=batch)
    around = partial(checkpoint_blocks, blocks=None, policy=policy)
    found, peak = trained(model, around, batch)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak < plain_peak
    assert not any("forward" in vars(module) for module in model.modules())
    assert trained(model, batch=batch)[1] == plain_peak


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first": 4}, [0, 1, 2, 3]),
        ({"first": 5, "every": 2}, [1, 3]),
        ({"blocks": "layers.[135]"}, [1, 3, 5]),
        ({"blocks": ["layers.4", "layers.0"]}, [0, 4]),
    ],
)
def test_blocks_are_chosen_by_name_and_number_and_these_run_twice(options, expected):
    runs, once, model = Counter(), Counter(), decoder()
    model.layers.extend(decoder().layers)
    for i, layer in enumerate(model.layers):
        layer.norm1.register_forward_hook(lambda *_, i=i: runs.update([i]))
        for kind in ("forward_pre", "forward", "full_backward"):
            note = partial(once.update, [(kind, i)])
            getattr(layer, f"register_{kind}_hook")(lambda *_, note=note: note())
    with checkpoint_blocks(model, **options) as handle:
        model.loss(TOKENS).backward()
    assert handle.names == tuple(f"layers.{i}" for i in expected)
    assert runs == {i: 2 if i in expected else 1 for i in range(6)}
    assert len(once) == once.total() == 3 * 6  # hooks on a block


def test_every_list_of_like_modules_is_found_but_not_those_inside_their_modules():
    def linears(count):
        return [nn.Linear(2, 2) for _ in range(count)]

    def stack(depth):  # of modules with a list inside
        return nn.ModuleList(
            nn.Sequential(nn.ModuleList(linears(3)), nn.ReLU()) for _ in range(depth)
        )

    parts = {"encoder": stack(3), "decoder": nn.ModuleList(deep_mlp(2, 2) for _ in range(2))}
    parts |= {"one": stack(1), "heads": nn.ModuleList(linears(5)), "other": deep_mlp(4, 2)}
    model = nn.ModuleDict({**parts, "again": parts["encoder"]})
    with checkpoint_blocks(model, None, first=4) as handle:
        assert handle.names == ("encoder.0", "encoder.1", "encoder.2", "decoder.0")
    assert checkpoint_blocks(model, None).names == (*handle.names, "decoder.1")
    assert checkpoint_blocks(nn.Sequential(*stack(2)), None).names == ("0", "1")
    lists = nn.ModuleList(stack(2) for _ in range(2))
    assert checkpoint_blocks(lists, None).names == ("0.0", "0.1", "1.0", "1.1")
    parts["one"] = nn.ModuleList([nn.Sequential(*linears(3))])
    # without a longer list of blocks: a list of one block, or single layers
    for names in (("one", "heads", "other"), ("heads", "other")):
        alone = checkpoint_blocks(nn.ModuleDict({name: parts[name] for name in names}), None)
        assert alone.names == tuple(f"{names[0]}.{i}" for i in range(len(parts[names[0]])))


def test_lists_of_several_types_are_blocks_only_without_larger_modules_of_one_type():
    def two(count, *more):
        """Return a list of modules of two types, which have modules inside."""
        kinds = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.TransformerEncoderLayer(2, 1, 2)
        return nn.ModuleList([*(copy.deepcopy(kinds[i % 2]) for i in range(count)), *more])

    single = nn.ModuleList([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Tanh()])
    parts = {"a": two(2), "b": two(4), "c": single, "d": nn.Sequential(*two(3)), "e": two(1)}
    heads = {"heads": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}
    layers = {"layers": nn.ModuleList([nn.Sequential(nn.Tanh(), nn.ReLU()) for _ in range(2)])}
    rest = nn.ModuleDict({name: parts[name] for name in "abcd"})
    longest = [*(f"b.{i}" for i in range(4)), "a.0", "a.1"]
    assert names_of(rest, None) == names_of(nn.ModuleDict({**rest, **heads}), None) == longest
    assert names_of(nn.ModuleDict({**rest, **layers}), None) == ["layers.0", "layers.1"]
    assert names_of(nn.ModuleDict(parts), None) == ["e.0"]  # a list of one type
    assert len(names_of(nn.ModuleDict({"c": single}), None)) == 5


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()), deep_mlp(1, 2)), "'1', '2'"),
        (lambda: nn.ModuleDict({"net": nn.Sequential(nn.Sequential(nn.Tanh()))}), "'net.0.0'"),
        (lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()}), "'a', 'b'"),
        (lambda: nn.Linear(3, 3), "contains no other modules"),
    ],
)
def test_a_model_without_lists_is_refused_with_names_to_choose(make, names):
    with pytest.raises(ValueError, match=rf"without a list of blocks .*, got None; .*{names}"):
        checkpoint_blocks(make(), None)


@pytest.mark.parametrize(("blocks", "shown"), [("foo.*", r"got 'foo"), (None, "got None")])
def test_a_model_without_blocks_is_refused(blocks, shown):
    with pytest.raises(ValueError, match=shown):
        checkpoint_blocks(nn.Linear(3, 3), blocks)


def test_blocks_are_checkpointed_once_and_restored_after_an_error():
    model = decoder()
    with pytest.raises(ValueError, match=r"layers\.0"), checkpoint_blocks(model, "layers.[01]"):
        checkpoint_blocks(model, "layers.2").remove()
        checkpoint_blocks(model)
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_a_block_may_have_an_argument_named_like_an_option_and_runs_once_without_gradients():
    class Block(nn.Linear):
        def forward(self, x, *, debug):
            debug.append(x)
            return super().forward(x).sin()

    model, seen, x = nn.Sequential(Block(2, 2), Block(2, 2)), [], torch.ones(2)
    with checkpoint_blocks(model, None):
        model[0](x, debug=seen).sum().backward()
        with torch.no_grad():
            model[0](x, debug=seen)
    assert len(seen) == 2 and all(each is x for each in seen)


@pytest.mark.parametrize(
    ("bias", "policy", "ran"),
    [
        (True, [aten.mm.default], "aten.addmm.default"),
        (False, [aten.addmm.default], "aten.mm.default"),
        (False, [aten.addmm.default, aten.mm.default], None),
        (True, [aten._softmax.default], None),  # only one of the two blocks runs softmax
        (True, [], None),  # nothing is kept on purpose
    ],
)
def test_a_policy_list_warns_once_if_no_block_runs_its_operators(bias, policy, ran):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6, bias), last) for last in (nn.Tanh(), nn.Softmax(-1)))
    )
    with (
        warnings.catch_warnings(record=True) as heard,
        checkpoint_blocks(model, "*", policy=policy),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(4, 6)).square().sum().backward()
    assert len(heard) == (ran is not None)
    assert all(ran in str(each.message) for each in heard)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_checkpointed_model_is_a_plain_model_of_its_own(copied):
    model = decoder()
    handle = checkpoint_blocks(model, policy=[aten.addmm.default])
    twin = copied(model)
    plain, plain_peak = trained(decoder())
    found, peak = trained(twin)
    assert_close(found, plain, rtol=0, atol=0)
    assert peak == plain_peak
    nn.init.zeros_(twin.layers[0].norm1.weight)
    assert_close(trained(model)[0], plain, rtol=0, atol=0)
    assert trained(twin, checkpoint_blocks)[1] < plain_peak
    handle.remove()
    handle.remove()
    assert trained(model)[1] == plain_peak


def test_a_checkpointed_model_dies_with_its_last_reference():
    with no_gc():
        model = decoder()
        checkpoint_blocks(model)
        model.loss(TOKENS).backward()
        ref = weakref.ref(model.layers[0])
        del model
        assert ref() is None


def test_a_forward_that_others_replaced_before_or_after_goes_on_working():
    calls, model = [], decoder()

    def noted(module, what):  # as accelerate does
        inner = module.forward
        module.forward = lambda *args: calls.append(what) or inner(*args)

    noted(model.layers[0], "before")
    handle = checkpoint_blocks(model)
    noted(model.layers[1], "after")
    plain, plain_peak = trained(decoder())
    assert_close(trained(model)[0], plain, rtol=0, atol=0)
    assert Counter(calls) == {"before": 2, "after": 1}
    handle.remove()
    assert trained(model)[1] == plain_peak


def test_checkpointed_blocks_of_a_parallel_model_get_the_plain_gradients():
    def gradients(model):
        torch.manual_seed(5)
        model(TOKENS).square().mean().backward()
        return [p.grad for p in model.parameters()]

    runs, model = [], decoder()
    model.layers[0].norm1.register_forward_hook(lambda *_: runs.append(1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        with checkpoint_blocks(parallel, "module.layers.*"):
            found = gradients(parallel)
    finally:
        dist.destroy_process_group()
    assert_close(found, gradients(decoder()))
    assert len(runs) == 2  # the second time for backward


# ---- policies


def stepped(policy, **options):
    """Return the gradients of two small blocks with dropout."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*layers)
    if policy is not None:
        checkpoint_blocks(model, "*", policy=policy, **options)
    model(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("value", [True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
def test_policy_function_keeps_outputs(value):
    kept = []

    def policy(context, operator, *args, **kwargs):
        keep = operator is aten.addmm.default
        kept.append(keep and not context.is_recompute)
        return value if keep else CheckpointPolicy.PREFER_RECOMPUTE

    assert all(map(torch.equal, stepped(policy), stepped(None)))
    assert kept.count(True) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"must be a CheckpointPolicy or a bool, got None"),
        (1, r"must be a CheckpointPolicy or a bool, got 1"),
        ("MUST_CPU_OFFLOAD", r"must be to save or to recompute, got MUST_CPU_OFFLOAD"),
        ("PREFER_CPU_OFFLOAD", r"must be to save or to recompute, got PREFER_CPU_OFFLOAD"),
    ],
)
def test_invalid_return_value_of_a_policy_is_an_error(value, message):
    if isinstance(value, str):
        if value not in CheckpointPolicy.__members__:
            pytest.skip("this version of torch has no such policy")
        value = CheckpointPolicy[value]
    with pytest.raises((TypeError, ValueError), match=message):
        stepped(lambda context, operator, *args, **kwargs: value)


def test_policy_that_keeps_noise_of_rrelu_is_an_error():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Tanh()))
    checkpoint_blocks(model, "*", policy=[aten.rrelu_with_noise.default])
    with pytest.raises(ValueError, match="must be to recompute, got MUST_SAVE"):
        model(torch.randn(4, 6))


def test_kept_dropout_before_another_dropout_is_refused_by_the_comparison():
    """PyTorch draws other numbers in the recomputation after a random operator that is skipped."""

    class Block(nn.Module):
        def forward(self, x):
            kept = torch.native_dropout(x, 0.5, True)[0].sin()
            return torch.native_dropout(kept, 0.4, True)[0].exp()

    def policy(context, operator, *args, **kwargs):
        return operator is aten.native_dropout.default and args[1] == 0.5

    model, x = nn.ModuleList([Block()]), torch.linspace(-2, 2, 96).requires_grad_()
    with checkpoint_blocks(model, "0", policy=policy):
        output = model[0](x).sum()
        with pytest.raises(RuntimeError, match="recomputation of 0 is not equal"):
            output.backward()


# ---- in compiled code and in torch.func


def test_blocks_run_without_checkpoint_inside_transforms():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.runs, self.weight = 0, nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.runs += 1
            return (x * self.weight).sin().exp()

    model, x = nn.Sequential(Block()), torch.linspace(-1, 1, 6).view(2, 3)
    expected = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
    checkpoint_blocks(model, "0")
    runs = model[0].runs
    with pytest.warns(UserWarning, match="0 runs without a checkpoint inside a transform"):
        found = torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x)
    assert torch.equal(found, expected) and model[0].runs == runs + 1
