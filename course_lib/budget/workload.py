"""What the command is asked about: a model and a batch, from a config.json, a function of the
user's, or sizes."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from course_lib._check import shown
from course_lib._origin import origin
from course_lib.configs import model_from, read_config
from course_lib.configs import shape_of as config_shape
from course_lib.labels import text
from course_lib.memory import symbolic
from course_lib.models import Decoder, random_tokens

from .loss import samples_in
from .step import check_function, pieces_of

HEAD_DIM = 128
VOCABULARY = 32_000
BY_SIZES = ("sequence", "batch", "vocabulary")  # of the course's decoder


@dataclass(frozen=True)
class Workload:
    """A model and its batch, as `fit` takes them, and what they are in words."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    loss_sum: Callable | None
    name: str
    batch: str

    def parameters(self) -> int:
        with symbolic():
            return sum(p.numel() for p in self.make_model().parameters())


def workload_of(given: Namespace) -> Workload:
    """By --config, --model, or else by sizes.

    Raises:
        ValueError: something is missing, cannot be found, or does not go together; in one sentence.
    """
    sizes = [
        name
        for name in ("parameters", "hidden", "layers", "heads")
        if getattr(given, name) is not None
    ]
    ways = [name for name in ("config", "model") if getattr(given, name) is not None] + sizes[:1]
    if len(ways) != 1:
        got = " and ".join(f"--{name}" for name in ways) or "missing"
        raise ValueError(
            f"the model is {got}; it takes --config, or --model, or --parameters, or --hidden and"
            " --layers"
        )
    fits = {"--model": ("batch_from",), "--config": ("sequence", "batch")}.get(
        f"--{ways[0]}", BY_SIZES
    )
    for name in ("batch_from", *BY_SIZES):
        if getattr(given, name) is not None and name not in fits:
            raise ValueError(
                f"--{name.replace('_', '-')} comes with --{ways[0]}, which does without"
            )
    if given.model:
        return _by_function(given)
    for name in ("sequence", "batch"):
        if getattr(given, name) is None:
            raise ValueError(f"--{name} is missing; it takes a whole number")
    return _by_config(given) if given.config else _by_sizes(given)


def _by_config(given: Namespace) -> Workload:
    config = read_config(given.config)
    model, sizes = config_shape(config, given.sequence)
    with symbolic():  # one layer says what else is wrong with the config
        model(**{**sizes, "layers": 1})
    said = "{file} ({kind}, in this course's plain implementation of its shapes)"
    name = text(said, file=given.config, kind=config["model_type"])
    make_model = partial(model_from, config, sequence=given.sequence)
    return Workload(make_model, *_tokens(given, sizes["vocabulary"]), name, _samples(given))


def _by_function(given: Namespace) -> Workload:
    make_model = _found("--model", given.model)
    make_batch = getattr(make_model, "make_batch", None)
    if given.batch_from:
        make_batch = _found("--batch-from", given.batch_from)
    if make_batch is None:
        got = f"--batch-from is missing and {given.model} has no attribute make_batch"
        raise ValueError(f"{got}; it takes a function, as package:function, that returns a batch")
    check_function("make_batch", make_batch)
    with symbolic():
        [batch] = pieces_of(make_batch(), 1)
        count = samples_in(batch)
    return Workload(
        make_model,
        make_batch,
        getattr(make_model, "loss_sum", None),
        given.model,
        text("{count} samples", count=count),
    )


def _by_sizes(given: Namespace) -> Workload:
    hidden, layers, vocabulary = given.hidden, given.layers, given.vocabulary or VOCABULARY
    if given.parameters is not None:
        wanted = shape_of(given.parameters, vocabulary)
        hidden, layers = hidden or wanted[0], layers or wanted[1]
    if not hidden or not layers:
        raise ValueError("the size is missing; it takes --parameters, or --hidden and --layers")
    most = max(1, hidden // HEAD_DIM)
    heads = given.heads or max(count for count in range(1, most + 1) if hidden % count == 0)
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "layers": layers, "heads": heads}
    name = text(
        "a decoder: hidden {hidden}, {layers} layers, {heads} heads, vocabulary {vocabulary}",
        **sizes,
    )
    return Workload(
        lambda: Decoder(**sizes, sequence=given.sequence),
        *_tokens(given, vocabulary),
        name,
        _samples(given),
    )


def _tokens(given: Namespace, vocabulary: int) -> tuple[Callable[[], Any], None]:
    return lambda: random_tokens(given.batch, given.sequence, vocabulary), None


def _samples(given: Namespace) -> str:
    one = "{count} sample of {sequence} tokens"
    many = "{count} samples of {sequence} tokens"
    return text(one if given.batch == 1 else many, count=given.batch, sequence=given.sequence)


def _found(option: str, name: str) -> Callable:
    """The function that "package.module:function" names."""
    module, _, attribute = name.partition(":")
    takes = "it takes package.module:function, which can be imported from here"
    if not attribute:
        raise ValueError(f"{option} is {name!r}, without a function after a colon; {takes}")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, ValueError, AttributeError) as error:
        if origin(error) is not None:  # found, and its own code fails
            raise
        raise ValueError(f"{option} is {name!r}, which is not found ({error}); {takes}") from None
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(f"{option} is {name!r}, {shown(found)}; {takes}")
    return found


def shape_of(parameters: float, vocabulary: int) -> tuple[int, int]:
    """hidden and layers of a decoder with about so many parameters: v h, 12 h^2 a layer, a layer
    for each 128 of h."""

    def count(hidden: int, layers: int) -> int:
        return vocabulary * hidden + 12 * layers * hidden**2

    hidden = HEAD_DIM
    while count(hidden + HEAD_DIM, hidden // HEAD_DIM + 1) <= parameters:
        hidden += HEAD_DIM
    # The number of layers is whole, so the width next to this one may come nearer.
    shapes = [
        (h, max(1, round((parameters - vocabulary * h) / (12 * h**2))))
        for h in (hidden, hidden + HEAD_DIM)
    ]
    return min(shapes, key=lambda shape: abs(count(*shape) - parameters))
