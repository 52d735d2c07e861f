// A form made from the run spec's JSON Schema, or the spec as YAML; checked and submitted by the coordinator.

import { get, post, Refusal } from "../api.js";
import { h } from "../dom.js";
import { EXAMPLES } from "../examples.js";
import { plural } from "../format.js";
import { about, Form, without } from "../form.js";
import { keyAt, lineOf, yamlOf } from "../yaml.js";
import { preview } from "./plan.js";

export async function show(root, place, signal) {
  const schema = await get("/v1/spec-schema", signal);
  const from = place.query.get("from");
  const at = place.query.get("at");
  const start = from ? without((await get(`/v1/runs/${encodeURIComponent(from)}`, signal)).spec, schema) : { model: {}, data: {}, reward: { scorers: [{ name: "exact" }] } };
  if (at) start.from_checkpoint = { run: from, step: Number(at) };
  const form = new Form(schema, start);
  const text = h("textarea", { id: "text", rows: 28, spellcheck: "false", "aria-label": "Spec as YAML" });
  const help = h("aside", { class: "panel help", "aria-label": "About the key", "aria-live": "polite" });
  const asText = h("div", { class: "beside", hidden: true }, text, help);
  const toggle = h("button", { type: "button", onclick: () => swap() }, "Edit as YAML");
  const workflows = Map.groupBy(EXAMPLES, ([workflow]) => workflow);
  const begin = h("section", { class: "panel workflows", role: "group", "aria-label": "Begin with a workflow" }, [...workflows].map(([workflow, found]) =>
    h("div", {}, h("b", {}, workflow.replaceAll("_", " ")), found.map(([, label, spec]) => h("button", { type: "button", class: "quiet", onclick: () => write(spec) }, label)))));
  const said = h("section", { role: "status", class: "said", tabindex: "-1" });
  const title = at ? `Fork ${from} at step ${at}` : from ? `Submit a run like ${from}` : "Submit a run";
  const element = h("form", { class: "spec", novalidate: true, onsubmit: (event) => { event.preventDefault(); send(false); } },
    h("div", { class: "row head" }, h("h1", {}, title), toggle), from ? null : begin,
    said, form.element, asText,
    h("div", { class: "row sticky" }, h("button", { type: "submit", class: "main" }, "Submit"), h("button", { type: "button", onclick: () => send(true) }, "Check and preview")));
  root.append(element);
  for (const kind of ["keyup", "click", "input"]) text.addEventListener(kind, explain);

  // What the schema says of the key that the cursor is at.
  function explain() {
    const key = keyAt(text.value, text.selectionStart);
    const found = key && about(schema, key);
    help.replaceChildren(...(found ? [h("h2", {}, key), h("p", {}, found.description ?? ""), h("p", { class: "muted" }, found.kind),
      found.keys.length ? h("p", { class: "wrap" }, "Its keys: ", h("code", {}, found.keys.join(", "))) : ""]
      : [h("p", { class: "muted" }, key ? `${key} is no key that the schema describes.` : "Put the cursor on a key to see what it means.")]));
  }

  function write(words) {
    text.value = words;
    open(true);
    explain();
  }

  function open(asYaml) {
    asText.hidden = !asYaml;
    form.element.hidden = asYaml;
    toggle.textContent = asYaml ? "Edit as a form" : "Edit as YAML";
  }

  async function swap() {
    if (asText.hidden) return write(yamlOf(form.value()));
    const spec = await parsed();
    if (!spec) return null;
    form.set(spec);
    return open(false);
  }

  // The text as data: JSON is read here, YAML by the coordinator, which reads it only in a spec that it would take.
  async function parsed() {
    try {
      return JSON.parse(text.value);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
    const answer = await ask(true);
    return answer && without(answer, schema);
  }

  async function ask(dry) {
    const spec = asText.hidden ? form.value() : text.value;
    tell([h("p", {}, "The coordinator checks it; scorers are loaded and tried…")]);
    try {
      return await post(`/v1/runs${dry ? "?dry_run=true" : ""}`, spec);
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      return problems(error.message, error.problems ?? []);
    }
  }

  async function send(dry) {
    form.clear();
    const wrong = asText.hidden ? form.wrong() : [];
    if (wrong.length) return problems("The form", wrong);
    const answer = await ask(dry);
    if (!answer) return null;
    if (!dry) { location.hash = `#/runs/${encodeURIComponent(answer.id)}`; return null; }
    return tell([h("p", { class: "good" }, "This run could start: the coordinator finds nothing wrong."), await preview(answer)]);
  }

  function problems(message, found) {
    for (const each of found) form.mark(each.key, `${each.problem}; ${each.fix}`);
    tell([h("h2", { class: "bad" }, found.length ? `${plural(found.length, "problem")}` : message),
      h("ul", {}, found.map((each) => h("li", {}, h("b", {}, each.key || "spec"), ` ${each.problem}; ${each.fix} `, asText.hidden
        ? form.has(each.key) && h("button", { type: "button", class: "quiet", onclick: () => form.focus(each.key) }, "Show") : toLine(each))))]);
    return null;
  }

  // Leads to the line of a problem: of its key, or the one that YAML itself names.
  function toLine(each) {
    const named = Number(/line (\d+)/.exec(each.problem)?.[1] ?? 0);
    const before = text.value.split("\n").slice(0, Math.max(0, named - 1)).join("\n").length;
    const found = each.key ? lineOf(text.value, each.key) : named && [named, before + (named > 1), text.value.indexOf("\n", before + 1)];
    if (!found) return null;
    return h("button", { type: "button", class: "quiet", onclick: () => {
      text.focus();
      text.setSelectionRange(found[1], found[2] < 0 ? text.value.length : found[2]);
      text.scrollTop = (found[0] - 4) * (text.scrollHeight / text.value.split("\n").length);
      explain();
    } }, `Line ${found[0]}`);
  }

  function tell(children) {
    said.replaceChildren(...children);
    said.focus();
  }
}
