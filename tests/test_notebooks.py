"""Checks on the notebooks themselves: twins, stored outputs, two languages, words, shape of the
cells.

Every check takes a notebook and returns a list of problems, so that a failing test says all that is
wrong at once. The second half shows that each check finds a fault that is put into a lesson.
"""

import ast
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from decimal import Decimal
from functools import lru_cache
from pathlib import Path

import pytest
from markup import spoken_problems

nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
TransformerManager = pytest.importorskip("IPython.core.inputtransformer2").TransformerManager

from publish import (
    translations,
)

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
    code, formulas = set(), set()

    def take_fence(match):
        code.add(re.sub(r"\s*#.*", "", match[0]))  # comments are prose
        return "\ufffc"

    def take_code(match):
        code.add(match[2].strip())
        return "\ufffc"

    def take_formula(match):
        body = re.sub(r"\\text\{[^{}]*\}", "", match[1] or match[2])
        formulas.add(re.sub(r"\s|\\[,;:! ]", "", body).rstrip(".,;。，；"))
        return "\ufffc"

    text = FENCE.sub(take_fence, text)
    text = INLINE_CODE.sub(take_code, text)
    text = MATH.sub(take_formula, text)
    text = LINK.sub(r"\1", text)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>|https?://\S+", "", text, flags=re.S)
    return text.replace("*", ""), code, formulas


UNITS = {
    "thousand": 3,
    "million": 6,
    "billion": 9,
    "trillion": 12,
    "千": 3,
    "万": 4,
    "百万": 6,
    "亿": 8,
    "万亿": 12,
}
NUMBER = re.compile(
    r"(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?:["
    r" -]?(thousand|million|billion|trillion|百万|万亿|千|万|亿))?"
)


def numbers_in(words):
    """The numbers of a text: 10,000 and 1 万 are the same one."""
    found = set()
    for match in NUMBER.finditer(words):
        number = Decimal(match[1].replace(",", "") + (match[2] or ""))
        found.add((number * 10 ** UNITS.get(match[3], 0)).normalize())
    return found


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
    problems = []
    for number, (cell, other) in enumerate(zip(notebook.cells, twin.cells, strict=False), 1):
        here, there = essence(cell), essence(other)
        differing = [key for key in here if here[key] != there[key]]
        if differing:
            problems.append(f"cell {number}: {', '.join(differing)} differ: {here} and {there}")
    if len(notebook.cells) != len(twin.cells):
        problems.append(
            f"{len(notebook.cells)} cells in the notebook, {len(twin.cells)} in the script"
        )
    return problems


def lonely(folder):
    """Notebooks without a script, and scripts without a notebook."""
    notebooks = {path.stem for path in folder.glob("*.ipynb")}
    scripts = {path.stem for path in (folder / "scripts").glob("*.py")}
    return [f"{name} has no twin" for name in sorted(notebooks ^ scripts)]


