"""Front door once the project is hosted: a clone line, links, badges.

    python -m course_lib.teaching.editions.address

`[project.urls]` of pyproject.toml is the one place of the project's addresses: `Repository`, a code
host's, and `Documentation`, the website's. Both may be missing. The command writes what follows
from them between `<!-- hosted: name -->` and `<!-- /hosted -->` in the READMEs, and into
CITATION.cff; `make address` calls it, and a test asks for it.
"""

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from .cells import EditionError

KEYS = ("Repository", "Documentation")
FRONT_DOORS = {"en": "README.md", "zh": "README.zh.md"}
_BLOCK = re.compile(r"(<!-- hosted: (\w+) -->\n).*?(<!-- /hosted -->)", re.S)
_COMMAND = "make lab TORCH=cpu"

# name of the block -> language -> text; what takes an address that is missing is left out.
_READ = {
    "en": (
        "**Read it without installing**: [the website]({documentation}/en/index.html), a page a"
        " lesson.\n"
    ),
    "zh": "**不安装也能读**：[课程网站]({documentation}/zh/index.html)，一课一页。\n",
}
_READ_HERE = {
    "en": (
        "**Read it without installing**: the [lessons](#lessons) are stored with their results. In"
        " a code host's\npreview and in VS Code both languages stand below each other and every"
        " solution is open; the language\nbuttons and folded solutions work in JupyterLab.\n"
    ),
    "zh": (
        "**不安装也能读**：[各课](#课程)都连同运行结果一起存好了。在代码托管网站的预览和 VS Code"
        " 里，两种语言会前后并列，答案也全都展开；语言按钮和折叠的答案要在 JupyterLab 里才有效。\n"
    ),
}
_BADGE = {
    "en": "[![checks]({repository}/actions/workflows/checks.yml/badge.svg)]"
    "({repository}/actions/workflows/checks.yml)\n",
    "zh": "[![检查]({repository}/actions/workflows/checks.yml/badge.svg)]"
    "({repository}/actions/workflows/checks.yml)\n",
}
_EDIT = {
    "en": "Found a mistake? [Tell us]({repository}/issues), or send a change.\n",
    "zh": "发现错误？[告诉我们]({repository}/issues)，或直接提交修改。\n",
}


def addresses(root: Path) -> dict[str, str]:
    """`[project.urls]` of the pyproject.toml in the folder, without a slash at the end.

    Raises:
        EditionError: a key of another name, or an address that is none.
    """
    urls = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    for key, url in urls.items():
        if key not in KEYS or not re.fullmatch(r"https?://[^\s\"'<>()]+", url):
            raise EditionError(
                f"[project.urls] must have only {' and '.join(KEYS)}, each an https address,"
                f" got {key} = {url!r}"
            )
    return {key: url.rstrip("/") for key, url in urls.items()}


def _blocks(language: str, urls: Mapping[str, str]) -> dict[str, str]:
    """Name of a block -> what stands in it."""
    named = {key.lower(): url for key, url in urls.items()}
    commands = [_COMMAND]
    if "repository" in named:
        folder = named["repository"].rpartition("/")[2].removesuffix(".git")
        commands = [f"git clone {named['repository']}", f"cd {folder}", _COMMAND]
    with_repository = {"badges": _BADGE, "mistakes": _EDIT}
    return {
        "command": "```\n" + "\n".join(commands) + "\n```\n",
        "read": (_READ if "documentation" in named else _READ_HERE)[language].format(**named),
        **{
            name: each[language].format(**named) if "repository" in named else ""
            for name, each in with_repository.items()
        },
    }


def with_addresses(text: str, language: str, urls: Mapping[str, str]) -> str:
    """A front door with its marked blocks as they are at these addresses.

    Raises:
        EditionError: a marked block of a name that is not known.
    """
    blocks = _blocks(language, urls)

    def filled(found: re.Match[str]) -> str:
        if found[2] not in blocks:
            raise EditionError(f"there is no block {found[2]!r}: {', '.join(sorted(blocks))}")
        return found[1] + blocks[found[2]] + found[3]

    return _BLOCK.sub(filled, text)


def citation_with(text: str, urls: Mapping[str, str]) -> str:
    """CITATION.cff with its two addresses, or without them."""
    lines = [line for line in text.splitlines() if not re.match(r"(repository-code|url):", line)]
    for key, field in zip(KEYS, ("repository-code", "url"), strict=True):
        if key in urls:
            lines.append(f'{field}: "{urls[key]}"')
    return "\n".join(lines) + "\n"


def main(root: Path) -> None:
    """Write all that follows from the addresses into the files of the folder."""
    urls = addresses(root)
    for language, name in FRONT_DOORS.items():
        path = root / name
        path.write_text(with_addresses(path.read_text("utf-8"), language, urls), "utf-8")
    path = root / "CITATION.cff"
    path.write_text(citation_with(path.read_text("utf-8"), urls), "utf-8")


if __name__ == "__main__":
    try:
        main(Path())
    except (EditionError, OSError) as error:
        sys.exit(f"address: {error}")
