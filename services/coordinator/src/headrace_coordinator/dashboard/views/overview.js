import { Refusal } from "../api.js";
import { chartBar, chosenAxis, chosenLook } from "../chartbar.js";
import { Chart, newest } from "../charts.js";
import { Curves, placeOf } from "../curves.js";
import { empty, h } from "../dom.js";
import { number } from "../format.js";
import { eventLog } from "./events.js";
import { flow } from "./flow.js";

// Figures by their tags. What a tag means: headrace_trainer/learning/figures.py.
const GROUPS = [
  ["What it learns", true, [
    ["Reward, mean ± spread", "reward"],
    ["Success, share of trained episodes", ["trainer/success_rate"]],
    ["Held-out score", "scores"],
    ["Answer length, tokens", ["trainer/answer_length_mean"]],
    ["Entropy, nats a token", ["trainer/entropy"]],
  ]],
  ["The update", true, [
    ["Loss", /^trainer\/(loss|.*_loss|loss_.*)$/],
    ["Gradient norm", ["trainer/grad_norm", "trainer/critic_grad_norm"]],
    ["KL of the step's first policy to the one in training, nats a token", ["trainer/approx_kl"]],
    ["KL of the step's first policy to the reference, nats a token", ["trainer/reference_kl"]],
    ["KL between policy and teacher, nats a token", ["trainer/teacher_kl"]],
    ["Share of tokens that are clipped", ["trainer/clip_fraction", "trainer/dual_clip_fraction"]],
    ["Learning rate", ["trainer/learning_rate"]],
  ]],
  ["Speed and slots", true, [
    ["Seconds of a step, and by stage", "stages"],
    ["Tokens per second", ["speed/tokens_per_second"]],
    ["Slots of a step", ["slots/trained", "slots/dropped"]],
    ["Groups whose rewards are all equal", ["trainer/groups_all_equal"]],
    ["Staleness, versions", ["train/max_staleness", "trainer/staleness_mean", "trainer/staleness_max"]],
  ]],
  ["The engine beside the trainer", false, [
    ["Difference of their log-probs, nats", ["trainer/log_prob_mismatch_mean", "trainer/log_prob_mismatch_max"]],
    ["KL of engine to trainer, nats a token", ["trainer/log_prob_mismatch_kl"]],
    ["Ratio of their probabilities", ["trainer/log_prob_ratio_mean", "trainer/log_prob_ratio_max"]],
    ["Effective share of the samples", ["trainer/log_prob_ratio_ess"]],
    ["Correction for the old policy", /^trainer\/correction_/],
    ["Share of drafted tokens that the policy drew, and of probability that it has in common with its head", ["trainer/draft_acceptance", "trainer/draft_overlap"]],
  ]],
];
// The same figures where a policy acts in an environment: its tokens are actions, and its rewards returns.
const OF_EPISODES = new Map([
  ["Reward, mean ± spread", "Return, mean ± spread"],
  ["Answer length, tokens", "Episode length, actions"],
  ["Mean reward", "Mean return"],
  ["Tokens per second", "Actions per second"],
  ["Slots of a step", "Episodes of a step"],
  ["Groups whose rewards are all equal", "Groups whose returns are all equal"],
]);
// What a figure is called in a run of a workflow.
export function wordsOf(run) {
  if (run.spec.workflow !== "embodied" && run.spec.workflow !== "episodes") return (name) => name;
  return (name) => OF_EPISODES.get(name) ?? name.replace(/, nats( a token)?$/, "").replaceAll("tokens", "actions").replaceAll("Tokens", "Actions");
}

// Shown within another plot, or the same under another name.
const KNOWN = new Set(["train/reward", "trainer/reward_mean", "trainer/reward_std", "trainer/learn_seconds", "speed/step_seconds", "speed/tokens", "trainer/log_prob_compared_tokens", "trainer/drafted_tokens", "trainer/accepted_tokens"]);
const STAGES = ["generate", "prefill", "score", "learn", "sync", "switch", "protocol"];
const CONSTANT_AFTER = 3; // Fewer points say nothing yet.

export async function overview(root, context) {
  const curves = new Curves(context.path, context.signal);
  const plots = h("div");
  const log = eventLog(context);
  const bar = chartBar(() => drawAgain());
  const own = ownCharts(context.place, () => drawAgain());
  root.append(flow(context).element, bar.element, own.element, plots, log.element);
  await curves.load();
  let drawn = all();
  function drawAgain() {
    drawn.end();
    drawn = all();
  }

  function all() {
    own.offer(Object.keys(curves.series));
    return draw(plots, curves, context, own.chosen());
  }

  let queued = false;
  let stale = false; // A load is owed: what is drawn ends before a rewind, and later steps would not fit.

  async function redraw() {
    if (stale) {
      await curves.load();
      stale = false;
    }
    if (drawn.names !== names(curves)) drawAgain();
    else drawn.update();
  }

  function soon(ms = 100) {
    if (queued) return;
    queued = true;
    setTimeout(() => {
      queued = false;
      if (context.signal.aborted) return;
      redraw().catch(() => soon(2000));
    }, stale ? Math.max(ms, 500) : ms);
  }

  context.onEvent((event) => {
    const change = curves.take(event);
    stale ||= change === "again";
    if (change) soon();
  });
  await log.load();
  try {
    await context.follow(Math.min(curves.event, log.newest()));
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
  }
}

