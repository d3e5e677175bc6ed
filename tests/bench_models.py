"""Estimates beside runs, on models that this course did not write: Hugging Face's, from
configurations.

One sample of each batch of text is padded, so that one of its micro-batches goes another way
through the model.
"""

from __future__ import annotations

import time
import warnings
from functools import partial

import torch
import transformers as hf

from course_lib.budget import Recipe, estimate, run

WORDS, IGNORED = 128, -100
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT = {
    **SIZES,
    "intermediate_size": 128,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
STATE = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}
STAGES = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
MODELS = {  # class of configurations, of models -> options
    ("Gemma2", "ForCausalLM"): {**HEADS, "sliding_window": 16},
    ("Gemma3Text", "Gemma3ForCausalLM"): {**HEADS, "sliding_window": 16},
    ("Phi3", "ForCausalLM"): GROUPED,
    ("Qwen3", "ForCausalLM"): HEADS,
    ("Qwen3Moe", "ForCausalLM"): {**HEADS, **SPARSE, "num_experts": 4},
    ("DeepseekV3", "ForCausalLM"): {
        **TEXT,
        **LATENT,
        **SPARSE,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    ("Falcon", "ForCausalLM"): {**SIZES, "vocab_size": WORDS},
    ("OPT", "ForCausalLM"): {
        **SIZES,
        "vocab_size": WORDS,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
    },
    ("GPTNeoX", "ForCausalLM"): TEXT,
    ("Olmo2", "ForCausalLM"): TEXT,
    ("Cohere", "ForCausalLM"): TEXT,
    ("Mistral", "ForCausalLM"): {**GROUPED, "sliding_window": 8},
    ("Starcoder2", "ForCausalLM"): GROUPED,
    ("Bloom", "ForCausalLM"): {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    ("GptOss", "ForCausalLM"): {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ("Llama4Text", "Llama4ForCausalLM"): {
        **HEADS,
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
    },
    ("Mamba2", "ForCausalLM"): {
        **STATE,
        "vocab_size": WORDS,
        "hidden_size": 64,
        "num_hidden_layers": 3,
    },
    ("Rwkv", "ForCausalLM"): {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3},
    ("Jamba", "ForCausalLM"): {
        **GROUPED,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
    ("ModernBert", "ForMaskedLM"): {**TEXT, "cls_token_id": 1, "sep_token_id": 2},
    ("Roberta", "ForMaskedLM"): TEXT,
    ("DebertaV2", "ForMaskedLM"): TEXT,
    ("Albert", "ForMaskedLM"): {**TEXT, "embedding_size": 32},
    ("Electra", "ForMaskedLM"): {**TEXT, "embedding_size": 32},
    ("Swin", "ForImageClassification"): STAGES,
    ("ConvNext", "ForImageClassification"): {
        "hidden_sizes": [16, 32],
        "depths": [2, 2],
        "num_stages": 2,
    },
    ("Dinov2", "ForImageClassification"): {**SIZES, "image_size": 64, "patch_size": 16},
}
RECIPES = [
    Recipe(),
    Recipe(precision="bf16", in_backward=True),
    Recipe(checkpoint="layers", micro_batches=4),
    Recipe(offload_optimizer=1.0, offload_activations=True, min_bytes=512),
]


def text(samples: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    tokens, mask = (
        torch.randint(3, WORDS, (samples, length)),
        torch.ones(samples, length, dtype=torch.long),
    )
    mask[1, length // 2 :] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, IGNORED),
    }


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4,))}


def made(config: str, of: str, options: dict) -> torch.nn.Module:
    return getattr(hf, of if of[0] != "F" else config + of)(
        getattr(hf, f"{config}Config")(**options)
    )


def main() -> None:
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print("peak in bytes of the run, and what was estimated besides")
    for number, recipe in enumerate(RECIPES, 1):
        print(f"  {number}: {recipe}")
    print(f"{'':12}" + "".join(f"{number:>20}" for number in range(1, len(RECIPES) + 1)))
    equal = tried = 0
    start = time.perf_counter()
    for (config, of), options in MODELS.items():
        make_model, make_batch = (
            partial(made, config, of, options),
            images if "Image" in of else text,
        )
        cells = []
        for recipe in RECIPES:
            predicted = estimate(make_model, make_batch, recipe).peak_bytes
            measured = run(make_model, make_batch, recipe).meter.peak_bytes
            cells.append(f"{measured:,} ({predicted - measured:+,})")
            equal, tried = equal + (predicted == measured), tried + 1
        print(f"{config:12}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    print(f"{equal} of {tried} equal, in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
