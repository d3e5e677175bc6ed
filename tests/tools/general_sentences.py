"""List sentences that generalize, so that each can be tried on cases that could break it.

    .venv/bin/python tests/tools/general_sentences.py notebooks/scripts/02_checkpointing.py docs

It prints FILE:LINE: SENTENCE for each sentence, English or Chinese, with a word that generalizes
("only", "every", "with more layers", "costs nothing") and a word of a quantity or of equality. In
Python files it reads comments of notebooks' text cells and all strings, in Markdown files all text
outside code. Without arguments it reads the lessons, `docs/` and the READMEs. Which sentences state
a measurement, and whether they are true in another case, is for the person who reads the list.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERAL = re.compile(
    r"\b(only|alone|always|never|no other|no longer|every|each|all|any|both|none|nothing|neither"
    r"|no|not an?|cannot|whatever|whichever|however|whenever|wherever|at any|in general|usually"
    r"|for free|the same|equal|equally|exactly|at (?:most|least|best)|must|as (?:much|many|large)"
    r"|the (?:more|less|fewer|longer|larger|smaller|deeper)|with (?:more|fewer|longer|larger)"
    r"|(?:nearly|almost) all|most|least|best|regardless|independent(?:ly)?|proportional(?:ly)?)\b"
    r"|[只永每都越唯]|总是|从不|任何|所有|全部|没有|无论|不管|不论|同样|一样|相同|相等|无关|不花"
    r"|不用|不需|至少|至多|最[多少大小低高快慢好]|[恰正]好|必须|不可能|不能|无法|不会|不变|成正比",
    re.IGNORECASE,
)
MEASURED = re.compile(
    r"\d|\b(bytes?|FLOPs?|seconds?|time|times|memory|peak|gradients?|bits?|equal|same|costs?|free"
    r"|sav(?:e|es|ed|ing)|lower|higher|faster|slower|longer|shorter|less|more|half|twice|double"
    r"|third|cop(?:y|ies)|storages?|tensors?|sum|error|random|activations?|weights?)\b"
    r"|字节|内存|显存|峰值|秒|时间|相等|相同|一样|梯度|倍|比特|拷贝|存储|张量|激活|权重|节省|省|代价"
)
LISTED = re.compile(r"\s*(?:[-*]|\d+\.)\s|\s*\||\s*</?(?:div|details|summary)|#")
ENDS = re.compile(r"(?<=[.!?])[*_\"”)]*\s+(?=[^a-z])|(?<=[.!?]\*\*)\s+|(?<=[。！？])[*”）]*")


def paragraphs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join lines of Markdown to paragraphs, items of lists and rows of tables; skip code blocks."""
    block: list[str] = []
    start, code = 0, False
    for number, line in [*lines, (0, "")]:
        fence = line.lstrip().startswith("```")
        if fence or code or not line.strip() or LISTED.match(line):
            if block:
                yield start, " ".join(block)
            block = []
        if not code and not fence and line.strip():
            start = start if block else number
            block.append(line.strip())
        code ^= fence


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, paragraph) for all prose of a file."""
    source = path.read_text(encoding="utf-8")
    lines = list(enumerate(source.splitlines(), 1))
    if path.suffix != ".py":
        yield from paragraphs(lines)
        return
    yield from paragraphs([(n, s[2:] if s.startswith("# ") else "") for n, s in lines])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


def main(names: list[str]) -> None:
    """Print the sentences of files and folders, or of the whole course."""
    course = [ROOT / "notebooks/scripts", ROOT / "docs", *sorted(ROOT.glob("README*.md"))]
    for path in map(Path, names or course):
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            for line, text in texts(file) if file.suffix in {".py", ".md", ".toml"} else ():
                for sentence in ENDS.split(text):
                    if GENERAL.search(sentence) and MEASURED.search(sentence):
                        print(f"{file}:{line}: {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
