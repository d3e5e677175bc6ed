"""Notebooks: agreement with their scripts, stored outputs, two languages, terms and cells.

Each check takes a notebook and returns a list of problems, so that a failing test lists all of
them. The last tests insert faults into a lesson that the checks must find.
"""

import ast
import os
import re
import subprocess
import sys
from decimal import Decimal
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest
from html_checks import spoken_problems

nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt

from publish import translations
from publish.cells import relative_links

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
MOST_BYTES = 1_500_000
# Outputs that differ from run to run are not compared; the cell says which of these it shows.
REASONS_NOT_TO_COMPARE = {"shows-seconds", "shows-device", "shows-picture"}

HAN = r"\u3400-\u4dbf\u4e00-\u9fff"
CJK = HAN + r"\u3000-\u303f\uff00-\uffef"


def cells_of(notebook, cell_type):
    """Return (number, cell) of the cells of one type, counted from 1 over all cells."""
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
    """Split the prose of one language into words, code and formulas; ￼ replaces the latter."""
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
    """Split a markdown cell into lines outside of the divs, English and Chinese, or None."""
    parts = dict(DIV.findall(source))
    outside = [line for line in DIV.sub("", source).splitlines() if line.strip()]
    return outside, parts.get("en"), parts.get("zh")


# --- checks: scripts and outputs ---


def essence(cell):
    """Return what a cell of a notebook has in common with that of its script."""
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
    """Compare the cells of a notebook with the text of its script."""
    from_script = jupytext.reads(script, fmt="py:percent")
    both = ([essence(cell) for cell in each.cells] for each in (notebook, from_script))
    pairs = enumerate(zip_longest(*both), 1)
    return [f"cell {n}: {one} and {other}" for n, (one, other) in pairs if one != other]


def glyph_problems(notebook):
    """Find matplotlib's warnings of missing glyphs, which print as empty boxes."""
    return [
        f"cell {number}: {text.strip()[:120]}"
        for number, cell in cells_of(notebook, "code")
        for text in output_texts(cell)
        if re.search(r"Glyph .* missing from", text)
    ]


def picture_problems(notebook):
    """Find outputs without text for screen readers: JupyterLab shows a PNG without alt text."""
    problems = []
    for number, cell in cells_of(notebook, "code"):
        for data in (output.get("data", {}) for output in cell.outputs):
            found = [kind for kind in data if kind.startswith("image/")]
            found += spoken_problems(data.get("text/html", ""))
            problems += [f"cell {number}: {problem}" for problem in found]
    return problems


def comparison_problems(notebook):
    """Find cells whose output is not compared without a reason, and reasons without effect."""
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
    """Find solutions that are not folded. The students' edition rejects their other faults."""
    return [
        f'cell {number}: a solution needs the metadata jupyter={{"source_hidden": true}}'
        for number, cell in enumerate(notebook.cells, 1)
        if "SOLUTION" in cell.source and not cell.metadata.get("jupyter", {}).get("source_hidden")
    ]


# --- checks: prose cells ---


HEADING = re.compile(rf"#{{1,6}} [^{CJK}]* / .*[{HAN}].*")


def layout_problems(source):
    """Require at most one heading line in both languages, and then one div per language."""
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
    """Find ** that does not print bold: after punctuation, no letter may follow (**注意：**文)."""
    prose = MATH.sub("$$", markdown)
    tokens = [
        child
        for token in MarkdownIt().enable("table").parse(prose)
        for child in token.children or []
    ]
    return [token.content for token in tokens if token.type == "text" and "**" in token.content]


def agreement_problems(english, chinese):
    """Compare numbers, formulas and code of both languages, except for `COURSE_LANG=zh`."""
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
    """Report Chinese characters, except for the label 中文 of the language switch."""
    found = re.findall(f"[{CJK}]+", english.replace("中文", ""))
    return [f"en: Chinese characters {found}"] if found else []


def chinese_problems(chinese):
    """Require Chinese punctuation, and a space between Chinese and Latin letters or digits."""
    words, _, _ = take_apart(chinese)
    problems = []
    if not re.search(f"[{HAN}]", words):
        problems.append("zh: no Chinese in it")
    if found := re.findall(rf".?[{HAN}][,;:?!]|[{HAN}]\.(?=\s|$)|[,;?!] *[{HAN}].?", words):
        problems.append(f"zh: ASCII punctuation at {found}")
    if found := re.findall(f"[{HAN}][A-Za-z0-9]+|[A-Za-z0-9]+[{HAN}]", words):
        problems.append(f"zh: no space between Chinese and Latin text at {found}")
    return problems


# Words of the glossary, and other translations that are common elsewhere.
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
    "估计": "估算",
    "可分页": "可换页",
    "步长": "步幅",
    "可重入": "(?<!可)重入",
    "往前跑": "空跑",
    "代价最小": "最便宜",
    "对比表": "记分表",
    "峰值里什么最多": "占满峰值|峰值由什么占满|撑起峰值",
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


SYMBOLS = "\n## Symbols / "  # the glossary's last section, a table of letters


def glossary_rows(text):
    """[(English forms, Chinese forms, number of the lesson that introduces the term, meaning)]"""
    text, _, _ = text.partition(SYMBOLS)
    rows = [row.split(" | ") for row in re.findall(r"^\| (?!English)(.+) \|$", text, re.M)]
    return [
        (english.split(", "), chinese.split("、"), lesson, meaning)
        for english, chinese, lesson, meaning in rows
    ]


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


