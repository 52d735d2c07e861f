// The spec of a run as it was accepted, with every default, and where its files are.

import { facts, h } from "../dom.js";

export async function specTab(root, { run }) {
  root.append(h("section", { class: "panel" }, h("h2", {}, "Spec"),
    facts([["Run directory", h("code", {}, run.run_directory || "–")], ["Exported to", run.export_path ? h("code", {}, run.export_path) : "–"]]),
    h("p", {}, h("a", { class: "button", href: `#/submit?from=${encodeURIComponent(run.id)}` }, "Submit one like it…")),
    h("pre", { class: "text", tabindex: "0", "aria-label": "Spec as JSON" }, JSON.stringify(run.spec, null, 2))));
}

// {"a": {"b": 1}} → {"a.b": 1}; lists and empty objects stay whole.
export function flatten(value, prefix = "", found = {}) {
  for (const [key, each] of Object.entries(value)) {
    const path = prefix ? `${prefix}.${key}` : key;
    if (each && typeof each === "object" && !Array.isArray(each) && Object.keys(each).length) flatten(each, path, found);
    else found[path] = each;
  }
  return found;
}
