"""Adapters on quantized weights of bitsandbytes: estimates equal runs, bytes equal a formula."""

import copy
from functools import partial
from math import ceil

import pytest
import torch
from estimate_checks import assert_measured, feasible
from torch import nn

from course_lib.budget import Recipe, estimate, train_step
from course_lib.memory import MemoryMeter, cast, measure
from course_lib.symbolic import symbolic
from course_lib.symbolic.quantization import quantization_state

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Linear4bit = bitsandbytes.nn.Linear4bit
# base -> function of the numbers of features that makes a layer
BASES = {
    "int8": partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False),
    "nf4": partial(Linear4bit, quant_type="nf4", compress_statistics=False),
    "nf4, double": partial(Linear4bit, quant_type="nf4"),
    "fp4": partial(Linear4bit, quant_type="fp4", compress_statistics=False),
}
every_base = pytest.mark.parametrize("base", BASES)
two_bases = pytest.mark.parametrize("base", ["int8", "nf4, double"])
# name -> (sizes of a model, number of samples). The sizes of "uneven" are not multiples of 64, so
# the last block of a weight is not full.
SHAPES = {
    "uneven": ({"hidden_size": 72, "intermediate_size": 100}, 1),
    "bias": ({"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}, 2),
}
SHAPES["bias"][0]["mlp_bias"] = True
WORDS = 200


def llama(shape, base):
    """Return a Llama with quantized linear layers in its blocks, as transformers loads it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    config = transformers.LlamaConfig(num_hidden_layers=2, **sizes, **SHAPES[shape][0])
    model = transformers.LlamaForCausalLM(config)
    for name, old in list(model.model.named_modules()):
        if type(old) is nn.Linear:
            new = BASES[base](old.in_features, old.out_features, bias=old.bias is not None)
            model.model.set_submodule(name, new)
    setattr(model, "is_loaded_in_8bit" if base == "int8" else "is_loaded_in_4bit", True)
    return model.to("cpu")  # quantizes


def adapted(shape, base, prepare=False, **options):
    """Return the model with adapters; `prepare` turns on the checkpoints of transformers."""
    model = llama(shape, base)
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepare)
    options |= {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def batch(shape):
    words = torch.randint(WORDS, (SHAPES[shape][1], 16))
    return {"input_ids": words, "labels": words}


@pytest.mark.parametrize(
    ("shape", "base", "recipe", "options"),
    [
        *(("uneven", base, Recipe(), {}) for base in ("int8", "nf4, double", "fp4")),
        ("bias", "int8", Recipe(), {"use_dora": True}),
        ("bias", "nf4, double", Recipe(), {"prepare": True}),  # checkpoints of transformers
        ("bias", "int8", Recipe(checkpoint="layers"), {}),
        ("bias", "nf4, double", Recipe(precision="bf16", micro_batches=2), {}),
        ("bias", "nf4, double", Recipe(checkpoint="selective"), {}),
        ("bias", "int8", Recipe(offload_activations=True, min_bytes=256), {}),
    ],
)
def test_estimate_of_quantized_base_model_equals_measurement(shape, base, recipe, options):
    step = partial(adapted, shape, base, **options), partial(batch, shape), recipe
    assert_measured(*step, extrapolated=shape == "bias")


# ---- bytes of a layer, by a formula


def weight_bytes(base, outputs, inputs):
    """Return the bytes of one weight: packed numbers, scales and tables.

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
    return codes + blocks + 4 * ceil(blocks / 256) + 4 * 256 + 4  # scales, table of scales, mean


@every_base
@pytest.mark.parametrize(("outputs", "inputs"), [(33, 50), (512, 640)])
def test_quantized_layer_bytes_equal_formula(base, outputs, inputs):
    def parameter_bytes():
        layer = BASES[base](inputs, outputs, bias=False).to("cpu")
        with MemoryMeter(layer) as meter:
            pass
        output = layer(torch.ones(2, inputs, requires_grad=True))  # moves the layer's state
        with MemoryMeter(layer) as later:
            pass
        assert later.at_peak() == meter.at_peak() and output.requires_grad
        return meter.at_peak()["parameter"]

    assert parameter_bytes() == weight_bytes(base, outputs, inputs)
    with symbolic():
        assert parameter_bytes() == weight_bytes(base, outputs, inputs)


# ---- other layers and recipes


class Blocks(nn.Module):
    def __init__(self, layer, copied=False):
        super().__init__()
        self.first = nn.Linear(64, 64)
        blocks = (nn.Sequential(layer(64, 64), nn.Tanh()) for _ in range(3))
        self.layers = nn.ModuleList(blocks).to("cpu")
        self.layers = copy.deepcopy(self.layers) if copied else self.layers

    def loss_sum(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum(), len(x)


ROWS = partial(torch.ones, 6, 64)


class Subclass(Linear4bit):
    """A user's own subclass."""


SCHEDULE = Recipe(checkpoint="optimal", schedule_bytes=1, blocks="layers.*")
OWN, FP32, BF16 = (Recipe(precision=precision) for precision in (None, "fp32", "bf16"))


@pytest.mark.parametrize(
    ("make_model", "recipe"),
    [
        # 16-bit weights, quantized in each step
        *((partial(Blocks, bitsandbytes.nn.Linear8bitLt), each) for each in (FP32, BF16, SCHEDULE)),
        (partial(Blocks, partial(Linear4bit, quant_storage=torch.bfloat16)), FP32),
        (partial(Blocks, partial(Linear4bit, quant_storage=torch.float32)), BF16),
        (partial(Blocks, partial(Linear4bit, bias=False)), OWN),
        (partial(Blocks, partial(Linear4bit, bias=False, compute_dtype=torch.bfloat16)), FP32),
        (partial(Blocks, Subclass), FP32),
        (partial(Blocks, BASES["nf4, double"]), SCHEDULE),
        (partial(Blocks, BASES["int8"], copied=True), FP32),
        (partial(Blocks, BASES["nf4, double"], copied=True), FP32),
    ],
)
def test_estimate_of_other_bitsandbytes_layers_equals_measurement(make_model, recipe):
    assert_measured(make_model, ROWS, feasible(make_model, ROWS, recipe))


def test_casting_module_dtype_leaves_quantized_weights_unchanged():
    layer = Linear4bit(64, 64, quant_storage=torch.bfloat16).to("cpu")
    before = layer.weight.detach().clone()
    cast(layer, torch.float32)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.view(torch.uint8), before.view(torch.uint8))
    assert layer.bias.dtype == torch.float32


# ---- FLOPs


@two_bases
def test_quantized_layers_have_same_flop_count_as_fp32_layers(base):
    model = nn.Sequential(nn.Linear(64, 64), BASES[base](64, 96).to("cpu").requires_grad_(False))

    def step():
        model(torch.ones(5, 64)).sum().backward()

    with MemoryMeter() as meter:
        step()
    assert measure(step, repeats=1).flops == meter.flops == 2 * 5 * 64 * (2 * 64 + 2 * 96)


# ---- an existing model


@pytest.mark.parametrize(
    ("base", "used"), [("nf4, double", False), ("int8", False), ("int8", True)]
)
def test_estimate_of_existing_quantized_model_equals_measurement_without_changing_model(base, used):
    model, words = adapted("bias", base), batch("bias")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    recipe = Recipe(precision=None, attention=None)
    step = partial(train_step, model, optimizer, words, recipe)
    if used:  # moves the state of 8-bit layers
        step()
    tensors = [*model.parameters(), *quantization_state(model)]
    before = copy.deepcopy([tensor.detach() for tensor in tensors])
    guess = estimate(model, words, optimizer)
    assert all(map(torch.equal, before, tensors))
    step()
    with MemoryMeter(model, optimizer) as meter:
        step()
    assert guess.at_peak == meter.at_peak() and guess.flops == meter.flops
    assert guess.trace().live[0].tolist() == meter.trace().live[0].tolist()  # at the start


# ---- limits


def test_estimate_does_not_call_optional_kernels_package(monkeypatch):
    """bitsandbytes has a faster matrix product in evaluation with the package `kernels`."""
    kernels = bitsandbytes.backends.cpu.ops
    monkeypatch.setattr(kernels, "gemm_4bit_forward_kernel", pytest.fail, raising=False)
    assert_measured(partial(Blocks, BASES["nf4"]), ROWS, Recipe())


def test_symbolic_mode_leaves_no_symbolic_tensor_in_bitsandbytes_cache():
    codes = bitsandbytes.functional.name2qmap
    codes.pop("dynamic", None)
    with symbolic():
        BASES["nf4, double"](64, 64).to("cpu")
    assert "dynamic" not in codes
    layer = BASES["nf4, double"](64, 64).to("cpu")
    assert layer.weight.quant_state.state2.code is not None
    assert all(type(each) is torch.Tensor for each in quantization_state(layer))


def test_int8_estimate_uses_int8_operators_for_cuda_but_not_cpu(caplog):
    """The matrix products also round the input to 8 bits, by the source of bitsandbytes 0.50."""
    functions = bitsandbytes.autograd._functions
    cpu_function, operators = functions.MatMul8bitFp, {}
    for kind in ("cpu", "cuda"):
        guess = estimate(partial(Blocks, BASES["int8"]), ROWS, Recipe(), kind=kind)
        operators[kind] = {str(operator) for operator, _ in guess.trace().operators}
    rounding = {"bitsandbytes.int8_vectorwise_quant.default", "bitsandbytes.int8_scaled_mm.default"}
    assert rounding <= operators["cuda"] and not rounding & operators["cpu"]
    assert (
        functions.MatMul8bitFp is cpu_function is not functions.MatMul8bitLt and not caplog.records
    )


def test_estimate_rejects_quantized_weights_with_several_ranks():
    recipe = Recipe(ranks=3, shard="ddp")
    with pytest.raises(ValueError, match=r"^ranks must be 1 for a model with quantized .* got 3."):
        estimate(partial(Blocks, BASES["nf4"]), ROWS, recipe)


def test_estimate_for_cuda_rejects_int8_outlier_threshold():
    layer = partial(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False, threshold=6.0)
    step = partial(Blocks, layer), ROWS, Recipe()
    assert_measured(*step)  # a CPU ignores the threshold
    with pytest.raises(ValueError, match=r"the values .*budget\.run\(\)\. Pass threshold=0\.0"):
        estimate(*step, kind="cuda")
