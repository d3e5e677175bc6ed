"""Tables on steps that store fewer bits per element or train fewer parameters."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from course_lib.budget import Estimate, Recipe, estimate, run
from course_lib.lessons.lesson_01.figures import with_adapters
from course_lib.models import Decoder
from course_lib.teaching import Table, table, text

from .fewer_bits import Adam8bit, FourBitLinear, run_in_8_bits

Variants = Mapping[str, tuple[Callable[[], nn.Module], Recipe]]


def compare_smaller(variants: Variants, make_batch: Callable[[], Tensor]) -> Table:
    """Show a table of each variant's predicted and measured peak, and the contents of the peak.

    The row after 8-bit Adam is an estimate with all moments of 8-bit Adam in host memory.

    Args:
        variants: Mapping from the label of a variant to its model and recipe.
        make_batch: Function that returns the batch.
    """
    rows = []
    for name, (make_model, recipe) in variants.items():
        found = estimate(make_model, make_batch, recipe)
        if recipe.optimizer == "adam8bit":  # runs without bitsandbytes
            meter = run_in_8_bits(make_model, make_batch, Recipe(checkpoint=recipe.checkpoint))
        else:
            meter = run(make_model, make_batch, recipe).meter
        rows.append((name, f"{found.peak_bytes:,}", f"{meter.peak_bytes:,}", *_contents(found)))
        if recipe.optimizer == "adam8bit":
            left = found.peak_bytes - found.at_peak["optimizer"]
            contents = _contents(found)
            rows.append(
                (
                    "8-bit Adam, paged",
                    f"{left:,}",
                    text("not run"),
                    *contents[:2],
                    "0.0",
                    contents[3],
                )
            )
    contents = ["weights (MB)", "gradients (MB)", "optimizer state (MB)", "all else (MB)"]
    return table(["variant", "predicted (bytes)", "measured (bytes)", *contents], rows)


def _contents(found: Estimate) -> list[str]:
    """Return the MB of weights, gradients, optimizer state and all other tensors at the peak."""
    held = found.at_peak
    parts = [
        held.get("parameter", 0) + held.get("buffer", 0),
        held.get("gradient", 0),
        held.get("optimizer", 0),
    ]
    return [f"{count / 1e6:.1f}" for count in (*parts, found.peak_bytes - sum(parts))]


def what_stays_right(make_model: Callable[[], Decoder], make_batch: Callable[[], Tensor]) -> Table:
    """Show a table of differences in updates and gradients between variants and their originals.

    The differences are computed on two sequences of the batch.
    """

    def make_two() -> Tensor:
        return make_batch()[:2]

    unchanged = []
    for lr in (1e-5, 1e-4):
        rounded = _train_two_steps(make_model().bfloat16(), torch.optim.AdamW, make_two, lr)
        unchanged.append((rounded[0] == rounded[1]).double().mean().item())
    expected, start = _train_two_steps(make_model(), torch.optim.AdamW, make_two, 1e-3)
    in_8_bits, _ = _train_two_steps(make_model(), Adam8bit, make_two, 1e-3)
    update = ((in_8_bits - expected).norm() / (expected - start).norm()).item()
    rounding, gradients = _four_bit_differences(make_model, make_two)
    chain = _chain_rule_difference(make_model, make_two)
    rows = [
        (
            "bf16 without master weights",
            "weights that two steps leave unchanged, learning rate 0.00001",
            f"{unchanged[0]:.0%}",
        ),
        (
            "bf16 without master weights",
            "weights that two steps leave unchanged, learning rate 0.0001",
            f"{unchanged[1]:.0%}",
        ),
        ("8-bit Adam", "difference of the update after two steps", f"{update:.1%}"),
        ("LoRA", "difference from the gradient by the chain rule", _small(chain)),
        ("QLoRA", "difference of the weights from rounding", f"{rounding:.0%}"),
        (
            "QLoRA",
            "difference from the gradients of LoRA on the rounded weights",
            _small(gradients),
        ),
    ]
    return table(["variant", "comparison", "measured"], rows)


def _small(difference: float) -> str:
    """Return a difference as text; a rounding error is shown as an upper bound."""
    return "< 0.00001" if difference < 1e-5 else f"{difference:.1e}"


def _train_two_steps(
    model: nn.Module,
    optimizer_class: Callable[..., torch.optim.Optimizer],
    make_batch: Callable[[], Tensor],
    lr: float,
) -> tuple[Tensor, Tensor]:
    """Train for two steps; return vectors of all weights after and before the training."""
    start = _flat(model.parameters())
    optimizer = optimizer_class(model.parameters(), lr=lr)
    for _ in range(2):
        optimizer.zero_grad()
        model.loss(make_batch()).backward()
        optimizer.step()
    return _flat(model.parameters()), start


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


def in_four_bits(decoder: Decoder) -> Decoder:
    """Freeze the decoder and round the weights of all linear layers in its blocks to 4 bits."""
    decoder.requires_grad_(False)
    for layer in decoder.layers:
        for parent in (layer.attention, layer.feedforward):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, FourBitLinear(child))
    return decoder
