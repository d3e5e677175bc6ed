"""The learner's project: its sheet of results, and helpers with which the cells run any model.

The cells of the notebook call the library themselves, and keep what they find on a `Sheet`. If a
model breaks a rule of the library, `Sheet.part` shows the error as a verdict, and the notebook
continues.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from course_lib._batches import samples_in
from course_lib._check import InfeasibleBudget, one_of
from course_lib.budget import Recipe, build, train_step
from course_lib.budget.recipe import technique_labels
from course_lib.checkpoint.blocks import names_of
from course_lib.labels import join_labels, text, verbatim
from course_lib.memory.show import decimal
from course_lib.models import seed_generators
from course_lib.teaching import Verdict, category_label, predictions, table
from course_lib.teaching.exercises import Messages
from course_lib.teaching.exercises.exercise import error_text

say = Messages(__file__)

#: The baseline: it leaves the model's dtypes and its attention unchanged, and trains with Adam.
AS_IT_IS = Recipe(precision=None, attention=None)

#: Result on the sheet -> section of the notebook that computes it.
SECTIONS = {
    "plain": "10.2",
    "measured": "10.2",
    "alone": "10.3",
    "errors": "10.4",
    "found": "10.5",
    "recipe": "10.5",
    "reduced": "10.6",
    "taken": "10.6",
    "error": "10.6",
}


_LOOP = verbatim("""\
from course_lib.budget import Recipe, build, train_step

recipe = {recipe}
model, optimizer = build(make_model, recipe, lr=1e-3)
for step in range(steps):
    train_step(model, optimizer, make_batch(step), recipe{loss})""")


class MissingResult(Exception):
    """Error for a section of the project that needs a result which no earlier section has computed.

    Args:
        name: Name of the result, a key of `SECTIONS`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.section = SECTIONS[name]


@dataclass(frozen=True)
class Difference:
    """Difference between the gradients of a step with techniques and those of the baseline.

    Attributes:
        relative: Norm of the difference, divided by the norm of the baseline's gradients.
        training: Whether the model was in training mode. If not, it was in evaluation mode, in
            which dropout is off.
    """

    relative: float
    training: bool

    def __str__(self) -> str:
        # Rounding differs between CPUs, so a small difference is shown as an upper bound.
        shown = "0" if self.relative == 0 else "< 0.001" if self.relative < 1e-3 else None
        shown = shown or f"{self.relative:.2g}"
        return shown if self.training else text("{number}, without dropout", number=shown)


