/* The language of the page: chosen by the switch, remembered, and part of the address (?lang=zh).
   This file runs in the <head>, so that nothing is shown and then hidden. Without it both languages show. */
(() => {
  const LANGUAGES = ["en", "zh", "both"];
  const KEY = "course-language";
  // What the theme says in English only.
  const WORDS = {
    "Next": "下一页", "Previous": "上一页", "Home": "首页", "On this page": "本页内容", "Back to top": "回到顶部",
    "Skip to content": "跳到正文", "Index": "索引", "Search": "搜索",
    "Show the solution": "显示答案", "Hide the solution": "收起答案",
    "Show the code": "显示代码", "Hide the code": "收起代码",
  };
  // What Sphinx's search says.
  const MESSAGES = {
    "Searching": "正在搜索", "Preparing search...": "正在准备搜索……", "Search Results": "搜索结果",
    "Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories.": "没有找到匹配的页面。请检查拼写，或换一个词。",
    "Search finished, found one page matching the search query.":
      ["找到 1 个匹配的页面。", "找到 ${resultCount} 个匹配的页面。"],
  };
  const page = document.documentElement;

  // A browser may refuse to remember; the address then carries the choice from page to page.
  const remembered = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const remember = (language) => { try { localStorage.setItem(KEY, language); } catch { /* see above */ } };
  const known = (language) => (LANGUAGES.includes(language) ? language : null);

  const asked = known(new URLSearchParams(location.search).get("lang"));
  // Going back to a page whose address has an earlier choice does not undo the last one.
  const goesBack = performance.getEntriesByType("navigation")[0]?.type === "back_forward";
  const chosen = (goesBack && known(remembered())) || asked || known(remembered());
  const readersOwn = (navigator.language || "").startsWith("zh") ? "zh" : "en";
  let title = null;

  function withLanguage(address, language) {
    const url = new URL(address);
    url.searchParams.set("lang", language);
    return url.href;
  }

  function show(language) {
    page.dataset.language = language;
    page.lang = language === "zh" ? "zh-Hans" : "en";
    for (const button of document.querySelectorAll(".language-switch button")) {
      button.setAttribute("aria-pressed", String(button.value === language));
    }
    if (title) document.title = title[language];
    const box = document.querySelector(".sidebar-search");
    if (box) box.placeholder = { en: "Search", zh: "搜索", both: "Search 搜索" }[language];
  }

  function choose(language) {
    remember(language);
    history.replaceState(history.state, "", withLanguage(location.href, language));
    show(language);
  }

  /* "English / 中文" of the heading and of the course, in each language. */
  function titles() {
    const read = (element, language) => {
      const copy = element.cloneNode(true);
      const others = { en: "[lang=zh], .both-languages", zh: "[lang=en], .both-languages", both: "none" }[language];
      copy.querySelectorAll(`.headerlink, ${others}`).forEach((other) => other.remove());
      return copy.textContent.trim().replace(/\s+/g, " ");
    };
    const heading = document.querySelector("article h1");
    const course = document.querySelector(".sidebar-brand-text");
    if (!heading || !course) return null;
    return Object.fromEntries(LANGUAGES.map((language) => {
      const parts = [read(heading, language), read(course, language)];
      return [language, parts[0] === parts[1] ? parts[0] : parts.join(" - ")];
    }));
  }

  function translate() {
    const places = ".context > span, .prev-page .title, .toc-title, .back-to-top span, .skip-to-content, " +
      "article h1, details.hide summary p";
    for (const element of document.querySelectorAll(places)) {
      const english = element.textContent.trim();
      if (!(english in WORDS) || element.querySelector("[lang]")) continue;
      const span = (language, words) => {
        const made = document.createElement("span");
        if (language) made.lang = language; else made.className = "both-languages";
        made.textContent = words;
        return made;
      };
      element.replaceChildren(span("en", english), span("", " / "), span("zh", WORDS[english]));
    }
  }

  /* A result is titled "English / 中文". */
  function translateResult(link) {
    const [english, chinese] = link.textContent.split(" / ");
    if (!chinese || link.querySelector("[lang]")) return;
    link.innerHTML = `<span lang="en"></span><span class="both-languages"> / </span><span lang="zh"></span>`;
    const number = (/^[\d.]+ /.exec(english) || [""])[0]; // belongs to both
    link.prepend(number);
    link.querySelector("[lang=en]").textContent = english.slice(number.length);
    link.querySelector("[lang=zh]").textContent = chinese;
  }

  page.dataset.language = chosen || readersOwn;
  if (chosen) remember(chosen);

  document.addEventListener("DOMContentLoaded", () => {
    translate();
    if (page.dataset.language === "zh" && typeof Documentation !== "undefined") {
      Documentation.addTranslations({ messages: MESSAGES, plural_expr: "n == 1 ? 0 : 1", locale: "zh" });
    }
    const results = document.getElementById("search-results");
    if (results) {
      new MutationObserver(() => results.querySelectorAll("li > a").forEach(translateResult))
        .observe(results, { childList: true, subtree: true });
    }
    title = titles();
    const controls = document.querySelector(".sidebar-drawer .language-switch");
    controls.hidden = false;
    // On a narrow screen the sidebar is hidden: the header has the switch as well.
    document.querySelector(".mobile-header .header-right").prepend(controls.cloneNode(true));
    if (chosen) choose(chosen); else show(readersOwn);
    document.addEventListener("click", (event) => {
      const button = event.target.closest(".language-switch button");
      if (button) choose(button.value);
      const link = event.target.closest("a[href]");
      if (link && link.protocol === location.protocol && link.host === location.host && !remembered()) {
        if (!link.getAttribute("href").startsWith("#")) link.href = withLanguage(link.href, page.dataset.language);
      }
    });
    // A table or a code box wider than the page scrolls by itself, with the keyboard as well.
    const reachable = () => {
      const tables = [...document.querySelectorAll("article table")].map(
        (table) => table.closest(".table-wrapper, .cell_output .output") || table.parentElement);
      for (const frame of [...tables, ...document.querySelectorAll("article pre")]) {
        if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
      }
    };
    reachable();
    document.addEventListener("click", () => setTimeout(reachable)); // what a click has brought to sight
  });
  addEventListener("pageshow", (event) => {
    const language = known(remembered());
    if (event.persisted && language) choose(language); // back to a page that was left in another language
  });
})();
