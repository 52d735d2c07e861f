// Runs beside each other: their curves overlaid, seeds of one spec as mean and range, any two figures, and the keys
// in which their specs differ.

import { get, repeat } from "../api.js";
import { chartBar, chosenAxis, chosenLook } from "../chartbar.js";
import { Chart, seriesColour } from "../charts.js";
import { along, placeOf } from "../curves.js";
import { chip, empty, h, table } from "../dom.js";
import { mean, middle, number, plural } from "../format.js";
import { shortName, wordsOf } from "./overview.js";
import { flatten } from "./spec.js";

const MOST = 8;
const SCORE = "heldout";
const PLOTS = [
  ["Mean reward", "train/reward"], ["Held-out score", SCORE], ["Answer length, tokens", "trainer/answer_length_mean"], ["Entropy, nats a token", "trainer/entropy"],
  ["Gradient norm", "trainer/grad_norm"], ["Tokens per second", "speed/tokens_per_second"], ["Step time, seconds", "speed/step_seconds"],
  ["Difference of engine's and trainer's log-probs, nats", "trainer/log_prob_mismatch_mean"], ["Worst staleness, versions", "train/max_staleness"],
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
  const seeds = h("input", { type: "checkbox", id: "seeds", onchange: () => draw() });
  seeds.checked = place.query.get("seeds") === "1";
  const left = h("select", { id: "left", onchange: () => draw() });
  const right = h("select", { id: "right", onchange: () => draw() });
  const bar = chartBar(() => draw());
  bar.element.append(h("label", { for: "seeds" }, seeds, " seeds of one spec as mean and range"));
  const names = h("div");
  const grid = h("div", { class: "charts" });
  const overlaid = h("div", { class: "charts one" });
  body.replaceChildren(names, bar.element, grid, h("section", {}, h("h2", {}, "Any two figures"),
    h("div", { class: "row" }, h("label", { for: "left" }, "Left"), left, h("label", { for: "right" }, "Right, dashed"), right), overlaid), differences(runs), answers(runs));
  let curves = [];
  let drawn = [];
  let shape = "";

  // What is drawn as one line: a run, or all runs whose specs differ in the seed alone.
  function groups() {
    if (!seeds.checked) return runs.map((run, index) => ({ label: run.id, of: [index] }));
    const found = new Map();
    runs.forEach((run, index) => {
      const { seed, ...rest } = run.spec;
      const key = JSON.stringify(rest);
      found.set(key, [...(found.get(key) ?? []), index]);
    });
    return [...found.values()].map((of) => ({ label: of.length > 1 ? runs[of[0]].spec.name ?? runs[of[0]].id : runs[of[0]].id, of }));
  }

  function draw() {
    drawn.forEach((chart) => chart.end());
    const lines = groups();
    names.replaceChildren(legend(lines, runs));
    const known = new Set(curves.flatMap((each) => Object.keys(each.series)));
    const has = (name) => (name === SCORE ? curves.some((each) => each.evaluations.some((point) => point.kind === SCORE)) : known.has(name));
    offer(left, [...known].sort());
    offer(right, [...known].sort());
    const words = wordsOf(runs[0]);
    const made = PLOTS.filter(([, name]) => has(name)).map(([title, name]) => plot(words(title), [name], lines, curves, signal));
    const two = [left.value, right.value].filter(Boolean);
    const both = two.length ? plot(two.map(shortName).join(" and "), two, lines, curves, signal) : null;
    grid.replaceChildren(...made.map((chart) => chart.element));
    overlaid.replaceChildren(both ? both.element : empty("Choose a figure on the left, and one on the right."));
    drawn = both ? [...made, both] : made;
  }

  await repeat(5000, signal, async () => {
    curves = await Promise.all(chosen.map((id) => get(`${address(id)}/curves`, signal, { points: 300 })));
    const now = JSON.stringify(curves.map((each) => [each.event, each.total]));
    if (now !== shape) draw();
    shape = now;
  });
}

function offer(select, tags) {
  if (select.options.length === tags.length + 1) return;
  const before = select.value;
  select.replaceChildren(h("option", { value: "" }, "–"), ...tags.map((tag) => h("option", { value: tag }, tag)));
  select.value = before;
}

