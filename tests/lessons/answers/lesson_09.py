"""Right and wrong answers to the exercises of lesson 09, with the expected messages."""

import torch

from course_lib.budget import Recipe
from course_lib.lessons.lesson_09 import exercises
from course_lib.lessons.lesson_09.exercises import MISTAKES, model_of, parameters_of, say


def only(tied):
    """Right if the embedding and the head are one matrix, or only if they are two."""
    return lambda config: parameters_of(config) if config["tie_word_embeddings"] == tied else None


def mistaken(*names):
    return lambda config: parameters_of(config, *names)


def counted_on_meta(config):
    """Right as well, and independent: the parameters of transformers' own model."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_of(config).parameters())


def qlora(config, rank):
    """Right, and independent of the check: counted from the modules of transformers and peft."""
    import peft

    with torch.device("meta"):
        model = model_of(
            {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
        )
        frozen = 0.0
        for name, weight in model.named_parameters():
            is_small = name.endswith("_proj.weight")
            frozen += weight.numel() * (0.5 + 4 / 64 if is_small else 2)
        adapters = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear"))
        count = sum(each.numel() for each in adapters.parameters() if each.requires_grad)
    return {"frozen weights": frozen, "adapters": 4 * count, "gradients and state": 12 * count}


def with_codes(config, rank):
    """Right as well: with the 16 values of NF4 that each quantized matrix keeps in fp32."""
    found = exercises.check_qlora_bytes.right_answer()(config, rank)
    found["frozen weights"] += 7 * 64 * config["num_hidden_layers"]
    return found


UPDATES = {"in_backward": True, "offload_optimizer": 1.0}

#: check -> right answers
RIGHT = {
    "parameters": [
        parameters_of,
        counted_on_meta,
        lambda config: parameters_of({"hidden_size": config.pop("hidden_size"), **config}),
    ],
    "recipe": [
        Recipe(**UPDATES, offload_activations=True),
        Recipe(**UPDATES, checkpoint="segments", segments=11),
    ],
    "qlora_bytes": [qlora, with_codes],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "parameters": [
        *((mistaken(name), say(f"parameters.{name}")) for name in MISTAKES),
        (only(True), "returns None for `tie_word_embeddings = False`"),
        (only(False), "returns None for `tie_word_embeddings = True`"),
        lambda config: config.update(vocab_size=9) or parameters_of(config),
        (mistaken("gate", "one_norm"), "gate, up and down. You counted one norm"),
        (mistaken("heads_of_keys", "gate"), "You counted two matrices"),
        (mistaken("heads_of_keys", "output"), None),  # as with "heads_of_keys", "keys_or_values"
        (lambda config: 31_141_376, "for the small Llama"),
        *(
            (lambda config, size=size: size * parameters_of(config), f"bytes {unit}")
            for size, unit in ((2, "in bf16"), (4, "in fp32"), (16, "of Adam's step"))
        ),
    ],
    "recipe": [
        (Recipe(**UPDATES, checkpoint="layers"), "exactly the three techniques"),
        (
            Recipe(**UPDATES, checkpoint="layers", first_blocks=9, attention="sdpa"),
            "exactly the three techniques",
        ),
        (Recipe(**UPDATES, checkpoint="layers", head_chunk=64), "saves nothing"),
        (Recipe(**UPDATES), "activation"),
        (Recipe("bf16"), "Keep fp32 and Adam"),
        (Recipe(optimizer="sgd", in_backward=True), "Keep fp32 and Adam"),
        (Recipe(ranks=2, shard="zero3"), "several devices"),
        (200_000_000, "`Recipe`"),
    ],
}
