"""Answers to the exercises of lesson 01: right ones, and wrong ones with what they are told."""


def state_of(parameter, gradient, optimizer):
    """Bytes a weight of each kind."""
    weights = 6_875_648
    return {"parameter": parameter * weights, "gradient": gradient * weights, "optimizer": optimizer * weights}


def layer(**changed):
    rows = {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
        **changed,
    }
    return lambda **sizes: {name: formula(**sizes) for name, formula in rows.items()}


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "adapter_bytes": (
        [14_320_000_000, 14.32e9],
        [
            *(
                (112e9, "no gradient and no state"),
                (28.32e9, "bf16 here"),
                (14e9, "adapters have"),
                (32e7, "are there"),
            ),
            *((14.24e9, "four fp32 numbers"), (14.3e9, "rounding"), (14.32, "in GB"), (1, "small"), (9e99, "large")),
        ],
    ),
    "training_state": (
        [state_of(4, 4, 8), {**state_of(4, 4, 8), "optimizer": 55_005_584}, state_of(4.0, 4.0, 8.0)],
        [
            *((state_of(1, 4, 8), "counts numbers"), (state_of(4, 2, 8), "2 bytes"), (state_of(4, 4, 4), "keeps two")),
            *((state_of(4, 4, 12), "Master weights"), ({"parameter": 1}, "keys"), state_of(4, 4, 9)),
            *((state_of(4, 8, 8), "`gradient`: Not yet. That is two"), (state_of(4, 4, 16), "all three kinds")),
            ({**state_of(4, 4, 8), "parameter": 27.5e6}, "`parameter`: Not yet. Right but for rounding"),
            ({**state_of(4, 4, 8), "optimizer": 55}, "`optimizer`: Not yet. That is in MB"),
        ],
    ),
    "layer_formula": (
        [layer(), layer(attention=lambda b, s, h, a: 4 * (3 + 1 + 1) * b * s * h)],
        [
            (layer(norms=lambda b, s, h, a: 2 * s * b * h), "counts elements"),
            (layer(norms=lambda b, s, h, a: 4 * s * b * h), "two LayerNorms"),
            (layer(norms=lambda b, s, h, a: 8 * s * h), "Each of the b sequences"),
            (layer(norms=lambda b, s, h, a: 0), "still empty"),
            (layer(norms=lambda b, s, h, a: 8 * 128 * 8 * 256), "Write it with the letters"),
            (layer(statistics=lambda b, s, h, a: 8 * s * b), "Two numbers"),
            (layer(probabilities=lambda b, s, h, a: 4 * a * s * s), "Each of the b sequences"),
            (layer(probabilities=lambda b, s, h, a: 4 * s * s * b), "each head"),
            (layer(probabilities=lambda b, s, h, a: 8 * a * s * s * b), "one storage"),
            (layer(attention=lambda b, s, h, a: 16 * s * b * h), "output projection"),
            (layer(attention=lambda b, s, h, a: 28 * s * b * h), "one product"),
            (layer(attention=lambda b, s, h, a: 12 * s * b * h), "V are three"),
            (layer(attention=lambda b, s, h, a: 24 * s * b * h), "five tensors"),
            (layer(attention=lambda b, s, h, a: 10 * s * b * h), "2 bytes"),
            (layer(attention=lambda b, s, h, a: 20 * s * b * h + 4 * a * s * s * b), "row of its own"),
            (layer(**{"feed-forward": lambda b, s, h, a: 20 * s * b * h}), "4h wide"),
            (layer(**{"feed-forward": lambda b, s, h, a: 32 * s * b * h}), "own input"),
            (layer(**{"feed-forward": lambda b, s, h, a: 52 * s * b * h}), "one tensor, not two"),
            (
                layer(probabilities=lambda b, s, h, a: 4 * s * h * s * b // 32),
                "b = 3, s = 40",
            ),  # right for one size only
            (lambda b, s, h, a: 1, "five rows"),
        ],
    ),
    "whole_peak": (
        [277_682_576, 277_682_584, 277_682_176, 277_682_184],
        [
            *((305_185_168, "No gradient"), (260_905_360, "Backward has begun"), (269_293_968, "Three tensors")),
            *((275_577_232, "last norm"), (222_676_992, "all the time"), (130_767_248, "eight layers"), 1),
            *((286_071_184, "result only"), (277_674_384, "statistics, too"), (276_634_000, "keeps its own")),
            *((258_800_016, "Backward has begun: two tensors of the logits' size have come. The last norm"),),
            *((277.7, "in MB"), (277_700_000, "rounding")),
        ],
    ),
    "largest_batch": (
        [17, 17.0],
        [(16, "so does 17"), (18, "18 peaks at"), *((n, "1 to 10,000") for n in (17.5, 0, -1, "17"))],
    ),
    "swiglu_bytes": (
        [8_912_896],
        [8_912_897, (8.912896, "in MB"), (8_912_896 / 4, "number of elements"), (4_718_592, "gate's branch")],
    ),
}
