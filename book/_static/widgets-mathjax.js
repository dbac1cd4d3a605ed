// The widgets' labels ask for typesetting through MathJax 2's queue, which MathJax 3 does
// not have: answer with MathJax 3. Widgets are drawn on `load`, which comes later.
document.addEventListener("DOMContentLoaded", () => {
  const mathjax = window.MathJax;
  if (mathjax?.startup && !mathjax.Hub) {
    mathjax.Hub = {
      Queue: ([, , element]) =>
        mathjax.startup.promise.then(() => mathjax.typesetPromise([element])),
    };
  }
});
