"""Small Hugging Face models with random weights, and batches for them."""

from functools import partial

import numpy as np
import pytest
import torch

WORDS, IGNORED = 99, -100
SIZES = {"hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
NUMBERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**SIZES, **NUMBERS, "vocab_size": WORDS}
SHARED = {**TEXT, "num_key_value_heads": 2}  # keys and values of two heads for queries of four
PAIR = {"vocab_size": WORDS, "d_model": 32}
for part in ("encoder", "decoder"):
    PAIR |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
SPECIAL = {**NUMBERS, "decoder_start_token_id": 1}


def text(kind="ones", samples=4, length=16, answer=None):
    """Return a batch with no mask, a mask of ones, or a mask that shortens all but one sample.

    Args:
        kind: "none", "ones" or "padded".
    """
    tokens = torch.randint(3, WORDS, (samples, length))
    labels = torch.randint(3, WORDS, (samples, answer)) if answer else tokens.clone()
    if kind == "none":
        return {"input_ids": tokens, "labels": labels}
    lengths = length - torch.arange(samples) * (kind == "padded")
    mask = (torch.arange(length) < lengths[:, None]).long()
    if not answer:
        labels = labels.masked_fill(mask == 0, IGNORED)
    return {"input_ids": tokens.where(mask == 1, 0), "attention_mask": mask, "labels": labels}


def images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}


def waves():
    np.random.seed(0)  # the model masks random spans of time
    batch = {"input_values": torch.randn(4, 2000), "labels": torch.randint(0, 2, (4,))}
    return {**batch, "attention_mask": torch.ones(4, 2000, dtype=torch.long)}


def maker(name, **options):
    """Return a function that makes a model of a class, `ConfigOf:Class`, from a configuration.

    Without transformers, the function skips the test that calls it.
    """
    config, model = name.split(":")

    def make():
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, model)(getattr(transformers, config + "Config")(**options))

    return make


LLAMA = maker("Llama:LlamaForCausalLM", **SHARED)
WAVES = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16}
WAVES |= {"num_conv_pos_embedding_groups": 4, "layerdrop": 0.0}  # else a random depth
POSITIONS = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 24, "experts_implementation": "batched_mm"}
MAMBA = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
ARCHITECTURES = {
    "decoder, grouped queries": (LLAMA, text),
    "decoder, tied head": (
        maker("GPT2:GPT2LMHeadModel", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4),
        text,
    ),
    "decoder, one key, tied head": (
        maker("Gemma:GemmaForCausalLM", **TEXT, num_key_value_heads=1, head_dim=8),
        text,
    ),
    "decoder, learned positions": (maker("OPT:OPTForCausalLM", **TEXT, **POSITIONS), text),
    "experts, grouped": (maker("Mixtral:MixtralForCausalLM", **SHARED, num_local_experts=4), text),
    "experts, batched, and a shared one": (
        maker("Qwen2Moe:Qwen2MoeForCausalLM", **SHARED, **EXPERTS),
        text,
    ),
    "encoder": (maker("Bert:BertForMaskedLM", **TEXT), text),
    "encoder and decoder, relative positions": (
        maker("T5:T5ForConditionalGeneration", **T5),
        partial(text, answer=12),
    ),
    "encoder and decoder": (
        maker("Bart:BartForConditionalGeneration", **PAIR, **SPECIAL),
        partial(text, answer=12),
    ),
    "vision": (
        maker("ViT:ViTForImageClassification", **SIZES, image_size=32, patch_size=8),
        images,
    ),
    "speech": (maker("Wav2Vec2:Wav2Vec2ForSequenceClassification", **SIZES, **WAVES), waves),
    "state space": (maker("Mamba:MambaForCausalLM", **MAMBA), text),
}


def padded(place, samples=4, length=32):
    """Return a batch whose sample at `place` is shorter than the others."""
    batch = text("ones", samples, length)
    batch["attention_mask"][place, length // 2 :] = 0
    batch["labels"][place, length // 2 :] = IGNORED
    return batch