def compile_problems(notebook):
    """Code cells that are no Python; IPython's magics and a top-level await are."""
    problems = []
    for number, cell in cells_of(notebook, "code"):
        code = TransformerManager().transform_cell(cell.source)
        try:
            compile(code, f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            problems.append(f"cell {number}: {error}")
    return problems


def execution_problems(notebook):
    """A stored notebook has been run once, from top to bottom, without an error."""
    problems = []
    full_cells = [
        (number, cell) for number, cell in cells_of(notebook, "code") if cell.source.strip()
    ]
    for expected, (number, cell) in enumerate(full_cells, 1):
        if cell.execution_count != expected:
            problems.append(
                f"cell {number}: execution count {cell.execution_count} instead of {expected}"
            )
        problems += [
            f"cell {number}: {o.ename}: {o.evalue}"
            for o in cell.outputs
            if o.output_type == "error"
        ]
    return problems


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
        for output in cell.outputs:
            found = [
                f"{kind} instead of an <img>"
                for kind in output.get("data", {})
                if kind.startswith("image/")
            ]
            found += spoken_problems(output.get("data", {}).get("text/html", ""))
            problems += [f"cell {number}: {problem}" for problem in found]
    return problems


def comparison_problems(notebook):
    """Cells whose output is not compared, without a reason; and reasons without effect."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        tags = tags_of(cell)
        if "nbval-skip" in tags or "raises-exception" in tags:
            problems.append(f"cell {number}: is not tested at all ({', '.join(sorted(tags))})")
        if "nbval-ignore-output" in tags and not tags & REASONS_NOT_TO_COMPARE:
            problems.append(
                f"cell {number}: nbval-ignore-output needs one of {sorted(REASONS_NOT_TO_COMPARE)}"
            )
        if tags & REASONS_NOT_TO_COMPARE and "nbval-ignore-output" not in tags:
            problems.append(
                f"cell {number}: {sorted(tags & REASONS_NOT_TO_COMPARE)} without"
                " nbval-ignore-output"
            )
    return problems


# --- checks: code cells ---


def solution_problems(notebook):
    """Solutions stand between two markers, in cells that are shown folded."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        markers = re.findall(r"^\s*### (BEGIN|END) SOLUTION\s*$", cell.source, re.M)
        if "SOLUTION" in cell.source and not markers:
            problems.append(
                f"cell {number}: a solution marker is a line of its own: ### BEGIN SOLUTION"
            )
        if markers != ["BEGIN", "END"] * (len(markers) // 2):
            problems.append(f"cell {number}: unbalanced solution markers: {markers}")
        if markers and cell.cell_type != "code":
            problems.append(f"cell {number}: a solution in a cell that is no code")
        if markers and not cell.metadata.get("jupyter", {}).get("source_hidden"):
            problems.append(
                f'cell {number}: a solution needs the metadata jupyter={{"source_hidden": true}}'
            )
    return problems


def top_level(source):
    """Names that a cell binds when it runs."""
    bound = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
            continue
        names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
        bound |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return bound


def guard_problems(notebook):
    """A solution that takes a name of the reader's asks first whether his answer was accepted, and
    checks it again."""
    problems, attempt = [], ""
    for number, cell in cells_of(notebook, "code"):
        if "### BEGIN SOLUTION" in cell.source:
            *_, last = body = ast.parse(cell.source).body
            check = (
                last.value.func
                if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
                else None
            )
            free = [node for node in body if not isinstance(node, ast.If)]
            taken = top_level("\n".join(map(ast.unparse, free))) & top_level(attempt)
            problems += [
                f"cell {number}: takes the reader's {name!r} whatever he wrote"
                for name in sorted(taken)
            ]
            for guard in (node for node in body if isinstance(node, ast.If)):
                if check is None or ast.unparse(guard.test) != f"not {ast.unparse(check)}.accepted":
                    problems.append(
                        f"cell {number}: asks {ast.unparse(guard.test)!r}, another check than"
                        " its own"
                    )
        attempt = cell.source
    return problems


# --- checks: prose cells ---


def layout_problems(source):
    """One heading line in both languages at most, then a div for each language, and nothing
    else."""
    problems = []
    outside, english, chinese = languages_of(FENCE.sub("", source))
    if outside and not re.match(r"#{1,6} ", outside[0]):
        problems.append(f"stands outside of the divs: {outside[0]!r}")
    elif outside:
        left, slash, right = outside[0].partition(" / ")
        if not slash or re.search(f"[{CJK}]", left) or not re.search(f"[{HAN}]", right):
            problems.append(f"is no heading in both languages, '## English / 中文': {outside[0]!r}")
        if not source.lstrip().startswith(outside[0]):
            problems.append(f"the heading stands below the divs: {outside[0]!r}")
    problems += [f"stands outside of the divs: {line!r}" for line in outside[1:]]
    if english is None and chinese is None:
        return problems if outside else [*problems, "has neither language"]
    if [language for language, _ in DIV.findall(source)] != ["en", "zh"]:
        return [*problems, 'needs one <div lang="en"> and then one <div lang="zh">']
    for language, body in DIV.findall(source):
        if not re.fullmatch(r"\n\s*\n.*\S.*\n\s*\n", body, re.S):
            problems.append(
                f"{language}: needs text, a blank line before it and a blank line after it"
            )
        if re.search(r"^ {0,3}#{1,6} |^ {0,3}\S.*\n {0,3}(=+|-+) *$", FENCE.sub("", body), re.M):
            problems.append(f"{language}: a heading inside of a div doubles the table of contents")
        if "<div" in body:
            problems.append(f"{language}: a div inside of a div")
        for text in printed_asterisks(body):
            problems.append(
                f"{language}: asterisks would be printed, as in **注意：**text: {text!r}"
            )
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
    problems = []
    words, code, formulas = take_apart(english.replace("COURSE_LANG=zh ", ""))
    other_words, other_code, other_formulas = take_apart(chinese.replace("COURSE_LANG=zh ", ""))
    for what, one, other in (
        ("numbers", numbers_in(words), numbers_in(other_words)),
        ("formulas", formulas, other_formulas),
        ("inline code", code, other_code),
    ):
        if one != other:
            only_one, only_other = sorted(map(str, one - other)), sorted(map(str, other - one))
            problems.append(f"{what}: only in English {only_one}, only in Chinese {only_other}")
    return problems


def english_problems(english):
    """No Chinese in it, but for the name of the switch's other position; one idea, so not many
    words."""
    problems = []
    if found := re.findall(f"[{CJK}]+", english.replace("中文", "")):
        problems.append(f"en: Chinese characters {found}")
    prose = "\n".join(
        line for line in take_apart(english)[0].splitlines() if not line.lstrip().startswith("|")
    )
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


# Renderings that are common elsewhere, and what the glossary has instead.
BANNED = {
    "校验点": "检查点",
    "存档点": "检查点",
    "微批(?!次)": "微批次",
    "重算": "重计算",
    "顶峰": "峰值",
    "卸除": "卸载",
    "固定内存(?!预算|大小|上限)": "锁页内存",
    "钉住内存": "锁页内存",
    "页锁定": "锁页",
    "梯度累加": "梯度累积",
    "梯度积累": "梯度累积",
    "反向传递": "反向传播",
    "后向(?=传播|传递|过程|计算)": "反向",
    "逆向传播": "反向传播",
    "正向传播": "前向传播",
    "前向传递": "前向传播",
    "折[中衷]": "权衡",
    "储存": "存储",
    "活化值": "激活值",
    "记忆体": "内存",
    "频宽": "带宽",
    "(?:计算|运算)强度": "算术强度",
    "译码器": "解码器",
    "帕累托边界": "帕累托前沿",
    "损失放缩": "损失缩放",
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


def letters_of(text):
    """(letters, lessons) of each row of lesson 00's table whose lessons are named one by one."""
    for letters, _, lessons in re.findall(r"^# \| (\$.*) \| (.*) \| ([\d, ]+) \|$", text, re.M):
        yield re.findall(r"\$(.+?)\$", letters), lessons.split(", ")


def test_letters_of_the_table_stand_in_the_lessons_that_it_names():
    scripts = {path.name[:2]: path.read_text("utf-8") for path in FOLDER.glob("scripts/*.py")}
    rows = [*letters_of(scripts["00"])]
    assert len(rows) > 10
    for letters, lessons in rows:
        for lesson in lessons:
            formulas = " ".join(re.findall(r"\$([^$\n]+)\$", scripts[lesson]))
            assert any(
                re.search(rf"(?<![A-Za-z\\]){re.escape(letter)}(?![A-Za-z])", formulas)
                for letter in letters
            ), (letters, lesson)


def read_glossary(text):
    """[(pattern of an English form, Chinese words)], long forms first, so that "gradient" is not
    looked for in "gradient checkpointing"."""
    entries = []
    for forms, chinese, _, _ in glossary_rows(text):
        for form in forms:
            # micro-batch, micro batch, microbatch, or a new line in between
            loose = re.sub("[- ]", r"[-\\s]?", form)
            pattern = re.compile(rf"\b{loose}s?\b", re.I)
            entries.append((form, pattern, chinese + OTHER_SENSES.get(form, [])))
    return sorted(entries, key=lambda entry: -len(entry[0]))


GLOSSARY = (FOLDER / "GLOSSARY.md").read_text(encoding="utf-8")


@lru_cache
def glossary():
    return read_glossary(GLOSSARY)


def chinese_text(notebook):
    """The Chinese of a lesson's prose, and its headings."""
    prose = [cell.source for _, cell in cells_of(notebook, "markdown")]
    return "\n".join(
        text
        for source in prose
        for text in (languages_of(source)[2] or "", source.partition("\n")[0])
    )


def introduction_problems(notebook, number, glossary):
    """Terms that the glossary says this lesson introduces, and whose preferred form its Chinese
    text never has; and terms of no lesson that it has."""
    chinese = chinese_text(notebook)
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
    for form, pattern, chinese_forms in glossary():
        words, count = pattern.subn("\ufffc", words)
        if (
            count
            and not pattern.search(chinese)
            and not any(word in chinese for word in chinese_forms)
        ):
            problems.append(
                f"{form!r} is in the English text, none of {chinese_forms} in the Chinese one"
            )
    for pattern, better in BANNED.items():
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


def link_problems(notebook, folder):
    """Links and pictures that name no file."""
    problems = []
    for number, cell in cells_of(notebook, "markdown"):
        prose = INLINE_CODE.sub("", FENCE.sub("", cell.source))
        targets = [target for _, target in LINK.findall(prose)] + re.findall(
            r'(?:href|src)="([^"]*)"', prose
        )
        for target in targets:
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z][a-z0-9+.-]*:", path) and not (folder / path).exists():
                problems.append(f"cell {number}: {target} does not exist")
    return problems


# --- checks: files ---

# Spelled in pieces, so that this file passes its own check.
MACHINE_PATHS = re.compile(
    "(?<![\\w.])/(?:"
    + "|".join(["work", "root", r"home/\w+", r"Users/\w+"])
    + ")/|/tmp/(?:bash|ipy)"
)


def machine_paths(text):
    """Paths of the machine that a file was made on."""
    return [
        f"...{text[max(0, m.start() - 20) : m.end() + 20]!r}" for m in MACHINE_PATHS.finditer(text)
    ]


def files_of_the_course():
    """All text files of the repository, without asking git: the course may have come as an
    archive."""
    folders = [ROOT / name for name in ("course_lib", "notebooks", "tests", ".ci")]
    paths = [path for folder in folders for path in folder.rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.name != ".git"]
    unwanted = {"__pycache__", ".ipynb_checkpoints"}
    for path in sorted(paths):
        if path.is_file() and not unwanted & set(path.parts):
            content = path.read_bytes()
            if b"\0" not in content:
                yield path.relative_to(ROOT), content.decode("utf-8")


# --- the course's notebooks ---

PATHS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@lru_cache
def load(path):
    return nbformat.read(path, as_version=4)


@each_notebook
def test_a_notebook_and_its_script_agree(path):
    script = path.parent / "scripts" / f"{path.stem}.py"
    assert twin_problems(load(path), script.read_text(encoding="utf-8")) == []


def test_every_notebook_has_a_script_and_every_script_a_notebook():
    assert lonely(FOLDER) == []


@each_notebook
@pytest.mark.parametrize(
    "check",
    [
        compile_problems,
        execution_problems,
        glyph_problems,
        picture_problems,
        comparison_problems,
        solution_problems,
        guard_problems,
        prose_problems,
    ],
)
def test_a_notebook_passes(check, path):
    assert check(load(path)) == []


@each_notebook
def test_the_links_of_a_notebook_lead_somewhere(path):
    assert link_problems(load(path), path.parent) == []


@each_notebook
def test_a_notebook_is_a_small_file(path):
    assert path.stat().st_size < MOST_BYTES


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
    known = {
        place: pair
        for place, pair in translations.read_pairs().items()
        if place.startswith(path.stem[:2])
    }
    found = translations.pairs(load(path))
    alone = sorted(
        {translations.section_of(place) for place in translations.one_sided(found, known)}
    )
    assert alone == [], (
        "one language was edited; if both are right: "
        f'make notebooks ARGS="--same {" ".join(alone)}"'
    )
    assert found == known, (
        f"make notebooks ARGS={path.stem[:2]} renews the hashes of both languages"
    )


def test_the_section_about_triton_runs_where_triton_is_missing():
    cells = jupytext.read(FOLDER / "scripts" / "06_flash_attention.py", fmt="py:percent").cells
    start = next(i for i, cell in enumerate(cells) if re.match(r"## .*Triton", cell.source))
    end = next(
        i for i, cell in enumerate(cells[start + 1 :], start + 1) if cell.source.startswith("## ")
    )
    before, code = (
        [cell.source for cell in part if cell.cell_type == "code"]
        for part in (cells[:start], cells[start:end])
    )
    statements = [node for source in before for node in ast.parse(source).body]
    imports = [
        ast.unparse(node) for node in statements if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    program = "\n".join(["import sys", "sys.modules['triton'] = None", *imports, *code])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
        "COURSE_LANG": "both",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", env=environment
    )
    assert code and done.returncode == 0, done.stderr
    assert "Triton" in done.stdout


def test_no_file_holds_a_path_of_the_machine_it_was_made_on():
    assert {
        str(path): found for path, text in files_of_the_course() if (found := machine_paths(text))
    } == {}


# --- each check finds a fault that is put into a lesson ---

LESSON = load(PATHS[2])
SOLUTION = "### BEGIN SOLUTION\nanswer = 42\n### END SOLUTION"
GLYPH = (
    "UserWarning: Glyph 23792 (\\N{CJK UNIFIED IDEOGRAPH-5CF0}) missing from font(s) DejaVu Sans."
)
FAILURE = nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])


