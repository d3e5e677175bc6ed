"""Answers to the exercises of lesson 01: right ones, and wrong ones with what they are told."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons.ledger import BASELINE, LAYER_BYTES
from course_lib.lessons.lesson_01.exercises import storages

WEIGHTS = 6_875_648


def state_of(parameter=4, gradient=4, optimizer=8, weights=WEIGHTS):
    """The number of weights, and the bytes of each kind for so many bytes per weight."""
    kinds = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    return {"weights": weights, **{kind: size * WEIGHTS for kind, size in kinds.items()}}


def parts(**changed):
    return {
        "state": 82_508_176,
        "layers": 167_903_232,
        "norm and head": 2_105_344,
        "logits": 25_165_824,
        **{name.replace("_", " "): value for name, value in changed.items()},
    }


# Meters
# --------------------------------------------------------------------------------------------------


def meter(*, go_in=True, named=True, dies=True, first=False, tensors=False, own=False, once=True):
    """A meter as readers write it, with or without one of its steps."""

    class Meter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            known = set(storages((args, kwargs) if named else args) if go_in else ())
            for tensor in tree_leaves(result)[: 1 if first else None]:
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    size = tensor.nbytes if tensors or own else storage.nbytes()
                    self.count(size)
                    if once:
                        known.add(storage._cdata)
                    if dies:
                        weakref.finalize(tensor if tensors else storage, self.count, -size)
            return result

        def count(self, change):
            self.live += change
            self.peak = max(self.peak, self.live)

    return Meter


def condition(is_new):
    """The meter of exercise 2 with a condition: a function of address, storage and `given`."""

    class TinyMeter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            given = storages((args, kwargs))
            for address, storage in storages(result).items():
                if self.is_new(address, storage, given):
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.release, address, storage.nbytes())
            return result

        def is_new(self, address, storage, given):
            return is_new(address, storage, given)

        def release(self, address, nbytes):
            self.live -= nbytes

    return TinyMeter


class EverSeen(condition(None)):
    """Counts an address that it has not seen in a result, and forgets none."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def is_new(self, address, storage, given):
        new = address not in self.seen
        self.seen.add(address)
        return new


class ByLivePresence(EverSeen):
    """Forgets an address when its storage is released, and still looks only at results."""

    def release(self, address, nbytes):
        self.seen.discard(address)
        super().release(address, nbytes)


class ByPresence(ByLivePresence):
    """Right in another way: has seen the arguments as well."""

    def is_new(self, address, storage, given):
        for each, argument in given.items():
            if each not in self.seen:  # made before the block
                self.seen.add(each)
                weakref.finalize(argument, self.seen.discard, each)
        return super().is_new(address, storage, given)


# Formulas
# --------------------------------------------------------------------------------------------------

GPT = {
    "norms": "8 * s * b * h",
    "statistics": "16 * s * b",
    "attention": "20 * s * b * h",
    "probabilities": "4 * a * s * s * b",
    "feed-forward": "36 * s * b * h",
}
LLAMA = {
    "norms": "16 * s * b * h",
    "statistics": "8 * s * b",
    "attention": "4 * s * b * (3 * h + 2 * n * h // a)",
    "probabilities": "4 * a * s * b",
    "feed-forward": "4 * s * b * (h + 4 * f)",
}


def layer(rows, row="norms", formula=None):
    """A function of the sizes that returns the bytes of each row, with another formula in one."""
    rows = rows if formula is None else {**rows, row: formula}
    return lambda **sizes: {row: eval(formula, {}, sizes) for row, formula in rows.items()}


def half_of(rows):
    return layer({row: f"({formula}) // 2" for row, formula in rows.items()})


