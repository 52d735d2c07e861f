// A run's curves by group, and its events.

import { Refusal } from "../api.js";
import { Chart } from "../charts.js";
import { Curves } from "../curves.js";
import { empty, h } from "../dom.js";
import { eventLog } from "./events.js";
import { flow } from "./flow.js";

const GROUPS = [
  ["What it learns", [
    ["Reward, mean ± spread", "reward"],
    ["Held-out score", "scores"],
    ["Answer length, tokens", ["trainer/answer_length_mean"]],
  ]],
  ["The update", [
    ["Loss", /^trainer\/(loss|.*_loss|loss_.*)$/],
    ["Entropy, nats", ["trainer/entropy"]],
    ["KL to the policy of the step's start, nats", ["trainer/approx_kl"]],
    ["KL to the reference, nats", ["trainer/reference_kl"]],
    ["Clip fraction", /^trainer\/(.*clip.*)$/],
    ["Gradient norm", ["trainer/grad_norm"]],
    ["Learning rate", ["trainer/learning_rate"]],
    ["Log-prob mismatch of engine and trainer, nats", ["trainer/log_prob_mismatch_mean", "trainer/log_prob_mismatch_max"]],
    ["KL of engine to trainer, nats", ["trainer/log_prob_mismatch_kl"]],
    ["Probability ratio of trainer to engine", /^trainer\/log_prob_ratio_.*$/],
    ["Importance ratio", /^trainer\/(?!log_prob_)(.*ratio.*|.*weight.*)$/],
  ]],
  ["Speed and slots", [
    ["Step time by stage, seconds", "stages"],
    ["Tokens per second", ["speed/tokens_per_second"]],
    ["Worst staleness, versions", ["train/max_staleness"]],
    ["Slots of a step", ["slots/trained", "slots/dropped"]],
    ["Groups whose rewards are all equal", ["trainer/groups_all_equal"]],
  ]],
];
// Shown within another plot, or the same under another name.
const KNOWN = new Set(["train/reward", "trainer/reward_mean", "trainer/reward_std", "trainer/learn_seconds", "speed/step_seconds", "speed/tokens", "trainer/log_prob_compared_tokens"]);
const STAGES = ["generate", "score", "learn", "sync", "switch", "protocol"];

export async function overview(root, context) {
  const curves = new Curves(context.path, context.signal);
  const plots = h("div");
  const log = eventLog(context);
  root.append(flow(context).element, plots, log.element);
  await curves.load();
  let drawn = draw(plots, curves, context.signal);
  let queued = false;
  let stale = false; // A load is owed: what is drawn ends before a rewind, and later steps would not fit.

  async function redraw() {
    if (stale) {
      await curves.load();
      stale = false;
    }
    if (drawn.names !== names(curves)) drawn = draw(plots, curves, context.signal);
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

function names(curves) {
  return Object.keys(curves.series).sort().join() + [...new Set(curves.evaluations.map((each) => each.kind))].sort().join();
}

function draw(root, curves, signal) {
  const known = Object.keys(curves.series);
  const left = new Set(known.filter((name) => !KNOWN.has(name) && !name.startsWith("stage_seconds/")));
  const updates = [];
  const groups = [];
  if (!known.length && !curves.evaluations.length) {
    root.replaceChildren(empty("No step is committed yet. Curves appear with the first one."));
    return { names: names(curves), update() {} };
  }
  const add = (made) => { if (made) { updates.push(made.update); made.update(); return made.chart.element; } return null; };
  for (const [title, plots] of GROUPS) {
    const made = plots.map(([name, what]) => add(plot(name, what, curves, left, signal))).filter(Boolean);
    if (made.length) groups.push(group(title, made));
  }
  const others = [...left].sort().map((name) => add(lines(shortName(name), [name], curves, signal)));
  if (others.length) groups.push(group("Other figures", others));
  root.replaceChildren(...groups);
  return { names: names(curves), update: () => updates.forEach((update) => update()) };
}

function group(title, plots) {
  return h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, plots));
}

function plot(title, what, curves, left, signal) {
  if (what === "reward") return reward(title, curves, signal);
  if (what === "scores") return scores(title, curves, signal);
  if (what === "stages") return stages(title, curves, signal);
  const found = [...left].filter((name) => (Array.isArray(what) ? what.includes(name) : what.test(name)));
  found.forEach((name) => left.delete(name));
  return found.length ? lines(title, found, curves, signal) : null;
}

function lines(title, found, curves, signal) {
  const chart = new Chart(title, found.map((name) => ({ label: shortName(name) })), { signal });
  return { chart, update: () => chart.set(curves.steps, found.map((name) => curves.column(name))) };
}

function shortName(name) {
  return name.replace(/^[^/]*\//, "").replaceAll("_", " ");
}

function reward(title, curves, signal) {
  if (!curves.steps.length) return null;
  const chart = new Chart(title, [
    { label: "mean", colour: "--c1" },
    { label: "+ spread", colour: "--c1", faint: true, band: true },
    { label: "− spread", colour: "--c1", faint: true },
  ], { signal });
  return {
    chart,
    update() {
      const mean = curves.column("train/reward");
      const spread = curves.column("trainer/reward_std");
      const edge = (sign) => mean.map((value, index) => (value === null || spread[index] === null ? null : value + sign * spread[index]));
      chart.set(curves.steps, [mean, edge(1), edge(-1)]);
    },
  };
}

function scores(title, curves, signal) {
  const kinds = [...new Set(curves.evaluations.map((each) => each.kind))].filter((kind) => kind !== "baseline_prefill").sort();
  if (!kinds.length) return null;
  const label = (kind) => (kind === "heldout" ? (kinds.length > 1 ? "held-out" : "score") : kind);
  const chart = new Chart(title, kinds.map((kind, place) => ({ label: label(kind), colour: `--c${3 + (place % 4)}`, points: true })), { signal });
  return {
    chart,
    update() {
      const found = kinds.map((kind) => curves.scores(kind));
      const steps = [...new Set(found.flatMap(([at]) => at))].sort((a, b) => a - b);
      chart.set(steps, found.map(([at, values]) => steps.map((step) => values[at.indexOf(step)] ?? null)));
    },
  };
}

function stages(title, curves, signal) {
  const found = Object.keys(curves.series).filter((name) => name.startsWith("stage_seconds/"));
  const place = (name) => (STAGES.indexOf(name.slice(14)) + 99) % 99;
  found.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
  if (!found.length) return null;
  const chart = new Chart(title, found.map((name) => ({ label: name.slice(14) })), { stacked: true, signal });
  return { chart, update: () => chart.set(curves.steps, found.map((name) => curves.column(name))) };
}
