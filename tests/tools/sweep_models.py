"""Compare estimates with runs for a small model of each type of transformers with a training head.

    HF_HUB_OFFLINE=1 python tests/tools/sweep_models.py        # all types; half an hour or more
    python tests/tools/sweep_models.py --types llama,t5,vit
    python tests/tools/sweep_models.py --limit 60 --seed 1     # 60 types, drawn with this seed

Nothing is downloaded: configurations are shrink by the names of their sizes, and weights are
random. A type counts as built if its model computes a loss from a batch. Its plain step and its
step with checkpoints are then estimated and run, and for a tenth of the types six more recipes.
`make test` and `make bench` do not run this program.
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

VOCABULARY, SAMPLES, TOKENS, PIXELS, SOUNDS = 128, 4, 32, 32, 8000
MOST_PARAMETERS, MOST_SECONDS = 30_000_000, 30

# Small value -> names of sizes in configurations.
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
# Tokens, and settings without random depths and masks, which would change the step.
FIXED = dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), 0.0)
FIXED |= {"apply_spec_augment": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FIXED |= {"decoder_start_token_id": 1}
LISTS: dict[str, Callable[[int], int]] = {
    "depths": lambda i: 1,
    **dict.fromkeys(("num_heads", "num_attention_heads"), lambda i: 2),
    **dict.fromkeys(("hidden_sizes", "embed_dims", "encoder_hidden_sizes"), lambda i: 16 * 2**i),
}


def tokens(classes: int | None, *shape: int, config) -> dict:
    """Return tokens, and labels of this shape; without classes, the tokens are the labels."""
    ids = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS))
    return {"input_ids": ids, "labels": torch.randint(classes, shape) if classes else ids.clone()}


def images(config) -> dict:
    size, channels = getattr(config, "image_size", PIXELS), getattr(config, "num_channels", 3)
    pixels = torch.randn(SAMPLES, channels, *((size, size) if isinstance(size, int) else size))
    return {"pixel_values": pixels, "labels": torch.randint(2, (SAMPLES,))}


def sounds(config) -> dict:
    return {"input_values": torch.randn(2, SOUNDS), "labels": torch.randint(2, (2,))}


# Head -> batch, in the order in which heads are tried.
HEADS: dict[str, Callable[..., dict]] = {
    **dict.fromkeys(("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM"), partial(tokens, None)),
    "SEQUENCE_CLASSIFICATION": partial(tokens, 2, SAMPLES),
    "TOKEN_CLASSIFICATION": partial(tokens, 2, SAMPLES, TOKENS),
    "IMAGE_CLASSIFICATION": images,
    "AUDIO_CLASSIFICATION": sounds,
}

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
    """Yield (head, class of models) of a type."""
    for head in HEADS:
        name = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).get(model_type)
        if name:
            yield head, name if isinstance(name, str) else name[0]


def shrink(config) -> None:
    """Set the sizes of a configuration, and of those in it, to small values."""
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            shrink(value)
        elif isinstance(value, list | tuple) and name in LISTS:
            setattr(config, name, [LISTS[name](i) for i in range(len(value))])
        elif name in NAMED and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, NAMED[name])
        elif name in FIXED:
            setattr(config, name, FIXED[name])


def built(model_type: str) -> tuple[str, Callable, Callable]:
    """Return (head, make_model, make_batch) of the first head that computes a loss.

    Raises:
        LookupError: No head of the type has a batch in `HEADS`.
        Exception: The error of the last head.
    """
    last: Exception = LookupError("no training head with a batch in HEADS")
    for head, name in heads_of(model_type):

        def make_model(model_class=name):
            config = hf.AutoConfig.for_model(model_type)
            shrink(config)
            return getattr(hf, model_class)(config)

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


def raise_timeout(*_) -> None:
    raise TimeoutError(f"more than {MOST_SECONDS} s")


def attempt(function: Callable, *arguments) -> tuple[Any, str]:
    """Return the result of a function, and its error in one line or an empty text."""
    signal.alarm(MOST_SECONDS)
    try:
        return function(*arguments), ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]
    finally:
        signal.alarm(0)


def compare(make_model, make_batch, recipe: Recipe) -> str:
    """Return "equal", "differs: ..." or "rejected: ..." for one recipe."""
    found, rejected = attempt(estimate, make_model, make_batch, recipe)
    result, error = attempt(run, make_model, make_batch, recipe)
    if rejected:
        return f"rejected{' by both' if error else ''}: {rejected}"
    if error:
        return f"differs: estimated, and the run fails: {error}"
    predicted = (found.peak_bytes, found.bytes_down, found.bytes_up)
    measured = (result.meter.peak_bytes, result.traffic.bytes_down, result.traffic.bytes_up)
    if predicted == measured:
        return "equal"
    return f"differs: {predicted} estimated, {measured} measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--types", help="names of types, separated by commas")
    parser.add_argument("--limit", type=int, help="number of types, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, raise_timeout)
    draw = random.Random(given.seed)
    types = given.types.split(",") if given.types else sorted(hf.CONFIG_MAPPING)
    if given.limit:
        types = sorted(draw.sample(types, min(given.limit, len(types))))
    in_all_recipes = set(draw.sample(types, max(1, len(types) // 10)))
    results: list[str] = []
    not_built: list[str] = []
    for model_type in types:
        functions, error = attempt(built, model_type)
        if error:
            not_built.append(error)
            print(f"{model_type:28} not built: {error}", flush=True)
            continue
        recipes = RECIPES | MORE if model_type in in_all_recipes else RECIPES
        head, *rest = functions
        found = {name: compare(*rest, each) for name, each in recipes.items()}
        results += found.values()
        shown = "; ".join(f"{name} {text}" for name, text in found.items())
        print(f"{model_type:28} {head}; {shown}", flush=True)
    print(f"\n{len(types)} types, {len(types) - len(not_built)} built; {len(results)} compare:")
    kinds = Counter(text.partition(":")[0] for text in results)
    print("  " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for reason, count in Counter(not_built).most_common(25):
        print(f"  {count:4} not built: {reason}")


if __name__ == "__main__":
    main()
