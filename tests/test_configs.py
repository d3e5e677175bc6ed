"""course_lib.configs: a Hugging Face config.json becomes a model with the published tensors."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from course_lib.budget import Recipe, estimate
from course_lib.configs import Experts, model_from, read_config, shape_of
from course_lib.memory import symbolic
from course_lib.models import random_tokens

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MISTRAL_7B = {
    **LLAMA_3_8B,
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
MIXTRAL = {**MISTRAL_7B, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_25_HALF_B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN_3_8B = {
    **LLAMA_3_8B,
    "model_type": "qwen3",
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40960,
}
GPT_2 = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}

PUBLISHED = {
    "Llama 3 8B": (LLAMA_3_8B, 8_030_261_248),
    "Mistral 7B": (MISTRAL_7B, 7_241_732_096),
    "Mixtral 8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen2.5 0.5B": (QWEN_25_HALF_B, 494_032_768),
    "Qwen3 8B": (QWEN_3_8B, 8_190_735_360),
    "GPT-2": (GPT_2, 124_439_808),
}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "n_positions": 64,
}


@pytest.mark.parametrize(("config", "count"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_model_has_as_many_parameters_as_are_published(config, count):
    with symbolic():
        model = model_from(config, sequence=1024)
        assert sum(p.numel() for p in model.parameters()) == count
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def small(config):
    sizes = {name: value for name, value in SMALL.items() if name in config}
    return {**config, **sizes, "head_dim": SMALL["head_dim"]}


NAMES = {  # ours: theirs, in this order
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


def theirs(name):
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


def of_transformers(config, **options):
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(**config, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(settings, **options)


@pytest.mark.parametrize(
    "config", [LLAMA_3_8B, MISTRAL_7B, QWEN_25_HALF_B, QWEN_3_8B], ids=lambda c: c["model_type"]
)
def test_with_the_same_weights_the_logits_are_those_of_transformers(config):
    config = {**small(config), "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
    other, model = of_transformers(config).eval(), model_from(config, sequence=32)
    weights = other.state_dict()
    model.load_state_dict({name: weights[theirs(name)] for name in model.state_dict()})
    tokens = random_tokens(2, 31, 97)
    for fused in (False, True):
        for layer in model.layers:
            layer.attention.fused = fused
        torch.testing.assert_close(model(tokens), other(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [MIXTRAL, GPT_2], ids=lambda config: config["model_type"])
def test_the_tensors_are_those_of_transformers(config):
    config = small(config)
    with symbolic():
        shapes = [
            sorted(sorted(p.shape) for p in model.parameters())
            for model in (of_transformers(config), model_from(config, sequence=32))
        ]
    # sorted within, too: GPT-2 there has its matrices transposed
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("config", "precision"), [(LLAMA_3_8B, "bf16"), (QWEN_3_8B, "fp32")])
def test_a_step_takes_what_that_of_transformers_takes(config, precision):
    wide = {"vocab_size": 2000, "hidden_size": 128, "head_dim": 32, "intermediate_size": 352}
    config = small(config) | wide

    def labelled():
        tokens = torch.ones(2, 64, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    plain, other = Recipe(precision), partial(of_transformers, config, attn_implementation="eager")
    expected = estimate(other, labelled, replace(plain, attention=None))
    found = estimate(
        partial(model_from, config, sequence=64), partial(random_tokens, 2, 64, 2000), plain
    )
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.01)


def test_experts_take_equal_shares_and_weigh_what_they_return():
    torch.manual_seed(0)
    experts = Experts(8, 16, experts=4, used=4)  # as many as there are: all of them see every token
    x = torch.randn(2, 3, 8)
    shares = experts.router(x).softmax(-1)
    expected = torch.zeros_like(x)
    for i in range(4):
        gate, up = (x @ experts.gate_up[i].T).chunk(2, dim=-1)
        returned = (torch.nn.functional.silu(gate) * up) @ experts.down[i].T
        expected += shares[..., i, None] * returned
    torch.testing.assert_close(experts(x), expected)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as all_of_them:
        experts(x)
    experts.used = 1
    with torch.utils.flop_counter.FlopCounterMode(display=False) as one:
        experts(x)
    router, rest = 2 * 6 * 8 * 4, 2 * 6 * 3 * 8 * 16  # of one expert with all tokens
    assert all_of_them.get_total_flops() == router + 4 * rest
    # 2 of the 6 tokens each, as 6 / 4 is rounded up
    assert one.get_total_flops() == router + 4 * rest * 2 // 6


def test_heads_have_128_features_in_qwen3_and_as_many_as_a_config_says():
    config = {**QWEN_3_8B, "hidden_size": 1024, "num_attention_heads": 16, "head_dim": None}
    assert shape_of(config, 8)[1]["head_dim"] == 128
    # a width that heads do not divide
    model = model_from({**small(LLAMA_3_8B), "hidden_size": 66, "head_dim": 16}, sequence=8)
    assert model.layers[0].attention.q.weight.shape == (64, 66)


def test_a_tied_head_and_biases_are_as_the_config_says():
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
        ({"model_type": None}, "model_type"),
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
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_the_name_of_what_is_wrong(changes, name):
    refused = pytest.raises((TypeError, ValueError), match=rf"^{name} must [^\n]+, got [^\n]+$")
    with refused, symbolic():
        model_from({**small(LLAMA_3_8B), **changes}, sequence=32)


def test_a_file_that_holds_no_config_is_refused_with_line_and_column(tmp_path):
    path = tmp_path / "config.json"
    for encoding in ("utf-8", "utf-8-sig"):  # as some editors begin a file
        path.write_text(json.dumps(GPT_2), encoding=encoding)
        assert read_config(path) == GPT_2
    for content, told in (
        (b"[1, 2]", "JSON object"),
        (b"\xff{}", "text file"),
        (b'{\n  "model_type": "llama",\n  "hidden_size" 64\n}', r"line 3, column 17"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^config must [^\n]*{told}"):
            read_config(path)
    for wrong in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"^config must [^\n]*, got [^\n]+$"):
            read_config(wrong)
