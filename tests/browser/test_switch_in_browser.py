"""The language switch by itself, in a page that has what it needs of JupyterLab's."""

import pytest

from course_lib.teaching.switch import Switch

pytestmark = pytest.mark.browser


def test_the_keyboard_reaches_the_switch_and_turns_it(open_page):
    page = open_page("about:blank")
    cells = (Switch("both")._repr_html_(), '<div lang="en">peak</div>', '<div lang="zh">峰值</div>')
    body = "".join(f'<div class="jp-Cell">{cell}</div>' for cell in cells)
    page.set_content(f'<body class="jp-Notebook"><a href="#">before</a>{body}</body>')
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    focused = page.locator("input:focus-visible")
    assert focused.get_attribute("value") == "both"
    assert focused.evaluate("button => getComputedStyle(button).outline").endswith("solid 2px")
    assert page.get_by_role("group", name="Language 语言").count() == 1
    for key, shown in (("ArrowLeft", ["zh"]), ("ArrowLeft", ["en"]), ("ArrowLeft", ["en", "zh"])):
        page.keyboard.press(key)
        assert [name for name in ("en", "zh") if page.locator(f"div[lang={name}]").is_visible()] == shown
    page.keyboard.press("Tab")
    assert page.locator("input:focus").count() == 0, "one Tab leads out of the group"