class Sheet:
    """Results of the learner's project, which `hand_in` shows as a table.

    Results are attributes, such as `sheet.plain = estimate(...)`. Reading a result that no section
    has computed yet raises `MissingResult`. Inside a `with` block of `part`, this error is shown as
    a verdict.

    Args:
        make_model: Function that returns a new model.
        make_batch: Function that takes the number of a training step and returns its batch.
        loss_sum: Function that takes (model, batch) and returns a pair: the sum of the losses, and
            the weight by which it is divided to give the mean loss. The weight is the number of
            tokens or samples in the sum. None uses the loss that the model computes itself.
        budget_bytes: Memory budget of the training step in bytes.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_batch: Callable[..., Any],
        loss_sum: Callable | None,
        budget_bytes: int,
    ) -> None:
        self.make_model, self.make_batch, self.loss_sum = make_model, make_batch, loss_sum
        self.budget_bytes = budget_bytes
        #: Name of a technique that cannot be used -> the reason.
        self.excluded: dict[str, str] = {}
        #: Whether the model is in training mode -> gradients of the baseline.
        self._baseline: dict[bool, dict[str, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        if name in SECTIONS:
            raise MissingResult(name)
        raise AttributeError(
            f"a Sheet has no attribute {name!r}; its results are {', '.join(SECTIONS)}", name=name
        )

    @contextmanager
    def part(self, section: str) -> Iterator[None]:
        """Context manager for the code of one section, which shows errors instead of raising them.

        At the start of the `with` block, the results of this section and of later sections are
        removed, so that no result of an earlier run remains. An error ends the block, and is shown
        as a verdict.

        Args:
            section: Number of the section, such as "10.2".
        """
        for name, computed_in in SECTIONS.items():
            if computed_in >= section:
                vars(self).pop(name, None)
        try:
            yield
        except MissingResult as missing:
            _show(Verdict(False, say("common.missing", section=missing.section)))
        except InfeasibleBudget as error:
            least = "–" if error.least_bytes is None else _mb(error.least_bytes)
            recipe = "–" if error.least is None else name_of(error.least.recipe)
            _show(Verdict(False, say("common.infeasible", least=least, recipe=recipe)))
            _show_reasons(error.not_tried)
        except Exception as error:
            _show(Verdict(False, say("common.failed", error=error_text(error))))

    def show(self, shown: Any) -> None:
        """Display an object below the notebook cell."""
        _show(shown)

    def show_guess(self, guess: float | None) -> None:
        """Display a table of the learner's guess next to the predicted and the measured peak.

        All three are peaks of the baseline.

        Args:
            guess: The guess in MB. None shows a dash.
        """
        rows = [(text("your guess of the peak (MB)"), "–" if guess is None else f"{guess:,}")]
        rows += [(text("peak, predicted (bytes)"), f"{self.plain.peak_bytes:,}")]
        rows += [(text("peak, measured (bytes)"), f"{self.measured.peak_bytes:,}")]
        self.show(table(["baseline", ""], rows))

    # ---- the techniques that the model allows, and the bytes that each saves

    def techniques(self) -> list[Recipe]:
        """Return a list of recipes, each with a single memory-saving technique."""
        samples = samples_in(self.make_batch(0)) or 2
        return [
            replace(AS_IT_IS, checkpoint="layers"),
            replace(AS_IT_IS, offload_activations=True),
            replace(AS_IT_IS, micro_batches=min(4, max(2, samples))),
            replace(AS_IT_IS, offload_optimizer=1.0),
            replace(AS_IT_IS, in_backward=True),
        ]

    @contextmanager
    def attempt(self, recipe: Recipe) -> Iterator[None]:
        """Context manager that records the error of a recipe that cannot be used.

        The code in the `with` block tries the recipe. If it raises an error, the error's text is
        stored in the attribute `excluded`, and the error is not raised.

        Args:
            recipe: Techniques of the training step.
        """
        try:
            with warnings.catch_warnings():
                # If none of a model's activations is large enough, offloading has no effect.
                warnings.filterwarnings("error", "no activation was moved")
                yield
        except Exception as error:
            self.excluded[name_of(recipe)] = error_text(error)

    def show_savings(self) -> None:
        """Display the peak of each technique alone, or the reason why it cannot be used."""
        base = self.plain.peak_bytes
        rows: list[Sequence] = [
            (name_of(each.recipe), _mb(each.peak_bytes), _mb(base - each.peak_bytes), "")
            for each in self.alone
        ]
        rows += [(name, "–", "–", reason) for name, reason in self.excluded.items()]
        self.show(table(["technique", "peak (MB)", "saves (MB)", "why it cannot be used"], rows))

    # ---- the gradients

    def gradients(self, recipe: Recipe, training: bool = True, seed: int = 0) -> dict[str, Tensor]:
        """Run one training step, and return a dict from the name of a parameter to its gradient.

        The optimizer is SGD with a learning rate of 0, so the weights do not change.

        Args:
            recipe: Techniques of the step.
            training: Whether the model is in training mode. In evaluation mode, dropout is off.
            seed: Seed of the step. The model's weights always have the same seed.
        """
        recipe = replace(recipe, optimizer="sgd", offload_optimizer=0.0)
        with seed_generators(0):
            model, optimizer = build(self.make_model, recipe, lr=0.0)
        if not training:
            model.eval()
        names, seen = {p: name for name, p in model.named_parameters()}, {}

        def keep(updated: torch.optim.Optimizer, *_: Any) -> None:
            own = (p for group in updated.param_groups for p in group["params"])
            seen.update({names[p]: p.grad.double() for p in own if p.grad is not None})

        optimizer.register_step_pre_hook(keep)
        with seed_generators(seed):
            train_step(model, optimizer, self.make_batch(0), recipe, loss_sum=self.loss_sum)
        return seen

    def gradient_error(self, recipe: Recipe) -> Difference:
        """Measure how much the gradients of a training step differ from those of the baseline.

        Both steps run in training mode, with one exception. If the recipe has micro-batches and the
        model draws random numbers, both steps run in evaluation mode, because micro-batches draw
        other random numbers than the whole batch.

        Args:
            recipe: Techniques of the step.
        """
        training = recipe.micro_batches == 1 or not self.is_random
        found, expected = self.gradients(recipe, training), self._baseline_gradients(training)
        if found.keys() != expected.keys():
            return Difference(inf, training)
        error = sum(float((found[name] - expected[name]).norm()) ** 2 for name in expected)
        whole = sum(float(gradient.norm()) ** 2 for gradient in expected.values())
        return Difference((error / whole if whole else error) ** 0.5, training)

    def _baseline_gradients(self, training: bool = True) -> dict[str, Tensor]:
        """Return the gradients of the baseline, and compute them only in the first call."""
        if training not in self._baseline:
            self._baseline[training] = self.gradients(AS_IT_IS, training)
        return self._baseline[training]

    @cached_property
    def is_random(self) -> bool:
        """Whether the baseline's gradients depend on the training step's seed, as with dropout."""
        first, second = self._baseline_gradients(), self.gradients(AS_IT_IS, seed=1)
        return any(not torch.equal(first[name], second[name]) for name in first)

    def show_errors(self, errors: dict[Recipe, Difference]) -> None:
        """Display how much the gradients of several recipes differ from those of the baseline.

        Args:
            errors: Dict from a recipe to the difference of its gradients.
        """
        rows = [(name_of(recipe), str(error)) for recipe, error in errors.items()]
        self.show(table(["technique", "difference of the gradients (relative)"], rows))

    # ---- the result

    def show_run(self) -> None:
        """Display the predicted and the measured peak of the chosen recipe.

        A second table shows how much its gradients differ from those of the baseline.
        """
        rows = [(name_of(self.recipe), self.reduced.peak_bytes, self.taken.peak_bytes)]
        self.show(predictions(rows, unit="bytes"))
        self.show_errors({self.recipe: self.error})

    def lines(self, framework: str) -> str:
        """Return lines of code that use the chosen recipe's techniques in another training script.

        Args:
            framework: "torch" for a hand-written loop, "trainer" for Hugging Face's Trainer, or
                "fsdp2" for PyTorch's FSDP2.
        """
        recipe: Recipe = self.recipe
        one_of("framework", framework, ("torch", "trainer", "fsdp2"))
        if framework == "trainer":
            return repr(recipe.as_training_arguments(samples_in(self.make_batch(0))))
        if framework == "fsdp2":
            return _fsdp2_lines(self, recipe)
        loss = "" if self.loss_sum is None else ", loss_sum=loss_sum"
        return _LOOP.format(recipe=repr(recipe), loss=loss)

    def hand_in(self, why: str, wrong_guess: str) -> Verdict:
        """Display a table of all results, and return a verdict on whether the table is complete.

        Args:
            why: The learner's reason why the recipe uses these techniques and no others.
            wrong_guess: A guess of the learner that turned out to be wrong.
        """
        rows, complete = [], _is_right(self)
        for name, fill in _ROWS.items():
            try:
                rows.append((text(name), fill(self)))
            except MissingResult as missing:
                rows.append((text(name), say("common.open", section=missing.section)))
                complete = False
        for name, own in (("why this recipe", why), ("a guess that was wrong", wrong_guess)):
            rows.append((text(name), verbatim(own.strip()) if own.strip() else say("common.own")))
            complete = complete and bool(own.strip())
        _show(table(["on the sheet", "your model"], rows))
        return Verdict(complete or None, say("common.complete" if complete else "common.rest"))


def _is_right(sheet: Sheet) -> bool:
    """Return whether the chosen recipe is right: its peak and its gradients.

    The measured peak must equal the estimate and fit into the budget. The gradients must differ
    from those of the baseline by less than 0.1%.
    """
    try:
        peak = sheet.taken.peak_bytes
        fits = peak == sheet.reduced.peak_bytes and peak <= sheet.budget_bytes
        return fits and sheet.error.relative < 1e-3
    except MissingResult:
        return False


def _fsdp2_lines(sheet: Sheet, recipe: Recipe) -> str:
    """Return the lines for FSDP2, with a comment that names the fields they leave out."""
    kept = {"precision": recipe.precision or "fp32", "micro_batches": recipe.micro_batches}
    if recipe.checkpoint == "layers":
        kept["checkpoint"] = "layers"
    sharded = Recipe(**kept, ranks=2, shard="zero3")
    lines = sharded.as_fsdp2(names_of(sheet.make_model(), recipe.blocks))
    left_out = recipe.changed_fields().keys() - {*kept, "attention"}
    names = ", ".join(sorted(left_out))
    return f"{lines}\n# left out: {names}" if left_out else lines


def _model(sheet: Sheet) -> str:
    sheet.plain  # noqa: B018  raises MissingResult if the model cannot be built
    model = sheet.make_model()
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return text(
        "`{name}`, {count:,} parameters, {trained:,} of them trained",
        name=verbatim(type(model).__name__),
        count=sum(count for count, _ in counts),
        trained=sum(count for count, trained in counts if trained),
    )


def _comparison(predicted: int, measured: int) -> str:
    return text(
        "predicted {predicted:,} bytes, measured {measured:,} bytes, difference {difference:,}",
        predicted=predicted,
        measured=measured,
        difference=measured - predicted,
    )


def _largest(at_peak: dict[str, int]) -> str:
    """Return the two largest categories of bytes at a peak."""
    largest = sorted(at_peak, key=lambda kind: -at_peak[kind])[:2]
    return join_labels(
        text("{kind} {size} MB", kind=category_label(kind), size=_mb(at_peak[kind]))
        for kind in largest
    )


def _cost_text(sheet: Sheet) -> str:
    """Return the cost of the recipe as text: FLOPs relative to the baseline, and moved bytes."""
    plain, reduced = sheet.plain, sheet.reduced
    return text(
        "FLOPs {ratio} times those of the baseline, {moved} GB moved",
        ratio=f"{reduced.flops / plain.flops:.2f}" if plain.flops else "–",
        moved=decimal(reduced.moved_bytes / 1e9),
    )


def _techniques(sheet: Sheet) -> str:
    used = [
        text("{technique}: {size} MB", technique=name_of(each.recipe), size=_mb(saved))
        for each in sheet.alone
        for saved in (sheet.plain.peak_bytes - each.peak_bytes,)
    ]
    used += [text("{technique}: cannot be used", technique=name) for name in sheet.excluded]
    return join_labels(used)


#: Row of the sheet -> function that fills it in.
_ROWS: dict[str, Callable[[Sheet], str]] = {
    "model": _model,
    "budget": lambda sheet: text("{size} MB", size=_mb(sheet.budget_bytes)),
    "baseline": lambda sheet: _comparison(sheet.plain.peak_bytes, sheet.measured.peak_bytes),
    "what fills its peak": lambda sheet: _largest(sheet.plain.at_peak),
    "saving of each technique alone": _techniques,
    "recipe": lambda sheet: name_of(sheet.recipe),
    "with this recipe": lambda sheet: _comparison(sheet.reduced.peak_bytes, sheet.taken.peak_bytes),
    "what fills the peak now": lambda sheet: _largest(sheet.reduced.at_peak),
    "price": _cost_text,
    "difference of the gradients": lambda sheet: str(sheet.error),
}


def name_of(recipe: Recipe) -> str:
    """Return a label with the techniques that a recipe adds to the baseline, or "no technique"."""
    plain = technique_labels(AS_IT_IS)
    added = [word for word in technique_labels(recipe) if word not in plain]
    return join_labels(added) if added else text("no technique")


def _show_reasons(reasons: Sequence[str]) -> None:
    for reason in reasons:
        _show(Verdict(None, reason))


def _mb(count: int) -> str:
    return f"{round(count / 1e6, 1) + 0:,.1f}"  # + 0 turns -0.0 into 0.0


def _show(shown: Any) -> None:
    from IPython.display import display

    display(shown)
