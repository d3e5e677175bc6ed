"""Checks on the notebooks themselves: twins, stored outputs, two languages, words, shape of the
cells.

Every check takes a notebook and returns a list of problems, so that a failing test says all that is
wrong at once. The second half shows that each check finds a fault that is put into a lesson.
"""

import ast
import os
import re
import subprocess
import sys
from copy import deepcopy
from decimal import Decimal
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from markup import spoken_problems

nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt

from publish import translations
from publish.cells import relative_links

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
MOST_BYTES = 1_500_000
MOST_ENGLISH_WORDS = 150
# Outputs that differ from run to run are not compared; the cell says which of these it shows.
REASONS_NOT_TO_COMPARE = {"shows-seconds", "shows-device", "shows-picture"}

HAN = r"\u3400-\u4dbf\u4e00-\u9fff"
CJK = HAN + r"\u3000-\u303f\uff00-\uffef"


# --- helpers ---


def cells_of(notebook, cell_type):
    """(number, cell) of the cells of one type, counted from 1 over all cells."""
    return [
        (number, cell)
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == cell_type
    ]


def tags_of(cell):
    return set(cell.metadata.get("tags", []))


def output_texts(cell):
    """Every text in a cell's stored outputs: streams and text-like data."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield from (value for value in output.get("data", {}).values() if isinstance(value, str))


FENCE = re.compile(r"^(```|~~~).*?^\1", re.S | re.M)
INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
MATH = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?!\s)([^$]+?)(?<![\s\\])\$", re.S)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
DIV = re.compile(r'<div lang="(en|zh)">(.*?)</div>', re.S)


def take_apart(text):
    """Prose of one language -> (words alone, code, formulas); code and formulas leave a ￼
    behind."""
    code = {re.sub(r"\s*#.*", "", fence[0]) for fence in FENCE.finditer(text)}  # without comments
    text = FENCE.sub("\ufffc", text)
    code |= {match[2].strip() for match in INLINE_CODE.finditer(text)}
    text = INLINE_CODE.sub("\ufffc", text)
    formulas = set()
    for match in MATH.finditer(text):
        body = re.sub(r"\\text\{[^{}]*\}", "", match[1] or match[2])
        formulas.add(re.sub(r"\s|\\[,;:! ]", "", body).rstrip(".,;。，；"))
    text = LINK.sub(r"\1", MATH.sub("\ufffc", text))
    text = re.sub(r"<!--.*?-->|<[^>\n]*>|https?://\S+", "", text, flags=re.S)
    return text.replace("*", ""), code, formulas


UNITS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS |= {"百万": 6, "万亿": 12, "千": 3, "万": 4, "亿": 8}  # longest first
NUMBER = re.compile(rf"(\d{{1,3}}(?:,\d{{3}})+|\d+)(\.\d+)?(?:[ -]?({'|'.join(UNITS)}))?")


def numbers_in(words):
    """The numbers of a text: 10,000 and 1 万 are the same one."""
    return {
        (Decimal(whole.replace(",", "") + part) * 10 ** UNITS.get(unit, 0)).normalize()
        for whole, part, unit in NUMBER.findall(words)
    }


def languages_of(source):
    """A markdown cell -> (lines outside of the divs, English, Chinese); None for a language that is
    missing."""
    parts = dict(DIV.findall(source))
    outside = [line for line in DIV.sub("", source).splitlines() if line.strip()]
    return outside, parts.get("en"), parts.get("zh")


# --- checks: twins and outputs ---


def essence(cell):
    """What a cell and its twin must have in common."""
    return {
        "cell type": cell.cell_type,
        "source": cell.source.strip(),
        "tags": sorted(tags_of(cell)),
        "slide type": cell.metadata.get("slideshow", {}).get("slide_type"),
        "slide": cell.metadata.get("slide"),
        "minutes": cell.metadata.get("minutes"),
        "folding": cell.metadata.get("jupyter", {}).get("source_hidden", False),
    }


def twin_problems(notebook, script):
    """Where a notebook and its script (text) disagree."""
    twin = jupytext.reads(script, fmt="py:percent")
    here, there = ([essence(cell) for cell in book.cells] for book in (notebook, twin))
    pairs = enumerate(zip_longest(here, there), 1)
    return [f"cell {n}: {one} and {other}" for n, (one, other) in pairs if one != other]


def glyph_problems(notebook):
    """Warnings of matplotlib about characters that its font lacks: an empty box in the picture."""
    return [
        f"cell {number}: {text.strip()[:120]}"
        for number, cell in cells_of(notebook, "code")
        for text in output_texts(cell)
        if re.search(r"Glyph .* missing from", text)
    ]


def picture_problems(notebook):
    """Outputs that a screen reader cannot say: a PNG by itself has no alt text in JupyterLab,
    whatever its metadata."""
    problems = []
    for number, cell in cells_of(notebook, "code"):
        for data in (output.get("data", {}) for output in cell.outputs):
            found = [kind for kind in data if kind.startswith("image/")]
            found += spoken_problems(data.get("text/html", ""))
            problems += [f"cell {number}: {problem}" for problem in found]
    return problems


def comparison_problems(notebook):
    """Cells whose output is not compared, without a reason; and reasons without effect."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        tags = tags_of(cell)
        if tags & {"nbval-skip", "raises-exception"}:
            problems.append(f"cell {number}: is not tested at all ({', '.join(sorted(tags))})")
        if ("nbval-ignore-output" in tags) != bool(tags & REASONS_NOT_TO_COMPARE):
            problems.append(
                f"cell {number}: nbval-ignore-output goes with one of"
                f" {sorted(REASONS_NOT_TO_COMPARE)}"
            )
    return problems


