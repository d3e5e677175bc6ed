"""The slides: what the metadata of cells shows, how it is cut, and that a deck is one file."""

import ast
import re
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from editions import failure, write_lesson
from test_notebooks import agreement_problems, chinese_problems, english_problems, glossary_problems
from test_pace import core

nbformat = pytest.importorskip("nbformat")
BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
pytest.importorskip("nbconvert")
pytest.importorskip("latex2mathml")

from course_lib import labels
from course_lib.teaching.claims import Claim, what_you_may_have_read
from course_lib.teaching.switch import PER_LANGUAGE
from publish import class_slides, lesson_slides, slide_parts, slides
from publish.cells import (
    EditionError,
    is_solution,
    read_lessons,
    without_guards,
)
from publish.student import check_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
HAN = "[\u3400-\u9fff]"
NOTE = slides.Note(5, {"en": "Why?", "zh": "为什么？"})
TITLE = (
    '# 9 Title / 题目\n\n<div lang="en">\n\nOpening.\n\n</div>\n<div lang="zh">\n\n开头。\n\n</div>'
)


def in_both_languages(en, zh, heading=""):
    """The source of a prose cell in both languages."""
    return (
        f'{heading}\n\n<div lang="en">\n\n{en}\n\n</div>\n<div lang="zh">\n\n{zh}\n\n</div>'.strip()
    )


def lesson_of(*cells, slide="both"):
    """A lesson: its title, then prose (a text with a div) and code (any other text, or (text,
    outputs)). The deck shows the text of prose, and `slide` of code."""
    made = [nbformat.v4.new_markdown_cell(TITLE)]
    for cell in cells:
        source, outputs = cell if isinstance(cell, tuple) else (cell, [])
        if "<div" in source or re.match("##? ", source):
            texts = dict(re.findall(r'<div lang="(..)">\n\n(.*?)\n\n</div>', source, re.S))
            metadata = {"slide": texts} if len(texts) == 2 else {}
            made.append(nbformat.v4.new_markdown_cell(source, metadata=metadata))
        else:
            metadata = {"slide": slide}
            made.append(nbformat.v4.new_code_cell(source, outputs=outputs, metadata=metadata))
    return nbformat.v4.new_notebook(cells=made)


def html_output(html):
    return nbformat.v4.new_output("display_data", {"text/html": html})


def text_output(text):
    return nbformat.v4.new_output("execute_result", {"text/plain": text})


PNG = "iVBORw0KGgo="  # the first bytes of a PNG; no code reads the others


def picture_output(alt="It falls.", zh="它下降。"):
    """A figure as a notebook stores it: a small picture per language, and large ones for slides."""
    pictures = (
        f'<figure lang="{language}" style="margin: 0">'
        f'<img alt="{words}" src="data:image/png;base64,AAAA"></figure>'
        for language, words in (("en", alt), ("zh", zh))
    )
    output = html_output("\n".join(pictures))
    output.metadata.slides = {"en": PNG, "zh": PNG}
    return output


def page_of(notebook, language="en"):
    html = slides.deck_html(notebook, "Title", language, dict.fromkeys(("9", "9.1", "9.2"), NOTE))
    return BeautifulSoup(html, "html.parser")


# --- cutting ---

LONG = "\n".join(
    [
        "def f(x):",
        *(f"    x = x + {i}" for i in range(20)),
        "    return x",
        "",
        "g = f(1)",
        "h = f(2)",
    ]
)


@pytest.mark.parametrize(
    "code", [LONG, "x = 1", "", "@cache\ndef f():\n" + "    pass\n" * 11 + "\n\ny = f()"]
)
def test_long_code_is_cut_and_no_line_is_lost(code):
    pieces = slide_parts.cut_code(code)
    assert all(len(piece.splitlines()) <= slide_parts.MOST_CODE_LINES for piece in pieces)
    kept = [line for piece in pieces for line in piece.splitlines() if line.strip()]
    assert kept == [line for line in code.splitlines() if line.strip()]


def test_a_long_table_is_cut_between_rows_and_keeps_its_headings():
    rows = "".join(f"<tr><td>{i}</td></tr>" for i in range(24))
    html = (
        f"<div><table><thead><tr><th>n</th></tr></thead><tbody>{rows}</tbody></table><p>24"
        " rows</p></div>"
    )
    cut = slide_parts.cut_table(html_output(html), "en")
    parts = [BeautifulSoup(part.data["text/html"], "html.parser") for part in cut]
    assert len(parts) == 2
    assert [cell.text for part in parts for cell in part.select("td")] == [
        str(i) for i in range(24)
    ]
    assert all(part.th for part in parts) and [bool(part.p) for part in parts] == [False, True]