#: Row, wrong formula, and a part of what it is told.
WRONG_ROWS_OF_GPT = [
    ("norms", "2 * s * b * h", "counted elements"),
    ("norms", "4 * s * b * h", "one LayerNorm"),
    ("norms", "8 * s * h", "one sequence"),
    ("norms", "0", "still empty"),
    ("norms", "8 * 128 * 8 * 256", "Use b, s, h, a instead of the lesson's numbers"),
    ("norms", "8 * 44 * 7 * 70", "but not for the lesson's layer. Use b, s, h, a"),
    ("norms", "16 * s * b * h", "norms' outputs"),
    ("norms", "8 * s * b * h + 16 * h", "counted weights"),
    ("statistics", "8 * s * b", "two numbers per token"),
    ("statistics", "16 * h", "for each token"),
    ("attention", "20 * s * b * h * a", "multiplied by a"),
    ("attention", "4 * s * b * h * (2 + 3 * a)", "multiplied by a"),
    ("attention", "16 * s * b * h", "one of five"),
    ("attention", "28 * s * b * h", "one product"),
    ("attention", "12 * s * b * h", "Q, K and V"),
    ("attention", "24 * s * b * h", "are five"),
    ("attention", "10 * s * b * h", "2 bytes"),
    ("attention", "20 * s * b * h + 4 * a * s * s * b", "its own row"),
    ("attention", "20 * s * b * h + 16 * h * h", "counted weights"),
    ("probabilities", "4 * a * s * s", "one sequence"),
    ("probabilities", "4 * s * s * b", "Each head"),
    ("probabilities", "8 * a * s * s * b", "needs no S"),
    ("probabilities", "4 * h * s * s * b", "multiplied by h"),
    ("probabilities", "2 * a * s * (s + 1) * b", "P is stored whole"),
    ("probabilities", "2 * a * s * s * b", "half of P"),
    ("probabilities", "4 * s * h * s * b // 32", "b = 7, s = 44"),  # right for one size only
    ("feed-forward", "20 * s * b * h", "4h wide"),
    ("feed-forward", "36 * s * h", "one sequence"),
    ("feed-forward", "32 * s * b * h", "own input"),
    ("feed-forward", "52 * s * b * h", "counted a tensor twice"),
    ("feed-forward", "40 * s * b * h", "an addition keeps nothing"),
    ("feed-forward", "36 * s * b * h + 32 * h * h", "counted weights"),
]
WRONG_ROWS_OF_LLAMA = [
    ("norms", "8 * s * b * h", "row of the other layer. You counted one tensor per norm"),
    ("norms", "24 * s * b * h", "three tensors per norm"),
    ("norms", "16 * s * b * h + 8 * h", "counted weights"),
    ("norms", "16 * b * s * 256", "Use b, s, h, a, n, f instead of the lesson's numbers"),
    ("statistics", "16 * s * b", "row of the other layer. You counted two numbers"),
    ("statistics", "4 * s * b", "one norm"),
    ("attention", "20 * s * b * h", "row of the other layer. You gave K and V as many heads as Q"),
    ("attention", "4 * s * b * (3 * h + n * h // a)", "one of K and V"),
    ("attention", "4 * s * b * (2 * h + 2 * n * h // a)", "h wide"),
    ("attention", "4 * s * b * (5 * h + 2 * n * h // a)", "`y` three times"),
    ("attention", "4 * s * b * (4 * h + 2 * n * h // a)", "one tensor too many"),
    ("attention", "4 * s * b * (3 * h + 2 * n)", "heads as numbers"),
    ("attention", "4 * s * b * (3 * h + h // 2)", "b = 3, s = 44, h = 70, a = 10, n = 2, f = 50"),
    ("attention", "4 * s * b * (4 * h + 3 * n * h // a)", "before and after the rotation"),
    ("probabilities", "4 * a * s * s * b", "row of the other layer. You counted P"),
    ("probabilities", "4 * s * b", "Each head has its own"),
    ("probabilities", "4 * n * s * b", "heads of K and V"),
    ("probabilities", "4 * a * s", "one sequence"),
    ("feed-forward", "36 * s * b * h", "row of the other layer. Which operators"),
    ("feed-forward", "16 * s * b * f", "own input"),
    ("feed-forward", "4 * s * b * (2 * h + 4 * f)", "the input twice"),
    ("feed-forward", "4 * s * b * (h + 3 * f)", "left out one of four"),
    ("feed-forward", "4 * s * b * (h + 2 * f)", "left out two of four"),
    ("feed-forward", "4 * s * b * (h + 5 * f)", "one wide tensor too many"),
    ("feed-forward", "4 * s * b * (h + 4 * f) + 12 * h * f", "counted weights"),
    ("feed-forward", "s * b * (h + 4 * f)", "elements"),
]