// A chart of one or two figures of all groups; a group of several runs is its mean with its range.
function plot(title, figures, lines, curves, signal) {
  const made = figures.flatMap((name, side) => lines.flatMap((line, index) => {
    const base = { colour: seriesColour(index), points: name === SCORE ? true : undefined, right: side > 0, dash: side ? [6, 4] : undefined };
    const label = figures.length > 1 ? `${line.label} ${shortName(name)}` : line.label;
    const found = line.of.map((each) => points(curves[each], name));
    if (found.length < 2) return [{ ...base, label, found: found[0] }];
    // A step has a mean once all have it: a mean of fewer would jump where one ends.
    const steps = [...found[0].keys()].filter((x) => found.every((each) => each.has(x)));
    const over = (fold) => new Map(steps.map((x) => [x, fold(found.map((each) => each.get(x)))]));
    return [
      { ...base, label, found: over((values) => values.reduce((sum, value) => sum + value, 0) / values.length) },
      ...(figures.length > 1 ? [] : [
        { ...base, label: "most", faint: true, band: index === 0, found: over((values) => Math.max(...values)) },
        { ...base, label: "least", faint: true, found: over((values) => Math.min(...values)) },
      ]),
    ];
  }));
  const chart = new Chart(title, made, { look: chosenLook(), signal });
  const xs = [...new Set(made.flatMap((line) => [...line.found.keys()]))].sort((a, b) => a - b);
  chart.set(xs, made.map((line) => xs.map((x) => line.found.get(x) ?? null)));
  return chart;
}

// Place on the chosen axis → value, of one run.
function points(curves, name) {
  const xs = along(chosenAxis(), curves.steps, curves.series, curves.total);
  if (name === SCORE) {
    const held = curves.evaluations.filter((point) => point.kind === SCORE).sort((a, b) => a.step - b.step);
    return new Map(held.map((point) => [placeOf(curves.steps, xs, point.step), point.score]));
  }
  return new Map(xs.map((x, index) => [x, curves.series[name]?.[index] ?? null]).filter(([, value]) => value !== null));
}

function legend(lines, runs) {
  const words = (run) => [h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.id), " ", chip(run.state), ` step ${run.step}, reward ${number(run.last_step?.reward_mean)} `];
  return h("ul", { class: "legend" }, lines.map((line, index) => h("li", {}, h("i", { vars: { "--mark": `var(${seriesColour(index)})` } }),
    line.of.length > 1 && `${line.label}, ${plural(line.of.length, "seed")}: `, line.of.map((each) => words(runs[each])))));
}

function differences(runs) {
  const specs = runs.map((run) => flatten(run.spec));
  const keys = [...new Set(specs.flatMap(Object.keys))].sort();
  const differ = keys.filter((key) => new Set(specs.map((spec) => JSON.stringify(spec[key]))).size > 1);
  const rows = differ.map((key) => h("tr", {}, h("th", { scope: "row" }, key), specs.map((spec) => h("td", {}, key in spec ? JSON.stringify(spec[key]) : "–"))));
  return h("section", { class: "panel" }, h("h2", {}, "Where the specs differ"),
    rows.length ? table("Differences of the specs", ["Key", ...runs.map((run) => run.id)], rows)[0] : empty("The specs are the same."));
}

// What each run's newest held-out evaluation shows of the same items, side by side.
function answers(runs) {
  const newest = runs.map((run) => run.evaluations.findLast((view) => view.kind === SCORE && view.examples.length));
  const items = new Map();
  newest.forEach((view, at) => view?.examples.forEach((each) => {
    const item = items.get(each.prompt) ?? { prompt: each.prompt, reference: each.reference, of: runs.map(() => []) };
    item.of[at].push(each);
    items.set(each.prompt, item);
  }));
  const both = [...items.values()].filter(({ of }) => of.filter((found) => found.length).length > 1);
  const side = (found, at) => h("article", { class: "panel" }, h("h3", {}, runs[at].id, h("span", { class: "muted" }, newest[at] ? `, step ${newest[at].step}` : "")),
    found.length ? found.map((each) => [h("p", { class: "muted" }, `reward ${number(each.reward)}`), h("pre", { class: "text", tabindex: "0" }, each.completion || "(nothing)")]) : h("p", { class: "muted" }, "not among its examples"));
  const rewards = ({ of }) => of.map((found) => (found.length ? number(mean(found.map((each) => each.reward)), 2) : "–")).join(" · ");
  return h("section", { class: "panel" }, h("h2", {}, "Answers to the same held-out items"), both.length
    ? both.map((item) => h("details", { class: "trajectory same-item" }, h("summary", {}, h("span", { class: "chip reward" }, rewards(item)), h("span", { class: "excerpt" }, middle(item.prompt, 160))),
      h("div", { class: "body" }, h("h4", {}, "Prompt"), h("pre", { class: "text" }, item.prompt), h("h4", {}, "Reference"), h("pre", { class: "text" }, item.reference || "(none)"), h("div", { class: "side" }, item.of.map(side)))))
    : empty("The newest held-out evaluations show no item in common; two evaluations of one suite are compared under Evaluations."));
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
