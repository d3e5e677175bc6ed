"""Make the model and the batch that the options of a command specify.

The model is given by a `config.json`, by a user's function, or by sizes. `course_lib.configs`
builds the model of a `config.json` from plain modules if it supports the type of model. For other
types, the package transformers builds the model, so it must be installed.
"""

from __future__ import annotations

import json
import math
import pkgutil
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from course_lib._batches import Split, samples_in
from course_lib._check import describe
from course_lib._hugging_face_losses import takes_arguments
from course_lib._origin import origin
from course_lib.adapters import with_adapters
from course_lib.configs import KNOWN, model_from, read_config
from course_lib.configs import shape_of as config_shape
from course_lib.labels import text, verbatim
from course_lib.models import Attention, Decoder, random_tokens
from course_lib.symbolic import symbolic

HEAD_DIM = 128  # features per head, for a model given by its number of parameters
VOCABULARY = 32_000  # default of --vocabulary
# Options that can be combined with the sizes of a model (--parameters, --hidden, --layers).
BY_SIZES = ("sequence", "batch", "vocabulary")


@dataclass(frozen=True)
class Source:
    """Python code that makes a model and a batch, for a training script that a command writes.

    Attributes:
        imports: Import statements, one per item.
        lines: Lines of code that define the functions `make_model` and `make_batch`.
        by_transformers: Whether the model comes from the package `transformers`. Such a model
            returns its own loss.
    """

    imports: tuple[str, ...]
    lines: tuple[str, ...]
    by_transformers: bool = False


@dataclass(frozen=True)
class Workload:
    """Model and batch for which a command estimates the memory.

    Attributes:
        make_model: Function without arguments that returns the model.
        make_batch: Function without arguments that returns the batch.
        loss_sum: Function (model, batch) that returns (sum of losses, weight). The weight is the
            number by which the sum is divided, such as the number of tokens. None uses the model's
            own loss.
        name: Text that describes the model.
        batch: Text that describes the batch.
        samples: Number of samples in the batch; None if it is not known.
        split: Function (batch, parts) that returns a list of `parts` batches. None splits all
            tensors of the batch along their first dimension.
        attention: Value of `Recipe.attention` for the baseline (the step without memory-saving
            techniques). None leaves the model's attention unchanged, because the model already
            calls PyTorch's `scaled_dot_product_attention`.
        block_list: Name of the list of blocks in the model that the user trains, such as
            "model.layers". It is set only if the user's model is from transformers and `make_model`
            returns a model of the course with the same shapes instead. None if `make_model` returns
            the user's model.
        source: Code that makes the model and the batch in a script; None if the command writes no
            script.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    loss_sum: Callable | None
    name: str
    batch: str
    samples: int | None
    split: Split | None = None
    attention: str | None = None
    block_list: str | None = None
    source: Source | None = None

    def parameters(self) -> int:
        """Return the number of elements of all parameters of the model.

        All elements of a quantized weight are counted, even if several are packed into one byte.
        """
        with symbolic():
            return sum(map(_num_elements, self.make_model().parameters()))


def workload_of(given: Namespace) -> Workload:
    """Return the model and the batch that the options of a command specify.

    The model is given by a `config.json` (--config), by a function (--model), or by sizes
    (--parameters, or --hidden and --layers). A model built from a config or from sizes calls
    PyTorch's `scaled_dot_product_attention`, which is also the default of transformers. A model
    that a user's function makes is not changed.

    Args:
        given: The parsed options. If `given.framework` is set, the command writes a script. The
            workload then has a `source`, and the model of a config is built by transformers, as in
            the script.

    Raises:
        ValueError: An option is missing, names something that cannot be found, or cannot be
            combined with another one.
    """
    sizes = [
        name
        for name in ("parameters", "hidden", "layers", "heads")
        if getattr(given, name) is not None
    ]
    ways = [name for name in ("config", "model") if getattr(given, name) is not None] + sizes[:1]
    if len(ways) != 1:
        actual = " and ".join(f"--{name}" for name in ways) or "none"
        raise ValueError(
            "the model must be given by one of --config, --model, --parameters, or"
            f" --hidden and --layers, got {actual}"
        )
    fits = {"--model": ("batch_from",), "--config": ("sequence", "batch")}.get(
        f"--{ways[0]}", BY_SIZES
    )
    for name in ("batch_from", *BY_SIZES):
        if getattr(given, name) is not None and name not in fits:
            why = "only with --model" if name == "batch_from" else "which already sets it"
            raise ValueError(
                f"--{name.replace('_', '-')} cannot be combined with --{ways[0]}, {why}"
            )
    _check_adapters(given)
    if given.model:
        return _with_lora(_by_function(given), given)
    if given.config:
        # The file is read here so that an unreadable file is reported before a missing option.
        read_config(given.config)
    for name in ("sequence", "batch"):
        if getattr(given, name) is None:
            raise ValueError(f"--{name} is missing: pass a whole number")
    return _with_lora(_by_config(given) if given.config else _by_sizes(given), given)


@dataclass(frozen=True)
class ConfiguredModel:
    """Functions that make the model of a `config.json` and its batches.

    Below, b is the number of samples in a batch, and s is the number of tokens per sample.

    Attributes:
        make_model: Function without arguments that builds the model in fp32, with random weights.
        make_batch: Function (samples, seed) that returns a batch of random tokens for the model.
        vocabulary: Number of different tokens.
        plain: Whether the model consists of the course's modules. If True, a batch is a tensor of
            shape (b, s + 1). If False, the model is from transformers and returns its own loss, and
            a batch is a dict {"input_ids": (b, s), "labels": (b, s)}.
        family: Name of the class of transformers that builds the model, one of `FAMILIES`; None if
            `plain` is True.
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Any]
    vocabulary: int
    plain: bool
    family: str | None = None