def fold_problems(notebook):
    """Solutions that are shown unfolded. The students' edition refuses other faults of theirs."""
    return [
        f'cell {number}: a solution needs the metadata jupyter={{"source_hidden": true}}'
        for number, cell in enumerate(notebook.cells, 1)
        if "SOLUTION" in cell.source and not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]


# --- checks: prose cells ---


HEADING = re.compile(rf"#{{1,6}} [^{CJK}]* / .*[{HAN}].*")


def layout_problems(source):
    """One heading line in both languages at most, then a div for each language, and nothing
    else."""
    outside, _, _ = languages_of(FENCE.sub("", source))
    problems = [f"stands outside of the divs: {line!r}" for line in outside[1:]]
    if outside and not (HEADING.fullmatch(outside[0]) and source.lstrip().startswith(outside[0])):
        problems.append(f"does not begin with '## English / 中文': {outside[0]!r}")
    bodies = DIV.findall(source)
    if [language for language, _ in bodies] != ["en", "zh"] and (bodies or not outside):
        problems.append('needs one <div lang="en"> and then one <div lang="zh">')
    for language, body in bodies:
        prose = FENCE.sub("", body)
        faults = {
            "no text, or no blank line around it": not re.fullmatch(
                r"\n\s*\n.*\S.*\n\s*\n", body, re.S
            ),
            "a heading inside of a div": re.search(
                r"^ {0,3}#{1,6} |^ {0,3}\S.*\n {0,3}(=+|-+) *$", prose, re.M
            ),
            "asterisks would be printed, as in **注意：**text": printed_asterisks(body),
        }
        problems += [f"{language}: {fault}" for fault, there in faults.items() if there]
    return problems


def printed_asterisks(markdown):
    """Texts in which ** does not make bold: after punctuation, a closing ** must not touch a letter
    (**注意：**文)."""
    prose = MATH.sub("$$", markdown)
    tokens = [
        child
        for token in MarkdownIt().enable("table").parse(prose)
        for child in token.children or []
    ]
    return [token.content for token in tokens if token.type == "text" and "**" in token.content]


def agreement_problems(english, chinese):
    """Both languages hold the same numbers, formulas and code, apart from the setting that makes a
    command print Chinese."""
    ours, theirs = (
        (numbers_in(words), formulas, code)
        for words, code, formulas in (
            take_apart(text.replace("COURSE_LANG=zh ", "")) for text in (english, chinese)
        )
    )
    return [
        f"{what}: only in English {sorted(map(str, one - other))}, only in Chinese"
        f" {sorted(map(str, other - one))}"
        for what, one, other in zip(("numbers", "formulas", "code"), ours, theirs, strict=True)
        if one != other
    ]


