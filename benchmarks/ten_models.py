"""Dict of ten small models whose predicted and measured peaks are compared, from name to
(make_model, make_batch)."""

from collections.abc import Callable
from functools import partial

import torch
import transformers as hf

from course_lib.models import Decoder, random_tokens

TEXT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
LLAMA = {**TEXT, "intermediate_size": 128, "num_key_value_heads": 2}
BERT = {**TEXT, "intermediate_size": 128}
GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512}
IMAGE = {**{k: v for k, v in BERT.items() if k != "vocab_size"}, "image_size": 64, "patch_size": 16}


def model_of(name: str, config: str, options: dict) -> torch.nn.Module:
    return getattr(hf, name)(getattr(hf, config)(**options))


def text() -> dict[str, torch.Tensor]:
    tokens = torch.randint(512, (4, 32))
    return {"input_ids": tokens, "labels": tokens}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 2, (4,))}


def decoder(layers: int) -> Callable:
    sizes = {"vocabulary": 512, "hidden": 128, "heads": 4, "sequence": 64}
    return partial(Decoder, **sizes, layers=layers)


CASES = {
    "decoder, 4 layers": (decoder(4), partial(random_tokens, 4, 64, 512)),
    "decoder, 8 layers": (decoder(8), partial(random_tokens, 4, 64, 512)),
} | {
    name: (
        partial(model_of, kind, f"{config}Config", options),
        images if options is IMAGE else text,
    )
    for name, kind, config, options in (
        ("Llama", "LlamaForCausalLM", "Llama", LLAMA),
        ("Mistral", "MistralForCausalLM", "Mistral", LLAMA),
        ("Qwen3", "Qwen3ForCausalLM", "Qwen3", LLAMA),
        ("GPT-2", "GPT2LMHeadModel", "GPT2", GPT),
        ("Bert", "BertForMaskedLM", "Bert", BERT),
        ("Roberta", "RobertaForMaskedLM", "Roberta", BERT),
        ("ViT", "ViTForImageClassification", "ViT", IMAGE),
        ("DINOv2", "Dinov2ForImageClassification", "Dinov2", IMAGE),
    )
}
