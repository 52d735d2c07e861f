// Runs beside each other: their curves overlaid, and the keys in which their specs differ.

import { get, repeat } from "../api.js";
import { Chart, seriesColour } from "../charts.js";
import { chip, empty, h, table } from "../dom.js";
import { number } from "../format.js";
import { flatten } from "./spec.js";

const MOST = 8;
const PLOTS = [
  ["Mean reward", "train/reward"], ["Answer length, tokens", "trainer/answer_length_mean"], ["Tokens per second", "speed/tokens_per_second"],
  ["Step time, seconds", "speed/step_seconds"], ["Entropy, nats", "trainer/entropy"], ["Gradient norm", "trainer/grad_norm"],
  ["Log-prob mismatch, nats", "trainer/log_prob_mismatch_mean"], ["Worst staleness, versions", "train/max_staleness"],
];

export async function show(root, place, signal) {
  const chosen = (place.query.get("runs") ?? "").split(",").filter(Boolean).map(decodeURIComponent).slice(0, MOST);
  const picker = h("section", { class: "panel" });
  const body = h("div");
  root.append(h("div", { class: "row head" }, h("h1", {}, "Compare runs")), picker, body);
  await pick(picker, chosen, signal);
  if (chosen.length < 2) return body.replaceChildren(empty("Choose two runs or more."));
  const address = (id) => `/v1/runs/${encodeURIComponent(id)}`;
  const runs = await Promise.all(chosen.map((id) => get(address(id), signal)));
  const charts = PLOTS.map(([title, name]) => ({ name, chart: new Chart(title, chosen.map((label) => ({ label, points: false })), { signal }) }));
  const score = new Chart("Held-out score", chosen.map((label) => ({ label, points: true })), { signal });
  const grid = h("div", { class: "charts" }, [charts[0].chart, score, ...charts.slice(1).map((each) => each.chart)].map((chart) => chart.element));
  body.replaceChildren(legend(runs), grid, differences(runs));
  await repeat(5000, signal, async () => {
    const curves = await Promise.all(chosen.map((id) => get(`${address(id)}/curves`, signal, { points: 300 })));
    for (const { name, chart } of charts) {
      chart.element.hidden = !curves.some((each) => each.series[name]);
      overlay(chart, curves.map((each) => [each.steps, each.series[name] ?? each.steps.map(() => null)]));
    }
    const held = curves.map((each) => each.evaluations.filter((point) => point.kind === "heldout").sort((a, b) => a.step - b.step));
    score.element.hidden = held.every((each) => !each.length);
    overlay(score, held.map((each) => [each.map((point) => point.step), each.map((point) => point.score)]));
  });
}

function overlay(chart, pairs) {
  const steps = [...new Set(pairs.flatMap(([own]) => own))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  chart.set(steps, pairs.map(([own, values]) => {
    const column = steps.map(() => null);
    own.forEach((step, index) => { column[place.get(step)] = values[index]; });
    return column;
  }));
}

function legend(runs) {
  return h("ul", { class: "legend" }, runs.map((run, index) => h("li", {}, h("i", { vars: { "--mark": `var(${seriesColour(index)})` } }),
    h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.id), " ", chip(run.state), ` step ${run.step}, reward ${number(run.last_step?.reward_mean)}`)));
}

function differences(runs) {
  const specs = runs.map((run) => flatten(run.spec));
  const keys = [...new Set(specs.flatMap(Object.keys))].sort();
  const differ = keys.filter((key) => new Set(specs.map((spec) => JSON.stringify(spec[key]))).size > 1);
  const rows = differ.map((key) => h("tr", {}, h("th", { scope: "row" }, key), specs.map((spec) => h("td", {}, key in spec ? JSON.stringify(spec[key]) : "–"))));
  return h("section", { class: "panel" }, h("h2", {}, "Where the specs differ"),
    rows.length ? table("Differences of the specs", ["Key", ...runs.map((run) => run.id)], rows)[0] : empty("The specs are the same."));
}

async function pick(root, chosen, signal) {
  const list = h("div", { class: "picks" });
  const search = h("input", { type: "search", placeholder: "Search run ids", "aria-label": "Search run ids", oninput: () => { clearTimeout(search.timer); search.timer = setTimeout(fill, 200); } });
  root.append(h("div", { class: "row" }, h("h2", {}, "Runs"), search), list);
  async function fill() {
    const page = await get("/v1/run-summaries", signal, { page_size: 12, search: search.value.trim() });
    const ids = [...new Set([...chosen, ...page.summaries.map((run) => run.id)])];
    list.replaceChildren(...(ids.length ? ids.map(choice) : [empty("No run matches.")]));
  }
  function choice(id) {
    const box = h("input", { type: "checkbox", onchange: () => {
      const next = box.checked ? [...chosen, id].slice(-MOST) : chosen.filter((each) => each !== id);
      location.hash = `#/compare${next.length ? `?runs=${next.map(encodeURIComponent).join(",")}` : ""}`;
    } });
    box.checked = chosen.includes(id);
    return h("label", { class: "pick" }, box, " ", id);
  }
  await fill();
}
