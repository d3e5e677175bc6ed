"""Estimates beside runs, on a small model of each model type of the installed transformers that has
a training head.

    HF_HUB_OFFLINE=1 python tests/sweep_models.py        # all types; half an hour or more
    python tests/sweep_models.py --types llama,t5,vit --json out.json
    python tests/sweep_models.py --limit 60 --seed 1     # 60 types, drawn with this seed

Nothing is downloaded: configurations are shrunk by the names of their sizes, and weights are
random. A type is counted as built where its model computes a loss from a batch; then it is
estimated and run, plain and with a checkpoint around each layer, and a tenth of the types in six
recipes more. No part of `make test` or `make bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from transformers.models.auto import modeling_auto as auto

from course_lib.budget import Recipe, estimate, run

WORDS, SAMPLES, TOKENS, PIXELS, SOUNDS = 128, 4, 32, 32, 8000
MOST_PARAMETERS, MOST_SECONDS = 30_000_000, 30

# Sizes by the names that configurations give them: value -> names.
SIZES = {
    64: (
        "hidden_size d_model n_embd embed_dim dim emb_dim encoder_hidden_size decoder_hidden_size"
        " word_embed_proj_dim"
    ),
    2: (
        "window_size num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
        " num_encoder_layers num_decoder_layers num_key_value_heads num_kv_heads n_kv_heads"
        " num_experts_per_tok num_experts_per_token first_k_dense_replace topk_group n_group"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads"
        " decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
        " num_experts n_routed_experts num_local_experts"
    ),
    16: "head_dim attention_head_size q_lora_rank kv_lora_rank moe_intermediate_size v_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim patch_size",
    128: (
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner dim_feedforward"
        " hidden_dim ffn_hidden_size max_position_embeddings n_positions vocab_size"
        " shared_expert_intermediate_size embedding_size"
    ),
    PIXELS: "image_size",
}
NAMED = {name: value for value, names in SIZES.items() for name in names.split()}
# Another draw is another step: layers that are dropped, and places that are masked, at random.
DRAWN = {
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "apply_spec_augment": False,
}
TOKEN_NUMBERS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LISTS: dict[str, Callable[[int], Any]] = {
    "depths": lambda i: 1,
    "num_heads": lambda i: 2,
    "num_attention_heads": lambda i: 2,
    "hidden_sizes": lambda i: 16 * 2**i,
    "embed_dims": lambda i: 16 * 2**i,
    "encoder_hidden_sizes": lambda i: 16 * 2**i,
}


def tokens() -> torch.Tensor:
    return torch.randint(3, WORDS, (SAMPLES, TOKENS))


def text(config) -> dict:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def classes(config) -> dict:
    return {"input_ids": tokens(), "labels": torch.randint(0, 2, (SAMPLES,))}


def tags(config) -> dict:
    return {"input_ids": tokens(), "labels": torch.randint(0, 2, (SAMPLES, TOKENS))}


def images(config) -> dict:
    size, channels = getattr(config, "image_size", PIXELS), getattr(config, "num_channels", 3)
    height, width = (size, size) if isinstance(size, int) else size
    return {
        "pixel_values": torch.randn(SAMPLES, channels, height, width),
        "labels": torch.randint(0, 2, (SAMPLES,)),
    }


def sounds(config) -> dict:
    return {"input_values": torch.randn(2, SOUNDS), "labels": torch.randint(0, 2, (2,))}


# Heads in the order in which they are tried, with the batch that each takes.
HEADS = {
    "SEQ_TO_SEQ_CAUSAL_LM": text,
    "CAUSAL_LM": text,
    "MASKED_LM": text,
    "SEQUENCE_CLASSIFICATION": classes,
    "TOKEN_CLASSIFICATION": tags,
    "IMAGE_CLASSIFICATION": images,
    "AUDIO_CLASSIFICATION": sounds,
}
OTHER_HEADS = [
    name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
    for name in vars(auto)
    if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
]
RECIPES = {"plain": Recipe(), "layers": Recipe(checkpoint="layers")}
MORE = {
    "bf16": Recipe(precision="bf16", in_backward=True),
    "selective": Recipe(checkpoint="selective"),
    "micro-batches": Recipe(micro_batches=2, optimizer="sgd"),
    "offload": Recipe(offload_optimizer=1.0, offload_activations=True, min_bytes=512),
    "layers and offload": Recipe(checkpoint="layers", offload_activations=True, min_bytes=512),
    "flash": Recipe(attention="sdpa", update="foreach"),
}


def heads_of(model_type: str) -> Iterator[tuple[str, str]]:
    """(head, class of models) of a type, those with a known batch first."""
    for head in dict.fromkeys([*HEADS, *OTHER_HEADS]):
        name = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).get(model_type)
        if name:
            yield head, name if isinstance(name, str) else name[0]


def shrunk(config) -> None:
    """Make a configuration and those in it small, by the names of its sizes; a list keeps its
    length."""
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            shrunk(value)
        elif isinstance(value, list | tuple) and name in LISTS:
            setattr(config, name, [LISTS[name](i) for i in range(len(value))])
        elif name in NAMED and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, NAMED[name])
        elif name in TOKEN_NUMBERS | DRAWN:
            setattr(config, name, (TOKEN_NUMBERS | DRAWN)[name])


def built(model_type: str) -> tuple[str, Callable, Callable]:
    """(head, make_model, make_batch) of the first head that computes a loss.

    Raises:
        LookupError: no head of the type has a batch that is known here.
        Exception: what the last of its heads has raised.
    """
    found = [(head, name) for head, name in heads_of(model_type)]
    if not found:
        raise LookupError("no training head")
    if not any(head in HEADS for head, _ in found):
        raise LookupError(f"no batch known for {found[0][0]}")
    for head, name in found:
        if head not in HEADS:
            break

        def make_model(of=name):
            config = hf.AutoConfig.for_model(model_type)
            shrunk(config)
            return getattr(hf, of)(config)

        try:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in make_model().parameters())
            if count > MOST_PARAMETERS:
                raise LookupError(f"{count / 1e6:.0f} million parameters after shrinking")
            model = make_model()
            make_batch = partial(HEADS[head], model.config)
            loss = model(**make_batch()).loss
            if loss is None:
                raise LookupError("the head gives no loss from labels")
            loss.backward()
        except Exception as error:
            last = error
            continue
        return head, make_model, make_batch
    raise last


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    def ring(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def compared(make_model, make_batch, recipe: Recipe) -> str:
    """ "equal", "differs: ..." or "refused: ..." for one recipe."""
    try:
        with alarm(MOST_SECONDS):
            found = estimate(make_model, make_batch, recipe)
    except TimeoutError as error:
        return f"refused: {error}"
    except Exception as error:
        try:
            with alarm(MOST_SECONDS):
                run(make_model, make_batch, recipe)
        except Exception:
            return f"refused by both: {first_line(error)}"
        return f"refused: {first_line(error)}"
    try:
        with alarm(MOST_SECONDS):
            real = run(make_model, make_batch, recipe)
    except Exception as error:
        return f"differs: estimated, and the run fails: {first_line(error)}"
    predicted = (found.peak_bytes, found.bytes_down, found.bytes_up)
    measured = (real.meter.peak_bytes, real.traffic.bytes_down, real.traffic.bytes_up)
    return (
        "equal" if predicted == measured else f"differs: {predicted} estimated, {measured} measured"
    )


def first_line(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"[:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--types", help="those alone, with commas between them")
    parser.add_argument("--limit", type=int, help="so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="a file for all that was found, written after each type")
    given = parser.parse_args()
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    warnings.simplefilter("ignore")
    draw = random.Random(given.seed)
    types = given.types.split(",") if given.types else sorted(hf.CONFIG_MAPPING)
    if given.limit:
        types = sorted(draw.sample(types, min(given.limit, len(types))))
    in_all_recipes = set(draw.sample(types, max(1, len(types) // 10)))
    found: dict[str, dict[str, str]] = {}
    for model_type in types:
        try:
            with alarm(MOST_SECONDS):
                head, make_model, make_batch = built(model_type)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            found[model_type] = {"not built": first_line(error)}
        else:
            recipes = {**RECIPES, **MORE} if model_type in in_all_recipes else RECIPES
            found[model_type] = {"head": head}
            found[model_type] |= {
                name: compared(make_model, make_batch, each) for name, each in recipes.items()
            }
        print(
            f"{model_type:28}",
            "; ".join(f"{name} {said}" for name, said in found[model_type].items()),
            flush=True,
        )
        if given.json:
            with Path(given.json).open("w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
    told(found)


def told(found: dict[str, dict[str, str]]) -> None:
    """Totals, and the reasons of what was refused or not built, the most frequent first."""
    said = [
        text
        for each in found.values()
        for name, text in each.items()
        if name not in ("head", "not built")
    ]
    kinds = Counter(text.partition(":")[0] for text in said)
    print(
        f"\n{len(found)} types, {sum('head' in each for each in found.values())} built; {len(said)}"
        " compared:"
    )
    print("  " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for title, reasons in {
        "refused": [text for text in said if text.startswith("refused")],
        "not built": [each["not built"] for each in found.values() if "not built" in each],
    }.items():
        print(f"{title}:")
        for reason, count in Counter(reasons).most_common(25):
            print(f"  {count:4} {reason}")


if __name__ == "__main__":
    main()
