"""Check that a screen reader can read HTML: alt texts, and Chinese that is marked as Chinese."""

import re

_HAN = re.compile("[\u3400-\u9fff]")


def spoken_problems(markup):
    """Return the problems of HTML that is shown in both languages."""
    from bs4 import BeautifulSoup  # GPU machines import this file but lack the package

    soup, problems = BeautifulSoup(markup, "html.parser"), []
    for image in soup.find_all("img"):
        words = image.get("alt") or ""
        right = {"en": not _HAN.search(words), "zh": _HAN.search(words)}.get(_language_of(image))
        if not (words and right):
            problems.append(f"a picture without an alt text in its language: {words!r}")
    for text in soup.find_all(string=_HAN):
        language = _language_of(text)
        if language not in ("zh", "mul") and text.parent.name != "style":
            problems.append(f"Chinese marked as {language}: {text.strip()[:60]!r}")
    return problems


def _language_of(node):
    marked = node.find_parent(lang=True)
    return marked["lang"] if marked else None