def twins(notebook):
    return twin_problems(
        notebook, (FOLDER / "scripts" / f"{PATHS[2].stem}.py").read_text(encoding="utf-8")
    )


def shows(markup, kind="text/html"):
    return {"outputs": [nbformat.v4.new_output("display_data", {kind: markup})]}


def folded(source):
    return {"source": source, "metadata": {"jupyter": {"source_hidden": True}}}


@pytest.mark.parametrize(
    ("check", "faults"),
    [
        (
            twins,
            [
                {"source": "1 + 2"},
                *(
                    {"metadata": each}
                    for each in (
                        {"tags": ["a"]},
                        {"slideshow": {"slide_type": "x"}},
                        {"slide": "both"},
                        {"minutes": 99},
                    )
                ),
            ],
        ),
        (compile_problems, [{"source": "x = (1,"}]),
        (
            execution_problems,
            [{"execution_count": None}, {"execution_count": 99}, {"outputs": [FAILURE]}],
        ),
        (glyph_problems, [shows(GLYPH)]),
        (
            picture_problems,
            [
                shows("iVBO", "image/png"),
                *(shows(f"<img {alt}>") for alt in ("", "alt='A.'", "alt='峰。'")),
            ],
        ),
        (
            picture_problems,
            [shows('<p lang="zh">峰</p><p>值</p>'), shows('<p lang="en">peak 峰值</p>')],
        ),
        (
            comparison_problems,
            [
                {"metadata": {"tags": [tag]}}
                for tag in ("nbval-ignore-output", "shows-device", "nbval-skip")
            ],
        ),
        (
            solution_problems,
            [
                {"source": SOLUTION},
                *(folded(SOLUTION.replace("END", to)) for to in ("BEGIN", "NO")),
            ],
        ),
    ],
)
def test_a_fault_in_a_code_cell_is_found(check, faults):
    for fault in faults:
        notebook = deepcopy(LESSON)
        cells_of(notebook, "code")[1][1].update(nbformat.from_dict(fault))
        assert check(notebook), fault


