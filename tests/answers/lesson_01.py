"""Answers to the exercises of lesson 01: right ones, and wrong ones with what they are told."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def parts(**changed):
    return {
        "state": 82_508_176,
        "layers": 167_903_232,
        "norm and head": 2_105_344,
        "logits": 25_165_824,
        **{name.replace("_", " "): value for name, value in changed.items()},
    }


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
            *(
                (14.24e9, "four fp32 numbers"),
                (14.3e9, "rounding"),
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
                (state_of(1, 4, 8), "counts numbers"),
                (state_of(4, 2, 8), "2 bytes"),
                (state_of(4, 4, 4), "keeps two"),
            ),
            *(
                (state_of(4, 4, 12), "Master weights"),
                ({"parameter": 1}, "keys"),
                state_of(4, 4, 9),
            ),
            *(
                (state_of(4, 8, 8), "`gradient`: Not yet. That is two"),
                (state_of(4, 4, 16), "all three kinds"),
            ),
            (state_of(4, 32, 8), "added up"),
            *(
                (counted(4 * 6_875_648), "in bytes"),
                (counted(6_875_648 - 128 * 256), "positions"),
                counted(7e6),
            ),
            *(
                (counted(6_875_648 + 2048 * 256), "one tensor"),
                (counted(6_875_648 - 8 * 9 * 256), "bias"),
            ),
            (counted(6_875_648 - 8 * 13 * 256 - 2 * 256), "13h numbers. The last LayerNorm"),
            (counted(6_875_648 - 17 * 256), "a scale and a shift"),
            (counted(6_875_648 - 16 * 256), "a scale and a shift"),
            ({**state_of(4, 4, 8), "gradient": 26.23}, "in MiB"),
            (
                {**state_of(4, 4, 8), "parameter": 27.5e6},
                "`parameter`: Not yet. Right but for rounding",
            ),
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
            (layer(probabilities=lambda b, s, h, a: 8 * a * s * s * b), "needs no S"),
            (layer(attention=lambda b, s, h, a: 16 * s * b * h), "output projection"),
            (layer(attention=lambda b, s, h, a: 28 * s * b * h), "one product"),
            (layer(attention=lambda b, s, h, a: 12 * s * b * h), "V are three"),
            (layer(attention=lambda b, s, h, a: 24 * s * b * h), "are five"),
            (layer(attention=lambda b, s, h, a: 10 * s * b * h), "2 bytes"),
            (
                layer(attention=lambda b, s, h, a: 20 * s * b * h + 4 * a * s * s * b),
                "row of its own",
            ),
            (layer(**{"feed-forward": lambda b, s, h, a: 20 * s * b * h}), "4h wide"),
            (layer(**{"feed-forward": lambda b, s, h, a: 32 * s * b * h}), "own input"),
            (layer(**{"feed-forward": lambda b, s, h, a: 52 * s * b * h}), "one tensor, not two"),
            (
                layer(probabilities=lambda b, s, h, a: 4 * s * h * s * b // 32),
                "b = 3, s = 40",
            ),  # right for one size only
            (layer(norms=lambda b, s, h, a: 16 * s * b * h), "what they give"),
            (layer(norms=lambda b, s, h, a: 8 * s * b * h + 16 * h), "Weights don't count"),
            (layer(statistics=lambda b, s, h, a: 16 * h), "for each token"),
            (layer(probabilities=lambda b, s, h, a: 2 * a * s * (s + 1) * b), "P is stored whole"),
            (
                layer(**{"feed-forward": lambda b, s, h, a: 40 * s * b * h}),
                "an addition keeps nothing",
            ),
            (layer(probabilities=lambda b, s, h, a: 2 * a * s * s * b), "The mask saves nothing"),
            (
                layer(attention=lambda b, s, h, a: 20 * s * b * h + 16 * h * h),
                "Weights don't count",
            ),
            (
                layer(**{"feed-forward": lambda b, s, h, a: 36 * s * b * h + 32 * h * h}),
                "Weights don't count",
            ),
            (
                lambda **sizes: {name: count // 2 for name, count in layer()(**sizes).items()},
                "Every row is half",
            ),
            (lambda b, s, h, a: 1, "five rows"),
        ],
    ),
    "meter": (
        [meter(), ByPresence],
        [
            (meter(go_in=False), "A view shares its base's storage"),
            (meter(named=False), "`kwargs`"),
            (meter(dies=False), "takes its bytes with it"),
            (meter(first=True), "several tensors"),
            (meter(tensors=True), "A view shares"),
            (meter(own=True), "Its storage may be larger"),
            (meter(once=False), "three results that share it"),
            (lambda: 1, None),
        ],
    ),
    "whole_peak": (
        [parts(), parts(state=82_507_776), parts(logits=25_165_832)],
        [
            *((parts(state=110_010_368), "No gradient"), (parts(state=27_502_592), "Adam's state")),
            (parts(state=110_010_768), "No gradient"),
            (parts(layers=134_348_800), "You left out P"),
            (parts(norm_and_head=2_107_392), "in `state` already"),
            *((parts(logits=8_388_608), "Backward has begun"), (parts(logits=16_777_216), "Three")),
            *(
                (parts(logits=33_554_432), "result only"),
                (parts(layers=20_987_904), "eight layers"),
            ),
            *(
                (parts(norm_and_head=1_048_576), "keeps its own"),
                (parts(norm_and_head=2_097_152), "statistics"),
            ),
            *(
                (parts(norm_and_head=1_056_768), "One is missing"),
                (parts(norm_and_head=10_493_952), "part of their"),
            ),
            (
                parts(norm_and_head=2_105_344 + 16_452),
                "`norm and head`: Not yet. Token numbers and targets",
            ),
            (parts(norm_and_head=10_510_404), "part of their own"),
            *(
                (parts(state=82.5), "`state`: Not yet. That is in MB"),
                (parts(layers=167_900_000), "rounding"),
            ),
            *((277_682_584, "keys"), (277_682_576, "keys"), parts(logits=None)),
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
    "swiglu_bytes": (
        [8_912_896],
        [
            8_912_897,
            (8.912896, "in MB"),
            (8_912_896 / 4, "number of elements"),
            (8_912_896 / 2, "2 bytes a number"),
            (4_718_592, "gate's branch"),
        ],
    ),
}
