// One run: its state, what it waits for, buttons to steer it, and the tabs below.

import { get, post, Refusal, repeat, stream } from "../api.js";
import { chip, confirmed, facts, h } from "../dom.js";
import { clock, duration, episodeFacts, number } from "../format.js";
import { labels } from "./labels.js";
import { progress } from "./runs.js";
import { overview } from "./overview.js";
import { demonstrations } from "./episode.js";
import { timeline } from "./timeline.js";
import { trajectories } from "./trajectories.js";
import { proof } from "./proof.js";
import { specTab } from "./spec.js";

const TABS = { overview: ["Overview", overview], timeline: ["Timeline", timeline], trajectories: ["Trajectories", trajectories], demonstrations: ["Demonstrations", demonstrations], proof: ["Proof", proof], spec: ["Spec", specTab] };
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];

export async function show(root, place, signal) {
  const path = `/v1/runs/${encodeURIComponent(place.id)}`;
  const first = await get(path, signal);
  const tab = TABS[place.tab] ? place.tab : "overview";
  const header = h("div");
  const body = h("div", { class: "tab" });
  const nav = h("nav", { class: "tabs", "aria-label": "Of this run" }, Object.entries(TABS).filter(([name]) => name !== "demonstrations" || first.spec.trainer?.warmup?.demonstrations || first.spec.data?.source === "lerobot").map(([name, [label]]) =>
    h("a", { href: `#${path.slice(3)}${name === "overview" ? "" : `/${name}`}`, "aria-current": name === tab ? "page" : null }, label)));
  root.append(header, nav, body);
  const top = runHeader(header, path, signal);
  top.update(first);

  const listeners = new Set();
  const context = {
    path, place, run: first, signal,
    onEvent: (listener) => listeners.add(listener),
    // Follows the run's events after one: `listeners` get each once.
    follow: (after) => stream(first.id, after, (event) => { for (const listener of listeners) listener(event); soon(); }, signal),
  };

  let asked = false;
  async function look() {
    context.run = await get(path, signal);
    top.update(context.run);
  }
  function soon() {
    if (asked) return;
    asked = true;
    setTimeout(() => { asked = false; if (!signal.aborted) look().catch(() => {}); }, 400); // `repeat` below tries again.
  }
  context.look = look;
  repeat(3000, signal, async () => { if (!ENDED.includes(context.run.state)) await look(); });
  await TABS[tab][1](body, context);
}

