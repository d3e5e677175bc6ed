// Shrink what does not fit: every size inside of a body is in em.
function fit(slide) {
  const body = slide && slide.querySelector(".body");
  if (!body || body.dataset.size || !body.clientHeight) return;
  let size = 100;
  const full = () => body.scrollHeight > body.clientHeight || body.scrollWidth > body.clientWidth;
  while (full() && size > 40) body.style.fontSize = (size -= 2) + "%";
  body.dataset.size = size;
}

Reveal.initialize({
  width: 1280,
  height: 720,
  margin: 0,
  center: false,
  hash: true,
  navigationMode: "linear", // else the right arrow skips the slides of a section
  slideNumber: "c/t",
  transition: "none",
  backgroundTransition: "none",
  scrollActivationWidth: null,
  pdfSeparateFragments: false, // a handout has one page per slide
  plugins: [RevealNotes],
});
Reveal.on("ready", (event) => fit(event.currentSlide));
Reveal.on("slidechanged", (event) => fit(event.currentSlide));
Reveal.on("pdf-ready", () => document.querySelectorAll(".slides section").forEach(fit));
