"""Answers to the exercises of lesson 01: right ones, and wrong ones with what they are told."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons.ledger import BASELINE
from course_lib.lessons.lesson_01.exercises import storages

STATE = {
    "weights": 6_875_648,
    "parameter": 27_502_592,
    "gradient": 27_502_592,
    "optimizer": 55_005_184,
}
PARTS = {
    "state": 82_508_176,
    "layers": 167_903_232,
    "norm and head": 2_105_344,
    "logits": 25_165_824,
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
    return lambda *sizes: {
        row: eval(one, dict(zip("bshanf", sizes, strict=False))) for row, one in rows.items()
    }


#: check -> right answers, and wrong ones, each alone or with a part of what it is told.
ANSWERS = {
    "adapter_bytes": ([14.32e9], [(14.32, "in GB"), (1, "small"), (9e99, "large")]),
    "training_state": (
        [STATE, STATE | {"optimizer": 55_005_584}, {row: float(STATE[row]) for row in STATE}],
        [
            ({"parameter": 1}, "keys"),
            (STATE | {"optimizer": 60_000_000}, "`optimizer`: Not yet. The number is too large."),
            (STATE | {"gradient": 55_005_184}, "`gradient`: Not yet. You counted two"),
            STATE | {"weights": 7e6},
            (STATE | {"weights": 6.875648}, "`weights`: Not yet. The number is too small."),
            (STATE | {"gradient": 26.23}, "in MiB"),
            (STATE | {"optimizer": 55}, "`optimizer`: That is in MB"),
        ],
    ),
    "layer_formula": (
        [layer(GPT, "attention", "4 * (3 + 1 + 1) * b * s * h")],
        [
            (layer(GPT, "norms", "0"), "still empty"),
            (layer(GPT, "norms", "8 * 128 * 8 * 256"), "but not for one with b = 7, s = 44"),
            (layer(GPT, "norms", "8 * 44 * 7 * 70"), "but not for one with b = 8, s = 128"),
            (layer(GPT, "attention", "10 * s * b * h"), "2 bytes"),
            (layer(GPT, "probabilities", "4 * s * h * s * b // 32"), "Use b, s, h, a instead of"),
            (layer(GPT, "feed-forward", "36 * s * h"), "one sequence"),
            (lambda b, s, h, a: 1, "a dictionary with the keys"),
        ],
    ),
    "llama_formula": (
        [layer(LLAMA, "attention", "4 * b * s * (h + h + h + n * (h / a) * 2)")],
        [
            (layer(LLAMA, "norms", "16 * b * s * 256"), "Use b, s, h, a, n, f instead of numbers"),
            (layer(LLAMA, "attention", "4 * s * b * (3 * h + h // 2)"), "a = 10, n = 2, f = 50"),
            (layer(LLAMA, "probabilities", "4 * a * s"), "one sequence"),
            (layer(LLAMA, "feed-forward", "s * b * (h + 4 * f)"), "elements"),
            (layer(GPT), "Not answered yet"),
            (layer(GPT | dict.fromkeys(("attention", "feed-forward"), "0")), "Not answered yet"),
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
        [PARTS, PARTS | {"state": 82_507_776}, PARTS | {"logits": 25_165_832}],
        [
            (PARTS | {"state": 82.5}, "`state`: That is in MB"),
            (PARTS | {"norm and head": 526_336}, "`norm and head`: Not yet. You counted elements"),
            PARTS | {"logits": None},
            (BASELINE.peak_bytes, "keys"),
        ],
    ),
    "largest_batch": (
        [49, 49.0],
        [
            (48, "49 fits as well"),
            (50, "50 peaks at"),
            *((n, "1 to 10,000") for n in (17.5, 0, -1, "17")),
        ],
    ),
}
