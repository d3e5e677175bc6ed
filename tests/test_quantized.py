"""Adapters on quantized weights of bitsandbytes: an estimate equals its run, and the bytes of the
weights equal a formula."""

import copy
import json
from functools import partial
from math import ceil

import pytest
import torch
from measured import assert_measured, feasible
from torch import nn
from torch.utils.checkpoint import checkpoint

from course_lib.budget import Recipe, estimate, run, train_step
from course_lib.budget import __main__ as command
from course_lib.memory import MemoryMeter, cast, measure
from course_lib.symbolic import symbolic
from course_lib.symbolic.quantization import quantization_state

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FOUR = bitsandbytes.nn.Linear4bit
# A base -> the layer that takes its numbers of features.
BASES = {
    "int8": partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False),
    "nf4": partial(FOUR, quant_type="nf4", compress_statistics=False),
    "nf4, double": partial(FOUR, quant_type="nf4"),
    "fp4": partial(FOUR, quant_type="fp4", compress_statistics=False),
}
BASE = pytest.mark.parametrize("base", BASES)
TWO = pytest.mark.parametrize("base", ["int8", "nf4, double"])
# Sizes of a model, and the number of its samples. The sizes of "uneven" are no multiples of 64, so
# that the last block of a weight is not full.
SHAPES = {
    "even": ({"hidden_size": 128, "intermediate_size": 320}, 3),
    "uneven": ({"hidden_size": 72, "intermediate_size": 100}, 1),
    "bias": ({"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}, 2),
}
SHAPES["bias"][0]["mlp_bias"] = True
WORDS = 200


def llama(shape, base, layers=2):
    """A Llama whose linear layers in the blocks are quantized, as bitsandbytes loads it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    config = transformers.LlamaConfig(num_hidden_layers=layers, **sizes, **SHAPES[shape][0])
    model = transformers.LlamaForCausalLM(config)
    for name, old in list(model.model.named_modules()):
        if type(old) is nn.Linear:
            new = BASES[base](old.in_features, old.out_features, bias=old.bias is not None)
            model.model.set_submodule(name, new)
    setattr(model, "is_loaded_in_8bit" if base == "int8" else "is_loaded_in_4bit", True)
    return model.to("cpu")  # quantizes


def adapted(shape, base, rank=4, prepare=False, layers=2, **options):
    """The model with adapters. `prepare` turns on its own checkpoints, whose blocks need an input
    that requires a gradient."""
    model = llama(shape, base, layers)
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepare)
    options |= {"r": rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def batch(shape):
    words = torch.randint(WORDS, (SHAPES[shape][1], 16))
    return {"input_ids": words, "labels": words}


# Each rank with each base, and with each shape.
@pytest.mark.parametrize(
    ("base", "shape", "rank"),
    [
        (base, shape, (1, 4, 16)[(i + k) % 3])
        for i, base in enumerate(BASES)
        for k, shape in enumerate(SHAPES)
    ],
)
def test_adapters_on_a_quantized_base_take_what_is_estimated(base, shape, rank):
    make_model, make_batch = partial(adapted, shape, base, rank), partial(batch, shape)
    guess = assert_measured(make_model, make_batch, Recipe())
    assert guess.at_peak["parameter"] == base_bytes(base, shape) + adapter_bytes(shape, rank)


@TWO
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (Recipe(), {"use_dora": True}),
        (Recipe(), {"prepare": True}),
        (Recipe(checkpoint="layers"), {}),
        (Recipe(precision="bf16", micro_batches=2), {}),
        (Recipe(checkpoint="selective"), {}),
        (Recipe(offload_activations=True, min_bytes=256), {}),
    ],
    ids=["dora", "own checkpoints", "checkpoints", "bf16", "selective", "offload"],
)
def test_recipes_for_a_quantized_base_take_what_is_estimated(base, recipe, options):
    assert_measured(partial(adapted, "bias", base, **options), partial(batch, "bias"), recipe)


# ---- the bytes of the base, by a formula


def weight_bytes(base, outputs, inputs):
    """Packed numbers, largest magnitudes and tables of one weight, by the formulas of the papers.

    Source: Dettmers et al. 2023, arXiv:2305.14314, section 3 (blocks of 64 and of 256); Dettmers et
    al. 2022, arXiv:2208.07339, section 2 (one magnitude per row).
    """
    numbers = outputs * inputs
    if base == "int8":
        return numbers + 4 * outputs
    blocks = ceil(numbers / 64)
    codes = ceil(numbers / 2) + 4 * 16
    if base != "nf4, double":
        return codes + 4 * blocks
    return codes + blocks + 4 * ceil(blocks / 256) + 4 * 256 + 4  # scales, their table, their mean


def linears(shape):
    """(outputs, inputs) of each linear layer of a block."""
    sizes, _ = SHAPES[shape]
    wide, hidden = sizes["intermediate_size"], sizes["hidden_size"]
    return [*[(hidden, hidden), (hidden // 2, hidden)] * 2, *[(wide, hidden)] * 2, (hidden, wide)]


def base_bytes(base, shape, layers=2):
    hidden = SHAPES[shape][0]["hidden_size"]
    biases = "attention_bias" in SHAPES[shape][0]
    block = sum(weight_bytes(base, *each) + 4 * biases * each[0] for each in linears(shape))
    norms = (2 * layers + 1) * hidden
    return layers * block + 4 * (norms + 2 * WORDS * hidden)  # embeddings and head in fp32


def adapter_bytes(shape, rank, layers=2):
    return 4 * layers * rank * sum(sum(each) for each in linears(shape))


@BASE
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (72, 100), (33, 50), (512, 640)])
def test_a_quantized_layer_has_the_bytes_of_the_formula(base, outputs, inputs):
    def counted():
        layer = BASES[base](inputs, outputs, bias=False).to("cpu")
        with MemoryMeter(layer) as meter:
            pass
        used = layer(torch.ones(2, inputs, requires_grad=True))  # keeps its state elsewhere
        with MemoryMeter(layer) as later:
            pass
        assert later.at_peak() == meter.at_peak() and used.requires_grad
        return meter.at_peak()["parameter"]

    assert counted() == weight_bytes(base, outputs, inputs)
    with symbolic():
        assert counted() == weight_bytes(base, outputs, inputs)


# ---- gradients, schedules and copies


@TWO
def test_gradients_reach_all_adapters_through_checkpoints(base):
    def gradients(prepare, recipe):
        torch.manual_seed(0)
        model = adapted("bias", base, prepare=prepare, init_lora_weights=False)
        words = torch.arange(32).view(2, 16)
        found = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_hook(partial(found.__setitem__, name))
        run(lambda: model, lambda: {"input_ids": words, "labels": words}, recipe)
        assert len(found) == 2 * 7 * 2 and all(g.abs().sum() > 0 for g in found.values())
        return found

    plain = gradients(False, Recipe())
    for prepare, recipe in ((True, Recipe()), (False, Recipe(checkpoint="layers"))):
        for name, gradient in gradients(prepare, recipe).items():
            torch.testing.assert_close(gradient, plain[name], rtol=0, atol=0)


class Blocks(nn.Module):
    """A chain of blocks with a quantized layer each."""

    def __init__(self, layer, width=64, copied=False):
        super().__init__()
        self.first = nn.Linear(width, width)
        blocks = (nn.Sequential(layer(width, width), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(blocks).to("cpu")
        self.layers = copy.deepcopy(self.layers) if copied else self.layers

    def loss_sum(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum(), len(x)


ROWS = partial(torch.ones, 6, 64)


@pytest.mark.parametrize("layer", [*BASES.values(), bitsandbytes.nn.Linear8bitLt], ids=str)
def test_a_schedule_is_planned_on_copies_of_a_quantized_model(layer):
    make_model = partial(Blocks, layer)
    recipe = Recipe(checkpoint="optimal", schedule_bytes=1, blocks="layers.*")
    assert_measured(make_model, ROWS, feasible(make_model, ROWS, recipe))


@TWO
def test_a_copied_layer_takes_what_is_estimated(base):
    assert_measured(partial(Blocks, BASES[base], copied=True), ROWS, Recipe())


class Named(FOUR):
    """A user's own subclass."""


@pytest.mark.parametrize(
    ("layer", "precision"),
    [
        (bitsandbytes.nn.Linear8bitLt, "fp32"),  # 16-bit weights, quantized in each step
        (bitsandbytes.nn.Linear8bitLt, "bf16"),
        (partial(FOUR, quant_type="nf4", quant_storage=torch.bfloat16), "fp32"),
        (partial(FOUR, quant_type="nf4", quant_storage=torch.float32), "bf16"),
        (partial(FOUR, bias=False), None),
        (partial(FOUR, bias=False, compute_dtype=torch.bfloat16), "fp32"),
        (bitsandbytes.nn.LinearNF4, "fp32"),
        (Named, "fp32"),
    ],
)
def test_other_layers_of_bitsandbytes_take_what_is_estimated(layer, precision):
    assert_measured(partial(Blocks, layer), ROWS, Recipe(precision=precision))


@pytest.mark.parametrize("table", ["Embedding4bit", "Embedding8bit"])
def test_a_quantized_embedding_takes_what_is_estimated(table):
    """The one in 4 bits copies its state by `copy.deepcopy` in each forward pass."""

    class Words(Blocks):
        def __init__(self):
            super().__init__(nn.Linear)
            self.words = getattr(bitsandbytes.nn, table)(90, 64).to("cpu").requires_grad_(False)

        def loss_sum(self, words):
            return super().loss_sum(self.words(words))

    assert_measured(Words, partial(torch.arange, 40), Recipe())


def test_a_cast_leaves_quantized_weights_unchanged():
    layer = FOUR(64, 64, quant_storage=torch.bfloat16).to("cpu")
    before = layer.weight.detach().clone()
    cast(layer, torch.float32)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.view(torch.uint8), before.view(torch.uint8))
    assert layer.bias.dtype == torch.float32


# ---- what a checkpoint frees


def test_a_checkpoint_frees_the_inputs_of_4_bit_layers_alone_unless_it_is_reentrant():
    """bitsandbytes keeps the input of an 8-bit product in an attribute of its node, which the
    hooks of a checkpoint do not see. A reentrant checkpoint has no node in its first run."""

    def kept(base, reentrant):
        layer = BASES[base](64, 64).to("cpu")
        x = torch.ones(1000, 64, requires_grad=True)
        with MemoryMeter() as meter:
            y = checkpoint(lambda x: layer(x.tanh()).tanh(), x, use_reentrant=reentrant)
        return meter.live_bytes - y.nbytes

    inputs, generator = 4 * 1000 * 64, 5056
    assert kept("int8", reentrant=False) == inputs + generator
    for base, reentrant in (("int8", True), ("nf4", False), ("nf4", True)):
        assert kept(base, reentrant) == generator


# ---- FLOPs


@BASE
def test_products_with_quantized_weights_are_counted(base):
    """As those of the same model in fp32 are."""

    def step_of(layer):
        model = nn.Sequential(nn.Linear(64, 64), layer(64, 96).to("cpu").requires_grad_(False))
        return lambda: model(torch.ones(5, 64)).sum().backward()

    flops = {}
    for layer in (BASES[base], nn.Linear):
        with MemoryMeter() as meter:
            step_of(layer)()
        assert measure(step_of(layer), repeats=1).flops == meter.flops
        flops[layer] = meter.flops
    assert flops[BASES[base]] == flops[nn.Linear] == 2 * 5 * 64 * (2 * 64 + 2 * 96)


# ---- a model that exists already


@pytest.mark.parametrize("used", [False, True])
@TWO
def test_a_quantized_model_that_exists_is_estimated_and_stays_as_it_is(base, used):
    model, words = adapted("bias", base), batch("bias")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    recipe = Recipe(precision=None, attention=None)
    step = partial(train_step, model, optimizer, words, recipe)
    if used:  # 8-bit layers then keep their state elsewhere
        step()
    held = [*model.parameters(), *quantization_state(model)]
    before = copy.deepcopy([tensor.detach() for tensor in held])
    guess = estimate(model, words, optimizer)
    assert all(map(torch.equal, before, held))
    assert guess.at_peak["parameter"] == base_bytes(base, "bias") + adapter_bytes("bias", 4)
    step()
    with MemoryMeter(model, optimizer) as meter:
        step()
    assert guess.at_peak == meter.at_peak() and guess.flops == meter.flops
    assert guess.trace().live[0].tolist() == meter.trace().live[0].tolist()  # at the start


# ---- the command


def make_model():
    return Blocks(BASES["nf4, double"])


make_model.make_batch = ROWS


def test_the_command_finds_recipes_for_a_quantized_model(capsys):
    options = ["--budget", "1GB", "--device", "laptop", "--precision", "fp32", "--quick"]
    assert command.main(["--model", f"{__name__}:make_model", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["peak_bytes"] == estimate(make_model, ROWS, Recipe()).peak_bytes


# ---- what an estimate must not depend on, and what it refuses


def test_an_estimate_runs_no_kernel_of_another_package(monkeypatch):
    """bitsandbytes has a faster product for evaluation if the package `kernels` is installed."""
    kernels = bitsandbytes.backends.cpu.ops
    monkeypatch.setattr(kernels, "gemm_4bit_forward_kernel", pytest.fail, raising=False)
    assert_measured(partial(adapted, "even", "nf4"), partial(batch, "even"), Recipe())


def test_nothing_symbolic_is_left_in_bitsandbytes():
    codes = bitsandbytes.functional.name2qmap
    codes.pop("dynamic", None)
    with symbolic():
        BASES["nf4, double"](64, 64).to("cpu")
    assert "dynamic" not in codes
    layer = BASES["nf4, double"](64, 64).to("cpu")
    assert layer.weight.quant_state.state2.code is not None
    assert all(type(each) is torch.Tensor for each in quantization_state(layer))


def test_an_estimate_for_cuda_runs_the_products_of_8_bit_weights_for_cuda(caplog):
    """They round the input to 8 bits as well, by the source of bitsandbytes 0.50."""
    functions = bitsandbytes.autograd._functions
    on_cpu, steps = functions.MatMul8bitFp, {}
    for kind in ("cpu", "cuda"):
        guess = estimate(partial(Blocks, BASES["int8"]), ROWS, Recipe(), kind=kind)
        steps[kind] = {str(operator) for operator, _ in guess.trace().operators}
    rounds = {"bitsandbytes.int8_vectorwise_quant.default", "bitsandbytes.int8_scaled_mm.default"}
    assert rounds <= steps["cuda"] and not rounds & steps["cpu"]
    assert functions.MatMul8bitFp is on_cpu is not functions.MatMul8bitLt and not caplog.records


def test_several_ranks_refuse_quantized_weights():
    given = partial(adapted, "even", "nf4"), partial(batch, "even"), Recipe(ranks=3, shard="ddp")
    with pytest.raises(ValueError, match=r"^ranks must be 1 for a model with quantized .* got 3;"):
        estimate(*given)


def test_outliers_are_refused_because_they_are_values():
    layer = partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False, threshold=6.0)
    given = partial(Blocks, layer), ROWS, Recipe()
    assert_measured(*given)  # a CPU trains without them
    with pytest.raises(ValueError, match=r"reads values .*budget\.run\(\)\. Pass threshold=0\.0"):
        estimate(*given, kind="cuda")