def english_problems(english):
    """No Chinese in it, but for the name of the switch's other position; one idea, so not many
    words."""
    problems = []
    if found := re.findall(f"[{CJK}]+", english.replace("中文", "")):
        problems.append(f"en: Chinese characters {found}")
    prose = re.sub(r"^\s*\|.*", "", take_apart(english)[0], flags=re.M)  # without tables
    words = len(re.findall(r"\w[\w'’.-]*", prose))
    if words > MOST_ENGLISH_WORDS:
        problems.append(f"en: {words} words, at most about {MOST_ENGLISH_WORDS}")
    return problems


def chinese_problems(chinese):
    """Chinese punctuation, and a space between CJK text and Latin letters or digits."""
    words, _, _ = take_apart(chinese)
    problems = []
    if not re.search(f"[{HAN}]", words):
        problems.append("zh: no Chinese in it")
    if found := re.findall(rf".?[{HAN}][,;:?!]|[{HAN}]\.(?=\s|$)|[,;?!] *[{HAN}].?", words):
        problems.append(f"zh: ASCII punctuation at {found}")
    if found := re.findall(f"[{HAN}][A-Za-z0-9]+|[A-Za-z0-9]+[{HAN}]", words):
        problems.append(f"zh: no space between Chinese and Latin text at {found}")
    return problems


# Words of the glossary, and renderings of them that are common elsewhere.
BANNED = {
    "检查点": "校验点|存档点",
    "微批次": "微批(?!次)",
    "重计算": "重算",
    "峰值": "顶峰",
    "卸载": "卸除",
    "锁页内存": "固定内存(?!预算|大小|上限)|钉住内存",
    "锁页": "页锁定",
    "梯度累积": "梯度累加|梯度积累",
    "反向传播": "反向传递|逆向传播",
    "反向": "后向(?=传播|传递|过程|计算)",
    "前向传播": "正向传播|前向传递",
    "权衡": "折[中衷]",
    "存储": "储存",
    "激活值": "活化值",
    "内存": "记忆体",
    "带宽": "频宽",
    "算术强度": "(?:计算|运算)强度",
    "解码器": "译码器",
    "帕累托前沿": "帕累托边界",
    "损失缩放": "损失放缩",
}
# What else an English word may mean: low rank, a call that blocks, a notebook's kernel, FLOPs a
# second; and where Chinese does without it: a sequence of 128 tokens.
OTHER_SENSES = {
    "rank": ["秩"],
    "block": ["阻塞"],
    "kernel": ["内核", "融合算子"],
    "FLOPs": ["算力"],
    "token": ["序列"],
}


def glossary_rows(text):
    """[(English forms, Chinese forms, number of the lesson that introduces the term, meaning)]"""
    rows = [row.split(" | ") for row in re.findall(r"^\| (?!English)(.+) \|$", text, re.M)]
    return [
        (english.split(", "), chinese.split("、"), lesson, meaning)
        for english, chinese, lesson, meaning in rows
    ]


def test_letters_of_the_table_stand_in_the_lessons_that_it_names():
    scripts = {path.name[:2]: path.read_text("utf-8") for path in FOLDER.glob("scripts/*.py")}
    formulas = {n: " ".join(re.findall(r"\$([^$\n]+)\$", text)) for n, text in scripts.items()}
    # the letters, their meaning, and the lessons if they are named one by one
    rows = re.findall(r"^# \| (\$.*) \| .* \| ([\d, ]+) \|$", scripts["00"], re.M)
    assert len(rows) > 10
    for row, lessons in rows:
        letters = "|".join(map(re.escape, re.findall(r"\$(.+?)\$", row)))
        pattern = rf"(?<![A-Za-z\\])({letters})(?![A-Za-z])"
        assert [n for n in lessons.split(", ") if not re.search(pattern, formulas[n])] == [], row