@pytest.mark.parametrize(
    ("pattern", "fault", "problem"),
    [
        (r"\A## .*\n", "Some text.\n", "outside of the divs"),
        (r"\A(## .*) / .*", r"\1", "no heading in both languages"),
        ("</div>\n<div", "</div>\n\nText in between.\n\n<div", "outside of the divs"),
        ('<div lang="en">\n\n', '<div lang="en">\n', "blank line"),
        ("\n\n</div>\n<div", "\n</div>\n<div", "blank line"),
        ('(<div lang="en">\n\n)', "\\1### A heading\n\n", "a heading inside"),
        ('(<div lang="en">\n\n)', "\\1A heading\n---------\n\n", "a heading inside"),
        ('<div lang="zh">', '<div lang="en">', "needs one <div"),
        (r"\A[^#][\s\S]*", "Text in no language.", "outside of the divs"),
        ('(<div lang="zh">\n\n)', r"\1**注意：**文。", "asterisks"),
        (
            '(<div lang="zh">\n\n)',
            r"\g<1>9876 字节。",
            "numbers: only in English [], only in Chinese ['9876']",
        ),
        ('(<div lang="en">\n\n)', r"\1$x^9$ ", "formulas:"),
        ('(<div lang="en">\n\n)', r"\1`some_name` ", "inline code:"),
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


@pytest.mark.parametrize(
    ("solution", "problem"),
    [
        ("answer = 2\nlesson.check_it(answer)", "takes the reader's 'answer'"),
        (
            "if not lesson.check_it.accepted:\n    x = 1\nanswer = x\nlesson.check_it(answer)",
            "takes the reader's",
        ),
        (
            "if not lesson.check_that.accepted:\n    answer = 2\nlesson.check_it(answer)",
            "another check than its own",
        ),
        (
            "if not lesson.check_it.accepted:\n    answer = 2\n    lesson.check_it(answer)",
            "another check",
        ),
        ("if not lesson.check_it.accepted:\n    answer = 2\nlesson.check_it(answer)", None),
        ("result = 2\nlesson.check_it(result)", None),
    ],
)
def test_a_solution_that_would_take_the_readers_work_is_found(solution, problem):
    sources = (
        "answer = None\nlesson.check_it(answer)",
        f"### BEGIN SOLUTION\n{solution}\n### END SOLUTION",
    )
    found = guard_problems(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    )
    assert (problem in "".join(found)) if problem else found == []


def bilingual(*texts):
    """Cells of (English, Chinese), the first with the heading of section 2.5."""
    sources = [
        f'<div lang="en">\n\n{en}\n\n</div>\n<div lang="zh">\n\n{zh}\n\n</div>' for en, zh in texts
    ]
    sources[0] = f"## 2.5 Which one? / 哪一个？\n\n{sources[0]}"
    return nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(source) for source in sources]
    )