def model_of_config(
    file: Path | str, sequence: int, by_transformers: bool = False
) -> ConfiguredModel:
    """Return functions that make the model of a `config.json` and its batches.

    Args:
        file: Path of the `config.json`.
        sequence: Number of tokens per sample.
        by_transformers: Whether transformers builds the model even if `course_lib.configs` supports
            its type.

    Raises:
        ValueError: The file is not a config, a size is missing, or the model accepts only shorter
            sequences. The error is also raised if neither `course_lib.configs` nor the installed
            transformers supports the type of the model.
    """
    config = read_config(file)
    if config.get("model_type") in KNOWN and not by_transformers:
        model, sizes = config_shape(config, sequence)
        with symbolic():  # a model with one layer is built to report any other error in the config
            model(**{**sizes, "layers": 1})
        vocabulary = sizes["vocabulary"]
        return ConfiguredModel(
            partial(model_from, config, sequence=sequence),
            lambda samples, seed=0: random_tokens(samples, sequence, vocabulary, seed=seed),
            vocabulary,
            plain=True,
        )
    if sequence < 2:
        raise ValueError(
            "--sequence must be at least 2 for a model that predicts the next token, got"
            f" {sequence}"
        )
    made, vocabulary, family = _by_transformers(config, sequence)

    def make_batch(samples: int, seed: int = 0) -> dict[str, Tensor]:
        tokens = random_tokens(samples, sequence, vocabulary, seed=seed)[:, :sequence]
        return {"input_ids": tokens.contiguous(), "labels": tokens.clone()}

    return ConfiguredModel(made, make_batch, vocabulary, plain=False, family=family)


#: Classes of transformers whose models take tokens and labels, in the order of their preference.
FAMILIES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