def read_glossary(text):
    """[(pattern of an English form, Chinese words)], long forms first, so that "gradient" is not
    looked for in "gradient checkpointing"."""
    entries = [
        # micro-batch, micro batch, microbatch, or a new line in between
        (form, re.compile(r"\b" + re.sub("[- ]", r"[-\\s]?", form) + r"s?\b", re.I), chinese)
        for forms, chinese, _, _ in glossary_rows(text)
        for form in forms
    ]
    return [
        (form, pattern, chinese + OTHER_SENSES.get(form, []))
        for form, pattern, chinese in sorted(entries, key=lambda entry: -len(entry[0]))
    ]


GLOSSARY = (FOLDER / "GLOSSARY.md").read_text(encoding="utf-8")
TERMS = read_glossary(GLOSSARY)


def introduction_problems(notebook, number, glossary):
    """Terms that the glossary says this lesson introduces, and whose preferred form its Chinese
    text never has; and terms of no lesson that it has."""
    sources = [cell.source for _, cell in cells_of(notebook, "markdown")]
    parts = [(languages_of(source)[2] or "", source.partition("\n")[0]) for source in sources]
    chinese = "\n".join("\n".join(part) for part in parts)
    wanted = {number: True, "–": False}
    return [
        forms[0]
        for _, forms, lesson, _ in glossary_rows(glossary)
        if lesson in wanted and (forms[0] in chinese) != wanted[lesson]
    ]


def glossary_problems(english, chinese):
    """An English term is there in Chinese, in the glossary's word or in English; no other
    renderings."""
    words, _, _ = take_apart(english)
    problems = []
    for form, pattern, chinese_forms in TERMS:
        words, count = pattern.subn("\ufffc", words)
        there = pattern.search(chinese) or any(word in chinese for word in chinese_forms)
        if count and not there:
            problems.append(f"{form!r} is in the English text, none of {chinese_forms} in Chinese")
    for better, pattern in BANNED.items():
        problems += [f"{match[0]!r} is {better!r} here" for match in re.finditer(pattern, chinese)]
    return problems


def prose_problems(notebook):
    """All checks on all markdown cells."""
    problems = []
    for number, cell in cells_of(notebook, "markdown"):
        found = layout_problems(cell.source)
        outside, english, chinese = languages_of(cell.source)
        if outside:
            left, _, right = outside[0].partition(" / ")
            found += glossary_problems(left, right)
        if english and chinese:
            found += agreement_problems(english, chinese) + english_problems(english)
            found += chinese_problems(chinese) + glossary_problems(english, chinese)
        problems += [f"cell {number}: {problem}" for problem in found]
    return problems


def missing_links(prose, folder):
    """Links and pictures of Markdown that name no file."""
    return [target for target in relative_links(prose) if not (folder / target).exists()]


# --- checks: files ---

# Spelled in pieces, so that this file passes its own check.
MACHINE_PATHS = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)" + b"/|/tmp/(?:bash|ipy)")


# --- the course's notebooks ---

PATHS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@cache
def load(path):
    return nbformat.read(path, as_version=4)


@each_notebook
def test_a_notebook_and_its_script_agree(path):
    script = path.parent / "scripts" / f"{path.stem}.py"
    problems = twin_problems(load(path), script.read_text(encoding="utf-8"))
    assert problems == [], f"edit the script, then: make notebooks ARGS={path.stem[:2]}"


def test_every_notebook_has_a_script_and_every_script_a_notebook():
    scripts = {path.stem for path in FOLDER.glob("scripts/*.py")}
    assert scripts == {path.stem for path in PATHS}


@each_notebook
def test_a_notebook_has_no_problems(path):
    checks = (glyph_problems, picture_problems, comparison_problems, fold_problems, prose_problems)
    assert [problem for check in checks for problem in check(load(path))] == []


@each_notebook
def test_a_notebook_is_a_small_file_whose_links_lead_somewhere(path):
    assert path.stat().st_size < MOST_BYTES
    prose = "\n\n".join(cell.source for _, cell in cells_of(load(path), "markdown"))
    assert missing_links(prose, path.parent) == []


@each_notebook
def test_a_lesson_introduces_its_terms_by_their_preferred_names(path):
    assert introduction_problems(load(path), path.stem[:2], GLOSSARY) == []


