// A run's tags and note, and the form that changes them.

import { post, Refusal } from "../api.js";
import { h } from "../dom.js";
import { markdown } from "../markdown.js";
import { tagList } from "./runs.js";

export function labels(path) {
  const shown = h("div", { class: "labels" });
  const tags = h("input", { id: "tags", type: "text", autocomplete: "off", placeholder: "words, with spaces between" });
  const note = h("textarea", { id: "note", rows: 2 });
  const problem = h("p", { class: "bad", role: "alert" });
  const form = h("form", { class: "labels-form", onsubmit: (event) => { event.preventDefault(); save(); } },
    h("label", { for: "tags" }, "Tags"), tags, h("label", { for: "note" }, "Note"), note, h("p", { class: "muted" }, "Markdown: # heading, - list, **bold**, `code`, [text](https://…)"), h("button", { type: "submit" }, "Save"), problem);
  const fold = h("details", {}, h("summary", { class: "muted" }, "Tags and note"), form);
  let now = "";

  async function save() {
    problem.textContent = "";
    try {
      update(await post(`${path}:label`, { tags: tags.value.split(/[\s,]+/).filter(Boolean), note: note.value.trim() }));
      fold.open = false;
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      problem.textContent = [error.message, ...(error.problems ?? []).map((each) => `${each.key} ${each.problem}; ${each.fix}`)].join(": ");
    }
  }

  function update(run) {
    const text = JSON.stringify([run.tags, run.note]);
    if (text === now) return;
    now = text;
    shown.replaceChildren(...[tagList(run.tags), run.note && markdown(run.note)].filter(Boolean));
    if (fold.open) return; // Somebody writes.
    tags.value = run.tags.join(" ");
    note.value = run.note;
  }

  return { element: h("div", {}, shown, fold), update };
}
