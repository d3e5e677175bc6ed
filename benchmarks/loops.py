"""Two loops for an AdamW step with clipping over 8 micro-batches of two sequences: a hand-written
loop, and a loop with accelerate."""

from collections.abc import Callable

from torch import nn


def by_hand(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    for micro_batch in batch.split(2):
        model.loss_sum(micro_batch)[0].backward()
    for parameter in model.parameters():
        parameter.grad.div_(batch[:, 1:].numel())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def with_accelerate(model, optimizer, batch) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        for micro_batch in batch.split(2):
            with accelerator.accumulate(model):
                loss, count = model.loss_sum(micro_batch)
                accelerator.backward(loss / count)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step
