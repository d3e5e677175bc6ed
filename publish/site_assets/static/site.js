/* The site works without this file. It remembers the language for the next visit, keeps the place in
   the page when the language changes, and makes wide tables reachable with the keyboard. */
(() => {
  // A browser may refuse to remember anything.
  try { localStorage.setItem("course-language", document.documentElement.lang.slice(0, 2)); } catch { /* see above */ }

  document.addEventListener("DOMContentLoaded", () => {
    document.addEventListener("click", (event) => {
      const link = event.target.closest(".language-switch a");
      if (!link) return;
      link.search = location.search; // the words of a search
      link.hash = location.hash;
    });
    // A table or a code box that is wider than the page scrolls by itself.
    const reachable = () => {
      const tables = [...document.querySelectorAll("article table")].map(
        (table) => table.closest(".table-wrapper, .cell_output .output") || table.parentElement);
      for (const frame of [...tables, ...document.querySelectorAll("article pre")]) {
        if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
      }
    };
    reachable();
    document.addEventListener("click", () => setTimeout(reachable)); // a click may unfold a table
  });
})();