def test_a_table_under_a_heading_in_both_languages_is_cut_earlier():
    rows = "".join(f"<tr><td>{i}</td></tr>" for i in range(12))
    output = html_output(f"<table><thead><tr><th>n</th></tr></thead><tbody>{rows}</tbody></table>")
    assert [len(slide_parts.cut_table(output, language)) for language in ("en", "zh", "both")] == [
        1,
        1,
        2,
    ]


# --- what becomes a slide ---


def test_result_waits_behind_its_code():
    made = lesson_slides.lesson_slides(lesson_of(("1 + 1", [text_output("2")])), "en")
    (parts,) = [["slideshow" in part.metadata for part in slide.parts] for slide in made[1:]]
    assert parts == [False, True]


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", ['A "peak".']), ("zh", ["峰值。"]), ("both", ['A "peak".', "峰值。"])],
)
def test_a_figure_stands_alone_and_is_the_picture_of_the_decks_language(language, words):
    drawn = picture_output(alt="A &quot;peak&quot;.", zh="峰值。")
    page = page_of(
        lesson_of(
            in_both_languages("Look.", "看。"),
            ("draw()", [drawn]),
            in_both_languages("So.", "所以。"),
        ),
        language,
    )
    found = page.select("section.is-figure")
    assert [slide.img["alt"] for slide in found] == words
    assert [slide.img["lang"] for slide in found] == (
        ["en", "zh"] if language == "both" else [language]
    )
    assert all(len(slide.select_one(".body").find_all(recursive=False)) == 1 for slide in found)
    assert {slide.img["src"] for slide in found} == {f"data:image/png;base64,{PNG}"}
    del drawn.metadata.slides["en"]
    with pytest.raises(EditionError, match="no picture for slides in en"):
        page_of(lesson_of(("draw()", [drawn])), language)


def test_outputs_that_need_a_kernel_are_not_shown():
    slider = text_output("interactive(children=(IntSlider(value=1),))")
    switch = html_output('<form class="course-language"></form>')
    progress = nbformat.v4.new_output(
        "stream", text="plain:   0%|          | 0/40 [00:00<?, ?it/s]"
    )
    shown = [
        slide_parts.shown_outputs(output, "en")
        for output in (slider, switch, progress, text_output(" "))
    ]
    assert shown == [[]] * 4


CLAIMS = [
    Claim(
        labels.text("peak"),
        labels.text("step"),
        labels.text("activation"),
        "fails",
        labels.text("forward"),
    ),
    Claim(
        labels.text("bytes"),
        labels.text("step"),
        labels.text("gradient"),
        "holds",
        labels.text("backward"),
    ),
]


@pytest.mark.parametrize("language", ["en", "zh", "both"])
def test_each_row_of_a_table_of_claims_is_a_slide_whose_figure_and_verdict_wait_for_a_click(
    language,
):
    shown = what_you_may_have_read(CLAIMS, "4 MB", "9 MB")._repr_html_()
    page = page_of(
        lesson_of(("said()", [html_output(shown)]), in_both_languages("So.", "所以。")), language
    )
    found = page.select("section.is-claim")
    assert [slide.select_one(".measured").text.split() for slide in found] == [
        ["4", "MB"],
        ["9", "MB"],
    ]
    for slide, claim in zip(found, CLAIMS, strict=True):
        words = {
            name: slide.select_one(f".{name}").get_text(" ", strip=True)
            for name in ("claim", "source", "verdict")
        }
        for name, said in words.items():
            both_words = labels.in_both_languages(getattr(claim, name))
            wanted = " ".join(both_words) if language == "both" else both_words[language == "zh"]
            assert " ".join(said.split()) == wanted
        waits = {
            name: bool(slide.select(f".fragment .{name}"))
            for name in ("claim", "source", "measured", "verdict")
        }
        assert waits == {"claim": False, "source": False, "measured": True, "verdict": True}
        assert "So." not in slide.select_one(".body").text


def test_a_folded_cell_shows_its_result_and_not_the_code():
    notebook = lesson_of(
        in_both_languages("Look.", "看。"), ("y = falling(2)\ny", [text_output("It falls.")])
    )
    assert "falling(2)" in page_of(notebook).text
    notebook.cells[-1].metadata.jupyter = {"source_hidden": True}
    page = page_of(notebook)
    assert "falling(2)" not in page.text and "It falls." in page.text


