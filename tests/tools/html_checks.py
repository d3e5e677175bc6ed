"""Check that a screen reader can read HTML: alt texts, and Chinese that is marked as Chinese."""

import re
from html.parser import HTMLParser

_HAN = re.compile("[\u3400-\u9fff]")


class _Checker(HTMLParser):
    def __init__(self):
        super().__init__()
        self.languages, self.problems = [("", None)], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        language, words = self.languages[-1][1], attrs.get("alt") or ""
        right = {"en": not _HAN.search(words), "zh": _HAN.search(words)}.get(language)
        if tag == "img" and not (words and right):
            self.problems.append(f"a picture without an alt text in its language: {words!r}")
        if tag not in ("img", "input", "br", "hr"):  # these have no end tag
            self.languages.append((tag, attrs.get("lang", language)))

    def handle_endtag(self, tag):
        while self.languages.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, language = self.languages[-1]
        if _HAN.search(data) and language not in ("zh", "mul") and tag != "style":
            self.problems.append(f"Chinese marked as {language}: {data.strip()[:60]!r}")


def spoken_problems(markup):
    """Return the problems of HTML that is shown in both languages."""
    checker = _Checker()
    checker.feed(markup)
    return checker.problems
