"""Steps that train fewer parameters or store fewer bits per element, and tables on their errors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.lessons.lesson_01.figures import with_adapters
from course_lib.models import Decoder
from course_lib.teaching import Table, table

from .fewer_bits import FourBitLinear


def in_four_bits(decoder: Decoder) -> Decoder:
    """Freeze a decoder, and round the weights of all linear layers in its blocks to 4 bits.

    The decoder is changed and returned.
    """
    return replace_linear(decoder.requires_grad_(False), FourBitLinear)


def replace_linear(decoder: Decoder, replace: Callable[[Any], nn.Module]) -> Decoder:
    """Replace each linear layer in a decoder's blocks, and return the decoder.

    Args:
        decoder: The decoder, which is changed.
        replace: Function that takes an `nn.Linear` or a `FourBitLinear`, and returns the new layer.
    """
    for layer in decoder.layers:
        for parent in (layer.attention, layer.feedforward):
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.Linear, FourBitLinear)):
                    setattr(parent, name, replace(child))
    return decoder


def compare_gradients(make_model: Callable[[], Decoder], make_batch: Callable[[], Tensor]) -> Table:
    """Return a table that compares gradients of LoRA and QLoRA adapters with reference gradients.

    The table also has the relative rounding error of the 4-bit weights.

    Args:
        make_model: Function that returns a new decoder.
        make_batch: Function that returns the batch. Its first two sequences are used.
    """

    def make_two() -> Tensor:
        return make_batch()[:2]

    rounding, gradients = _four_bit_differences(make_model, make_two)
    chain = _chain_rule_difference(make_model, make_two)
    rows = [
        ("LoRA", "difference from the gradient by the chain rule", _small(chain)),
        ("QLoRA", "difference of the weights from rounding", f"{rounding:.0%}"),
        (
            "QLoRA",
            "difference from the gradients of LoRA on the rounded weights",
            _small(gradients),
        ),
    ]
    return table(["variant", "comparison", "measured"], rows)


#: Function of the exact weights -> the weights in bf16, and the rest that the next update adds.
Rounding = Callable[[Tensor], tuple[Tensor, Tensor | int]]


def compare_roundings(
    make_model: Callable[[], Decoder],
    make_batch: Callable[[], Tensor],
    roundings: Mapping[str, Rounding],
    *,
    guesses: Mapping[float, float | None],
) -> Table:
    """Return a table of how much of an AdamW update remains in weights that are rounded to bf16.

    The model is trained for two steps with each of three learning rates.

    Args:
        make_model, make_batch: Functions that return the model and the batch.
        roundings: Dict from a label to a rounding. A rounding is a function of the exact weights
            after an update. It returns a pair: the weights in bf16, and the rest that is added
            again before the next update. The fraction of unchanged weights is shown for the first
            rounding only.
        guesses: Dict from a learning rate to the learner's guess of the fraction of unchanged
            weights, in percent. None is a missing guess.
    """

    def master(exact: Tensor) -> tuple[Tensor, Tensor]:
        return exact.bfloat16(), exact - exact.bfloat16()

    rows = []
    for lr in (1e-5, 1e-4, 1e-3):
        (expected, _), *found = (
            _train_in_bf16(make_model, lambda: make_batch()[:2], rounding, lr)
            for rounding in (master, *roundings.values())
        )
        shares = [(update @ expected / expected.square().sum()).item() for update, _ in found]
        guess = "–" if guesses.get(lr) is None else f"{guesses[lr]}%"
        counted = f"{found[0][1]:.2%}", *(f"{share:.0%}" for share in shares)
        rows.append((f"{lr:.5f}".rstrip("0"), guess, *counted))
    return table(["learning rate", "your guess", "weights unchanged", *roundings], rows)


def _train_in_bf16(
    make_model: Callable[[], Decoder],
    make_batch: Callable[[], Tensor],
    rounding: Rounding,
    lr: float,
) -> tuple[Tensor, float]:
    """Train two steps; return the update of weights plus rests, and the unchanged fraction."""
    torch.manual_seed(0)  # for random roundings
    model = make_model().bfloat16()
    parameters = list(model.parameters())
    start, exact = _flat(parameters), [p.detach().float() for p in parameters]
    adam, rests = torch.optim.AdamW(exact, lr=lr), [0] * len(parameters)
    for _ in range(2):
        model.zero_grad()
        model.loss(make_batch()).backward()
        for weight, p, rest in zip(exact, parameters, rests, strict=True):
            weight.copy_(p.detach() + torch.as_tensor(rest).float())
            weight.grad = p.grad.float()
        adam.step()
        for i, p in enumerate(parameters):
            p.data, rests[i] = rounding(exact[i])
    kept = _flat(torch.as_tensor(r).expand_as(p) for r, p in zip(rests, parameters, strict=True))
    unchanged = (_flat(parameters) == start).double().mean().item()
    return _flat(parameters) + kept - start, unchanged


def _small(difference: float) -> str:
    """Return a difference as text; a rounding error is shown as an upper bound."""
    return "< 0.00001" if difference < 1e-5 else f"{difference:.1e}"


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def _gradients(model: Decoder, make_batch: Callable[[], Tensor]) -> Tensor:
    model.loss(make_batch()).backward()
    return _flat(p.grad for p in model.parameters() if p.grad is not None)


def _four_bit_differences(
    make_model: Callable[[], Decoder], make_batch: Callable[[], Tensor]
) -> tuple[float, float]:
    """Return the relative rounding error of the weights, and the difference of adapter gradients.

    The adapter gradients are compared with gradients of adapters on an fp32 model with the same
    rounded weights.
    """
    four_bits = with_adapters(in_four_bits(make_model()), 8)
    plain = with_adapters(make_model(), 8)
    layers = dict(plain.named_modules())
    before, after = [], []
    for name, layer in four_bits.named_modules():
        if isinstance(layer, FourBitLinear):
            weight = layers[name].weight
            before.append(weight.detach().clone())
            after.append(layer.dequantize(weight.dtype))
            weight.data.copy_(after[-1])
    _fill_adapters(four_bits)
    _fill_adapters(plain)
    rounding = (_flat(after) - _flat(before)).norm() / _flat(before).norm()
    gradients = [_gradients(model, make_batch) for model in (four_bits, plain)]
    return rounding.item(), ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


def _fill_adapters(model: nn.Module) -> None:
    """Give the adapters random weights, because gradients of new adapters are partly zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.02, generator=generator)


def _chain_rule_difference(
    make_model: Callable[[], Decoder], make_batch: Callable[[], Tensor]
) -> float:
    """Return the largest relative difference of an adapter's gradient from the chain rule.

    In `W + up @ down`, the gradient of `up` is the gradient of W times the transpose of `down`.
    New adapters leave the output unchanged, so the gradient of W is that of full training.
    """
    full, adapted = make_model(), with_adapters(make_model(), 8)
    full.loss(make_batch()).backward()
    adapted.loss(make_batch()).backward()
    differences = []
    for one, other in zip(full.layers, adapted.layers, strict=True):
        adapter = other.attention.qkv
        expected = one.attention.qkv.weight.grad @ adapter.down.weight.T
        differences.append((adapter.up.weight.grad - expected).norm() / expected.norm())
    return max(differences).item()
