"""Versions of lesson 05's training loop: one per bug, and one without a bug."""

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad_norm_


def _loop(bug: str | None) -> Callable[..., None]:
    """Return the training loop with one bug, or the right loop if `bug` is None."""

    def train_epoch(
        model: Any,
        loss_sum: Any,
        micro_batches: Any,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        every: int,
        max_norm: float,
    ) -> None:
        for start in range(0, len(micro_batches), every):
            group = micro_batches[start : start + every]
            if bug == "remainder dropped" and len(group) < every:
                break
            total = sum(loss_sum(model, micro_batch)[1] for micro_batch in group)
            for micro_batch in group:
                loss, count = loss_sum(model, micro_batch)
                divisor = count * len(group) if bug == "mean of means" else total
                scaler.scale(loss / divisor).backward()
                # The bound is multiplied by the loss scale, because the gradients are still scaled.
                if bug == "clipped per micro-batch":
                    clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
                if bug == "scheduled per micro-batch":
                    scheduler.step()
            if bug != "not unscaled":
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            if bug != "scheduled per micro-batch":
                scheduler.step()
            optimizer.zero_grad()

    return train_epoch


correct_loop = _loop(None)
PLANTED = {
    name: _loop(name)
    for name in (
        "mean of means",
        "clipped per micro-batch",
        "scheduled per micro-batch",
        "remainder dropped",
        "not unscaled",
    )
}
