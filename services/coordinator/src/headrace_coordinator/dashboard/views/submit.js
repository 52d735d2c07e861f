// A form made from the run spec's JSON Schema, or the spec as JSON; checked and submitted by the coordinator.

import { get, post, Refusal } from "../api.js";
import { h } from "../dom.js";
import { plural } from "../format.js";
import { Form, without } from "../form.js";
import { preview } from "./plan.js";

export async function show(root, place, signal) {
  const schema = await get("/v1/spec-schema", signal);
  const from = place.query.get("from");
  const start = from ? without((await get(`/v1/runs/${encodeURIComponent(from)}`, signal)).spec, schema) : { model: {}, data: {}, reward: { scorers: [{ name: "exact" }] } };
  const form = new Form(schema, start);
  const text = h("textarea", { id: "json", rows: 28, spellcheck: "false", "aria-label": "Spec as JSON" });
  const asText = h("div", { hidden: true }, text);
  const toggle = h("button", { type: "button", onclick: () => swap() }, "Edit as JSON");
  const said = h("section", { role: "status", class: "said", tabindex: "-1" });
  const element = h("form", { class: "spec", novalidate: true, onsubmit: (event) => { event.preventDefault(); send(false); } },
    h("div", { class: "row head" }, h("h1", {}, from ? `Submit a run like ${from}` : "Submit a run"), toggle),
    said, form.element, asText,
    h("div", { class: "row sticky" }, h("button", { type: "submit", class: "main" }, "Submit"), h("button", { type: "button", onclick: () => send(true) }, "Check and preview")));
  root.append(element);

  function swap() {
    const open = asText.hidden;
    if (open) text.value = JSON.stringify(form.value(), null, 2);
    else {
      const spec = parsed();
      if (!spec) return;
      form.set(spec);
    }
    asText.hidden = !open;
    form.element.hidden = open;
    toggle.textContent = open ? "Edit as a form" : "Edit as JSON";
  }

  function parsed() {
    try {
      return JSON.parse(text.value);
    } catch (error) {
      tell([h("p", { class: "bad" }, `This is not JSON: ${error.message}`)]);
      return null;
    }
  }

  async function send(dry) {
    form.clear();
    const wrong = asText.hidden ? form.wrong() : [];
    if (wrong.length) return problems("The form", wrong);
    const spec = asText.hidden ? form.value() : parsed();
    if (!spec) return null;
    tell([h("p", {}, "The coordinator checks it; scorers are loaded and tried…")]);
    try {
      const answer = await post(`/v1/runs${dry ? "?dry_run=true" : ""}`, spec);
      if (!dry) { location.hash = `#/runs/${encodeURIComponent(answer.id)}`; return null; }
      return tell([h("p", { class: "good" }, "This run could start: the coordinator finds nothing wrong."), await preview(answer)]);
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      return problems(error.message, error.problems ?? []);
    }
  }

  function problems(message, found) {
    for (const each of found) form.mark(each.key, `${each.problem}; ${each.fix}`);
    tell([h("h2", { class: "bad" }, found.length ? `${plural(found.length, "problem")}` : message),
      h("ul", {}, found.map((each) => h("li", {}, h("b", {}, each.key || "spec"), ` ${each.problem}; ${each.fix} `,
        form.has(each.key) && h("button", { type: "button", class: "quiet", onclick: () => form.focus(each.key) }, "Show"))))]);
    return null;
  }

  function tell(children) {
    said.replaceChildren(...children);
    said.focus();
  }
}
