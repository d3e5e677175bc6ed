"""Write the addresses of the hosted project into the READMEs: a clone command, links and badges.

    python -m publish.address

The addresses are in `[project.urls]` of pyproject.toml: `Repository` on the code host, and
`Documentation`, the website. Both may be missing. The command writes the texts that contain them
into CITATION.cff, and between `<!-- hosted: name -->` and `<!-- /hosted -->` in the READMEs. `make
address` calls the command, and a test fails if these texts are out of date.
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
_COMMAND = {"en": "make lab TORCH=cpu", "zh": "make lab TORCH=cpu LANGUAGE=zh"}

# Language -> text of a block. A block that needs a missing address is empty.
_READ = {
    "en": (
        "**Read without installing**: [the website]({documentation}/en/index.html) has one page per"
        " lesson.\n"
    ),
    "zh": "**不安装也能读**：[课程网站]({documentation}/zh/index.html)，一课一页。\n",
}
_READ_HERE = {
    "en": (
        "**Read without installing**: the [lessons](#lessons) are stored with their results. A code"
        " host's preview and VS Code show both\nlanguages one below the other, with all solutions"
        " open. The language buttons and folded solutions work in JupyterLab. The course\nalso has"
        " configuration files for [Binder and dev containers](docs/installing.md).\n"
    ),
    "zh": (
        "**不安装也能读**：[各课](#课程)的文件里已经存有运行结果。在代码托管网站的预览或 VS Code 里"
        "打开时，英文和中文上下排列，答案全部展开。只有在 JupyterLab 里，才能用按钮切换语言，也才能"
        "折叠答案。课程还备有 [Binder 和开发容器](docs/installing.zh.md)的配置文件，"
        "可以在其中打开课程。\n"
    ),
}
#: Branch to which .github/workflows/site.yml publishes the lessons in one language. Colab opens a
#: notebook from a branch, not from a website.
PAGES_BRANCH = "single-language"
# Colab, Binder and Codespaces read repositories on GitHub. {name} is owner/name.
_RUN = (
    "[![{colab}](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{name}/blob/"
    + PAGES_BRANCH
    + "/{language}/00_start_here.ipynb)\n"
    "[![{binder}](https://mybinder.org/badge_logo.svg)]"
    "(https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/work/00_start_here.ipynb)\n"
    "[![{codespaces}](https://github.com/codespaces/badge.svg)]"
    "(https://codespaces.new/{name})\n"
)
_RUN_WORDS = {
    "en": {
        "colab": "Open in Colab",
        "binder": "Open in Binder",
        "codespaces": "Open in Codespaces",
    },
    "zh": {
        "colab": "在 Colab 中打开",
        "binder": "在 Binder 中打开",
        "codespaces": "在 Codespaces 中打开",
    },
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
    """Return `[project.urls]` of the pyproject.toml in the folder, without slashes at the end.

    Raises:
        EditionError: A key is neither "Repository" nor "Documentation", or a value is not an
            address.
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
    """Return the texts of a README's marked blocks, as a dict from the name of a block."""
    named = {key.lower(): url for key, url in urls.items()}
    commands = [_COMMAND[language]]
    if "repository" in named:
        folder = named["repository"].rpartition("/")[2].removesuffix(".git")
        commands = [
            f"git clone --depth 1 {named['repository']}",
            f"cd {folder}",
            _COMMAND[language],
        ]
    with_repository = {
        "badges": _BADGE[language] + _run(language, urls),
        "mistakes": _EDIT[language],
    }
    return {
        "command": "```\n" + "\n".join(commands) + "\n```\n",
        "read": (_READ if "documentation" in named else _READ_HERE)[language].format(**named),
        **{
            name: each.format(**named) if "repository" in named else ""
            for name, each in with_repository.items()
        },
    }


def _run(language: str, urls: Mapping[str, str]) -> str:
    """Return badges that link to services, such as Colab, which run the lessons from GitHub."""
    found = re.fullmatch(
        r"https?://github\.com/([\w.-]+/[\w.-]+?)(\.git)?", urls.get("Repository", "")
    )
    if not found:
        return ""
    return _RUN.format(name=found[1], language=language, **_RUN_WORDS[language])


def with_addresses(text: str, language: str, urls: Mapping[str, str]) -> str:
    """Return a README in which the texts of the marked blocks have these addresses.

    Raises:
        EditionError: A marked block has an unknown name.
    """
    blocks = _blocks(language, urls)

    def fill(found: re.Match[str]) -> str:
        if found[2] not in blocks:
            raise EditionError(
                f"a block must be one of {', '.join(sorted(blocks))}, got {found[2]!r}"
            )
        return found[1] + blocks[found[2]] + found[3]

    return _BLOCK.sub(fill, text)


def citation_with(text: str, urls: Mapping[str, str]) -> str:
    """Return the text of CITATION.cff with the addresses in `urls`."""
    lines = [line for line in text.splitlines() if not re.match(r"(repository-code|url):", line)]
    for key, field in zip(KEYS, ("repository-code", "url"), strict=True):
        if key in urls:
            lines.append(f'{field}: "{urls[key]}"')
    return "\n".join(lines) + "\n"


def main(root: Path) -> None:
    """Write the addresses in pyproject.toml into the READMEs and CITATION.cff of a folder."""
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
