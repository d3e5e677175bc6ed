"""Private parts of `torch.compile`. Parts that take seconds to load are loaded inside functions."""

import sys
from contextlib import AbstractContextManager
from types import ModuleType

import torch

guards = torch._C._dynamo.guards


def load_eval_frame() -> ModuleType:
    """Load Dynamo, and return its module `eval_frame`, which calls compiled functions."""
    import torch._dynamo.eval_frame

    return torch._dynamo.eval_frame


def generated_modules() -> list[ModuleType]:
    """Return the Python modules that TorchInductor has generated in this process so far."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return list(codecache.PyCodeCache.modules) if codecache is not None else []


def activation_memory_budget(budget: float) -> AbstractContextManager[None]:
    """Return a context in which `torch.compile` lets functions keep only some of their activations.

    Args:
        budget: Fraction of the activations' bytes that a function may keep, between 0 (recompute as
            much as possible) and 1 (the default of PyTorch).
    """
    return torch._functorch.config.patch(activation_memory_budget=budget)