def _num_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter, which may be quantized."""
    # bitsandbytes packs two 4-bit weights into a byte. The attribute `quant_state` has the shape of
    # the unpacked weights.
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def _check_adapters(given: Namespace) -> None:
    """Raise ValueError if an option for adapters was given without --lora."""
    for option in ("lora_targets", "base"):
        if getattr(given, option, None) is not None and not given.lora:
            raise ValueError(
                f"--{option.replace('_', '-')} cannot be used without --lora, the rank of the"
                " adapters"
            )


def _with_lora(workload: Workload, given: Namespace) -> Workload:
    """Return the workload with the adapters of --lora added to its model."""
    if not getattr(given, "lora", None):
        return workload
    targets, base = given.lora_targets, given.base or "bf16"
    if targets is not None and len(targets) == 1:
        (targets,) = targets if targets[0] == "all-linear" else ([*targets],)
    make_model = with_adapters(workload.make_model, given.lora, targets=targets, base=base)
    name = text(
        "{model}, LoRA of rank {rank} on frozen {base} weights",
        model=workload.name,
        rank=given.lora,
        base=verbatim(base),
    )
    source = workload.source and _with_adapters_in(workload.source, given.lora, targets, base)
    return replace(workload, make_model=make_model, name=name, block_list=None, source=source)


def _by_transformers(
    config: Mapping[str, Any], sequence: int
) -> tuple[Callable[[], nn.Module], int, str]:
    """Return (function that makes the model, size of its vocabulary, its class in `FAMILIES`).

    Raises:
        ValueError: transformers is not installed, does not support this type of model, or supports
            only shorter sequences.
    """
    name, known = config.get("model_type"), ", ".join(KNOWN)
    try:
        import transformers
    except ImportError:
        if name in KNOWN:
            raise ValueError(
                "transformers must be installed to add adapters to this model, or to write a"
                " script for it: pip install transformers peft"
            ) from None
        raise ValueError(
            f"model_type must be one of {known}, got {name!r}; with transformers installed"
            " (pip install transformers) it may be any type that transformers knows"
        ) from None
    if name not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"model_type must be one of {known}, or one that transformers"
            f" {transformers.__version__} knows, got {name!r}"
        )
    settings = transformers.AutoConfig.for_model(**config)
    classes = {family: getattr(transformers, family) for family in FAMILIES}
    kinds = [name for name, each in classes.items() if type(settings) in each._model_mapping]
    if not kinds:
        raise ValueError(
            "model_type must be a type for which transformers has a language model, got"
            f" {name!r}. For other models, pass --model with a function that returns a model, and"
            " --batch-from with a function that returns a batch"
        )
    text_settings = settings.get_text_config()
    longest = getattr(text_settings, "max_position_embeddings", None)
    if longest is not None and sequence > longest:
        raise ValueError(
            f"sequence must be at most {longest} (the limit of the config), got {sequence}"
        )
    make_model = partial(classes[kinds[0]].from_config, settings)
    return make_model, text_settings.vocab_size, kinds[0]


def _by_config(given: Namespace) -> Workload:
    """Return the workload for the model that the file of --config describes."""
    adapted, scripted = bool(getattr(given, "lora", None)), _is_scripted(given)
    found = model_of_config(given.config, given.sequence, by_transformers=adapted or scripted)
    kind = json.loads(Path(given.config).read_text("utf-8-sig"))["model_type"]
    label = (
        "{file} ({kind}, in this course's plain implementation of its shapes)"
        if found.plain
        else "{file} ({kind}, by transformers)"
    )
    name = text(label, file=verbatim(Path(given.config).name), kind=verbatim(kind))
    make_model = partial(with_fused_attention, found.make_model)
    block_list = ("transformer.h" if kind == "gpt2" else "model.layers") if found.plain else None
    return Workload(
        make_model,
        partial(found.make_batch, given.batch),
        None,
        name,
        _samples_label(given),
        samples=given.batch,
        block_list=block_list,
        source=_source_of_config(given, found) if scripted else None,
    )


def with_fused_attention(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Make a model and let its attention modules call PyTorch's `scaled_dot_product_attention`.

    Only modules of the class `course_lib.models.Attention` are changed.

    Args:
        make_model: Function without arguments that returns the model.
    """
    model = make_model()
    for module in model.modules():
        if isinstance(module, Attention):
            module.fused = True
    return model


def _by_function(given: Namespace) -> Workload:
    """Return the workload whose model is made by the function that --model names.

    The function of --batch-from makes the batch. Without --batch-from, the attribute `make_batch`
    of the function of --model makes it.
    """
    make_model = named_function("--model", given.model)
    make_batch = getattr(make_model, "make_batch", None)
    if given.batch_from:
        make_batch = named_function("--batch-from", given.batch_from)
    if make_batch is None:
        raise ValueError(
            "a function that returns a batch is missing: pass it with --batch-from"
            f" package.module:function, or set it as the attribute make_batch of {given.model}"
        )
    samples = samples_of(make_batch)
    batch = "a batch whose number of samples is not known"
    return Workload(
        make_model,
        make_batch,
        getattr(make_model, "loss_sum", None),
        verbatim(given.model),
        text(batch) if samples is None else text("{count} samples", count=samples),
        attention="standard",
        samples=samples,
        split=getattr(make_model, "split", None),
        source=_source_of_function(given, make_model) if _is_scripted(given) else None,
    )