def test_solution_says_what_it_is():
    solution = ("### BEGIN SOLUTION\ncheck_f(g)\n### END SOLUTION", [text_output("✓ Right.")])
    page = page_of(lesson_of("import torch\nx = 1", solution))
    assert "SOLUTION" not in page.text and "import" not in page.select(".code")[0].text
    (last,) = [section for section in page.select("section section") if "✓ Right." in section.text]
    assert last.select_one(".part").text == "solution"


def test_a_solution_stands_on_a_slide_without_what_keeps_the_readers_answer():
    attempt = "answer = None\nlesson.check_it(answer)"
    solution = "if not lesson.check_it.accepted:\n    answer = 6 * 7\n\nlesson.check_it(answer)"
    guarded = f"### BEGIN SOLUTION\n{solution}\n### END SOLUTION"
    notebook = lesson_of(attempt, (guarded, [text_output("✓ Right.")]))
    (page,) = (
        page
        for language, _, page in slides.decks({"09": notebook}, {"9": NOTE})
        if language == "en"
    )
    (code,) = (
        each.text.strip()
        for each in BeautifulSoup(page, "html.parser").select(".code")
        if "6" in each.text
    )
    assert code == "answer = 6 * 7\n\nlesson.check_it(answer)"


def lesson_with_metadata():
    """Sections 9.1 without slides and 9.2 with a question, a result, and code."""
    cells = [
        in_both_languages("Hidden.", "不显示。", "## 9.1 A / 甲"),
        in_both_languages("Long prose.", "长文。", "## 9.2 B / 乙"),
        in_both_languages("More.", "再来。"),
    ]
    notebook = lesson_of(
        *cells, ("x = 2\nx", [text_output("2")]), ("y = 3\ny", [text_output("3")]), "z = 4"
    )
    wanted = [None, None, {"en": "Why?", "zh": "为什么？"}, "result", "code", None]
    for cell, slide in zip(notebook.cells[1:], wanted, strict=True):
        cell.metadata = {"slide": slide} if slide else {}
    return notebook


def test_deck_shows_what_the_metadata_names_and_prose_is_spoken():
    page = page_of(lesson_with_metadata())
    found = page.select("section section")
    assert [slide.select_one(".heading").text.strip() for slide in found] == [
        "9 Title",
        "In this lesson",
        "9.2 B",
        "9.2 B",
    ]
    assert [slide.select_one(".prose, .code").text.strip() for slide in found[2:]] == [
        "Why?",
        "y = 3\ny",
    ]
    assert found[2].select_one(".result.fragment").text.strip() == "2"
    notes = found[2].select_one(".notes").parent.text
    assert "Long prose." in notes and "More." in notes
    assert "Hidden." not in page.text and "Opening." in found[0].text
    assert "为什么？" in page_of(lesson_with_metadata(), "zh").text
    assert len(page_of(lesson_with_metadata(), "both").select(".columns")) > 1


def lesson_with_exercises():
    """Exercise 1 in a section, and exercise 2 in depth."""
    stated = in_both_languages("**Exercise {}.** How many?", "**练习 {}。** 多少？")
    stub = "answer = None\nlesson.check_sum(answer)"
    notebook = lesson_of(
        in_both_languages("Look.", "看。", "## 9.1 A / 甲"),
        stated.replace("{}", "1"),
        stub,
        "## In depth / 深入",
        in_both_languages("More.", "再来。", "## 9.2 B / 乙"),
        stated.replace("{}", "2"),
        stub,
    )
    for cell in notebook.cells:
        if cell.source == stub:
            cell.metadata = {"minutes": 6}
        if "**Exercise" in cell.source:
            cell.metadata = {}
    return notebook


@pytest.mark.parametrize(
    ("language", "words"),
    [
        ("en", ["Exercise 1 · 6 minutes", "In your notebook, section 9.1: check_sum"]),
        ("zh", ["练习 1 · 6 分钟", "在你的 notebook 里，9.1 节：check_sum"]),
    ],
)
def test_an_exercise_of_a_section_has_a_slide_with_its_minutes(language, words):
    (slide,) = page_of(lesson_with_exercises(), language).select("section.is-exercise")
    assert [each.text for each in slide.select(".prose p")] == words
    assert {"en": "How many?", "zh": "多少？"}[language] in slide.select_one(".notes").text
    assert slide.select_one(".heading").text.split()[0] == "9.1"
    assert len(page_of(lesson_with_exercises(), "both").select(".is-exercise .prose p")) == 4


