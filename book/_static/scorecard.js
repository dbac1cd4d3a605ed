// Filters the scorecard. Without this script every row is shown.
(() => {
  const form = document.querySelector(".icml25-filter");
  const groups = document.querySelectorAll(".icml25-ledger tbody");
  if (!form || !groups.length) return;

  const apply = () => {
    let shown = 0;
    for (const group of groups) {
      const fits = !form.chapter.value || group.dataset.chapter === form.chapter.value;
      let any = false;
      for (const row of group.querySelectorAll("[data-claim]")) {
        row.hidden =
          !fits || (form.verdict.value && row.dataset.verdict !== form.verdict.value);
        if (!row.hidden) { any = true; shown += 1; }
      }
      group.hidden = !any;
    }
    form.querySelector("output").value = `${shown} claims`;
  };

  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  apply();
})();