def samples_of(make_batch: Any) -> int | None:
    """Return the number of samples in the batch that a function makes, without allocating memory.

    The function runs on symbolic tensors, which have shapes but need no memory. The result is None
    if the number cannot be determined, for example because the first dimensions of the tensors
    differ.

    Args:
        make_batch: Function without arguments that returns the batch.

    Raises:
        TypeError: `make_batch` is not a function without arguments.
        ValueError: The batch has no samples.
    """
    if isinstance(make_batch, nn.Module) or not callable(make_batch):
        raise TypeError(
            f"make_batch must be a function without arguments, got {describe(make_batch)}"
        )
    takes_arguments("make_batch", make_batch, "no arguments")
    with symbolic():
        batch = make_batch()
        samples = samples_in(batch)
        if samples == 0:
            raise ValueError(
                f"batch must contain at least one sample, got {describe(batch)} without samples"
            )
        return samples


def _by_sizes(given: Namespace) -> Workload:
    """Return the workload of a decoder with the size that the options give.

    These options are --parameters, or --hidden and --layers.
    """
    hidden, layers, vocabulary = given.hidden, given.layers, given.vocabulary or VOCABULARY
    if given.parameters is not None:
        wanted = shape_of(given.parameters, vocabulary)
        hidden, layers = hidden or wanted[0], layers or wanted[1]
    if not hidden or not layers:
        raise ValueError("the size is missing: pass --parameters, or --hidden and --layers")
    most = max(1, hidden // HEAD_DIM)
    heads = given.heads or max(count for count in range(1, most + 1) if hidden % count == 0)
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "layers": layers, "heads": heads}
    name = text(
        "a decoder: hidden {hidden}, layers {layers}, heads {heads}, vocabulary {vocabulary}",
        **sizes,
    )
    return Workload(
        lambda: Decoder(**sizes, sequence=given.sequence, fused=True),
        *_token_batches(given, vocabulary),
        name,
        _samples_label(given),
        samples=given.batch,
        source=_source_of_sizes(given, sizes) if _is_scripted(given) else None,
    )


def _token_batches(given: Namespace, vocabulary: int) -> tuple[Callable[[], Any], None]:
    """Return `make_batch` of a workload with random tokens, and its `loss_sum`, which is None."""
    return lambda: random_tokens(given.batch, given.sequence, vocabulary), None


def _samples_label(given: Namespace) -> str:
    """Return a label that describes the batch, such as "8 samples of 1024 tokens"."""
    one = "{count} sample of {sequence} tokens"
    many = "{count} samples of {sequence} tokens"
    return text(one if given.batch == 1 else many, count=given.batch, sequence=given.sequence)


# ---- Code that makes the model and the batch in a script


def _is_scripted(given: Namespace) -> bool:
    """Return whether the command writes a training script, that is, whether --framework is set."""
    return getattr(given, "framework", None) is not None


def _source_of_config(given: Namespace, found: ConfiguredModel) -> Source:
    """Return code that builds the model of a config with transformers, and makes a batch for it."""
    return Source(
        ("import torch", f"from transformers import AutoConfig, {found.family}"),
        (
            "def make_model():",
            f"    config = AutoConfig.from_pretrained({_as_code(given.config)})",
            f"    return {found.family}.from_config(config)  # from_pretrained(...) loads weights",
            "",
            "def make_batch():",
            f"    tokens = torch.randint({found.vocabulary}, ({given.batch}, {given.sequence}))"
            "  # your data",
            '    return {"input_ids": tokens, "labels": tokens.clone()}',
        ),
        by_transformers=True,
    )


def _source_of_sizes(given: Namespace, sizes: Mapping[str, int]) -> Source:
    """Return code that builds a `Decoder` with the given sizes, and makes a batch for it."""
    arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
    tokens = f"{given.batch}, {given.sequence}, {sizes['vocabulary']}"
    return Source(
        ("from course_lib.models import Decoder, random_tokens",),
        (
            "def make_model():",
            f"    return Decoder({arguments}, sequence={given.sequence}, fused=True)",
            "",
            "def make_batch():",
            f"    return random_tokens({tokens})  # your data",
        ),
    )


