"""Test the slides: how metadata selects cells, how long cells are cut, and the built decks."""

import re
from itertools import cycle

import pytest
from edition_fixtures import NAMES, NOTEBOOKS, stored_lessons
from test_notebooks import agreement_problems, chinese_problems, english_problems, glossary_problems

nbformat = pytest.importorskip("nbformat")
BeautifulSoup = pytest.importorskip("bs4").BeautifulSoup
pytest.importorskip("nbconvert")
pytest.importorskip("latex2mathml")

from course_lib import labels
from course_lib.teaching.claims import Claim, claims_table
from course_lib.teaching.switch import PER_LANGUAGE
from publish import slide_parts, slides
from publish.cells import EditionError, is_project
from publish.languages import words_in

LESSONS = [name for name in NAMES if not is_project(name)]
NOTE = slides.Note(5, {"en": "Why?", "zh": "为什么？"})
PNG = "iVBORw0KGgo="  # the first bytes of a PNG; no code reads the others
new = nbformat.v4


def prose(en, zh, heading="", slide=True):
    """Return a prose cell in both languages; its text is on a slide if `slide` is true."""
    divs = f'<div lang="en">\n\n{en}\n\n</div>\n<div lang="zh">\n\n{zh}\n\n</div>'
    metadata = {"slide": {"en": en, "zh": zh}} if slide else {}
    return new.new_markdown_cell(f"{heading}\n\n{divs}".strip(), metadata=metadata)


def code(source, *outputs, **metadata):
    """Return a code cell; `slide` is "both" unless metadata is passed."""
    metadata = metadata or {"slide": "both"}
    return new.new_code_cell(source, outputs=[*outputs], metadata=metadata)


def lesson_of(*cells):
    title = prose("Opening.", "开头。", "# 9 Title / 题目", slide=False)
    return new.new_notebook(cells=[title, *cells])


def html_output(html, **metadata):
    return new.new_output("display_data", {"text/html": html}, metadata=metadata)


def text_output(text):
    return new.new_output("execute_result", {"text/plain": text})


def page_of(notebook, language="en"):
    html = slides.deck_html(notebook, "Title", language, dict.fromkeys(("9", "9.1", "9.2"), NOTE))
    return BeautifulSoup(html, "html.parser")


LONG = "def f(x):\n" + "    x = x + 1\n" * 20 + "    return x\n\ng = f(1)\nh = f(2)"
DECORATED = "@cache\ndef f():\n" + "    pass\n" * 11 + "\n\ny = f()"


@pytest.mark.parametrize("code", [LONG, DECORATED, "x = 1", ""])
def test_long_code_is_divided_among_slides_without_losing_lines(code):
    parts = slide_parts.cut_code(code)
    assert all(len(part.splitlines()) <= slide_parts.MOST_CODE_LINES for part in parts)
    kept = [line for part in parts for line in part.splitlines() if line.strip()]
    assert kept == [line for line in code.splitlines() if line.strip()]


def test_long_table_is_divided_between_rows_with_repeated_headings():
    def cut(rows, language):
        body = "".join(f"<tr><td>{i}</td></tr>" for i in range(rows))
        head = "<table><thead><tr><th>n</th></tr></thead>"
        html = f"<div>{head}<tbody>{body}</tbody></table><p>{rows} rows</p></div>"
        return slide_parts.cut_table(html_output(html), language)

    parts = [BeautifulSoup(part.data["text/html"], "html.parser") for part in cut(24, "en")]
    assert [cell.text for part in parts for cell in part.select("td")] == [*map(str, range(24))]
    assert [(bool(part.th), bool(part.p)) for part in parts] == [(True, False), (True, True)]
    # a heading in both languages takes more lines
    assert [len(cut(12, language)) for language in ("en", "zh", "both")] == [1, 1, 2]


@pytest.mark.parametrize(
    ("language", "words"),
    [("en", ['A "peak".']), ("zh", ["峰值。"]), ("both", ['A "peak".', "峰值。"])],
)
def test_slide_with_plot_shows_image_in_deck_language(language, words):
    # a small picture per language, and large ones for slides
    image = (
        '<figure lang="{}" style="margin: 0">'
        '<img alt="{}" src="data:image/png;base64,AAAA"></figure>'
    )
    pictures = image.format("en", "A &quot;peak&quot;.") + image.format("zh", "峰值。")
    drawn = html_output(pictures, slides={"en": PNG, "zh": PNG})
    found = page_of(lesson_of(code("draw()", drawn)), language).select("section.is-figure")
    assert [slide.img["alt"] for slide in found] == words
    assert all(len(slide.select_one(".body").find_all(recursive=False)) == 1 for slide in found)
    assert {slide.img["src"] for slide in found} == {f"data:image/png;base64,{PNG}"}
    del drawn.metadata.slides["en"]
    with pytest.raises(EditionError, match="no picture for slides in en"):
        page_of(lesson_of(code("draw()", drawn)), language)


