// The curves of a run as columns: loaded once, then longer by every committed step that the event stream brings.

import { get } from "./api.js";

const POINTS = 500;

// The same tags as TensorBoard's (projections/tensorboard.py).
function scalars(view) {
  const found = {
    "train/reward": view.reward_mean,
    "train/max_staleness": view.max_staleness,
    "speed/step_seconds": view.wall_s,
    "speed/tokens_per_second": view.tokens_per_s,
    "speed/tokens": view.tokens,
    "slots/trained": view.trained,
    "slots/dropped": view.dropped,
    "slots/filtered": view.filtered ?? 0,
    "slots/refilled_groups": view.refilled ?? 0,
  };
  for (const [stage, seconds] of Object.entries(view.stage_s)) found[`stage_seconds/${stage}`] = seconds;
  for (const [name, value] of Object.entries(view.figures)) found[`trainer/${name}`] = value;
  return found;
}

export class Curves {
  constructor(path, signal) {
    this.path = path;
    this.signal = signal;
    this.steps = [];
    this.series = {};
    this.evaluations = [];
    this.total = 0;
    this.event = 0;
    this.loading = null;
    this.meanwhile = [];
  }

  // Loads everything; calls while a load is under way share it. Throws what `get` throws.
  load() {
    this.loading ??= this.loadAll().finally(() => { this.loading = null; });
    return this.loading;
  }

  // The answer may be older than events that came while it was on its way: those are taken again.
  async loadAll() {
    do {
      this.meanwhile = [];
      Object.assign(this, await get(`${this.path}/curves`, this.signal, { points: POINTS }));
    } while (this.meanwhile.some((event) => event.id > this.event && this.apply(event) === "again"));
  }

  // Whether the event changed anything; "again" when everything must be loaded again.
  take(event) {
    if (this.loading) this.meanwhile.push(event);
    return this.apply(event);
  }

  apply(event) {
    if (event.type === "version_restored" && this.steps.length) return "again";
    if (event.type === "evaluated") {
      const { step, kind, score } = event.data.view;
      this.evaluations = this.evaluations.filter((each) => each.step !== step || each.kind !== kind);
      this.evaluations.push({ step, kind, score });
      return "changed";
    }
    if (event.type !== "step_committed") return "";
    const { view } = event.data;
    if (this.steps.length >= 2 * POINTS) return "again";
    if (this.steps.length && view.step <= this.steps.at(-1)) return "";
    const values = scalars(view);
    for (const name of Object.keys(values)) this.series[name] ??= this.steps.map(() => null);
    for (const name of Object.keys(this.series)) this.series[name].push(values[name] ?? null);
    this.steps.push(view.step);
    this.total += 1;
    return "changed";
  }

  // Steps and columns of some series; names that the run lacks are columns of nothing.
  column(name) {
    return this.series[name] ?? this.steps.map(() => null);
  }

  // Scores of a kind over all steps at which there is a curve or an evaluation.
  scores(kind) {
    const found = this.evaluations.filter((each) => each.kind === kind).sort((a, b) => a.step - b.step);
    return [found.map((each) => each.step), found.map((each) => each.score)];
  }
}