// Which charts there are: by the tags, by which of them are constant, and by the kinds of evaluations.
function names(curves) {
  const tags = Object.keys(curves.series).sort().map((name) => (constant(curves.column(name)) ? `${name}=` : name));
  return tags.join() + [...new Set(curves.evaluations.map((each) => each.kind))].sort().join();
}

function constant(column) {
  const known = column.filter((value) => value !== null);
  return known.length >= CONSTANT_AFTER && known.every((value) => value === known[0]);
}

// Charts of the reader's choice: each of some figures, in the page's address, so that a link shows them too.
function ownCharts(place, changed) {
  const add = h("select", { id: "own-figure" });
  const beside = h("select", { id: "own-chart" });
  const list = h("span", { class: "row" });
  let charts = (place.query.get("own") ?? "").split(";").filter(Boolean).map((each) => each.split(","));
  const pair = (label, control) => h("span", { class: "pair" }, h("label", { for: control.id }, label), control);
  const element = h("div", { class: "row chart-bar", role: "group", "aria-label": "Own charts" }, pair("Own chart of", add), pair("in", beside),
    h("button", { type: "button", onclick: () => { if (add.value) set(beside.value === "" ? [...charts, [add.value]] : charts.map((each, at) => (at === Number(beside.value) ? [...new Set([...each, add.value])] : each))); } }, "Add"), list);

  function set(now) {
    charts = now;
    const [path, text] = location.hash.split("?");
    const query = new URLSearchParams(text);
    if (charts.length) query.set("own", charts.map((each) => each.join(",")).join(";")); else query.delete("own");
    history.replaceState(null, "", query.size ? `${path}?${query}` : path);
    changed();
  }

  function show() {
    const chosen = beside.value;
    beside.replaceChildren(h("option", { value: "" }, "a new one"), ...charts.map((each, at) => h("option", { value: at }, each.map(shortName).join(", "))));
    beside.value = charts[Number(chosen)] && chosen !== "" ? chosen : "";
    list.replaceChildren(...charts.map((each, at) => h("button", { type: "button", class: "quiet", onclick: () => set(charts.filter((_, index) => index !== at)) }, `Remove ${each.map(shortName).join(", ")}`)));
  }

  return {
    element,
    chosen: () => charts,
    offer(names) {
      const before = add.value;
      element.hidden = !names.length;
      add.replaceChildren(...names.sort().map((name) => h("option", { value: name }, `${name.split("/")[0]}: ${shortName(name)}`)));
      if (names.includes(before)) add.value = before;
      show();
    },
  };
}

function draw(root, curves, { signal, run }, own) {
  const charts = [];
  const known = Object.keys(curves.series);
  const left = new Set(known.filter((name) => !KNOWN.has(name) && !name.startsWith("stage_seconds/")));
  const still = [];
  const groups = [];
  if (!known.length && !curves.evaluations.length) {
    root.replaceChildren(empty(["SUCCEEDED", "FAILED", "CANCELLED"].includes(run.state) ? "No step was committed." : "No step is committed yet. Curves appear with the first one."));
    return { names: names(curves), update() {}, end() {} };
  }
  const options = { look: chosenLook(), signal };
  const add = (made) => { if (made) { charts.push(made); made.update(); return made.chart.element; } return null; };
  // One's own are shown where they are constant too.
  const chosen = own.map((found) => add(lines(found.map(shortName).join(", "), found.filter((name) => known.includes(name)), curves, null, options))).filter(Boolean);
  if (chosen.length) groups.push(group("Own charts", true, chosen));
  const words = wordsOf(run);
  for (const [title, open, plots] of GROUPS) {
    const made = plots.map(([name, what]) => add(plot(words(name), what, curves, left, still, options))).filter(Boolean);
    if (made.length) groups.push(group(title, open, made));
  }
  const policies = byPolicy(left).map(([title, found]) => add(lines(title, found, curves, still, options))).filter(Boolean);
  if (policies.length) groups.push(group("Each policy", true, policies));
  const others = [...left].sort().map((name) => add(lines(shortName(name), [name], curves, still, options))).filter(Boolean);
  if (others.length) groups.push(group("Other figures", false, others));
  const folded = still.length ? h("p", { class: "muted constant" }, `The same in every step: ${still.join("; ")}.`) : null;
  root.replaceChildren(...groups, ...(folded ? [folded] : []));
  return { names: names(curves), update: () => charts.forEach((made) => made.update()), end: () => charts.forEach((made) => made.chart.end()) };
}