def glossary_problems(english, chinese):
    """Require the glossary's word, or the English one, in Chinese for each English term."""
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

# Split into two literals, so that this file passes its own check.
MACHINE_PATHS = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)" + b"/|/tmp/(?:bash|ipy)")


# --- the course's notebooks ---

PATHS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


@cache
def load(path):
    return nbformat.read(path, as_version=4)


@each_notebook
def test_notebook_cells_equal_cells_of_its_script(path):
    script = path.parent / "scripts" / f"{path.stem}.py"
    problems = twin_problems(load(path), script.read_text(encoding="utf-8"))
    assert problems == [], f"edit the script, then: make notebooks ARGS={path.stem[:2]}"


@each_notebook
def test_notebook_has_no_problems_in_fonts_images_folding_or_prose(path):
    checks = (glyph_problems, picture_problems, comparison_problems, fold_problems, prose_problems)
    assert [problem for check in checks for problem in check(load(path))] == []


@each_notebook
def test_notebook_is_small_and_links_to_existing_files(path):
    assert path.stat().st_size < MOST_BYTES
    prose = "\n\n".join(cell.source for _, cell in cells_of(load(path), "markdown"))
    assert missing_links(prose, path.parent) == []


def test_glossary_defines_each_word_in_both_languages():
    lessons = {path.stem[:2] for path in PATHS} | {"–"}  # in no lesson's prose
    problems, words = [], set()
    for english, chinese, lesson, meaning in glossary_rows(GLOSSARY):
        left, _, right = meaning.partition("<br>")
        found = agreement_problems(left, right) + english_problems(left) + chinese_problems(right)
        found += glossary_problems(left, right)
        found += [f"{word} means two terms" for word in words & {*english, *chinese}]
        found += [f"is of lesson {lesson}"] * (lesson not in lessons)
        problems += [f"{english[0]}: {problem}" for problem in found]
        words |= {*english, *chinese}
    assert problems == []


@each_notebook
def test_no_text_is_edited_in_only_one_language(path):
    stored, lesson = translations.read_pairs().items(), path.stem[:2]
    known = {place: pair for place, pair in stored if place.startswith(lesson)}
    found = translations.pairs(load(path))
    alone = {translations.section_of(place) for place in translations.one_sided(found, known)}
    advice = f'if both are right: make notebooks ARGS="--same {" ".join(sorted(alone))}"'
    assert not alone, f"one language was edited; {advice}"
    assert found == known, f"make notebooks ARGS={lesson} renews the hashes of both languages"


def test_triton_section_runs_without_triton():
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


def test_no_repository_file_contains_local_absolute_path():
    assert MACHINE_PATHS.findall(b"see /" + b"home/somebody/course and notebooks/work/a.py")
    folders = [ROOT / name for name in ("course_lib", "notebooks", "tests", "publish", "docs")]
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    unwanted = {".git", ".pyc"}  # a worktree's .git is a file
    paths = [path for path in paths if path.is_file() and not unwanted & {path.name, path.suffix}]
    texts = {path: path.read_bytes() for path in paths}
    assert [path for path, text in texts.items() if MACHINE_PATHS.search(text)] == []


# --- checks find inserted faults ---

LESSON = load(PATHS[2])


@pytest.mark.parametrize(
    ("pattern", "fault", "problem"),
    [
        ("</div>\n<div", "</div>\n\nText in between.\n\n<div", "outside of the divs"),
        ('<div lang="zh">', '<div lang="en">', "needs one <div"),
        ('(<div lang="zh">\n\n)', r"\1**注意：**文。", "asterisks"),
        ('(<div lang="zh">\n\n)', r"\g<1>9876 字节。", "numbers: "),
        ('(<div lang="en">\n\n)', r"\1`some_name` ", "code:"),
        ('(<div lang="en">\n\n)', r"\1峰值 ", "en: Chinese characters"),
        ('(<div lang="zh">\n\n)', r"\1参数,", "ASCII punctuation"),
        ('(<div lang="zh">\n\n)', r"\1是x的", "no space"),
        ('(<div lang="en">\n\n)', r"\1A frobnication trade-off. ", "'trade-off'"),
        ('(<div lang="zh">\n\n)', r"\1校验点。", "'检查点'"),
    ],
)
def test_prose_check_reports_fault_in_bilingual_cell(pattern, fault, problem):
    cells = [cell for _, cell in cells_of(LESSON, "markdown") if "<div" in cell.source]
    cell = next(cell for cell in cells if re.search(pattern, cell.source))
    faulty = re.sub(pattern, fault, cell.source, count=1)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(faulty)])
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


def test_edit_in_only_one_language_is_reported_until_confirmed(tmp_path):
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


def test_missing_links_returns_links_to_nonexistent_files(tmp_path):
    links = '[a](01_next.ipynb#top) [b](https://a.example) [c](#here) `[d](no.md)` <a href="e.md">'
    assert missing_links(links, tmp_path) == ["01_next.ipynb", "e.md"]
    (tmp_path / "e.md").touch()
    assert missing_links(links, tmp_path) == ["01_next.ipynb"]
