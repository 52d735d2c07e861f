// What all charts of a page are drawn over and how: kept in this browser. Knows no run.

import { h } from "./dom.js";
import { AXES } from "./curves.js";

const KEY = "headrace-charts";
const chosen = { axis: "step", smoothing: 0, log: false };
try {
  Object.assign(chosen, JSON.parse(localStorage.getItem(KEY)));
} catch {
  localStorage.removeItem(KEY);
}
if (!(chosen.axis in AXES)) chosen.axis = "step";

// Controls above charts; `changed` draws them again.
export function chartBar(changed) {
  const axis = h("select", { id: "chart-axis" }, Object.keys(AXES).map((name) => h("option", { value: name }, name)));
  const smoothing = h("input", { id: "chart-smoothing", type: "range", min: 0, max: 0.98, step: 0.02 });
  const log = h("input", { id: "chart-log", type: "checkbox" });
  axis.value = chosen.axis;
  smoothing.value = chosen.smoothing;
  log.checked = chosen.log;
  const take = () => {
    Object.assign(chosen, { axis: axis.value, smoothing: Number(smoothing.value), log: log.checked });
    localStorage.setItem(KEY, JSON.stringify(chosen));
    changed();
  };
  for (const control of [axis, smoothing, log]) control.addEventListener("change", take);
  const pair = (label, control) => h("span", { class: "pair" }, h("label", { for: control.id }, label), control);
  return { element: h("div", { class: "row chart-bar", role: "group", "aria-label": "Charts" }, pair("By", axis), pair("Smoothing", smoothing), pair("Log scale", log)) };
}

export function chosenAxis() {
  return chosen.axis;
}

// How a `Chart` looks now.
export function chosenLook() {
  return { label: AXES[chosen.axis][0], smoothing: chosen.smoothing, log: chosen.log };
}
