"""Builder for the lines of a training script, used by the scripts of several frameworks.

The user runs the script, so it contains only public names of this library. Everything that the
lines depend on, such as the names of blocks, is read from a symbolic copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from course_lib._check import describe
from course_lib._torch.tensors import tensors_in
from course_lib.budget.recipe import Recipe
from course_lib.budget.step import model_of
from course_lib.symbolic import symbolic

if TYPE_CHECKING:
    from course_lib.workload import Workload


@dataclass
class Lines:
    """Builder of a training script for a recipe and a workload.

    A recipe is a set of memory-saving techniques. A workload is a model and a batch.

    Each function that returns lines of the script registers the imports of these lines by the
    method `use`.

    Attributes:
        recipe: Memory-saving techniques of the step. With several ranks, the recipe describes the
            step of a single rank.
        workload: Model and batch. Its attribute `source` has the code that makes them, and must not
            be None.
        imports: Dict from the name of a module to the set of names that the script imports from it.
    """

    recipe: Recipe
    workload: Workload
    imports: dict[str, set[str]] = field(default_factory=dict)

    def use(self, module: str, *names: str) -> None:
        """Make the script import the given names from a module."""
        self.imports.setdefault(module, set()).update(names)

    def script(self, *parts: Sequence[str]) -> str:
        """Return the text of the script: imports, model and batch, and then the lines of all parts.

        Args:
            parts: Lists of lines, in the order in which they are added.

        Raises:
            ValueError: The workload has no source code for a script.
        """
        if self.workload.source is None:
            raise ValueError(
                "to write a script, workload.source must be a Source with code that creates the"
                " model and the batch, got None"
            )
        plain = {"import torch"}
        for line in self.workload.source.imports:
            start, _, names = line.partition(" import ")
            if start.startswith("from ") and names:
                self.use(start.removeprefix("from "), *names.split(", "))
            else:
                plain.add(line)
        used = {f"from {name} import {', '.join(sorted(of))}" for name, of in self.imports.items()}
        first = [*sorted(plain), *sorted(used)]
        lines = [*first, "", *self.workload.source.lines, ""]
        for part in parts:
            lines += part
        return "\n".join(lines)

    @cached_property
    def model(self) -> nn.Module:
        """The workload's model with symbolic tensors, which have shapes but need no memory.

        The model keeps its own dtypes, whatever the precision of the recipe is.
        """
        with symbolic():
            return model_of(self.workload.make_model, replace(self.recipe, precision=None))

    @cached_property
    def batch(self) -> Any:
        """The workload's batch with symbolic tensors, which have shapes but need no memory."""
        with symbolic():
            return self.workload.make_batch()

    def trained_parameters(self) -> str:
        """Return a Python expression for the model's parameters that require gradients.

        An example is "model.parameters()".
        """
        if all(p.requires_grad for p in self.model.parameters()):
            return "model.parameters()"
        return "[p for p in model.parameters() if p.requires_grad]"

    def to_device(self, batch: str, dtype: torch.dtype | None = None) -> str:
        """Return a Python expression that moves a batch to the device in the variable `device`.

        Args:
            batch: Python expression for the batch, such as "make_batch()".
            dtype: Dtype to which floating-point tensors of the batch are converted; None keeps
                their dtypes.

        Raises:
            ValueError: The batch for which the script is written (`self.batch`) is neither a tensor
                nor a dict, list or tuple of tensors.
        """
        if problem := batch_problem(self.batch):
            raise ValueError(problem)
        floats = [tensor.is_floating_point() for tensor in tensors_in(self.batch)]
        target = "device"
        if dtype is not None and any(floats):
            target = f"device, {dtype}"
            if not all(floats):
                target = f"device, {dtype} if x.is_floating_point() else None"
        if isinstance(self.batch, Tensor):
            return f"{batch}.to({target})"
        if isinstance(self.batch, Mapping):
            return f"{{name: x.to({target}) for name, x in {batch}.items()}}"
        return f"[x.to({target}) for x in {batch}]"


def batch_problem(batch: Any) -> str | None:
    """Return an error message if a script cannot move the batch to a device, or else None.

    A script can move a tensor, and a dict, list or tuple of tensors.
    """
    values = [batch] if isinstance(batch, Tensor) else ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif type(batch) in (list, tuple):
        values = batch
    if values and all(isinstance(value, Tensor) for value in values):
        return None
    return (
        "for a script, make_batch must return a tensor, or a dict, list or tuple of"
        f" tensors, got {describe(batch)}; convert any other batch to one of these in"
        " make_batch"
    )