// Of a run with several policies: (figure, its tags of all policies), which are then no others.
function byPolicy(left) {
  const found = new Map();
  for (const name of [...left].sort()) {
    const figure = name.match(/^trainer\/[^/]+\/([^/]+)$/)?.[1];
    if (!figure) continue;
    left.delete(name);
    found.set(figure, [...(found.get(figure) ?? []), name]);
  }
  return [...found].map(([figure, names]) => [figure[0].toUpperCase() + figure.slice(1).replaceAll("_", " "), names]);
}

function group(title, open, plots) {
  return h("details", { class: "group", open }, h("summary", {}, h("h2", {}, title)), h("div", { class: "charts" }, plots));
}

function plot(title, what, curves, left, still, options) {
  if (what === "reward") return reward(title, curves, options);
  if (what === "scores") return scores(title, curves, options);
  if (what === "stages") return stages(title, curves, options);
  const found = [...left].filter((name) => (Array.isArray(what) ? what.includes(name) : what.test(name)));
  found.forEach((name) => left.delete(name));
  return found.length ? lines(title, found, curves, still, options) : null;
}

// Gives data to a chart over the steps, with the recoveries marked.
function over(chart, curves, columns) {
  const [xs, marks] = curves.axis(chosenAxis());
  chart.set(xs, columns, marks);
}

// A chart of some tags; null where all are constant: then `still`, if given, gets their values in words.
function lines(title, found, curves, still, options) {
  const columns = () => found.map((name) => curves.column(name));
  if (!found.length) return null;
  if (still && columns().every(constant)) {
    const values = found.map((name, index) => `${found.length > 1 ? `${shortName(name)} ` : ""}${number(newest(columns()[index]))}`);
    still.push(`${/^[A-Z]{2}/.test(title) ? title : title[0].toLowerCase() + title.slice(1)} ${values.join(", ")}`);
    return null;
  }
  const chart = new Chart(title, found.map((name) => ({ label: shortName(name) })), options);
  return { chart, update: () => over(chart, curves, columns()) };
}

export function shortName(name) {
  return name.replace(/^[^/]*\//, "").replaceAll("_", " ");
}

function reward(title, curves, options) {
  if (!curves.steps.length) return null;
  const chart = new Chart(title, [
    { label: "mean", colour: "--c1" },
    { label: "+ spread", colour: "--c1", faint: true, band: true },
    { label: "− spread", colour: "--c1", faint: true },
  ], options);
  return {
    chart,
    update() {
      const mean = curves.column("train/reward");
      const spread = curves.column("trainer/reward_std");
      const edge = (sign) => mean.map((value, index) => (value === null || spread[index] === null ? null : value + sign * spread[index]));
      over(chart, curves, [mean, edge(1), edge(-1)]);
    },
  };
}

function scores(title, curves, options) {
  const kinds = [...new Set(curves.evaluations.map((each) => each.kind))].filter((kind) => kind !== "baseline_prefill").sort();
  if (!kinds.length) return null;
  const label = (kind) => (kind === "heldout" ? (kinds.length > 1 ? "held-out" : "score") : kind);
  const chart = new Chart(title, kinds.map((kind, place) => ({ label: label(kind), colour: `--c${3 + (place % 4)}`, points: true })), options);
  return {
    chart,
    update() {
      const found = kinds.map((kind) => curves.scores(kind));
      const steps = [...new Set(found.flatMap(([at]) => at))].sort((a, b) => a - b);
      const [xs, marks] = curves.axis(chosenAxis());
      chart.set(steps.map((step) => placeOf(curves.steps, xs, step)), found.map(([at, values]) => steps.map((step) => values[at.indexOf(step)] ?? null)), marks);
    },
  };
}

// Stages overlap (answers are scored while others are generated), so they are lines beside the whole and no stack.
function stages(title, curves, options) {
  const found = Object.keys(curves.series).filter((name) => name.startsWith("stage_seconds/"));
  const place = (name) => (STAGES.indexOf(name.slice(14)) + 99) % 99;
  found.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  if (!found.length) return null;
  const chart = new Chart(title, [{ label: "whole step", colour: "--muted" }, ...found.map((name, index) => ({ label: name.slice(14), colour: `--c${1 + (index % 8)}` }))], options);
  return { chart, update: () => over(chart, curves, ["speed/step_seconds", ...found].map((name) => curves.column(name))) };
}