def test_the_glossary_says_what_each_word_means_in_both_languages():
    lessons = {path.stem[:2] for path in PATHS} | {"–"}  # in no lesson's prose
    problems, seen = [], set()
    for english, chinese, lesson, meaning in glossary_rows(GLOSSARY):
        left, _, right = meaning.partition("<br>")
        found = agreement_problems(left, right) + english_problems(left) + chinese_problems(right)
        found += glossary_problems(left, right)
        found += [f"{word} stands for two terms" for word in seen & {*english, *chinese}]
        found += [f"is of lesson {lesson}"] * (lesson not in lessons)
        problems += [f"{english[0]}: {problem}" for problem in found]
        seen |= {*english, *chinese}
    assert problems == []


@each_notebook
def test_no_text_was_edited_in_one_language_alone(path):
    stored, lesson = translations.read_pairs().items(), path.stem[:2]
    known = {place: pair for place, pair in stored if place.startswith(lesson)}
    found = translations.pairs(load(path))
    alone = {translations.section_of(place) for place in translations.one_sided(found, known)}
    advice = f'if both are right: make notebooks ARGS="--same {" ".join(sorted(alone))}"'
    assert not alone, f"one language was edited; {advice}"
    assert found == known, f"make notebooks ARGS={lesson} renews the hashes of both languages"


def test_the_section_about_triton_runs_where_triton_is_missing():
    script = (FOLDER / "scripts" / "06_flash_attention.py").read_text("utf-8")
    before, section = re.split(r"^# ## .*Triton.*$", script, maxsplit=1, flags=re.M)
    code, _, _ = section.partition("\n# ## ")
    imports = [
        ast.unparse(node)
        for node in ast.parse(before).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    program = "\n".join(["import sys", "sys.modules['triton'] = None", *imports, code])
    names = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "COURSE_LANG": "both"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | names,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton" in done.stdout


def test_no_file_holds_a_path_of_the_machine_it_was_made_on():
    assert MACHINE_PATHS.findall(b"see /" + b"home/somebody/course and notebooks/work/a.py")
    folders = [ROOT / name for name in ("course_lib", "notebooks", "tests", "publish", "docs")]
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    unwanted = {".git", ".pyc"}  # a worktree's .git is a file
    paths = [path for path in paths if path.is_file() and not unwanted & {path.name, path.suffix}]
    texts = {path: path.read_bytes() for path in paths}
    assert [path for path, text in texts.items() if MACHINE_PATHS.search(text)] == []


# --- each check finds a fault that is put into a lesson ---

LESSON = load(PATHS[2])


def twins(notebook):
    script = FOLDER / "scripts" / f"{PATHS[2].stem}.py"
    return twin_problems(notebook, script.read_text(encoding="utf-8"))


def shows(markup, kind="text/html"):
    return {"outputs": [nbformat.v4.new_output("display_data", {kind: markup})]}


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (twins, {"source": "1 + 2"}),
        (twins, {"metadata": {"tags": ["a"]}}),
        (twins, {"metadata": {"slideshow": {"slide_type": "x"}}}),
        (twins, {"metadata": {"slide": "both"}}),
        (twins, {"metadata": {"minutes": 99}}),
        (glyph_problems, shows("UserWarning: Glyph 23792 missing from font(s) DejaVu Sans.")),
        (picture_problems, shows("iVBO", "image/png")),
        (picture_problems, shows("<img>")),
        (picture_problems, shows("<img alt='峰。'>")),
        (picture_problems, shows('<p lang="zh">峰</p><p>值</p>')),
        (picture_problems, shows('<p lang="en">峰</p>')),
        (comparison_problems, {"metadata": {"tags": ["nbval-ignore-output"]}}),
        (comparison_problems, {"metadata": {"tags": ["shows-device"]}}),
        (comparison_problems, {"metadata": {"tags": ["nbval-skip"]}}),
        (fold_problems, {"source": "### BEGIN SOLUTION"}),
    ],
)
def test_a_fault_in_a_code_cell_is_found(check, fault):
    notebook = deepcopy(LESSON)
    cells_of(notebook, "code")[1][1].update(nbformat.from_dict(fault))
    assert check(notebook)


