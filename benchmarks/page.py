"""Write docs/scoreboard.md, docs/scoreboard.zh.md and their figures from the rows of a run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from figure import draw
from scoreboard import Row

TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, list[str]] = TEXTS["groups"]
HEADS = {
    "en": ("Work", "Peer", "Time, course / peer", "Bytes, course", "Bytes, peer", "Note"),
    "zh": (
        "测试项目",
        "对比对象",
        "用时之比（本课程 / 对方）",
        "字节数（本课程）",
        "字节数（对方）",
        "说明",
    ),
}
ABOUT = {
    "en": "# Scoreboard\n\n{other}\n\n"
    "This page compares each technique of the library with the tool that you would otherwise use."
    " This tool does the same work and is called the peer here. `make bench` measures everything"
    " again and prints all rows.\n\n"
    "A run has several rounds, and in each round the course and the peer do the work once. The"
    " column of times shows the course's median time divided by the peer's, so the course is faster"
    " if this ratio is below 1. In parentheses are the quartiles of the ratios of the single"
    " rounds. If the machine's speed changes during the run, the ratio of the medians can lie"
    " outside of the quartiles. Bytes are exact. The results were measured on {date} ({machine},"
    " Python {python}, torch {torch}, one thread, {rounds} rounds).\n\n"
    "![Ratios of time and bytes, group by group](scoreboard.svg)\n",
    "zh": "# 对比表\n\n{other}\n\n"
    "本页把课程库里的每种技术与一个功能相同的常用工具相比较，下文把这个工具称为“对方”。"
    "`make bench` 会重新测量全部项目，并打印每一行结果。\n\n"
    "一次运行分成几轮，每一轮都让本课程和对方把同样的工作各做一次。"
    "“用时之比”一栏是双方用时的中位数之比，小于 1 表示本课程更快。"
    "括号里是各轮用时之比的四分位数。"
    "如果机器的速度在运行期间有变化，中位数之比可能落在四分位数之外。"
    "字节数是精确值。这些结果于 {date} 测得，机器是 {machine}，"
    "使用 Python {python} 和 torch {torch}，单线程，共 {rounds} 轮。\n\n"
    "![各组的时间比与字节比](scoreboard.zh.svg)\n",
}
LOST_NOTHING = "; lost: nothing"
RESULTS = {
    "equal": {
        "en": "All {count} predicted numbers equal the measured ones.",
        "zh": "{count} 个预测值全部等于实测值。",
    },
    "faults": {
        "en": "After {count:,} faults in {techniques} techniques, nothing was lost or changed.",
        "zh": "在 {techniques} 种技术里注入了 {count:,} 次故障，检查的对象都没有丢失或改变。",
    },
    "cases": {
        "en": "{count:,} random cases in {comparisons} comparisons show no difference.",
        "zh": "共 {comparisons} 种对照、{count:,} 个随机用例，没有发现差异。",
    },
}
OTHER = {
    "en": "**English** · [中文](scoreboard.zh.md)",
    "zh": "[English](scoreboard.md) · **中文**",
}


def in_chinese(text: str) -> str:
    """Return a text of a row with its English phrases replaced."""
    if text in TEXTS["phrases"]:
        return TEXTS["phrases"][text]
    for pattern, replacement in TEXTS["patterns"].items():
        text = re.sub(pattern, replacement, text)
    for phrase in sorted(TEXTS["phrases"], key=len, reverse=True):
        text = text.replace(phrase, TEXTS["phrases"][phrase])
    return text


def short(ratio: float) -> str:
    """Return a ratio with two decimal places, or with one digit if it is small."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.1g}"


def cells(row: Row, language: str) -> list[str]:
    said = in_chinese if language == "zh" else str
    ratio = "" if row.ratio is None else f"{short(row.ratio)} ({short(row.low)}–{short(row.high)})"
    sizes = ["" if size is None else f"{size:,}" for size in (row.course_bytes, row.peer_bytes)]
    return [said(row.work), said(row.peer), ratio, *sizes, said(row.note)]


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that agree, into one row per mode and one row per technique.

    Rows of equal predictions become a row with the peak, and rows of faults that lost nothing
    become a row with the number of places.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.note == "equal":
            key = "equal", row.work.partition(":")[0]
        elif row.note.endswith(LOST_NOTHING):
            key = "faults", row.work
        else:
            key = "", f"{row.work} {row.peer}"
        groups.setdefault(key, []).append(row)
    return [_merged(kind, alike) for (kind, _), alike in groups.items()]


def _merged(kind: str, rows: Sequence[Row]) -> Row:
    if kind == "equal":
        (peak,) = [row for row in rows if "peak" in row.work]
        return replace(peak, note=f"{len(rows)} of {len(rows)} predictions equal")
    if kind == "faults":
        places = sum(int(row.note.split()[0]) for row in rows)
        return Row(
            rows[0].work, f"{len(rows)} kinds of fault", note=f"{places} places{LOST_NOTHING}"
        )
    (row,) = rows
    return row


def result(rows: Sequence[Row], language: str) -> str:
    """Return a sentence on the result of a group if all its rows agree, otherwise ""."""
    notes = [row.note for row in rows]
    if all(note == "equal" for note in notes):
        kind, counts = "equal", {"count": len(rows)}
    elif all(note.endswith(LOST_NOTHING) for note in notes):
        faults = sum(int(note.split()[0]) for note in notes)
        kind, counts = "faults", {"count": faults, "techniques": len({row.work for row in rows})}
    elif all(", 0 differences, " in note for note in notes):
        cases = sum(int(note.split()[0]) for note in notes)
        kind, counts = "cases", {"count": cases, "comparisons": len(rows)}
    else:
        return ""
    return RESULTS[kind][language].format(**counts)


def page(found: Mapping[str, Sequence[Row]], about: Mapping[str, str], language: str) -> str:
    """Return the page in one language, `en` or `zh`."""
    parts = [ABOUT[language].format(other=OTHER[language], **about)]
    for group, rows in found.items():
        title, what = GROUPS[group][:2] if language == "en" else GROUPS[group][2:]
        lines = [f"## {title}\n", f"{what}\n"]
        if sentence := result(rows, language):
            lines.append(f"**{sentence}**\n")
        lines += [f"| {' | '.join(HEADS[language])} |", "|---|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(cells(row, language))} |" for row in summarize(rows)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def write(found: Mapping[str, Sequence[Row]], about: Mapping[str, str], folder: Path) -> None:
    """Write both pages and their figures into the folder."""
    for language, ending, place in (("en", "", 0), ("zh", ".zh", 2)):
        text = page(found, about, language)
        (folder / f"scoreboard{ending}.md").write_text(text, encoding="utf-8")
        titles = {group: texts[place].replace("`", "") for group, texts in GROUPS.items()}
        said = in_chinese if language == "zh" else str
        draw(found, titles, said, language, folder / f"scoreboard{ending}.svg")
