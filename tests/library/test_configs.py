"""Models from a Hugging Face config.json, compared with published sizes and transformers."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from course_lib.budget import Recipe, estimate
from course_lib.configs import Experts, model_from, read_config, shape_of
from course_lib.memory import symbolic
from course_lib.models import random_tokens

COLUMNS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def config_of(*values, **more):
    return dict(zip(COLUMNS, values, strict=True)) | more


LLAMA_OPTIONS = {"hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False}
LLAMA_3_8B = config_of("llama", 128256, 4096, 14336, 32, 32, 8, 8192, **LLAMA_OPTIONS)
MISTRAL_7B = config_of("mistral", 32000, 4096, 14336, 32, 32, 8, 32768, **LLAMA_OPTIONS)
MIXTRAL = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_25_HALF_B = config_of("qwen2", 151936, 896, 4864, 24, 14, 2, 32768, tie_word_embeddings=True)
QWEN_3_8B = config_of("qwen3", 151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128, **LLAMA_OPTIONS)
GPT_2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
GPT_2 |= {"n_positions": 1024}

PUBLISHED = {
    "Llama 3 8B": (LLAMA_3_8B, 8_030_261_248),
    "Mistral 7B": (MISTRAL_7B, 7_241_732_096),
    "Mixtral 8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen2.5 0.5B": (QWEN_25_HALF_B, 494_032_768),
    "Qwen3 8B": (QWEN_3_8B, 8_190_735_360),
    "GPT-2": (GPT_2, 124_439_808),
}
SMALL = config_of(None, 97, 64, 112, 2, 4, 2, 64, n_embd=64, n_layer=2, n_head=4, n_positions=64)


@pytest.mark.parametrize(("config", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_model_from_config_has_published_parameter_count(config, count):
    with symbolic():
        model = model_from(config, sequence=1024)
        assert sum(p.numel() for p in model.parameters()) == count
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def small(config):
    sizes = {name: SMALL[name] for name in SMALL if name in config and name != "model_type"}
    return {**config, **sizes, "head_dim": 16}


# Name in this library -> name in transformers, replaced in this order.
NAMES = {
    "norm.": "model.norm.",
    "tokens.": "model.embed_tokens.",
    "head.": "lm_head.",
    "layers.": "model.layers.",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention.norm_q": "self_attn.q_norm",
    "attention.norm_k": "self_attn.k_norm",
    "attention.q.": "self_attn.q_proj.",
    "attention.k.": "self_attn.k_proj.",
    "attention.v.": "self_attn.v_proj.",
    "attention.out.": "self_attn.o_proj.",
    "feedforward.gate.": "mlp.gate_proj.",
    "feedforward.up.": "mlp.up_proj.",
    "feedforward.down.": "mlp.down_proj.",
}


def transformers_name(name):
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


def transformers_model(config, **options):
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(**config, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(settings, **options)


@pytest.mark.parametrize(
    "config", [LLAMA_3_8B, MISTRAL_7B, QWEN_25_HALF_B, QWEN_3_8B], ids=lambda c: c["model_type"]
)
def test_logits_equal_transformers_model_with_same_weights(config):
    config = {**small(config), "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
    other, model = transformers_model(config).eval(), model_from(config, sequence=32)
    weights = other.state_dict()
    model.load_state_dict({name: weights[transformers_name(name)] for name in model.state_dict()})
    tokens = random_tokens(2, 31, 97)
    for fused in (False, True):
        for layer in model.layers:
            layer.attention.fused = fused
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("config", "precision"), [(LLAMA_3_8B, "bf16"), (QWEN_3_8B, "fp32")])
def test_peak_of_training_step_equals_transformers_model(config, precision):
    wide = {"vocab_size": 2000, "hidden_size": 128, "head_dim": 32, "intermediate_size": 352}
    config = small(config) | wide

    def labelled():
        tokens = torch.ones(2, 64, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    plain, other = (
        Recipe(precision),
        partial(transformers_model, config, attn_implementation="eager"),
    )
    expected = estimate(other, labelled, replace(plain, attention=None))
    found = estimate(
        partial(model_from, config, sequence=64), partial(random_tokens, 2, 64, 2000), plain
    )
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)


def test_experts_process_equal_token_counts_and_outputs_are_weighted():
    torch.manual_seed(0)
    experts = Experts(8, 16, experts=4, used=4)  # each token uses all experts
    x = torch.randn(2, 3, 8)
    shares = experts.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for i in range(4):
        gate, up = (x @ experts.gate_up[i].T).chunk(2, dim=-1)
        returned = (torch.nn.functional.silu(gate) * up) @ experts.down[i].T
        expected += shares[..., i, None] * returned
    torch.testing.assert_close(experts(x), expected)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as with_all:
        experts(x)
    experts.used = 1
    with torch.utils.flop_counter.FlopCounterMode(display=False) as with_one:
        experts(x)
    router, rest = 2 * 6 * 8 * 4, 2 * 6 * 3 * 8 * 16  # FLOPs of one expert for all tokens
    assert with_all.get_total_flops() == router + 4 * rest
    # Each expert has 2 of the 6 tokens, because 6 / 4 is rounded up.
    assert with_one.get_total_flops() == router + 4 * rest * 2 // 6


def test_head_dim_comes_from_config_or_qwen3_default():
    config = {**QWEN_3_8B, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": None}
    assert shape_of(config, 8)[1]["head_dim"] == 128
    # The number of heads does not divide this width.
    model = model_from({**small(LLAMA_3_8B), "hidden_size": 66, "head_dim": 16}, sequence=8)
    assert model.layers[0].attention.q.weight.shape == (64, 66)


def test_config_options_enable_tied_head_and_biases():
    options = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    model = model_from({**small(LLAMA_3_8B), **options}, sequence=8)
    assert model.head.weight is model.tokens.weight
    biases = {name for name, _ in model.layers[0].named_parameters() if name.endswith("bias")}
    expected = {f"attention.{part}.bias" for part in ("q", "k", "v", "out")}
    assert biases == expected | {f"feedforward.{part}.bias" for part in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model_type": "t5"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": None}, "config"),
        *(({"num_hidden_layers": wrong}, "num_hidden_layers") for wrong in ("32", True, 0)),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"max_position_embeddings": 16}, "sequence"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({**SMALL, "model_type": "gpt2", "n_inner": 100}, "n_inner"),
        ({**SMALL, "model_type": "gpt2", "n_head": 3}, "n_embd"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size"),
    ],
)
def test_invalid_config_is_rejected_naming_its_key(changes, name):
    message = rf"^{name} must [^\n]+, got [^\n]+$"
    with pytest.raises((TypeError, ValueError), match=message), symbolic():
        model_from({**small(LLAMA_3_8B), **changes}, sequence=32)


def test_malformed_config_file_is_rejected_with_line_and_column(tmp_path):
    path = tmp_path / "config.json"
    for encoding in ("utf-8", "utf-8-sig"):  # with a byte order mark
        path.write_text(json.dumps(GPT_2), encoding=encoding)
        assert read_config(path) == GPT_2
    for content, message in (
        (b"[1, 2]", "JSON object"),
        (b"\xff{}", "text file"),
        (b'{\n  "model_type": "llama",\n  "hidden_size" 64\n}', r"line 3, column 17"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^config must [^\n]*{message}"):
            read_config(path)
    for wrong in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"^config must [^\n]*, got [^\n]+$"):
            read_config(wrong)