function runHeader(element, path, signal) {
  const title = h("h1", { class: "wrap" });
  const state = h("span");
  const bar = h("div", { class: "wide" });
  const reason = h("p", { class: "reason" });
  const waits = h("ul", { class: "waits", "aria-label": "It waits for, or works on" });
  const warnings = h("ul", { class: "bad", "aria-label": "Warnings" });
  const problem = h("p", { class: "bad", role: "alert" });
  const figures = h("div");
  const buttons = h("div", { class: "row" });
  const said = labels(path);
  element.append(h("div", { class: "row head" }, title, state, buttons), bar, reason, waits, warnings, problem, figures, said.element);
  let shown = "";
  let now;

  async function steer(action, question, verb) {
    if (question && !(await confirmed(question, verb))) return;
    problem.textContent = "";
    try {
      update(await post(`${path}:${action}`));
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      problem.textContent = error.message;
    }
  }

  function offers(run) {
    if (run.suite) return [h("a", { class: "button main", href: `#/evaluations/${encodeURIComponent(run.id)}` }, "Its figures"), ...(ENDED.includes(run.state) ? [] : steering(run))];
    if (ENDED.includes(run.state)) return [h("a", { class: "button", href: `#/submit?from=${encodeURIComponent(run.id)}` }, "Submit again…")];
    return steering(run);
  }

  function steering(run) {
    const cancel = h("button", { type: "button", class: "danger", onclick: () => steer("cancel", `Cancel ${run.id}? It cannot be resumed; its checkpoints stay.`, "Cancel the run") }, "Cancel");
    if (run.intent === "CANCEL" || run.state === "CANCELLING") return [];
    if (run.state === "PAUSED") return [h("button", { type: "button", class: "main", onclick: () => steer("resume") }, "Resume"), cancel];
    if (run.intent.startsWith("PAUSE")) return [h("button", { type: "button", onclick: () => steer("resume") }, "Resume"), cancel];
    return [h("button", { type: "button", onclick: () => steer("pause") }, "Pause"),
      h("button", { type: "button", title: "Abort the step in hand; it is made again on resume", onclick: () => steer("pause?now=true") }, "Pause now"), cancel];
  }

  function update(run) {
    now = run;
    title.textContent = run.id;
    state.replaceChildren(chip(run.state));
    bar.replaceChildren(progress(run.step, run.steps));
    reason.textContent = run.reason;
    reason.hidden = !run.reason;
    reason.classList.toggle("bad", run.state === "FAILED");
    waits.replaceChildren(...run.waiting_for.map((what) => h("li", {}, "waits for ", what)), ...run.doing.map((what) => h("li", {}, what)));
    waits.hidden = !waits.children.length;
    warnings.replaceChildren(...run.warnings.map((text) => h("li", {}, text)));
    warnings.hidden = !run.warnings.length;
    const key = run.state + run.intent;
    if (key !== shown) buttons.replaceChildren(...offers(run));
    shown = key;
    said.update(run);
    tick();
  }

  function tick() {
    const run = now;
    const given = ["supervised", "preference", "reward_model"].includes(run.spec.workflow); // no rollout and no scorer takes part
    const best = run.evaluations.filter((view) => view.kind === "heldout");
    const until = run.finished_at ?? Date.now() / 1000;
    figures.replaceChildren(facts([
      ["Owner", `${run.owner}${run.team ? ` of ${run.team}` : ""}, seen by ${{ private: "the owner", team: "the team", fleet: "everybody" }[run.visibility]}`],
      ...(given ? [["Loss", number(run.last_step?.figures.loss)]] : [[["embodied", "episodes"].includes(run.spec.workflow) ? "Return" : "Reward", number(run.last_step?.reward_mean)]]),
      ...(run.last_step && "reward_accuracy" in run.last_step.figures ? [["Accuracy of pairs", number(run.last_step.figures.reward_accuracy)]] : []),
      [best.at(-1)?.measure ? `Held-out ${best.at(-1).measure.replaceAll("_", " ")}` : "Score", best.length > 1 ? `${number(best[0].score)} → ${number(best.at(-1).score)}` : number(best[0]?.score)],
      ...episodeFacts(best.at(-1)),
      ...(best.at(-1)?.unanswered ? [["Not answered", `${best.at(-1).unanswered}: ${best.at(-1).failure}`]] : []),
      ["Version", run.policy ? `${run.policy.number}` : "–"],
      ["Trained", run.counts.trained.toLocaleString("en")],
      ["Dropped", run.counts.dropped.toLocaleString("en") + (run.counts.filtered ? `, of equal rewards ${run.counts.filtered.toLocaleString("en")}` : "")],
      ...(given ? [] : [["Worst staleness", number(run.counts.max_staleness)]]),
      ["Recoveries", `${run.recoveries}`],
      ...(run.engine_restarts ? [["Engine restarts", `${run.engine_restarts}`]] : []),
      ["Started", clock(run.started_at)],
      ["Time", run.started_at ? duration(until - run.started_at) : "–"],
      ...(run.place ? [["Place in the queue", `${run.place}`]] : []),
      ...(run.pipeline?.length ? [["Pipeline", h("span", {}, ...run.pipeline.flatMap((id, at) => [at ? " → " : "", id === run.id ? h("strong", {}, id) : h("a", { href: `#/runs/${encodeURIComponent(id)}` }, id)]))]] : []),
      ...(run.forked_from ? [["Forked from", h("a", { href: `#/runs/${encodeURIComponent(run.forked_from)}` }, run.forked_from)]] : []),
    ]));
  }
  const timer = setInterval(() => { if (now && !now.finished_at) tick(); }, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
  return { update };
}