def test_an_edit_in_one_language_alone_is_noticed_until_somebody_gives_the_word(tmp_path):
    store = tmp_path / "translations.toml"
    before = translations.pairs(bilingual(("One.", "一。"), ("Two.", "二。")))
    assert list(before) == ["02.5", "02.5-2"]
    translations.store_pairs("02", before, store)
    assert translations.read_pairs(store) == before

    both = translations.pairs(bilingual(("One.", "一。"), ("A second.", "第二。")))
    assert (
        translations.one_sided(both, before) == {}
        and translations.renew_pairs(both, before) == both
    )
    for edited in (("A second.", "二。"), ("Two.", "第二。")):
        alone = translations.pairs(bilingual(("One.", "一。"), edited))
        assert translations.one_sided(alone, before) == {"02.5-2": before["02.5-2"]}
        assert translations.renew_pairs(alone, before, ["02.4"]) == before
        assert translations.renew_pairs(alone, before, ["02.5"]) == alone
    moved = translations.pairs(bilingual(("New.", "新。"), ("Two.", "二。"), ("One.", "第一。")))
    assert list(translations.one_sided(moved, before)) == [], (
        "its heading makes the first text another one"
    )
    moved = translations.pairs(bilingual(("New.", "新。"), ("Two.", "第二。"), ("Three.", "三。")))
    assert list(translations.one_sided(moved, before)) == ["02.5-2"]
    respaced = translations.pairs(bilingual(("One.", "一。"), ("Two.\n", " 二。")))
    assert respaced == before


