"""Checks of the formulas for the bytes that one layer keeps for backward."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.labels import join_labels
from course_lib.teaching import Verdict, expect_number, text
from course_lib.teaching.exercises import cases, exercise, not_answered, right, wrong

from .verdicts import of_row

_TWO_BYTES = "You took 2 bytes per number. These are fp32 numbers of 4 bytes."
_WEIGHTS = "You counted weights, too. They are in memory anyway, so leave them out."
_HALF = "Each of your rows is half of the right one. You took 2 bytes per number, but fp32 takes 4."

Formula = Callable[..., int]


def _gpt_rows() -> dict[str, Formula]:
    return {
        "norms": lambda b, s, h, a: 8 * s * b * h,
        "statistics": lambda b, s, h, a: 16 * s * b,
        "attention": lambda b, s, h, a: 20 * s * b * h,
        "probabilities": lambda b, s, h, a: 4 * a * s * s * b,
        "feed-forward": lambda b, s, h, a: 36 * s * b * h,
    }


def _llama_rows() -> dict[str, Formula]:
    return {
        "norms": lambda b, s, h, a, n, f: 16 * s * b * h,
        "statistics": lambda b, s, h, a, n, f: 8 * s * b,
        "attention": lambda b, s, h, a, n, f: 4 * s * b * (3 * h + 2 * n * h // a),
        "probabilities": lambda b, s, h, a, n, f: 4 * a * s * b,
        "feed-forward": lambda b, s, h, a, n, f: 4 * s * b * (h + 4 * f),
    }


# The sizes of the list in the lesson, and other ones, for which exchanged letters give other
# results.
Sizes = dict[str, int]
_GPT_SIZES = {"b": 8, "s": 128, "h": 256, "a": 8}, {"b": 7, "s": 44, "h": 70, "a": 5}
_LLAMA_SIZES = (
    {**_GPT_SIZES[0], "n": 2, "f": 896},
    {"b": 3, "s": 44, "h": 70, "a": 10, "n": 2, "f": 50},
)


def _draw_gpt(rng: random.Random) -> Sizes:
    a = rng.randint(3, 9)
    return {"b": rng.randint(2, 9), "s": rng.randint(20, 60), "h": a * rng.randint(5, 15), "a": a}


def _draw_llama(rng: random.Random) -> Sizes:
    n = rng.randint(2, 4)
    a = n * rng.randint(2, 5)
    return {**_draw_gpt(rng), "h": a * rng.randint(5, 15), "a": a, "n": n, "f": rng.randint(20, 90)}


@exercise(
    hint=(
        "Go through the eight lines: what does the derivative of each operator need, apart from its"
        " weight?",
        "How many tensors does this row have, and how many numbers has each, in b, s, h and a?"
        " Multiply by 4 bytes.",
    )
)
def check_layer_formula(answer: Any) -> Verdict:
    """Check a function of b, s, h and a that returns the bytes of each row."""
    given = answer(**_GPT_SIZES[1])
    open_rows = ("attention", "probabilities", "feed-forward")
    if isinstance(given, Mapping) and not any(given.get(row, 1) for row in open_rows):
        return not_answered()
    return _verdict(
        answer,
        _gpt_rows(),
        (_GPT_SIZES[0], cases(_GPT_SIZES[1:], _draw_gpt)),
        _gpt_mistakes,
        "Right, for two layers of different sizes: 16sbh + as²b elements, and 4sb for the"
        " statistics.",
    )


@exercise(
    hint=(
        "Go through the lines of this layer: what does the derivative of each operator need, apart"
        " from its weight?",
        "How many tensors does this row have, and how many numbers has each, in b, s, h, a,"
        " n and f? Multiply by 4 bytes.",
    )
)
def check_llama_formula(answer: Any) -> Verdict:
    """Check a function of b, s, h, a, n and f that returns the bytes of each row."""
    sizes = _LLAMA_SIZES[1]
    given = answer(**sizes)
    gpt = {row: f(**{k: sizes[k] for k in "bsha"}) for row, f in _gpt_rows().items()}
    # Rows of exercise 3 that are still 0 are passed on by the stub.
    if isinstance(given, Mapping) and all(given.get(row, 1) in (0, gpt[row]) for row in gpt):
        return not_answered()
    return _verdict(
        answer,
        _llama_rows(),
        (_LLAMA_SIZES[0], cases(_LLAMA_SIZES[1:], _draw_llama)),
        _llama_mistakes,
        "Right, for two layers of different sizes: no term grows with s², and K, V and the"
        " feed-forward network have sizes of their own.",
    )


def _verdict(
    answer: Any,
    rows: Mapping[str, Formula],
    sizes: tuple[Sizes, Sequence[Sizes]],
    mistakes_of: Callable[..., dict[float, str]],
    praise: str,
) -> Verdict:
    """Return the verdict on the first wrong row of the first layer that has one, or the praise."""
    shown, others = sizes
    for other in others:
        verdict = _verdict_on_layer(answer, rows, shown, other, mistakes_of)
        if verdict is not None:
            return verdict
    return right(praise)


def _verdict_on_layer(
    answer: Any,
    rows: Mapping[str, Formula],
    shown: Sizes,
    other: Sizes,
    mistakes_of: Callable[..., dict[float, str]],
) -> Verdict | None:
    given, of_the_list = answer(**other), answer(**shown)
    if not isinstance(given, Mapping) or set(given) != set(rows):
        names = join_labels(f"`{name}`" for name in rows)
        return wrong(text("Return a dictionary with the keys {names}.", names=names), exact=True)
    if all(expect_number(given[name], formula(**other) // 2) for name, formula in rows.items()):
        return wrong(_HALF, exact=True)
    for name, formula in rows.items():
        count = formula(**other)
        verdict = expect_number(given[name], count, wrong_answers=mistakes_of(name, count, **other))
        fits_the_list = bool(expect_number(of_the_list[name], formula(**shown)))
        if bool(verdict) != fits_the_list:
            sizes_in_words = join_labels(f"{letter} = {size}" for letter, size in other.items())
            message = (
                "{name} is right for the lesson's layer, but not for one with {sizes}. Use"
                " {letters} instead of the lesson's numbers."
                if fits_the_list
                else "{name} is right for a layer with {sizes}, but not for the lesson's layer. Use"
                " {letters} instead of numbers."
            )
            return wrong(
                text(message, name=f"`{name}`", sizes=sizes_in_words, letters=join_labels(other)),
                exact=True,
            )
        if not verdict:
            return of_row(name, verdict)
    return None


def _any_row(count: int, b: int) -> dict[float, str]:
    return {
        0: "This row is still empty.",
        count // b: "You counted one sequence. Each of the b sequences has its own numbers.",
        count // 2: _TWO_BYTES,
        count // 4: "You counted elements. In fp32, each takes 4 bytes.",
    }


def _gpt_mistakes(row: str, count: int, *, b: int, s: int, h: int, a: int) -> dict[float, str]:
    """Return wrong numbers of bytes for a row with `count` bytes, and the mistake of each."""
    one = 4 * s * b * h  # bytes of a tensor (b, s, h)
    mistakes = _any_row(count, b)
    if row == "norms":
        mistakes[one] = "You counted one LayerNorm. The layer has two."
        mistakes[4 * one] = (
            "You counted the norms' outputs, too. Each is the input of the next Linear, and is"
            " counted in that row."
        )
        mistakes[2 * one + 16 * h] = _WEIGHTS
    if row == "statistics":
        mistakes[count // 2] = (
            "You counted half of them. Each of the two LayerNorms keeps two numbers per token."
        )
        mistakes[16 * h] = (
            "You counted one mean and one deviation for each feature. LayerNorm has them for each"
            " token."
        )
    if row == "probabilities":
        mistakes[count // a] = mistakes[count // a // b] = (
            "You counted one s × s matrix. Each head has its own."
        )
        mistakes[4 * h * s * s * b] = (
            "You multiplied by h. P has one s × s matrix for each of the a heads."
        )
        mistakes[2 * count] = (
            "You counted two matrices. Only P is kept: the derivative of softmax needs no S,"
            " and the"
            " product with V keeps the same storage as softmax."
        )
        mistakes[count // 2] = (
            "You counted half of P. Either you left out what the mask sets to zero, which is stored"
            " like the rest, or you took 2 bytes per number."
        )
        mistakes[2 * a * s * (s + 1) * b] = (
            "You counted the triangle that the causal mask leaves. P is stored whole, zeros"
            " included: s × s."
        )
    if row == "attention":
        mistakes[3 * one] = (
            "You counted Q, K and V. The inputs of the two projections are kept, too."
        )
        mistakes[4 * one] = (
            "You left out one of five tensors. The inputs of both projections are kept, `y` and"
            " `P @ v`."
        )
        mistakes |= dict.fromkeys(
            (count * a, (2 + 3 * a) * one, (1 + 4 * a) * one),
            "You multiplied by a. The a heads share the h numbers, h / a each.",
        )
        mistakes[6 * one] = (
            "You counted one tensor too many. `y`, `q`, `k`, `v` and `P @ v` are five."
        )
        mistakes[5 * one + 4 * 4 * h * h] = _WEIGHTS
        mistakes[7 * one] = (
            "You counted the projection's input three times. Q, K and V come from one"
            " product, which"
            " keeps its input once."
        )
        mistakes[5 * one + 4 * a * s * s * b] = "You counted P here. P has its own row."
    if row == "feed-forward":
        for width in (3, 5, 6):
            mistakes[width * one] = (
                "You took a wrong width. Two of the tensors are 4h wide: the inputs of GELU and of"
                " the last product."
            )
        mistakes[8 * one] = "You left out the network's own input, which is h wide."
        mistakes[10 * one] = (
            "You counted what the last product returns. It is added to x, and an addition keeps"
            " nothing."
        )
        mistakes[13 * one] = (
            "You counted a tensor twice. The output of GELU is the input of the last product."
        )
        mistakes[9 * one + 4 * 8 * h * h] = _WEIGHTS
    return mistakes


def _llama_mistakes(
    row: str, count: int, *, b: int, s: int, h: int, a: int, n: int, f: int
) -> dict[float, str]:
    """Return wrong numbers of bytes for a row with `count` bytes, and the mistake of each."""
    token = 4 * s * b  # bytes of one number per token
    mistakes = _any_row(count, b)
    old_row = _gpt_rows()[row](b=b, s=s, h=h, a=a)
    mistakes[old_row] = "Which operators has this layer instead?"
    if row == "norms":
        mistakes[2 * token * h] = (
            "You counted one tensor per norm. RMSNorm keeps two: `x`, and `m`, which the"
            " gradient of"
            " its weight needs."
        )
        mistakes[6 * token * h] = (
            "You counted three tensors per norm. The result of a norm is the input of the next"
            " Linear, and is counted in that row."
        )
        mistakes[4 * token * h + 8 * h] = _WEIGHTS
    if row == "statistics":
        mistakes[token] = "You counted one norm. The layer has two."
        mistakes[4 * token] = (
            "You counted two numbers per token and norm. RMSNorm has no mean, so it keeps one."
        )
    if row == "attention":
        kv = n * h // a
        mistakes[token * 5 * h] = (
            "You gave K and V as many heads as Q. They have n heads, so each is n · h / a wide."
        )
        mistakes[token * (3 * h + kv)] = "You counted one of K and V. Both are kept."
        mistakes[token * (2 * h + 2 * kv)] = (
            "You left out one of three tensors that are h wide: `y`, `q` and the output of SDPA."
        )
        mistakes[token * (5 * h + 2 * kv)] = (
            "You counted `y` three times. The three projections read the same storage."
        )
        mistakes[token * (4 * h + 2 * kv)] = (
            "You counted one tensor too many. The output of SDPA is also the input of the last"
            " projection, and a rotation keeps neither of its tensors."
        )
        mistakes[token * (4 * h + 3 * kv)] = (
            "You counted `q` and `k` both before and after the rotation. The rotation keeps only"
            " cos and sin."
        )
        mistakes[token * (3 * h + 2 * n)] = (
            "You counted heads as numbers. K and V have n heads with h / a numbers each."
        )
    if row == "probabilities":
        mistakes[4 * a * s * s * b] = (
            "You counted P. SDPA does not keep it. It keeps one number per query and head."
        )
        mistakes[token] = "You counted one number per query. Each head has its own."
        mistakes[4 * n * s * b] = (
            "You counted the heads of K and V. There is one number per query and head of Q."
        )
    if row == "feed-forward":
        mistakes[4 * token * f] = "You left out the network's own input, which is h wide."
        mistakes[token * (2 * h + 4 * f)] = (
            "You counted the input twice. Both projections read the same storage."
        )
        mistakes[token * (h + 3 * f)] = (
            "You left out one of four wide tensors. SiLU keeps its input, the product keeps both"
            " factors, and the last Linear keeps its input."
        )
        mistakes[token * (h + 2 * f)] = (
            "You left out two of four wide tensors. SiLU keeps its input, the product keeps both"
            " factors, and the last Linear keeps its input."
        )
        mistakes[token * (h + 5 * f)] = (
            "You counted one wide tensor too many. The output of SiLU is a factor of the product."
        )
        mistakes[token * (h + 4 * f) + 12 * h * f] = _WEIGHTS
    mistakes[old_row] = text(
        "This is still the row of the other layer. {reason}", reason=mistakes[old_row]
    )
    return mistakes