def test_the_second_slide_is_the_outline_with_minutes_and_exercises():
    found = page_of(lesson_with_exercises()).select("section section")[1]
    assert found.select_one(".heading").text.strip() == "In this lesson"
    rows = [[td.text for td in row.select("td")] for row in found.select("tbody tr")]
    assert rows == [["9.1 A", "5", "1"]]


def test_lesson_without_slide_metadata_is_an_error():
    notebook = lesson_of()
    with pytest.raises(EditionError, match="no cell has `slide` metadata"):
        page_of(notebook)


@pytest.mark.parametrize(
    ("cell", "wrong"),
    [(4, "answer"), (4, {"en": "Why?", "zh": "为什么？"}), (3, "result"), (3, {"en": "Why?"})],
)
def test_slide_metadata_of_another_kind_is_named(cell, wrong):
    notebook = lesson_with_metadata()  # its cell 3 is prose, its cell 4 code
    notebook.cells[cell].metadata.slide = wrong
    with pytest.raises(EditionError, match="`slide` must be"):
        page_of(notebook)


def test_each_language_has_its_half_and_both_stand_beside_each_other():
    section = in_both_languages("English.", "中文。", heading="## 9.1 Bytes / 字节")
    cell = ("table()", [html_output('<td lang="en">peak</td><td lang="zh">峰值</td>')])
    texts = {
        language: page_of(lesson_of(section, cell, slide="result"), language)
        .select("section")[-1]
        .text
        for language in ("en", "zh")
    }
    assert "English." in texts["en"] and "peak" in texts["en"] and not re.search(HAN, texts["en"])
    assert "中文。" in texts["zh"] and "峰值" in texts["zh"] and "English" not in texts["zh"]
    columns = (
        page_of(lesson_of(section), "both").select("section")[-1].select(".prose .columns > div")
    )
    assert [column["lang"] for column in columns] == ["en", "zh"]


def test_a_formula_becomes_mathml_and_keeps_its_punctuation():
    page = page_of(
        lesson_of(
            in_both_languages(
                r"So $\sqrt{L}$, and $$\frac{a}{b}$$", r"所以 $\sqrt{L}$，$$\frac{a}{b}$$"
            )
        )
    )
    assert page.select_one(".whole math msqrt") and page.select_one('math[display="block"] mfrac')
    assert "$" not in page.select("section")[-1].text
    with pytest.raises(EditionError, match=r"\$\\frac\$"):
        page_of(lesson_of(in_both_languages(r"$\frac$", r"$\frac$")))


def test_long_lines_are_broken():
    line = (
        "value = function_name(argument_one, argument_two, argument_three) +"
        " another_function(argument_four)"
    )
    notebook = slide_parts.with_short_lines(lesson_of(line))
    assert max(map(len, notebook.cells[1].source.splitlines())) <= slide_parts.CODE_WIDTH
    with pytest.raises(EditionError):
        slide_parts.with_short_lines(lesson_of("f("))


# --- notes ---


def test_notes_are_read_by_section():
    notes = slides.read_notes("| section | minutes |\n|---|---|\n| 2.1 | 5 | Why? | 为什么？ |\n")
    assert notes == {"2.1": slides.Note(5, {"en": "Why?", "zh": "为什么？"})}
    for row in (
        "| 2.1 | five | Why? | 为什么？ |",
        "| 2.1 | 5 | Why? |",
        "| 2.1 | 5 |  | 为什么？ |",
    ):
        with pytest.raises(EditionError, match=r"NOTES\.md"):
            slides.read_notes(row)


each_lesson = pytest.mark.parametrize("name", NAMES)
LESSONS = read_lessons(NOTEBOOKS)
NOTES = slides.read_notes((NOTEBOOKS.parent / slides.NOTES).read_text(encoding="utf-8"))


def test_every_section_of_every_lesson_has_notes_and_no_other():
    assert slides.missing_notes(LESSONS, NOTES) == []
    assert set(NOTES) == {
        number for notebook in LESSONS.values() for number, _ in slides._sections(notebook)
    }
    assert slides.missing_notes({"x": lesson_of("## 9.1 A / 甲")}, {"9": NOTE}) == ["9.1"]