def test_a_slide_s_words_and_a_heading_s_are_texts_too():
    book = bilingual(("One.", "一。"))
    book.cells[0].metadata["slide"] = {"en": "One?", "zh": "一？"}
    before = translations.pairs(book)
    assert list(before) == ["02.5", "02.5 slide"]
    book.cells[0].metadata["slide"]["zh"] = "一吗？"
    book.cells[0].source = book.cells[0].source.replace("Which one?", "Which?")
    assert list(translations.one_sided(translations.pairs(book), before)) == ["02.5", "02.5 slide"]


def test_numbers_and_formulas_are_equal_in_both_ways_of_writing_them():
    assert numbers_in("10,000 of 2.50 million, in 2016, at 3.") == {
        Decimal(n) for n in (10000, 2500000, 2016, 3)
    }
    assert numbers_in("1 万、250 万、2016 年、3。") == {
        Decimal(n) for n in (10000, 2500000, 2016, 3)
    }
    assert (
        agreement_problems(
            r"$a = \text{peak}$ of 7-billion, $$b = c.$$", r"70 亿的 $a=\text{峰值}$，$$b = c$$"
        )
        == []
    )


def test_a_term_that_its_lesson_never_names_is_found():
    lesson = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("## Offload / 卸载"),
            nbformat.v4.new_markdown_cell('<div lang="zh">\n\n在 CPU 上预取。\n\n</div>'),
        ]
    )
    terms = (
        "offload | 卸载 | 04",
        "tier | 存储层级、级 | 04",
        "prefetch | 预取 | 04",
        "rank | 进程 | 05",
    )
    rows = "\n".join(f"| {term} | . |" for term in terms)
    assert introduction_problems(lesson, "04", rows) == ["存储层级"]


