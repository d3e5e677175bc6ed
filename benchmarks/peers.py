"""Functions (make_model, make_batch) that predict the peak in bytes of a step with AdamW in fp32,
one per tool."""

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from course_lib.budget import Recipe, estimate


def by_course(make_model, make_batch) -> int:
    return estimate(make_model, make_batch, Recipe()).peak_bytes


def loss_of(model, batch):
    return model.loss(batch) if hasattr(model, "loss") else model(**batch).loss


def by_tracker(make_model, make_batch) -> int:
    with FakeTensorMode():
        model, batch = make_model(), make_batch()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):  # the first step creates the optimizer state
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    return max(at["Total"] for at in tracker.get_tracker_snapshot("peak").values())


def by_kitsune(make_model, make_batch) -> int:
    from kitsune.predict import predict_memory

    batch = make_batch()
    tensor = batch if isinstance(batch, torch.Tensor) else next(iter(batch.values()))
    shape = tuple(tensor.shape[1:])
    found = predict_memory(
        make_model(), input_shape=shape, batch_size=len(tensor), optimizer="adamw"
    )
    # The 15% that it adds for context and allocator are left out, because tensors are compared.
    return found.param_bytes + found.gradient_bytes + found.optimizer_bytes + found.activation_bytes


def by_accelerate(make_model, make_batch) -> int:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    sizes = estimate_training_usage(calculate_maximum_sizes(make_model())[0], "float32")
    return int(max(sizes.values()))


def by_formula(make_model, make_batch) -> int:
    return 16 * sum(parameter.numel() for parameter in make_model().parameters())


PREDICTORS = {
    "course": by_course,
    "MemTracker": by_tracker,
    "torch-kitsune": by_kitsune,
    "accelerate": by_accelerate,
    "16 bytes per parameter": by_formula,
}
