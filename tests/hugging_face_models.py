"""Small Hugging Face models with random weights, and batches for them."""

from functools import partial

import numpy as np
import pytest
import torch

WORDS, IGNORED = 99, -100
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**SIZES, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED = {**TEXT, "num_key_value_heads": 2}  # keys and values of two heads for queries of four
PAIR = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def mask_of(kind, samples, length):
    """None; 1 for all tokens; or 0 for the last tokens of every sample but the first, as padding
    has it."""
    if kind == "none":
        return None
    lengths = torch.tensor([length - (i if kind == "padded" else 0) for i in range(samples)])
    return (torch.arange(length) < lengths[:, None]).long()


def text(kind="ones", samples=4, length=16, answer=None):
    tokens, mask = torch.randint(3, WORDS, (samples, length)), mask_of(kind, samples, length)
    labels = torch.randint(3, WORDS, (samples, answer)) if answer else tokens.clone()
    if mask is None:
        return {"input_ids": tokens, "labels": labels}
    if not answer:
        labels = labels.masked_fill(mask == 0, IGNORED)
    return {"input_ids": tokens.where(mask == 1, 0), "attention_mask": mask, "labels": labels}


def images():
    return {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))}


def waves():
    np.random.seed(0)  # spans of time are masked at random: for real the same ones
    mask = torch.ones(4, 2000, dtype=torch.long)
    return {
        "input_values": torch.randn(4, 2000),
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (4,)),
    }


def made(name, **options):
    """Return a function that makes a model of a class, `ConfigOf:Class`, from a configuration.

    Without transformers, the function skips the test that calls it.
    """
    config, of = name.split(":")

    def make():
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, of)(getattr(transformers, config + "Config")(**options))

    return make


LLAMA = made("Llama:LlamaForCausalLM", **SHARED)
WAVES = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,  # else a random depth
}
ARCHITECTURES = {
    "decoder, grouped queries": (LLAMA, text),
    "decoder, tied head": (
        made("GPT2:GPT2LMHeadModel", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4),
        text,
    ),
    "decoder, one key, tied head": (
        made("Gemma:GemmaForCausalLM", **TEXT, num_key_value_heads=1, head_dim=8),
        text,
    ),
    "decoder, learned positions": (
        made(
            "OPT:OPTForCausalLM",
            **TEXT,
            ffn_dim=48,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        ),
        text,
    ),
    "experts, grouped": (made("Mixtral:MixtralForCausalLM", **SHARED, num_local_experts=4), text),
    "experts, batched, and a shared one": (
        made(
            "Qwen2Moe:Qwen2MoeForCausalLM",
            **{**SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            shared_expert_intermediate_size=24,
            experts_implementation="batched_mm",
        ),
        text,
    ),
    "encoder": (made("Bert:BertForMaskedLM", **TEXT), text),
    "encoder and decoder, relative positions": (
        made("T5:T5ForConditionalGeneration", **T5),
        partial(text, answer=12),
    ),
    "encoder and decoder": (
        made("Bart:BartForConditionalGeneration", **PAIR, **SPECIAL),
        partial(text, answer=12),
    ),
    "vision": (made("ViT:ViTForImageClassification", **SIZES, image_size=32, patch_size=8), images),
    "speech": (made("Wav2Vec2:Wav2Vec2ForSequenceClassification", **SIZES, **WAVES), waves),
    "state space": (
        made(
            "Mamba:MambaForCausalLM",
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
        ),
        text,
    ),
}


def padded(place, samples=4, length=32):
    """One sample is shorter than the others."""
    batch = text("ones", samples, length)
    batch["attention_mask"][place, length // 2 :] = 0
    batch["labels"][place, length // 2 :] = IGNORED
    return batch