@pytest.mark.parametrize(
    ("english", "chinese", "right"),
    [
        ("gradient checkpointing", "激活检查点", True),
        ("two micro-batches and a microbatch", "微批次", True),  # one batch, many batches
        ("the rank of a low-rank matrix", "低秩矩阵的秩", True),
        ("call `backward()`", "调用它", True),
        ("a CUDA stream", "一个 CUDA stream", True),
        ("gradient accumulation", "把梯度加起来", False),
        ("tradeoff", "取舍", False),
        ("", "每个微批的梯度", False),
    ],
)
def test_the_words_are_the_glossarys(english, chinese, right):
    assert (glossary_problems(english, chinese) == []) == right


def test_a_file_that_is_missing_is_found(tmp_path):
    links = '[a](01_next.ipynb#top) [b](https://a.example) [c](#here) `[d](no.md)` <a href="e.md">'
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(links)])
    assert len(link_problems(notebook, tmp_path)) == 2
    (tmp_path / "01_next.ipynb").touch()
    (tmp_path / "e.md").touch()
    assert link_problems(notebook, tmp_path) == []
    assert lonely(tmp_path) == ["01_next has no twin"]


def test_a_path_of_a_machine_is_found():
    assert machine_paths(json.dumps({"file": "/".join(["", "home", "somebody", "course"])}))
    assert machine_paths("see https://a.example/home and notebooks/work/a.py") == []
