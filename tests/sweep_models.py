"""Estimates beside runs, on a small model of each model type of the installed transformers that has
a training head.

    HF_HUB_OFFLINE=1 python tests/sweep_models.py        # all types; half an hour or more
    python tests/sweep_models.py --types llama,t5,vit
    python tests/sweep_models.py --limit 60 --seed 1     # 60 types, drawn with this seed

Nothing is downloaded: configurations are shrunk by the names of their sizes, and weights are
random. A type is counted as built where its model computes a loss from a batch; then it is
estimated and run, plain and with a checkpoint around each layer, and a tenth of the types in six
recipes more. No part of `make test` or `make bench`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
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
# Numbers of tokens, and settings without random depths and masks: another draw is another step.
FIXED = dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0)
FIXED |= {"apply_spec_augment": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIXED |= {"decoder_start_token_id": 1}
LISTS: dict[str, Callable[[int], int]] = {
    "depths": lambda i: 1,
    **dict.fromkeys(("num_heads", "num_attention_heads"), lambda i: 2),
    **dict.fromkeys(("hidden_sizes", "embed_dims", "encoder_hidden_sizes"), lambda i: 16 * 2**i),
}


def tokens(classes: int | None, *shape: int, config) -> dict:
    """Tokens, and labels of this shape; with no number of classes, the tokens are the labels."""
    ids = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    return {"input_ids": ids, "labels": torch.randint(classes, shape) if classes else ids.clone()}


def images(config) -> dict:
    size, channels = getattr(config, "image_size", PIXELS), getattr(config, "num_channels", 3)
    pixels = torch.randn(SAMPLES, channels, *((size, size) if isinstance(size, int) else size))
    return {"pixel_values": pixels, "labels": torch.randint(2, (SAMPLES,))}


def sounds(config) -> dict:
    return {"input_values": torch.randn(2, SOUNDS), "labels": torch.randint(2, (2,))}


# Heads in the order in which they are tried, with the batch that each takes.
HEADS: dict[str, Callable[..., dict]] = {
    **dict.fromkeys(("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM"), partial(tokens, None)),
    "SEQUENCE_CLASSIFICATION": partial(tokens, 2, SAMPLES),
    "TOKEN_CLASSIFICATION": partial(tokens, 2, SAMPLES, TOKENS),
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
        elif name in FIXED:
            setattr(config, name, FIXED[name])


def built(model_type: str) -> tuple[str, Callable, Callable]:
    """(head, make_model, make_batch) of the first head that computes a loss.

    Raises:
        LookupError: no head of the type has a batch that is known here.
        Exception: what the last of its heads has raised.
    """
    found = list(heads_of(model_type))
    last: Exception = LookupError(
        f"no batch known for {found[0][0]}" if found else "no training head"
    )
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
            make_batch = partial(HEADS[head], config=model.config)
            model(**make_batch()).loss.backward()
        except Exception as error:
            last = error
        else:
            return head, make_model, make_batch
    raise last


def ring(*_) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS} s")


def tried(function: Callable, *given) -> tuple[Any, str]:
    """What a function returns, and its error in one line, which is empty if there is none."""
    signal.alarm(MOST_SECONDS)
    try:
        return function(*given), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
    finally:
        signal.alarm(0)


def compared(make_model, make_batch, recipe: Recipe) -> str:
    """ "equal", "differs: ..." or "refused: ..." for one recipe."""
    found, refused = tried(estimate, make_model, make_batch, recipe)
    real, fails = tried(run, make_model, make_batch, recipe)
    if refused:
        return f"refused{' by both' if fails else ''}: {refused}"
    if fails:
        return f"differs: estimated, and the run fails: {fails}"
    predicted = (found.peak_bytes, found.bytes_down, found.bytes_up)
    measured = (real.meter.peak_bytes, real.traffic.bytes_down, real.traffic.bytes_up)
    if predicted == measured:
        return "equal"
    return f"differs: {predicted} estimated, {measured} measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--types", help="those alone, with commas between them")
    parser.add_argument("--limit", type=int, help="so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, ring)
    draw = random.Random(given.seed)
    types = given.types.split(",") if given.types else sorted(hf.CONFIG_MAPPING)
    if given.limit:
        types = sorted(draw.sample(types, min(given.limit, len(types))))
    in_all_recipes = set(draw.sample(types, max(1, len(types) // 10)))
    said: list[str] = []  # of each comparison
    not_built: list[str] = []
    for model_type in types:
        made, error = tried(built, model_type)
        if error:
            not_built.append(error)
            print(f"{model_type:28} not built: {error}", flush=True)
            continue
        recipes = RECIPES | MORE if model_type in in_all_recipes else RECIPES
        found = {name: compared(*made[1:], each) for name, each in recipes.items()}
        said += found.values()
        shown = "; ".join(f"{name} {text}" for name, text in found.items())
        print(f"{model_type:28} {made[0]}; {shown}", flush=True)
    print(f"\n{len(types)} types, {len(types) - len(not_built)} built; {len(said)} compared:")
    kinds = Counter(text.partition(":")[0] for text in said)
    print("  " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for reason, count in Counter(not_built).most_common(25):
        print(f"  {count:4} not built: {reason}")


if __name__ == "__main__":
    main()
