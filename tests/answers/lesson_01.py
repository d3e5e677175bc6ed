"""Answers to the exercises of lesson 01: right ones, and wrong ones with what they are told."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.lessons import lesson_01
from course_lib.lessons.ledger import BASELINE, LAYER_BYTES


def state_of(parameter, gradient, optimizer):
    """The weights, and bytes a weight of each kind."""
    weights = 6_875_648
    kinds = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    return {"weights": weights, **{kind: size * weights for kind, size in kinds.items()}}


def counted(weights):
    return {**state_of(4, 4, 8), "weights": weights}


def meter(*, go_in=True, named=True, dies=True, first=False, tensors=False, own=False, once=True):
    """A meter as readers write it, with or without one of its steps."""

    class Meter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            known = (
                {s._cdata for s in _storages((args, kwargs) if named else args)} if go_in else set()
            )
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


def _storages(values):
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class ByPresence(TorchDispatchMode):
    """Right in another way: asks which storages were ever seen, and takes the dead ones out."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.seen:  # made before the block
                self.seen.add(storage._cdata)
                weakref.finalize(storage, self.seen.discard, storage._cdata)
        result = operator(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, address, nbytes):
        self.seen.discard(address)
        self.live -= nbytes


class ByLivePresence(TorchDispatchMode):
    """Looks only at results: a set of addresses, into which they go and which they leave."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, address, nbytes):
        self.seen.discard(address)
        self.live -= nbytes


class EverSeen(ByLivePresence):
    """Forgets no address."""

    def gone(self, address, nbytes):
        self.live -= nbytes


def parts(**changed):
    return {
        "state": 82_508_176,
        "layers": 167_903_232,
        "norm and head": 2_105_344,
        "logits": 25_165_824,
        **{name.replace("_", " "): value for name, value in changed.items()},
    }


def condition(is_new):
    """The meter of exercise 2 with a condition: a function of address, storage and `given`."""

    class TinyMeter(TorchDispatchMode):
        live = peak = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            given = lesson_01.storages((args, kwargs))
            for address, storage in lesson_01.storages(result).items():
                if is_new(address, storage, given):
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self.release, storage.nbytes())
            return result

        def release(self, nbytes):
            self.live -= nbytes

    return TinyMeter


def llama(**changed):
    rows = {
        "norms": lambda b, s, h, a, n, f: 16 * s * b * h,
        "statistics": lambda b, s, h, a, n, f: 8 * s * b,
        "attention": lambda b, s, h, a, n, f: 4 * s * b * (3 * h + 2 * n * h // a),
        "probabilities": lambda b, s, h, a, n, f: 4 * a * s * b,
        "feed-forward": lambda b, s, h, a, n, f: 4 * s * b * (h + 4 * f),
        **{name.replace("_", "-"): formula for name, formula in changed.items()},
    }
    return lambda **sizes: {name: formula(**sizes) for name, formula in rows.items()}


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
                (32e7, "adapters alone"),
            ),
            *(
                (14.24e9, "four fp32 numbers"),
                (14.3e9, "rounded"),
                (14.32, "in GB"),
                (1, "small"),
                (9e99, "large"),
            ),
        ],
    ),
    "training_state": (
        [
            state_of(4, 4, 8),
            {**state_of(4, 4, 8), "optimizer": 55_005_584},
            state_of(4.0, 4.0, 8.0),
        ],
        [
            *(
                (state_of(1, 4, 8), "counted numbers"),
                (state_of(4, 2, 8), "2 bytes"),
                (state_of(4, 4, 4), "keeps two"),
            ),
            *(
                (state_of(4, 4, 12), "master weights"),
                ({"parameter": 1}, "keys"),
                (state_of(4, 4, 9), "`optimizer`: Not yet. The number is too large."),
            ),
            *(
                (state_of(4, 8, 8), "`gradient`: Not yet. You counted two"),
                (state_of(4, 4, 16), "all three kinds"),
            ),
            (state_of(4, 32, 8), "adds them up"),
            *(
                (counted(4 * 6_875_648), "gave bytes"),
                (counted(6_875_648 - 128 * 256), "positions"),
                counted(7e6),
            ),
            *(
                (counted(6_875_648 + 2048 * 256), "same tensor"),
                (counted(6_875_648 - 8 * 9 * 256), "bias"),
            ),
            (
                counted(6_875_648 - 8 * 13 * 256 - 2 * 256),
                "13h numbers per layer. You left out the last LayerNorm",
            ),
            (counted(6_875_648 - 17 * 256), "a scale and a shift"),
            (counted(6_875_648 - 16 * 256), "a scale and a shift"),
            ({**state_of(4, 4, 8), "gradient": 26.23}, "in MiB"),
            (
                {**state_of(4, 4, 8), "parameter": 27.5e6},
                "`parameter`: Not yet. You rounded",
            ),
            ({**state_of(4, 4, 8), "optimizer": 55}, "`optimizer`: Not yet. That is in MB"),
        ],
    ),
    "layer_formula": (
        [layer(), layer(attention=lambda b, s, h, a: 4 * (3 + 1 + 1) * b * s * h)],
        [
            (layer(norms=lambda b, s, h, a: 2 * s * b * h), "counted elements"),
            (layer(norms=lambda b, s, h, a: 4 * s * b * h), "one LayerNorm"),
            (layer(norms=lambda b, s, h, a: 8 * s * h), "one sequence"),
            (layer(norms=lambda b, s, h, a: 0), "still empty"),
            (
                layer(norms=lambda b, s, h, a: 8 * 128 * 8 * 256),
                "Use b, s, h, a instead of the lesson's numbers",
            ),
            (
                layer(norms=lambda b, s, h, a: 8 * 44 * 7 * 70),
                "but not for the lesson's layer. Use b, s, h, a",
            ),
            (layer(attention=lambda b, s, h, a: 20 * s * b * h * a), "multiplied by a"),
            (layer(attention=lambda b, s, h, a: 4 * s * b * h * (2 + 3 * a)), "multiplied by a"),
            (layer(statistics=lambda b, s, h, a: 8 * s * b), "two numbers per token"),
            (layer(probabilities=lambda b, s, h, a: 4 * a * s * s), "one sequence"),
            (layer(probabilities=lambda b, s, h, a: 4 * s * s * b), "Each head"),
            (layer(probabilities=lambda b, s, h, a: 8 * a * s * s * b), "needs no S"),
            (layer(probabilities=lambda b, s, h, a: 4 * h * s * s * b), "multiplied by h"),
            (layer(attention=lambda b, s, h, a: 16 * s * b * h), "one of five"),
            (layer(attention=lambda b, s, h, a: 28 * s * b * h), "one product"),
            (layer(attention=lambda b, s, h, a: 12 * s * b * h), "Q, K and V"),
            (layer(attention=lambda b, s, h, a: 24 * s * b * h), "are five"),
            (layer(attention=lambda b, s, h, a: 10 * s * b * h), "2 bytes"),
            (
                layer(attention=lambda b, s, h, a: 20 * s * b * h + 4 * a * s * s * b),
                "its own row",
            ),
            (layer(**{"feed-forward": lambda b, s, h, a: 20 * s * b * h}), "4h wide"),
            (layer(**{"feed-forward": lambda b, s, h, a: 36 * s * h}), "one sequence"),
            (layer(**{"feed-forward": lambda b, s, h, a: 32 * s * b * h}), "own input"),
            (
                layer(**{"feed-forward": lambda b, s, h, a: 52 * s * b * h}),
                "counted a tensor twice",
            ),
            (
                layer(probabilities=lambda b, s, h, a: 4 * s * h * s * b // 32),
                "b = 7, s = 44",
            ),  # right for one size only
            (layer(norms=lambda b, s, h, a: 16 * s * b * h), "norms' outputs"),
            (layer(norms=lambda b, s, h, a: 8 * s * b * h + 16 * h), "counted weights"),
            (layer(statistics=lambda b, s, h, a: 16 * h), "for each token"),
            (layer(probabilities=lambda b, s, h, a: 2 * a * s * (s + 1) * b), "P is stored whole"),
            (
                layer(**{"feed-forward": lambda b, s, h, a: 40 * s * b * h}),
                "an addition keeps nothing",
            ),
            (layer(probabilities=lambda b, s, h, a: 2 * a * s * s * b), "half of P"),
            (
                layer(attention=lambda b, s, h, a: 20 * s * b * h + 16 * h * h),
                "counted weights",
            ),
            (
                layer(**{"feed-forward": lambda b, s, h, a: 36 * s * b * h + 32 * h * h}),
                "counted weights",
            ),
            (
                lambda **sizes: {name: count // 2 for name, count in layer()(**sizes).items()},
                "half of the right one",
            ),
            (lambda b, s, h, a: 1, "a dictionary with the keys"),
        ],
    ),
    "llama_formula": (
        [
            llama(),
            llama(attention=lambda b, s, h, a, n, f: 4 * b * s * (h + h + h + n * (h / a) * 2)),
        ],
        [
            (llama(norms=lambda b, s, h, a, n, f: 8 * s * b * h), "one tensor per norm"),
            (llama(norms=lambda b, s, h, a, n, f: 24 * s * b * h), "three tensors per norm"),
            (llama(norms=lambda b, s, h, a, n, f: 16 * s * b * h + 8 * h), "counted weights"),
            (llama(statistics=lambda b, s, h, a, n, f: 16 * s * b), "no mean"),
            (llama(statistics=lambda b, s, h, a, n, f: 4 * s * b), "one norm"),
            (llama(attention=lambda b, s, h, a, n, f: 20 * s * b * h), "as many heads as Q"),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (3 * h + n * h // a)),
                "one of K and V",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (2 * h + 2 * n * h // a)),
                "h wide",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (5 * h + 2 * n * h // a)),
                "`y` three times",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (4 * h + 2 * n * h // a)),
                "one tensor too many",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (3 * h + 2 * n)),
                "heads as numbers",
            ),
            (llama(probabilities=lambda b, s, h, a, n, f: 4 * a * s * s * b), "counted P"),
            (llama(probabilities=lambda b, s, h, a, n, f: 4 * s * b), "Each head has its own"),
            (llama(probabilities=lambda b, s, h, a, n, f: 4 * n * s * b), "heads of K and V"),
            (llama(probabilities=lambda b, s, h, a, n, f: 4 * a * s), "one sequence"),
            (llama(feed_forward=lambda b, s, h, a, n, f: 36 * s * b * h), "the other layer"),
            (llama(feed_forward=lambda b, s, h, a, n, f: 16 * s * b * f), "own input"),
            (
                llama(feed_forward=lambda b, s, h, a, n, f: 4 * s * b * (2 * h + 4 * f)),
                "the input twice",
            ),
            (
                llama(feed_forward=lambda b, s, h, a, n, f: 4 * s * b * (h + 3 * f)),
                "left out one of four",
            ),
            (
                llama(feed_forward=lambda b, s, h, a, n, f: 4 * s * b * (h + 2 * f)),
                "left out two of four",
            ),
            (
                llama(feed_forward=lambda b, s, h, a, n, f: 4 * s * b * (h + 5 * f)),
                "one wide tensor too many",
            ),
            (
                llama(feed_forward=lambda b, s, h, a, n, f: 4 * s * b * (h + 4 * f) + 12 * h * f),
                "counted weights",
            ),
            (llama(feed_forward=lambda b, s, h, a, n, f: s * b * (h + 4 * f)), "elements"),
            (
                llama(norms=lambda b, s, h, a, n, f: 16 * b * s * 256),
                "Use b, s, h, a, n, f instead of the lesson's numbers",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (3 * h + h // 2)),
                "but not for one with b = 3, s = 44, h = 70, a = 10, n = 2, f = 50. Use",
            ),
            (
                llama(attention=lambda b, s, h, a, n, f: 4 * s * b * (4 * h + 3 * n * h // a)),
                "before and after the rotation",
            ),
            *(
                (llama(**{name: formula}), "This is still the row of the other layer. ")
                for name, formula in {
                    "norms": lambda b, s, h, a, n, f: 8 * s * b * h,
                    "statistics": lambda b, s, h, a, n, f: 16 * s * b,
                    "attention": lambda b, s, h, a, n, f: 20 * s * b * h,
                    "probabilities": lambda b, s, h, a, n, f: 4 * a * s * s * b,
                    "feed_forward": lambda b, s, h, a, n, f: 36 * s * b * h,
                }.items()
            ),
            (
                lambda **sizes: {name: count // 2 for name, count in llama()(**sizes).items()},
                "half of the right one",
            ),
            (
                lambda b, s, h, a, n, f: layer()(b=b, s=s, h=h, a=a),
                "Not answered yet",
            ),
            (
                lambda b, s, h, a, n, f: {
                    **layer()(b=b, s=s, h=h, a=a),
                    **dict.fromkeys(("attention", "probabilities", "feed-forward"), 0),
                },
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
            (condition(lambda address, storage, given: True), "A view shares the storage"),
            (condition(lambda address, storage, given: storage not in given), "compare `address`"),
            (
                condition(lambda address, storage, given: True),
                "With `x = torch.empty(100).view(10, 10).t()[1:].detach()`, your meter",
            ),
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
            (meter(tensors=True), "A view shares"),
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
            *(
                (parts(state=110_010_368), "gradients of the parameters"),
                (parts(state=27_502_592), "Adam's state"),
            ),
            (parts(state=110_010_768), "gradients of the parameters"),
            (parts(layers=134_348_800), "You left out P"),
            (parts(norm_and_head=2_107_392), "in `state` already"),
            *(
                (parts(logits=8_388_608), "Backward has already"),
                (parts(logits=16_777_216), "two tensors"),
            ),
            *(
                (parts(logits=33_554_432), "logits themselves"),
                (parts(layers=LAYER_BYTES), "has eight"),
            ),
            *(
                (parts(norm_and_head=1_048_576), "keeps its own"),
                (parts(norm_and_head=2_097_152), "statistics"),
            ),
            *(
                (parts(norm_and_head=1_056_768), "one of two inputs"),
                (parts(norm_and_head=3 * 1_048_576 + 8_192), "They are the same tensor"),
                (parts(norm_and_head=526_336), "`norm and head`: Not yet. You counted elements"),
                (parts(layers=41_975_808), "`layers`: Not yet. You counted elements"),
                (parts(layers=167_772_160), "statistics of the layers' LayerNorms"),
                (parts(norm_and_head=10_493_952), "belongs to `logits`"),
            ),
            (
                parts(norm_and_head=2_105_344 + 16_452),
                "`norm and head`: Not yet. You counted token numbers or targets",
            ),
            (parts(norm_and_head=10_510_404), "belongs to `logits`"),
            *(
                (parts(state=82.5), "`state`: Not yet. That is in MB"),
                (parts(layers=167_900_000), "rounded"),
            ),
            *((BASELINE.peak_bytes, "keys"), (BASELINE.peak_bytes - 8, "keys"), parts(logits=None)),
        ],
    ),
    "largest_batch": (
        [17, 17.0],
        [
            (16, "17 fits as well"),
            (18, "18 peaks at"),
            (23, "with one sequence"),
            (19, "have no Adam state yet"),
            *((n, "1 to 10,000") for n in (17.5, 0, -1, "17")),
        ],
    ),
}
