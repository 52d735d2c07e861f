// Columns that a reader chooses of a list of runs, and conditions on them. Knows no page's layout.

import { get, Refusal } from "./api.js";
import { h } from "./dom.js";

const OPERATORS = { ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "!=": (a, b) => a !== b, ">": (a, b) => a > b, "<": (a, b) => a < b, "=": (a, b) => a === b };
const CONDITION = /^\s*([\w.@/-]+)\s*(>=|<=|!=|=|>|<)\s*(.+?)\s*$/;
const MOST = 20;

export function columnsOf(text) {
  return [...new Set((text ?? "").split(",").filter(Boolean))].slice(0, MOST);
}

// "optimizer.lr>=1e-5, state=FAILED" → {columns to ask for, meets(run, valueOf), what is wrong}.
export function conditions(text, known) {
  const parts = text.split(",").filter((part) => part.trim());
  const read = parts.map((part) => part.match(CONDITION));
  const bad = parts.find((_, at) => !read[at]);
  if (bad !== undefined) return { columns: [], meets: () => true, problem: `${bad.trim()} is no condition: write COLUMN>=VALUE (or <=, >, <, =, !=), several with commas between` };
  const only = read.map(([, name, operator, value]) => {
    const limit = Number.isNaN(Number(value)) ? value : Number(value);
    return { name, holds: (given) => OPERATORS[operator](typeof limit === "number" ? given : `${given}`, limit) };
  });
  const meets = (run, valueOf) => only.every(({ name, holds }) => {
    const given = valueOf(run, name);
    return given !== undefined && given !== null && holds(given);
  });
  return { columns: only.map(({ name }) => name).filter((name) => !known.includes(name)), meets, problem: "" };
}

// A fold with a field that offers every column that the newest runs have, and the chosen ones to take away.
export function columnPicker(chosen, signal, changed) {
  let now = chosen;
  const offered = h("datalist", { id: "every-column" });
  const field = h("input", { type: "search", id: "add-column", list: "every-column", placeholder: "optimizer.lr, figures.entropy", autocomplete: "off" });
  const list = h("span", { class: "row" });
  const form = h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); add(); } }, h("label", { for: "add-column" }, "Column"), field, offered, h("button", { type: "submit" }, "Add"), list);
  const fold = h("details", { class: "columns", ontoggle: () => { if (fold.open && !offered.children.length) offer(); } }, h("summary", {}, "Columns"), form);

  function set(columns) {
    now = columns;
    show();
    changed(now);
  }

  function show() {
    list.replaceChildren(...now.map((name) => h("button", { type: "button", class: "quiet", onclick: () => set(now.filter((each) => each !== name)) }, `Remove ${name}`)));
  }

  function add() {
    const name = field.value.trim();
    field.value = "";
    if (name && !now.includes(name) && now.length < MOST) set([...now, name]);
  }

  async function offer() {
    try {
      const page = await get("/v1/run-summaries", signal, { page_size: 20, column: "*" });
      const names = new Set(page.summaries.flatMap((run) => Object.keys(run.values)));
      offered.replaceChildren(...[...names].sort().map((name) => h("option", { value: name })));
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof Refusal) && error.name !== "AbortError") throw error; // Offered at the next opening.
    }
  }

  show();
  return fold;
}