@each_lesson
def test_the_minutes_of_the_sections_are_those_of_the_lesson(name):
    announced = re.search(
        r"\((\d+) minutes\)", "\n".join(cell.source for cell in LESSONS[name].cells[:5])
    )
    sections = [
        number
        for number, _ in slides._sections(nbformat.v4.new_notebook(cells=core(LESSONS[name])))
    ]
    assert sum(NOTES[number].minutes for number in sections) == int(announced[1])


# --- the course's decks ---


FEWER_PICTURES = {"06", "07"}  # up to two fifths of their slides are text


@each_lesson
def test_lesson_has_a_number_of_slides_that_can_be_presented(name):
    with_short = slide_parts.with_short_lines(LESSONS[name])
    counts = [
        sum(slide.kind != "exercise" for slide in lesson_slides.lesson_slides(with_short, language))
        for language in ("en", "zh")
    ]
    fewest, most = (8, 14) if name.startswith("00") else (25, 36)
    assert fewest <= min(counts) <= max(counts) <= most


@each_lesson
def test_every_exercise_of_the_core_has_its_slide_and_its_place_in_the_outline(name):
    cells = core(LESSONS[name])
    checks = [check_of(cell) for cell in cells if cell.metadata.get("minutes") and check_of(cell)]
    made = [
        slide
        for slide in lesson_slides.lesson_slides(LESSONS[name], "zh")
        if slide.kind == "exercise"
    ]
    assert [slide.parts[0].source.split("`")[1] for slide in made] == checks
    minutes = {number: note.minutes for number, note in NOTES.items()}
    table = class_slides.outline(LESSONS[name].cells, minutes, "en")
    numbers = re.findall(r"\d+", ",".join(row.split("|")[3] for row in table.splitlines()[2:]))
    assert numbers == [str(n) for n in range(1, len(checks) + 1)]


@each_lesson
def test_at_most_a_third_of_the_slides_is_text_alone(name):
    """A claim is not text alone, because its number appears after a click."""
    most = 2 / 5 if name[:2] in FEWER_PICTURES else 1 / 3
    with_short = slide_parts.with_short_lines(without_guards(LESSONS[name]))
    for language in ("en", "zh"):
        made = lesson_slides.lesson_slides(with_short, language)
        # the result of a question before an exercise comes after the exercise
        alone = [
            slide
            for slide, following in pairwise([*made, made[0]])
            if slide.kind in ("title", "point", "heading") and following.kind != "exercise"
        ]
        made = [slide for slide in made if slide.kind != "exercise"]
        assert len(alone) <= most * len(made), f"{len(alone)} of {len(made)}"


# No blank, but a loop with bugs in it: the question itself. Its slide has no verdict, since
# `slide="code"`.
TO_BE_MENDED = ("def train_epoch(",)


@each_lesson
def test_no_lesson_shows_an_attempt_above_its_result(name):
    """What a learner has to fill in is the speaker's question; its slide would show a blank above a
    verdict."""
    cells = LESSONS[name].cells
    attempts = [cell for cell, following in pairwise(cells) if is_solution(following)]
    shown = [cell.source for cell in attempts if "slide" in cell.metadata]
    assert [source for source in shown if not source.startswith(TO_BE_MENDED)] == []
    shown = [cell for cell in cells if cell.metadata.get("slide") in ("code", "both")]
    blanks = [
        node for cell in shown for node in ast.walk(ast.parse(cell.source)) if _is_blank(node)
    ]
    assert [ast.unparse(node) for node in blanks] == []


def _is_blank(node):
    """A body or a value that is yet to be written: `...`."""
    return isinstance(node, ast.Constant) and node.value is ...


@each_lesson
def test_every_picture_of_the_core_is_on_a_slide(name):
    drawn = [
        cell
        for cell in core(LESSONS[name])
        if any(
            "<img" in output.get("data", {}).get("text/html", "")
            for output in cell.get("outputs", [])
        )
    ]
    assert (
        drawn
        and [cell.source for cell in drawn if cell.metadata.get("slide") not in ("result", "both")]
        == []
    )


@each_lesson
def test_a_slides_text_is_short_and_the_same_in_both_languages(name):
    texts = [
        cell.metadata.slide
        for cell in LESSONS[name].cells
        if isinstance(cell.metadata.get("slide"), dict)
    ]
    for text in texts:
        words = re.sub(r"\$\$[^$]*\$\$|\$[^$]*\$", "x", text["en"]).split()
        assert len(words) <= 25 and len(re.findall(HAN, text["zh"])) <= 60, text
        assert (
            agreement_problems(text["en"], text["zh"]) == [] and chinese_problems(text["zh"]) == []
        ), text
        assert (
            english_problems(text["en"]) == [] and glossary_problems(text["en"], text["zh"]) == []
        ), text