#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "adapter_bytes": (
        [14_320_000_000, 14.32e9],
        [
            (112e9, "no gradient and no state"),
            (28.32e9, "bf16 here"),
            (14e9, "adapters have"),
            (32e7, "adapters alone"),
            (14.24e9, "four fp32 numbers"),
            (14.3e9, "rounded"),
            (14.32, "in GB"),
            (1, "small"),
            (9e99, "large"),
        ],
    ),
    "training_state": (
        [state_of(), {**state_of(), "optimizer": 55_005_584}, state_of(4.0, 4.0, 8.0)],
        [
            (state_of(parameter=1), "counted numbers"),
            (state_of(gradient=2), "2 bytes"),
            (state_of(optimizer=4), "keeps two"),
            (state_of(optimizer=12), "master weights"),
            ({"parameter": 1}, "keys"),
            (state_of(optimizer=9), "`optimizer`: Not yet. The number is too large."),
            (state_of(gradient=8), "`gradient`: Not yet. You counted two"),
            (state_of(optimizer=16), "all three kinds"),
            (state_of(gradient=32), "adds them up"),
            (state_of(weights=4 * WEIGHTS), "gave bytes"),
            (state_of(weights=WEIGHTS - 128 * 256), "positions"),
            state_of(weights=7e6),
            (state_of(weights=WEIGHTS + 2048 * 256), "same tensor"),
            (state_of(weights=WEIGHTS + 8 * 256**2), "one h × h matrix too many in each layer"),
            (state_of(weights=WEIGHTS - 8 * 256**2), "one h × h matrix in each of the eight"),
            (state_of(weights=WEIGHTS - 8 * 9 * 256), "bias"),
            (
                state_of(weights=WEIGHTS - 8 * 13 * 256 - 2 * 256),
                "13h numbers per layer. You left out the last LayerNorm",
            ),
            (state_of(weights=WEIGHTS - 17 * 256), "a scale and a shift"),
            (state_of(weights=WEIGHTS - 16 * 256), "a scale and a shift"),
            ({**state_of(), "gradient": 26.23}, "in MiB"),
            ({**state_of(), "parameter": 27.5e6}, "`parameter`: Not yet. You rounded"),
            ({**state_of(), "optimizer": 55}, "`optimizer`: Not yet. That is in MB"),
        ],
    ),
    "layer_formula": (
        [layer(GPT), layer(GPT, "attention", "4 * (3 + 1 + 1) * b * s * h")],
        [
            *((layer(GPT, row, formula), said) for row, formula, said in WRONG_ROWS_OF_GPT),
            (half_of(GPT), "half of the right one"),
            (lambda b, s, h, a: 1, "a dictionary with the keys"),
        ],
    ),
    "llama_formula": (
        [layer(LLAMA), layer(LLAMA, "attention", "4 * b * s * (h + h + h + n * (h / a) * 2)")],
        [
            *((layer(LLAMA, row, formula), said) for row, formula, said in WRONG_ROWS_OF_LLAMA),
            (half_of(LLAMA), "half of the right one"),
            (layer(GPT), "Not answered yet"),
            (
                layer(GPT | dict.fromkeys(("attention", "probabilities", "feed-forward"), "0")),
                "Not answered yet",
            ),
            (lambda b, s, h, a, n, f: 1, "a dictionary with the keys"),
        ],
    ),
    "new_storages": (
        [
            condition(lambda address, storage, given: address not in given),
            condition(lambda address, storage, given: given.get(address) is None),
        ],
        [
            (
                condition(lambda address, storage, given: True),
                "a peak of 2,000, but 400 and 400 are right. You counted the storage of a view",
            ),
            (condition(lambda address, storage, given: storage not in given), "compare `address`"),
            (ByLivePresence, "existed before the meter started"),
            (EverSeen, "used again"),
            (
                condition(lambda address, storage, given: address in given),
                "storages of the arguments",
            ),
            (condition(lambda address, storage, given: not given), "result of `x * 2`"),
            (
                condition(
                    lambda address, storage, given: (
                        address not in given and storage.nbytes() not in (8, 4)
                    )
                ),
                "several tensors",
            ),
            (condition(lambda address, storage, given: None), "Not answered yet"),
            (lambda: 1, None),
        ],
    ),
    "meter": (
        [meter(), ByPresence],
        [
            (meter(go_in=False), "A view shares the storage"),
            (meter(named=False), "`kwargs`"),
            (meter(dies=False), "were released"),
            (meter(first=True), "several tensors"),
            (meter(tensors=True), "attach the finalizer to the storage"),
            (meter(own=True), "Its storage can be larger"),
            (meter(once=False), "three results that share it"),
            (ByLivePresence, "existed before the meter started"),
            (EverSeen, "used again"),
            (lambda: 1, None),
        ],
    ),
    "whole_peak": (
        [parts(), parts(state=82_507_776), parts(logits=25_165_832)],
        [
            (parts(state=110_010_368), "gradients of the parameters"),
            (parts(state=27_502_592), "Adam's state"),
            (parts(state=110_010_768), "gradients of the parameters"),
            (parts(state=82.5), "`state`: Not yet. That is in MB"),
            (parts(layers=134_348_800), "You left out P"),
            (parts(layers=LAYER_BYTES), "has eight"),
            (parts(layers=178_413_636), "have rows of their own"),
            (parts(layers=41_975_808), "`layers`: Not yet. You counted elements"),
            (parts(layers=167_772_160), "statistics of the layers' LayerNorms"),
            (parts(layers=167_900_000), "rounded"),
            (parts(norm_and_head=2_107_392), "in `state` already"),
            (parts(norm_and_head=1_048_576), "keeps its own"),
            (parts(norm_and_head=2_097_152), "statistics"),
            (parts(norm_and_head=1_056_768), "one of two inputs"),
            (parts(norm_and_head=3 * 1_048_576 + 8_192), "They are the same tensor"),
            (parts(norm_and_head=526_336), "`norm and head`: Not yet. You counted elements"),
            (parts(norm_and_head=2_105_344 + 16_452), "You counted token numbers or targets"),
            (parts(norm_and_head=10_493_952), "belongs to `logits`"),
            (parts(norm_and_head=10_510_404), "belongs to `logits`"),
            (parts(logits=8_388_608), "Backward has already"),
            (parts(logits=16_777_216), "two tensors"),
            (parts(logits=33_554_432), "logits themselves"),
            parts(logits=None),
            (BASELINE.peak_bytes, "keys"),
        ],
    ),
    "largest_batch": (
        [49, 49.0],
        [
            (48, "49 fits as well"),
            (50, "50 peaks at"),
            (51, "with one sequence"),
            (52, "have no Adam state yet"),
            (53, "added up the kinds"),
            (54, "with one sequence"),
            *((n, "1 to 10,000") for n in (17.5, 0, -1, "17")),
        ],
    ),
}