def test_slides_hide_interactive_and_progress_outputs():
    slider = text_output("interactive(children=(IntSlider(value=1),))")
    switch = html_output('<form class="course-language"></form>')
    progress = new.new_output("stream", text="plain:   0%|          | 0/40 [00:00<?, ?it/s]")
    for output in (slider, switch, progress, text_output(" ")):
        assert slide_parts.shown_outputs(output, "en") == []


WORDS = [labels.text(each) for each in ("peak", "step", "activation", "forward")]
CLAIMS = [Claim(*WORDS[:3], "fails", WORDS[3]), Claim(*WORDS[1:], "holds", WORDS[0])]


@pytest.mark.parametrize("language", ["zh", "both"])
def test_claim_slide_reveals_number_and_verdict_after_click(language):
    shown = claims_table(CLAIMS, "4 MB", "9 MB")._repr_html_()
    lesson = lesson_of(code("show_claims()", html_output(shown)), prose("So.", "所以。"))
    found = page_of(lesson, language).select("section.is-claim")
    for slide, claim, measured in zip(found, CLAIMS, ("4 MB", "9 MB"), strict=True):
        for name in ("claim", "source", "verdict"):
            text = slide.select_one(f".{name}").get_text(" ", strip=True)
            assert " ".join(text.split()) == words_in(getattr(claim, name), language)
        assert slide.select_one(".measured").text.split() == measured.split()
        assert slide.select(".fragment .measured") and slide.select(".fragment .verdict")
        assert not slide.select(".fragment .claim, .fragment .source")
        assert "所以。" not in slide.select_one(".body").text


def test_slide_of_folded_cell_shows_result_without_code():
    notebook = lesson_of(code("y = falling(2)\ny", text_output("It falls.")))
    page = page_of(notebook)
    assert "falling(2)" in page.text and page.select_one(".result.fragment").text == "It falls."
    notebook.cells[-1].metadata.jupyter = {"source_hidden": True}
    page = page_of(notebook)
    assert "falling(2)" not in page.text and "It falls." in page.text


def test_solution_slide_is_labeled_and_omits_guard_code():
    attempt = "answer = None\nlesson.check_it(answer)"
    solution = "if not lesson.check_it.accepted:\n    answer = 6 * 7\n\nlesson.check_it(answer)"
    guarded = f"### BEGIN SOLUTION\n{solution}\n### END SOLUTION"
    cells = code("import torch\n" + attempt), code(guarded, text_output("✓ Right."))
    _, _, deck = next(slides.decks({"09": lesson_of(*cells)}, {"9": NOTE}))
    page = BeautifulSoup(deck, "html.parser").select_one(".slides")
    assert "SOLUTION" not in page.text and "import" not in page.text
    (last,) = [slide for slide in page.select("section section") if "✓ Right." in slide.text]
    assert last.select_one(".part").text == "solution"
    shown = "".join(each.text for each in last.select(".code"))
    assert shown.strip() == "answer = 6 * 7\n\nlesson.check_it(answer)"


def lesson_with_metadata():
    """Return a lesson with section 9.1 without slides and section 9.2 with three slides."""
    return lesson_of(
        prose("Hidden.", "不显示。", "## 9.1 A / 甲", slide=False),
        prose("Long prose.", "长文。", "## 9.2 B / 乙", slide=False),
        prose("Why?", "为什么？"),
        code("x = 2\nx", text_output("2"), slide="result"),
        code("y = 3\ny", text_output("3"), slide="code"),
        code("z = 4", minutes=1),
    )


def test_deck_shows_marked_cells_and_other_prose_as_speaker_notes():
    page = page_of(lesson_with_metadata())
    title, _, question, last = page.select("section section")
    headings = [each.text.strip() for each in page.select("section section .heading")]
    assert headings == ["9 Title", "In this lesson", "9.2 B", "9.2 B"]
    assert question.select_one(".prose").text.strip() == "Why?"
    assert question.select_one(".result.fragment").text.strip() == "2"
    assert last.select_one(".code").text.strip() == "y = 3\ny"
    notes = question.select_one(".notes").parent.text
    assert "Long prose." in notes and "Why?" in notes
    assert "Hidden." not in page.text and "Opening." in title.text
    chinese = page_of(lesson_with_metadata(), "zh").select("section section")[2]
    assert chinese.select_one(".prose").text.strip() == "为什么？"
    columns = page_of(lesson_with_metadata(), "both").select(".prose .columns > div")
    shown = [(each["lang"], each.text.strip()) for each in columns]
    assert shown[-2:] == [("en", "Why?"), ("zh", "为什么？")]


def exercise(number):
    stated = prose(f"**Exercise {number}.** How many?", f"**练习 {number}。** 多少？", slide=False)
    return stated, code("answer = None\nlesson.check_sum(answer)", minutes=6)


