/* Sphinx's scores of search results, with one more point for the page on what to do when memory runs
   out: of pages that match equally well, it comes first. */
var Scorer = {
  score: ([docname, , , , score]) => score + (docname === "docs/out_of_memory" ? 1 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