# Every lesson in one of the languages, in turns; all are built.
@pytest.fixture(scope="module", params=list(zip(cycle(slides.LANGUAGES), NAMES)), ids="-".join)
def deck(request, built_decks):
    """(language, path, page) of one deck."""
    language, name = request.param
    path = built_decks / language / f"{name}.html"
    return language, path, BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


def loaded_addresses(page):
    """What a browser would load when it opens the page."""
    found = [
        tag[key]
        for key in ("src", "srcset", "poster", "data")
        for tag in page.find_all(attrs={key: True})
    ]
    found += [tag.get("href", "") for tag in page.find_all("link")]
    styles = "\n".join(tag.text for tag in page.find_all("style")) + "".join(
        t["style"] for t in page.select("[style]")
    )
    found += re.findall(r"url\(\s*['\"]?([^'\")]+)", styles) + re.findall(
        r"@import\s+['\"]([^'\"]+)", styles
    )
    return [address for address in found if not address.startswith("data:")]


def test_what_a_page_would_load_is_found():
    bad = (
        '<link href="a.css"><script src="//b"></script><style>@import'
        ' "c";p{background:url(d)}</style>'
    )
    assert sorted(loaded_addresses(BeautifulSoup(bad, "html.parser"))) == ["//b", "a.css", "c", "d"]


def test_a_deck_is_whole_and_loads_nothing(deck):
    language, path, page = deck
    assert loaded_addresses(page) == []
    stacks = page.select(".slides > section")
    assert all(stack.section.select_one(".notes") for stack in stacks)
    for slide in page.select("section section"):
        lines = sum(len(code.text.strip("\n").splitlines()) for code in slide.select(".code pre"))
        assert lines <= slide_parts.MOST_CODE_LINES, slide.select_one(".heading").text
    links = [link["href"] for link in page.select(".slides a[href]")]
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
    texts = [image.get("alt", "") for image in page.find_all("img")]
    assert texts and all(texts)
    assert language == "both" or all(
        bool(re.search(HAN, text)) == (language == "zh") for text in texts
    )


def test_a_deck_speaks_its_language(deck):
    language, _, page = deck
    assert page.html["lang"] == slides.LANGUAGES[language]
    for tag in page.select(".code, script, style"):  # code is the same in every language
        tag.decompose()
    if language == "both":
        assert page.select('[lang="en"]') and page.select('[lang="zh"]')
        return
    assert page.find_all(PER_LANGUAGE, lang={"en": "zh", "zh": "en"}[language]) == []
    words = [
        tag.get_text(" ")
        for tag in page.select(".heading, .prose p, .prose li, .notes p, .html, pre")
    ]
    if language == "en":
        assert [text for text in words if re.search(HAN, text)] == []
    else:
        prose = [tag.get_text(" ") for tag in page.select(".heading, .prose p, .notes p")]
        assert [
            text
            for text in prose
            if not re.search(HAN, text) and len(re.findall("[A-Za-z]{3,}", text)) > 3
        ] == []


# --- bad input ---


def stored(*cells):
    """A lesson as a file's text, its code run."""
    notebook = lesson_of(*cells)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = 1
    return nbformat.writes(notebook)


RUN = ("1", [text_output("1")])
HALF = '<div lang="en">\n\nOnly English.\n\n</div>'


@pytest.mark.parametrize(
    ("lesson", "notes", "named"),
    [
        (stored(), None, "09_a.ipynb"),  # no outputs
        (stored(RUN), None, "NOTES.md"),
        (stored(RUN), "none", "NOTES.md"),
        (
            stored(HALF, RUN),
            "| 9 | 5 | Why? | 为什么？ |",
            '09_a: a markdown cell has no <div lang="zh">',
        ),
    ],
)
def test_the_program_names_what_is_wrong_in_one_sentence_and_builds_nothing(
    tmp_path, capsys, lesson, notes, named
):
    write_lesson(tmp_path / "notebooks", "09_a", lesson)
    if notes:
        path = tmp_path / slides.NOTES
        path.parent.mkdir(parents=True)
        path.write_text(notes, encoding="utf-8")
    assert named in failure(slides, tmp_path / "notebooks", tmp_path / "out", capsys)
