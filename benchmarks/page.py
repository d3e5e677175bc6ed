"""The pages docs/scoreboard.md and docs/scoreboard.zh.md, and their figures, from a run's rows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from figure import draw
from scoreboard import Row

TEXTS = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
GROUPS: dict[str, list[str]] = TEXTS["groups"]
HEADS = {
    "en": ("Work", "Peer", "Time, course / peer", "Bytes, course", "Bytes, peer", "Note"),
    "zh": ("做什么", "对比对象", "时间，本课程 / 对方", "字节，本课程", "字节，对方", "说明"),
}
ABOUT = {
    "en": "# Scoreboard\n\n{other}\n\n"
    "This page compares each technique of the library with the tool that you would otherwise use,"
    " on the same work. `make bench` measures everything again and prints the same table.\n\n"
    "The calls take turns in one run. The time is the course's median divided by the peer's, so the"
    " course is faster where it is below 1. The quartiles of the ratio over the rounds are in"
    " parentheses. If the machine's speed changes during the run, the ratio of the medians can lie"
    " outside of them. Bytes are exact. Measured on {date}: {machine}, Python {python}, torch"
    " {torch}, one thread, {rounds} rounds.\n\n"
    "![Ratios of time and bytes, group by group](scoreboard.svg)\n",
    "zh": "# 对比表\n\n{other}\n\n库里的每项技术，与你原本会用的工具做同样的工作，逐一对照。"
    "`make bench` 会测量全部项目，并打印同一张表。\n\n"
    "同一次运行中各方轮流执行。时间一栏是本课程的中位数除以对方的中位数：小于 1 表示本课程更快。"
    "括号里是各轮比值的四分位数；运行期间机器快慢有变时，中位数之比可能落在它们之外。"
    "字节数是精确值。测量日期 {date}：{machine}，Python {python}，"
    "torch {torch}，单线程，{rounds} 轮。\n\n"
    "![各组的时间比与字节比](scoreboard.zh.svg)\n",
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


def page(found: Mapping[str, Sequence[Row]], about: Mapping[str, str], language: str) -> str:
    """Return the page in one language, `en` or `zh`."""
    parts = [ABOUT[language].format(other=OTHER[language], **about)]
    for group, rows in found.items():
        title, what = GROUPS[group][:2] if language == "en" else GROUPS[group][2:]
        lines = [f"## {title}\n", f"{what}\n"]
        lines += [f"| {' | '.join(HEADS[language])} |", "|---|---|---:|---:|---:|---|"]
        lines += [f"| {' | '.join(cells(row, language))} |" for row in rows]
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
