// The ledger by operator: searched as one types, sorted by the column that is clicked.
{
  const columns = [["stage", true], ["rank", true], ["component"], ["operator"], ["low", true], ["typical", true], ["high", true]];
  const state = { by: "typical", down: true, words: [] };
  const body = make("tbody");
  const heads = columns.map(([name, right]) => {
    const button = make("button", { type: "button" }, name);
    const head = make("th", { scope: "col", class: right ? "number" : "" }, button);
    button.addEventListener("click", () => {
      Object.assign(state, { by: name, down: state.by === name ? !state.down : Boolean(right) });
      show();
    });
    return head;
  });

  function show() {
    const rows = report.operators.filter((row) => {
      const text = `stage ${row.stage} rank ${row.rank} ${row.component} ${row.operator}`.toLowerCase();
      return state.words.every((word) => text.includes(word));
    });
    rows.sort((a, b) => {
      const [one, two] = [a[state.by], b[state.by]];
      const order = typeof one === "number" ? one - two : one.localeCompare(two);
      return state.down ? -order : order;
    });
    heads.forEach((head, at) => {
      if (columns[at][0] === state.by) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...rows.map((row) => make("tr", {}, ...columns.map(([name, right]) => {
      const value = row[name];
      return make("td", { class: right ? "number" : "" }, ["low", "typical", "high"].includes(name) ? number(value) : value);
    }))));
    const sum = rows.reduce((held, row) => held + row.typical, 0);
    document.getElementById("found").textContent = `${rows.length} of ${report.operators.length} lines, ${bytes(sum)} together`;
  }

  document.getElementById("find").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    show();
  });
  put("operators", make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
  const sources = new Map(report.operators.filter((row) => row.source).map((row) => [row.operator, row.source]));
  put("sources", ...[...sources].map(([operator, source]) => make("li", {}, `${operator}: ${source}`)));
  show();
}
