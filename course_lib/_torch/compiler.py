"""Parts of the compiler. Those that take seconds to load are loaded inside functions."""

import sys
from contextlib import AbstractContextManager
from types import ModuleType

import torch

guards = torch._C._dynamo.guards


def load_eval_frame() -> ModuleType:
    """Load Dynamo, and return the module that calls compiled functions."""
    import torch._dynamo.eval_frame

    return torch._dynamo.eval_frame


def generated_modules() -> list[ModuleType]:
    """Return the modules that TorchInductor has generated."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return list(codecache.PyCodeCache.modules) if codecache is not None else []


def activation_memory_budget(budget: float) -> AbstractContextManager[None]:
    """Return a context in which compiled functions keep the share `budget` of their activations.

    The share is between 0 and 1.
    """
    return torch._functorch.config.patch(activation_memory_budget=budget)
