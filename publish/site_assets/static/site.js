/* A page is in one language, in en/ or zh/, or in both. The links between them work without this
   file, which brings a reader to the language of before and keeps the place in the page. */
(() => {
  const KEY = "course-language";
  // What Sphinx's search says.
  const MESSAGES = {
    "Searching": "正在搜索", "Preparing search...": "正在准备搜索……", "Search Results": "搜索结果",
    "Your search did not match any documents. Please make sure that all words are spelled correctly and that you've selected enough categories.": "没有找到匹配的页面。请检查拼写，或换一个词。",
    "Search finished, found one page matching the search query.":
      ["找到 1 个匹配的页面。", "找到 ${resultCount} 个匹配的页面。"],
  };
  const html = document.documentElement;
  const { language, page } = html.dataset;

  // A browser may refuse to remember: then each visit begins in the browser's own language.
  const remembered = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const remember = (chosen) => { try { localStorage.setItem(KEY, chosen); } catch { /* see above */ } };

  const asked = new URLSearchParams(location.search).get("lang");
  const readersOwn = () => remembered() || ((navigator.language || "").startsWith("zh") ? "zh" : "en");
  // The front page asks nobody to choose; an address with ?lang=zh leads to the page in that language.
  const wanted = language !== "both" ? language : asked || (page === "index.html" ? readersOwn() : "both");
  if (wanted !== language && ["en", "zh"].includes(wanted)) {
    const query = new URLSearchParams(location.search);
    query.delete("lang");
    location.replace(`${html.dataset.content_root}${wanted}/${page}${query.size ? `?${query}` : ""}${location.hash}`);
    return;
  }
  if (language !== "both" || asked === "both") remember(language);

  /* A result is titled "English / 中文"; a number before it belongs to both. */
  function inOneLanguage(link) {
    const [english, chinese] = link.textContent.split(" / ");
    if (!chinese) return;
    const number = (/^[\d.]+ /.exec(english) || [""])[0];
    link.textContent = language === "zh" ? number + chinese : english;
  }

  document.addEventListener("DOMContentLoaded", () => {
    if (language === "zh" && typeof Documentation !== "undefined") {
      Documentation.addTranslations({ messages: MESSAGES, plural_expr: "n == 1 ? 0 : 1", locale: "zh" });
    }
    const results = document.getElementById("search-results");
    if (results && language !== "both") {
      new MutationObserver(() => results.querySelectorAll("li > a").forEach(inOneLanguage))
        .observe(results, { childList: true, subtree: true });
    }
    document.addEventListener("click", (event) => {
      const link = event.target.closest(".language-switch a");
      if (!link) return;
      link.hash = location.hash;
      const query = new URLSearchParams(location.search).get("q");
      if (query) {
        const url = new URL(link.href);
        url.searchParams.set("q", query);
        link.href = url.href;
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
})();
