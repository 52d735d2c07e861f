// The curves of a run as columns: loaded once, then longer by every committed step that the event stream brings.

import { get } from "./api.js";

const POINTS = 500;

// What a curve can be drawn over: what one step adds to each.
export const AXES = {
  step: ["step", null], samples: ["samples", "slots/trained"], tokens: ["tokens", "speed/tokens"], time: ["seconds in steps", "speed/step_seconds"],
};

// Where steps stand on an axis, in the order of `steps`: what all steps until then made together. Steps that are
// thinned out count as the ones that stand for them. `total`: how many steps there are.
export function along(axis, steps, series, total) {
  const each = AXES[axis][1];
  if (!each) return steps;
  let before = (steps.at(-1) ?? 0) - total; // A fork's first steps are another run's.
  let sum = 0;
  return steps.map((step, index) => {
    sum += (step - before) * (series[each]?.[index] ?? 0);
    before = step;
    return sum;
  });
}

// The place on an axis of any step, one at which there is an evaluation or a recovery.
export function placeOf(steps, xs, step) {
  const after = steps.findIndex((each) => each >= step);
  if (after < 0) return xs.at(-1) ?? step;
  if (steps[after] === step) return xs[after];
  if (!after) return xs === steps ? step : 0;
  const part = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
  return xs[after - 1] + part * (xs[after] - xs[after - 1]);
}

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
    this.rewinds = [];
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

  // Where the steps stand on an axis, and where the recoveries do.
  axis(name) {
    const xs = along(name, this.steps, this.series, this.total);
    return [xs, this.rewinds.map((each) => placeOf(this.steps, xs, each.step))];
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
