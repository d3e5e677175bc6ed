"""Right and wrong answers to the exercises of lesson 01, with the expected messages."""

import weakref
from functools import partial

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons.lesson_01.exercises import (
    check_layer_formula,
    check_llama_formula,
    check_training_state,
    check_whole_peak,
    storages,
)

STATE = check_training_state.right_answer()
PARTS = check_whole_peak.right_answer()


def layer(check, row, formula):
    """A function of the sizes that returns the right bytes of each row, except for one formula."""
    return lambda *sizes: check.right_answer()(*sizes) | {row: formula(*sizes)}


gpt, llama = partial(layer, check_layer_formula), partial(layer, check_llama_formula)


def gpt_formulas(b, s, h, a, n, f):
    """The unanswered cell of the second formula, with the formulas of GPT."""
    return check_layer_formula.right_answer()(b, s, h, a)


# Meters
# --------------------------------------------------------------------------------------------------


def meter(go_in=True, named=True, dies=True, first=False, tensors=False, own=False, once=True):
    """A meter as learners write it, with or without one of its steps."""

    class Meter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            given = storages((args, kwargs) if named else args) if go_in else {}
            counted = set()
            for tensor in tree_leaves(result)[: 1 if first else None]:
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address not in counted and self.is_new(address, storage, given):
                    size = tensor.nbytes if tensors or own else storage.nbytes()
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    if once:
                        counted.add(address)
                    if dies:
                        holder = tensor if tensors else storage
                        weakref.finalize(holder, self.release, address, size)
            return result

        def is_new(self, address, storage, given):
            return address not in given

        def release(self, address, nbytes):
            self.live -= nbytes

    return Meter


def condition(is_new):
    """The meter of exercise 2 with a condition on address, storage and `given`."""

    class TinyMeter(meter()):
        def is_new(self, *of_a_result):
            return is_new(*of_a_result)

    return TinyMeter


class NeverRemoves(meter()):
    """Counts an address that no earlier result had, and never removes an address."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def is_new(self, address, storage, given):
        new = address not in self.addresses
        self.addresses.add(address)
        return new


class RecordsResults(NeverRemoves):
    """Removes an address when its storage is released, and checks only results."""

    def release(self, address, nbytes):
        self.addresses.discard(address)
        super().release(address, nbytes)


#: check -> right answers
RIGHT = {
    "training_state": [STATE | {"optimizer": 55_005_584}],
    "layer_formula": [gpt("attention", lambda b, s, h, a: 4 * (3 + 1 + 1) * b * s * h)],
    "llama_formula": [
        llama("attention", lambda b, s, h, a, n, f: 4 * b * s * (h + h + h + n * (h / a) * 2))
    ],
    "new_storages": [meter()],
    "meter": [meter()],
    "whole_peak": [PARTS | {"logits": 25_165_832}],
    "largest_batch": [49],
}

#: check -> wrong answers, each alone or with a part of the expected message
WRONG = {
    "adapter_bytes": [(14.32, "in GB")],
    "training_state": [
        (STATE | {"optimizer": 60_000_000}, "`optimizer`: Not yet. The number is too large.")
    ],
    "layer_formula": [
        (gpt("norms", lambda *_: 8 * 128 * 8 * 256), "but not for one with b = 7, s = 44"),
        (gpt("probabilities", lambda b, s, h, a: 4 * s * h * s * b // 32), "Use b, s, h, a"),
    ],
    "llama_formula": [
        (llama("norms", lambda b, s, *_: 16 * b * s * 256), "h, a, n, f instead of numbers"),
        (gpt_formulas, "Not answered yet"),
    ],
    "new_storages": [
        (condition(lambda address, storage, given: True), "You counted the storage of a view"),
        (RecordsResults, "existed before the meter started"),
        (NeverRemoves, "used again"),
        (condition(lambda address, storage, given: address in given), "storages of the arguments"),
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
    ],
    "meter": [
        (meter(go_in=False), "A view shares the storage"),
        (meter(named=False), "`kwargs`"),
        (meter(dies=False), "were released"),
        (meter(first=True), "several tensors"),
        (meter(tensors=True), "attach the finalizer to the storage"),
        (meter(own=True), "Its storage can be larger"),
        (meter(once=False), "three results that share it"),
        (RecordsResults, "existed before the meter started"),
        (NeverRemoves, "used again"),
        (lambda: 1, None),
    ],
    "whole_peak": [(PARTS | {"logits": None}, "`logits`: Not answered yet")],
    "largest_batch": [
        (48, "49 fits as well"),
        (50, "50 peaks at"),
        *((n, "1 to 10,000") for n in (17.5, "17")),
    ],
}