def _source_of_function(given: Namespace, make_model: Callable[[], nn.Module]) -> Source:
    """Return code that imports the user's functions as `make_model` and `make_batch`."""
    named, imports, lines = {"make_model": given.model}, [], []
    if given.batch_from:
        named["make_batch"] = given.batch_from
    for name, place in named.items():
        module, _, path = place.partition(":")
        first, dot, rest = path.partition(".")
        imports.append(f"from {module} import {first}{f' as {name}' * (first != name)}")
        lines += [f"{name} = {name}.{rest}"] * bool(dot)
    if not given.batch_from:
        lines.append("make_batch = make_model.make_batch")
    with symbolic():
        by_transformers = is_of_transformers(make_model())
    return Source((*imports,), (*lines,), by_transformers)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a `PreTrainedModel` of the library `transformers`.

    If the model is wrapped by the library `peft`, the model inside the wrapper is examined.
    """
    classes = [("transformers", "PreTrainedModel"), ("peft", "PeftModel")]
    # Neither package is imported here. If the model is of one of these classes, its package has
    # been imported already.
    found = [getattr(sys.modules.get(package), name, None) for package, name in classes]
    own, adapted = (isinstance(model, each) if each else False for each in found)
    return own or (adapted and is_of_transformers(model.get_base_model()))


def _with_adapters_in(source: Source, rank: int, targets: Any, base: str) -> Source:
    """Return code for a model and a batch, extended by a line that adds adapters to the model."""
    named = [str(rank), *([] if targets is None else [f"targets={_as_code(targets)}"])]
    line = f"make_model = with_adapters(make_model, {', '.join(named)}, base={_as_code(base)})"
    return replace(
        source,
        imports=(*source.imports, "from course_lib.adapters import with_adapters"),
        lines=(*source.lines, "", line),
    )


def _as_code(value: Any) -> str:
    """Return a string, a path or a list of strings as Python code."""
    return json.dumps(value if isinstance(value, list) else str(value), ensure_ascii=False)


def named_function(option: str, name: str) -> Callable[..., Any]:
    """Import a function by its name, such as "package.module:function", and return it.

    Args:
        option: Command-line option whose value is the name, for the error message.
        name: Name of the function, with a colon after the module.

    Raises:
        ValueError: No function has this name. An error that the code of the module raises is passed
            on unchanged.
    """
    allowed = "package.module:function, the name of a function that can be imported"
    if not name.partition(":")[2]:
        raise ValueError(
            f"{option} must be {allowed}, got {name!r} without a function after a colon"
        )
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, ValueError, AttributeError) as error:
        if origin(error) is not None:  # the module was found, but its own code fails
            raise
        advice = (
            "; run the command in the folder of the module, or add that folder to PYTHONPATH"
            if isinstance(error, ModuleNotFoundError)
            else ""
        )
        raise ValueError(
            f"{option} must be {allowed}, got {name!r}, which is not found ({error}){advice}"
        ) from None
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(
            f"{option} must be {allowed}, got {name!r}, which is {describe(found)}, not a function"
        )
    return found


def shape_of(parameters: float, vocabulary: int) -> tuple[int, int]:
    """Return the pair (hidden size, layers) of a decoder with about `parameters` parameters.

    The decoder has about one layer per 128 units of its hidden size h. The embedding has v h
    parameters, where v is the size of the vocabulary, and each layer has 12 h^2 parameters.

    Args:
        parameters: Number of parameters to approximate.
        vocabulary: Size of the vocabulary.
    """

    def count(hidden: int, layers: int) -> int:
        return vocabulary * hidden + 12 * layers * hidden**2

    hidden = HEAD_DIM
    while count(hidden + HEAD_DIM, hidden // HEAD_DIM + 1) <= parameters:
        hidden += HEAD_DIM
    # The number of layers is rounded, so the next larger width can give a total that is closer to
    # `parameters`.
    shapes = [
        (h, max(1, round((parameters - vocabulary * h) / (12 * h**2))))
        for h in (hidden, hidden + HEAD_DIM)
    ]
    return min(shapes, key=lambda shape: abs(count(*shape) - parameters))
