// The list of runs: state, place in the queue, progress, rewards; filter and search.

import { get, repeat } from "../api.js";
import { sparkline } from "../charts.js";
import { chip, empty, h, keyed, table } from "../dom.js";
import { clock, duration, number, plural } from "../format.js";

const SIZE = 50;
const HEADS = ["", "Run", "State", "Progress", "Reward", "Reward by step", "Score", "Created"];

export async function show(root, place, signal) {
  const { query } = place;
  const chosen = new Set();
  const tokens = [""];
  const count = h("p", { class: "muted", role: "status" });
  const states = h("div", { class: "row chips", role: "group", "aria-label": "Filter by state" });
  const search = h("input", { type: "search", placeholder: "Search run ids", "aria-label": "Search run ids", value: query.get("search") ?? "" });
  const [list, body] = table("Runs", HEADS);
  list.classList.add("runs");
  const none = empty("");
  const compare = h("a", { class: "button", href: "#/compare", hidden: true }, "Compare");
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Newer");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Older");
  const pager = h("div", { class: "row pager" }, back, on);
  root.append(h("div", { class: "row head" }, h("h1", {}, "Runs"), search, compare), states, count, list, none, pager);

  const wanted = () => ({ state: query.get("state") ?? "", search: search.value.trim() });
  let token = "";
  let timer = 0;

  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { remember(); first(); }, 200);
  });

  function remember() {
    const { state, search: text } = wanted();
    const kept = new URLSearchParams(Object.entries({ state, search: text }).filter(([, value]) => value));
    history.replaceState(null, "", `#/runs${kept.size ? `?${kept}` : ""}`);
  }

  function first() {
    tokens.length = 1;
    return load().catch(() => {}); // The next look, seconds later, tells what is wrong.
  }

  function turn(by) {
    if (by > 0) tokens.push(token); else tokens.pop();
    load().then(() => list.scrollIntoView({ block: "nearest" }), () => {});
  }

  function choose(state) {
    if (state) query.set("state", state); else query.delete("state");
    remember();
    first();
  }

  async function load() {
    const { state, search: text } = wanted();
    const page = await get("/v1/run-summaries", signal, { page_size: SIZE, page_token: tokens.at(-1), state, search: text });
    token = page.next_page_token;
    filters(page.states, state);
    count.textContent = page.total === page.summaries.length ? plural(page.total, "run")
      : `${page.summaries.length} of ${plural(page.total, "run")}, page ${tokens.length}`;
    keyed(body, page.summaries, (run) => run.id, row);
    list.hidden = !page.summaries.length;
    none.hidden = !list.hidden;
    const total = Object.values(page.states).reduce((sum, each) => sum + each, 0);
    none.replaceChildren(...(total ? ["No run matches."] : ["There is no run yet. ", h("a", { href: "#/submit" }, "Submit one"), " here, or with ", h("code", {}, "headrace run submit examples/tiny.yaml"), "."]));
    back.disabled = tokens.length === 1;
    on.disabled = !token;
    pager.hidden = back.disabled && on.disabled;
  }

  function filters(counts, state) {
    const total = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const shown = [["", "All", total], ...Object.entries(counts).sort().map(([name, each]) => [name, name, each])];
    if (state && !counts[state]) shown.push([state, state, 0]);
    const items = shown.map(([name, label, each]) => ({ name, label, each, pressed: name === state }));
    keyed(states, items, (item) => item.name, ({ name, label, each, pressed }) =>
      h("button", { type: "button", class: "filter", "aria-pressed": String(pressed), "data-focus": name || "all", onclick: () => choose(name) },
        label, h("span", { class: "muted" }, ` ${each.toLocaleString("en")}`)));
  }

  function row(run) {
    const tick = h("input", {
      type: "checkbox", "aria-label": `Compare ${run.id}`, "data-focus": `tick ${run.id}`,
      onchange: () => { if (tick.checked) chosen.add(run.id); else chosen.delete(run.id); offer(); },
    });
    tick.checked = chosen.has(run.id);
    const why = run.waiting_for[0] ? `waits for ${run.waiting_for[0]}` : run.reason;
    return h("tr", {},
      h("td", { class: "tick" }, tick),
      h("td", { class: "name" }, h("a", { href: `#/runs/${encodeURIComponent(run.id)}`, "data-focus": run.id }, run.id), why && h("div", { class: "why", title: why }, why)),
      h("td", { class: "state" }, chip(run.state), run.place && h("span", { class: "muted" }, ` place ${run.place}`)),
      h("td", { class: "progress" }, progress(run.step, run.steps)),
      h("td", { class: "reward" }, number(run.reward_mean)),
      h("td", { class: "sparks" }, sparkline(run.rewards, `mean reward over ${run.step} steps, now ${number(run.reward_mean)}`)),
      h("td", { class: "score" }, number(run.score)),
      h("td", { class: "when" }, clock(run.created_at), run.finished_at && run.started_at && h("div", { class: "muted" }, duration(run.finished_at - run.started_at))));
  }

  function offer() {
    compare.hidden = chosen.size < 2;
    compare.textContent = `Compare ${chosen.size}`;
    compare.href = `#/compare?runs=${[...chosen].slice(0, 8).map(encodeURIComponent).join(",")}`;
  }

  await repeat(3000, signal, load);
}

export function progress(step, steps, word = "step") {
  return h("div", { class: "bar", role: "progressbar", "aria-valuenow": step, "aria-valuemin": 0, "aria-valuemax": steps, "aria-label": `${word} ${step} of ${steps}`, vars: { "--part": `${Math.min(100, (100 * step) / steps)}%` } },
    h("span", {}, `${step} / ${steps}`));
}