@pytest.mark.parametrize(
    ("pattern", "fault", "problem"),
    [
        (r"\A## .*\n", "Some text.\n", "does not begin with"),
        (r"\A(## .*) / .*", r"\1", "does not begin with"),
        ("</div>\n<div", "</div>\n\nText in between.\n\n<div", "outside of the divs"),
        ('<div lang="en">\n\n', '<div lang="en">\n', "blank line"),
        ("\n\n</div>\n<div", "\n</div>\n<div", "blank line"),
        ('(<div lang="en">\n\n)', "\\1### A heading\n\n", "a heading inside"),
        ('(<div lang="en">\n\n)', "\\1A heading\n---------\n\n", "a heading inside"),
        ('<div lang="zh">', '<div lang="en">', "needs one <div"),
        (r"\A[^#][\s\S]*", "Text in no language.", "does not begin with"),
        ('(<div lang="zh">\n\n)', r"\1**注意：**文。", "asterisks"),
        ('(<div lang="zh">\n\n)', r"\g<1>9876 字节。", "numbers: "),
        ('(<div lang="en">\n\n)', r"\1$x^9$ ", "formulas:"),
        ('(<div lang="en">\n\n)', r"\1`some_name` ", "code:"),
        ('(<div lang="en">\n\n)', r"\1峰值 ", "en: Chinese characters"),
        ('(<div lang="en">\n\n)', r"\1" + "word " * 150, "words, at most"),
        ('(<div lang="zh">\n\n)', r"\1参数,", "ASCII punctuation"),
        ('(<div lang="zh">\n\n)', r"\1是x的", "no space"),
        ('(<div lang="en">\n\n)', r"\1A frobnication trade-off. ", "'trade-off'"),
        ('(<div lang="zh">\n\n)', r"\1校验点。", "'检查点'"),
    ],
)
def test_a_fault_in_a_prose_cell_is_found(pattern, fault, problem):
    notebook = deepcopy(LESSON)
    cell = next(
        cell
        for _, cell in cells_of(notebook, "markdown")
        if re.search(pattern, cell.source) and "<div" in cell.source
    )
    cell.source = re.sub(pattern, fault, cell.source, count=1)
    assert problem in "\n".join(prose_problems(notebook))


def pairs_of(*texts):
    """Hashes of the cells (English, Chinese), the first with the heading of section 2.5."""
    cells = [
        f'<div lang="en">\n\n{en}\n\n</div>\n<div lang="zh">\n\n{zh}\n\n</div>' for en, zh in texts
    ]
    cells[0] = f"## 2.5 Which one? / 哪一个？\n\n{cells[0]}"
    return translations.pairs(
        nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_markdown_cell, cells)))
    )


def test_a_term_that_its_lesson_never_names_is_found():
    assert introduction_problems(LESSON, "02", "| x | 无此词 | 02 | . |") == ["无此词"]


def test_an_edit_in_one_language_is_reported_until_confirmed(tmp_path):
    store, one = tmp_path / "translations.toml", ("One.", "一。")
    before = pairs_of(one, ("Two.", "二。"))
    assert list(before) == ["02.5", "02.5-2"]
    translations.store_pairs("02", before, store)
    assert translations.read_pairs(store) == before
    assert pairs_of(one, ("Two.\n", " 二。")) == before

    both = pairs_of(one, ("A second.", "第二。"))
    assert translations.one_sided(both, before) == {}
    assert translations.renew_pairs(both, before) == both
    alone = pairs_of(one, ("New.", "新。"), ("Two.", "第二。"))
    assert translations.one_sided(alone, before) == {"02.5-3": before["02.5-2"]}
    alone = pairs_of(one, ("A second.", "二。"))
    assert translations.one_sided(alone, before) == {"02.5-2": before["02.5-2"]}
    assert translations.renew_pairs(alone, before, ["02.4"]) == before
    assert translations.renew_pairs(alone, before, ["02.5"]) == alone


def test_a_file_that_is_missing_is_found(tmp_path):
    links = '[a](01_next.ipynb#top) [b](https://a.example) [c](#here) `[d](no.md)` <a href="e.md">'
    assert missing_links(links, tmp_path) == ["01_next.ipynb", "e.md"]
    (tmp_path / "e.md").touch()
    assert missing_links(links, tmp_path) == ["01_next.ipynb"]