@pytest.mark.parametrize(
    ("language", "words", "note"),
    [
        ("en", ["Exercise 1 · 6 minutes", "In your notebook, section 9.1: check_sum"], "How many?"),
        ("zh", ["练习 1 · 6 分钟", "在你的 notebook 里，9.1 节：check_sum"], "多少？"),
    ],
)
def test_deck_has_exercise_slide_and_outline_row_per_section(language, words, note):
    lesson = lesson_of(
        prose("Look.", "看。", "## 9.1 A / 甲"),
        *exercise(1),
        prose("**End of the first sitting** (7 minutes).", "**第一次学习到此结束**（7 分钟）。"),
        new.new_markdown_cell("## In depth / 深入"),
        prose("More.", "再来。", "## 9.2 B / 乙"),
        *exercise(2),
    )
    page = page_of(lesson, language)
    (slide,) = page.select("section.is-exercise")
    assert [each.text for each in slide.select(".prose p")] == words
    assert note in slide.select_one(".notes").text
    assert slide.select_one(".heading").text.split()[0] == "9.1"
    row = [cell.text for cell in page.select("section section")[1].select("tbody td")]
    names = {"en": ["9.1 A", "first sitting"], "zh": ["9.1 甲", "第一次学习"]}[language]
    assert row == [names[0], "5", "1", names[1], "7", ""]


@pytest.mark.parametrize(
    ("cell", "wrong"), [(4, "answer"), (4, {"en": "Why?", "zh": "为什么？"}), (3, {"en": "Why?"})]
)
def test_invalid_slide_metadata_raises(cell, wrong):
    notebook = lesson_with_metadata()  # its cell 3 is prose, its cell 4 code
    notebook.cells[cell].metadata.slide = wrong
    with pytest.raises(EditionError, match="`slide` must be"):
        page_of(notebook)


def test_formula_becomes_mathml_and_invalid_formula_raises():
    formulas = r"So $\sqrt{L}$, and $$\frac{a}{b}$$"
    page = page_of(lesson_of(prose(formulas, formulas)))
    assert page.select_one(".whole math msqrt") and page.select_one('math[display="block"] mfrac')
    assert "$" not in page.select("section")[-1].text
    with pytest.raises(EditionError, match=r"\$\\frac\$"):
        page_of(lesson_of(prose(r"$\frac$", r"$\frac$")))


def test_long_code_lines_are_wrapped_on_slides():
    line = f"value = function_name({', '.join(['argument'] * 20)})"
    notebook = slide_parts.with_short_lines(lesson_of(code(line)))
    assert max(map(len, notebook.cells[1].source.splitlines())) <= slide_parts.CODE_WIDTH


def test_read_notes_returns_notes_by_section_and_rejects_malformed_rows():
    notes = slides.read_notes("| section | minutes |\n|---|---|\n| 2.1 | 5 | Why? | 为什么？ |\n")
    assert notes == {"2.1": NOTE}
    for columns in ("five | Why? | 为什么？", "5 | Why?", "5 |  | 为什么？"):
        with pytest.raises(EditionError, match=r"NOTES\.md"):
            slides.read_notes(f"| 2.1 | {columns} |")


each_lesson = pytest.mark.parametrize("name", LESSONS)
NOTES = slides.read_notes((NOTEBOOKS.parent / slides.NOTES).read_text(encoding="utf-8"))


def test_every_speaker_note_belongs_to_existing_section():
    lessons = [each for name, each in stored_lessons().items() if not is_project(name)]
    assert NOTES.keys() == {number for each in lessons for number, _ in slides._sections(each)}


@each_lesson
def test_slide_texts_have_equal_content_in_both_languages(name):
    for cell in stored_lessons()[name].cells:
        if isinstance(text := cell.metadata.get("slide"), dict):
            problems = agreement_problems(text["en"], text["zh"]) + chinese_problems(text["zh"])
            problems += english_problems(text["en"]) + glossary_problems(text["en"], text["zh"])
            assert problems == [], text


# each lesson in one language; all decks are built
@pytest.mark.parametrize(("language", "name"), list(zip(cycle(slides.LANGUAGES), LESSONS)))
def test_deck_is_self_contained_and_shows_only_selected_languages(built_decks, language, name):
    path = built_decks / language / f"{name}.html"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"""(?:\bsrc=|url\(\s*|@import\s+)["']?(?:https?:)?//""", text)
    page = BeautifulSoup(text, "html.parser")
    stacks = page.select(".slides > section")
    assert all(stack.section.select_one(".notes") for stack in stacks)
    for slide in page.select("section section"):
        lines = sum(len(code.text.strip("\n").splitlines()) for code in slide.select(".code pre"))
        assert lines <= slide_parts.MOST_CODE_LINES, slide.select_one(".heading").text
    links = [link["href"] for link in page.select(".slides a[href]")]
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
    assert all(image.get("alt") for image in page.find_all("img"))
    assert page.html["lang"] == slides.LANGUAGES[language]
    spoken = {each for each in ("en", "zh") if page.find_all(PER_LANGUAGE, lang=each)}
    assert spoken == {"en", "zh"} if language == "both" else spoken <= {language}
