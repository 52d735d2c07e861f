// A preview of what a spec asks for, and the planner's prediction of its step from the measured times of a run.

import { get, post, Refusal } from "../api.js";
import { h, table } from "../dom.js";
import { duration, number, plural } from "../format.js";

const SCORERS = "scorers"; // Scoring takes no device of its own.

// A section about a spec with every default, as the coordinator's dry run answers it.
export async function preview(spec) {
  const slots = spec.algorithm.group_size * spec.algorithm.prompts_per_step;
  const [leases, measured] = await Promise.all([get("/v1/leases"), newestMeasured()]);
  const devices = leases.devices.filter((each) => each.state !== "QUARANTINED");
  const busy = devices.filter((each) => each.state === "LEASED").length;
  return h("section", { class: "panel", "aria-label": "Plan preview" }, h("h2", {}, "Plan preview"),
    h("p", {}, `${plural(spec.steps, "step")} of ${plural(slots, "sample")}: ${(spec.steps * slots).toLocaleString("en")} in all. `,
      `${plural(spec.rollout.instances, "rollout")} and ${plural(spec.trainer.ranks, "trainer")}, ${spec.placement.mode}, on ${plural(devices.length, "device")}`,
      busy ? `, of which ${busy} ${busy === 1 ? "is" : "are"} held by another run now.` : ", all free."),
    measured ? await predicted(spec, slots, devices, measured)
      : h("p", { class: "muted" }, "Step times are predicted once a run has measured some: no run has finished a step yet."));
}

async function newestMeasured() {
  const { runs } = await get("/v1/runs", undefined, { page_size: 50 });
  return runs.find((run) => run.last_step?.stage_s?.generate && run.last_step?.stage_s?.learn);
}

async function predicted(spec, slots, devices, run) {
  const request = planRequest(spec, slots, devices, run);
  let plan;
  try {
    plan = await post("/v1/plans", request);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    const said = error.problems.map((each) => `${each.key}: ${each.problem}; ${each.fix}`).join(". ");
    return h("p", { class: "bad" }, `The planner: ${said || error.message}`);
  }
  const [shapes] = table("Predicted step by shape", ["Shape", "Step", "All steps", "Why"], plan.alternatives.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.mode, each.mode.startsWith(spec.placement.mode) ? " (as this spec)" : ""),
    h("td", {}, each.step_s === null ? "–" : duration(each.step_s)), h("td", {}, each.step_s === null ? "–" : duration(each.step_s * spec.steps)), h("td", { class: "why" }, each.why))));
  return h("div", {},
    h("p", {}, `The fastest shape is ${plan.mode}: ${duration(plan.step_s)} a step, ${duration(plan.step_s * spec.steps)} in all. `,
      `${plan.bottleneck.stage} is at work for ${number(100 * plan.bottleneck.busy_share, 0)}% of it.`),
    bars(plan), shapes,
    h("p", { class: "muted" }, "From the times of ", h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.id), `, step ${run.last_step.step}: another model or other lengths of answers take other times. Evaluations and checkpoints are not counted. This is ${plan.note}.`));
}

// The measured step as costs of one sample; see docs/planning.md.
function planRequest(spec, slots, devices, run) {
  const { stage_s: seconds, devices: used, trained, dropped } = run.last_step;
  const made = Math.max(1, trained + dropped);
  const kind = devices[0]?.name.split("/").at(-1).split(":")[0] || "device";
  const count = (stage) => Math.max(1, Object.values(used).filter((stages) => stages[stage] > 0).length);
  const cost = (stage) => ({ kind, item_s: Math.max(1e-9, seconds[stage] * count(stage) / made), load_s: (seconds.switch ?? 0) / 4, offload_s: (seconds.switch ?? 0) / 4 });
  return {
    workflow: { name: "reasoning", group_size: spec.algorithm.group_size },
    items: slots,
    profile: {
      about: `step ${run.last_step.step} of ${run.id}`,
      stages: { generate: cost("generate"), learn: cost("learn"), score: { kind: SCORERS, item_s: Math.max(1e-9, (seconds.score ?? 0) / made) } },
      sync: { between_s: seconds.sync ?? 0, same_s: seconds.sync ?? 0 },
    },
    cluster: { [kind]: { count: Math.max(1, devices.length) }, [SCORERS]: { count: 1 } },
  };
}

function bars(plan) {
  return h("ul", { class: "gantt", "aria-label": "When each stage is predicted to run" }, plan.timeline.map((bar) => h("li", {
    vars: { "--from": `${(100 * bar.begin) / plan.step_s}%`, "--long": `${(100 * (bar.end - bar.begin)) / plan.step_s}%` },
  }, h("span", {}, `${bar.stage}: ${duration(bar.begin)} to ${duration(bar.end)}, at work ${duration(bar.busy)}`))));
}
