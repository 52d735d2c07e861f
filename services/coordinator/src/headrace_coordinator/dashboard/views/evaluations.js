// Evaluations of suites: the list, one with its figures and answers, and two compared item by item.

import { get, pages, post, Refusal, repeat } from "../api.js";
import { chip, empty, facts, h, keyed, table } from "../dom.js";
import { clock, duration, episodeFacts, mean, middle, number, plural, scorerFact, spoken } from "../format.js";
import { answer } from "../tokens.js";
import { besides, recorded } from "./episode.js";
import { progress } from "./runs.js";
import { trajectories } from "./trajectories.js";

const SIZE = 50;
const MOST_ANSWERS = 2000; // of each of two that are compared
const MOST_ITEMS = 200;
const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
const link = (id) => `#/evaluations/${encodeURIComponent(id)}`;
const path = (id) => `/v1/evaluations/${encodeURIComponent(id)}`;
const run = (id) => `/v1/runs/${encodeURIComponent(id)}`;

export function show(root, place, signal) {
  const pair = (place.query.get("compare") ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  if (place.id) return one(root, place, signal);
  return pair.length === 2 ? compared(root, pair, signal) : list(root, signal);
}

async function list(root, signal) {
  const chosen = new Set();
  const tokens = [""];
  let token = "";
  const [element, body] = table("Evaluations", ["", "Evaluation", "State", "Suite", "Of", "Score", "Answers", "Created"]);
  element.classList.add("panel");
  const none = empty("There is no evaluation yet. Evaluate a checkpoint with ", h("code", {}, "headrace eval FILE"), ".");
  const compare = h("a", { class: "button", hidden: true, href: "#/evaluations" }, "Compare 2");
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Newer");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Older");
  const pager = h("div", { class: "row pager" }, back, on);
  root.append(h("div", { class: "row head" }, h("h1", {}, "Evaluations"), compare), element, none, pager);

  function turn(by) {
    if (by > 0) tokens.push(token); else tokens.pop();
    load().catch(() => {}); // The next look, seconds later, tells what is wrong.
  }

  async function load() {
    const page = await get("/v1/evaluations", signal, { page_size: SIZE, page_token: tokens.at(-1) });
    token = page.next_page_token;
    keyed(body, page.evaluations, (each) => each.id, row);
    element.hidden = !page.evaluations.length;
    none.hidden = !element.hidden;
    back.disabled = tokens.length === 1;
    on.disabled = !token;
    pager.hidden = back.disabled && on.disabled;
  }

  function row(each) {
    const tick = h("input", {
      type: "checkbox", "aria-label": `Compare ${each.id}`, "data-focus": `tick ${each.id}`, disabled: !each.result,
      onchange: () => { if (tick.checked) chosen.add(each.id); else chosen.delete(each.id); offer(); },
    });
    tick.checked = chosen.has(each.id);
    const mode = each.result?.modes[0];
    return h("tr", {},
      h("td", {}, tick),
      h("td", { class: "wrap" }, h("a", { href: link(each.id), "data-focus": each.id }, each.id), each.state !== "SUCCEEDED" && h("div", { class: "why" }, each.reason)),
      h("td", {}, chip(each.state), each.place && h("span", { class: "muted" }, ` place ${each.place}`)),
      h("td", {}, each.suite),
      h("td", { class: "wrap" }, subject(each)),
      h("td", {}, mode ? [number(mode.score), h("div", { class: "muted" }, mode.mode, " ", interval(mode))] : "–"),
      h("td", {}, progress(each.answers, each.answers_total, "answer")),
      h("td", {}, clock(each.created_at), each.finished_at && each.started_at && h("div", { class: "muted" }, duration(each.finished_at - each.started_at))));
  }

  function offer() {
    compare.hidden = chosen.size !== 2;
    compare.href = `#/evaluations?compare=${[...chosen].map(encodeURIComponent).join(",")}`;
  }

  await repeat(3000, signal, load);
}

async function one(root, place, signal) {
  const header = h("div");
  const said = h("p", { class: "bad", role: "alert" });
  const figures = h("div");
  const answers = h("section");
  root.append(header, said, figures, answers);
  let now = await get(path(place.id), signal);
  let listed = false;

  async function again() {
    said.textContent = "";
    try {
      location.hash = link((await post("/v1/evaluations", now.spec)).id);
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      said.textContent = [error.message, ...(error.problems ?? []).map((each) => `${each.key}: ${each.problem}; ${each.fix}`)].join(". ");
    }
  }

  async function draw() {
    header.replaceChildren(h("div", { class: "row head" }, h("h1", { class: "wrap" }, now.id), chip(now.state),
      h("a", { class: "button", href: `#${run(now.id).slice(3)}` }, ENDED.includes(now.state) ? "Events and timeline" : "Steer, events and timeline"),
      ENDED.includes(now.state) && h("button", { type: "button", onclick: again }, "Evaluate again")),
    h("div", { class: "wide" }, progress(now.answers, now.answers_total, "answer")),
    now.reason && h("p", { class: now.state === "FAILED" ? "reason bad" : "reason" }, now.reason),
    now.waiting_for.length + now.doing.length ? h("ul", { class: "waits", "aria-label": "It waits for, or works on" }, [...now.waiting_for.map((what) => `waits for ${what}`), ...now.doing].map((what) => h("li", {}, what))) : "",
    facts([
      ["Suite", now.suite], ["Of", subject(now)], ["Items", now.items.toLocaleString("en")], ["Samples of each", `${now.samples}`],
      ["Recoveries", `${now.recoveries}`], ["Started", clock(now.started_at)],
      ["Time", now.started_at ? duration((now.finished_at ?? Date.now() / 1000) - now.started_at) : "–"],
      ...Object.entries(now.versions).map(([name, version]) => [name, version]),
    ]));
    if (now.result) figures.replaceChildren(...await results(now, signal));
    if (ENDED.includes(now.state) && !listed) {
      listed = true;
      answers.append(h("h2", {}, "Answers"));
      await trajectories(answers, { path: run(now.id), address: link(now.id), place, signal, run: { spec: now.spec } });
    }
  }

  await draw();
  await repeat(3000, signal, async () => {
    if (ENDED.includes(now.state)) return;
    now = await get(path(place.id), signal);
    await draw();
  });
}

async function results(evaluation, signal) {
  const { result } = evaluation;
  return [
    h("section", { class: "panel" }, h("h2", {}, "Figures"),
      table("Figures", ["Figure", spoken(result.measure || "score"), "95% interval over items"], result.modes.map((each) => h("tr", {}, h("th", { scope: "row" }, each.mode), h("td", {}, bar(each.score)), h("td", {}, interval(each)))))[0],
      facts([
        ...episodeFacts(result),
        ...Object.entries(result.parts).map(([name, value]) => scorerFact(evaluation.spec, name, value)),
        ["Answers", result.answers.toLocaleString("en")],
        ...(result.unanswered ? [["Not answered", result.unanswered.toLocaleString("en")]] : []),
        ...(result.failed ? [["A scorer failed on", plural(result.failed, "answer")]] : []),
        ["Cut by the limit", `${number(100 * result.truncated, 1)}%`], ["Tokens or actions of an answer", number(result.tokens_mean, 1)],
      ])),
    ...(result.tasks.length ? [h("section", { class: "panel" }, h("h2", {}, "By task"),
      table("Figures by task", ["Task", "Variant", "Items", result.modes[0]?.mode ?? "Score", "95% interval over items"], result.tasks.map((each) => h("tr", {},
        h("th", { scope: "row" }, each.task), h("td", {}, each.variant || "–"), h("td", {}, each.items.toLocaleString("en")), h("td", {}, bar(each.score)), h("td", {}, interval(each)))))[0])] : []),
    ...await recorded(path(evaluation.id), signal, h("p", { class: "muted" }, "Fetch them with ", h("code", {}, `headrace eval videos ${evaluation.id} DIR`), ".")),
  ];
}

async function compared(root, [first, second], signal) {
  root.append(h("div", { class: "row head" }, h("h1", {}, "Two evaluations compared")));
  const found = await get("/v1/evaluations:compare", signal, { first, second });
  const both = await Promise.all([first, second].map((id) => get(path(id), signal)));
  const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value))}`);
  root.append(
    h("section", { class: "panel" }, facts(both.map((each, index) => [index ? "Second" : "First", h("span", {}, h("a", { href: link(each.id) }, each.id), " of ", subject(each))])),
      table("Differences", ["Figure", "First", "Second", "Second minus first", "95% interval", "Better", "Worse", "Equal", "p (McNemar)"], found.differences.map((each) => h("tr", {},
        h("th", { scope: "row" }, each.mode), h("td", {}, number(each.first)), h("td", {}, number(each.second)), h("td", {}, signed(each.difference)),
        h("td", {}, each.low === null ? "–" : `${signed(each.low)} to ${signed(each.high)}`), h("td", {}, `${each.wins}`), h("td", {}, `${each.losses}`), h("td", {}, `${each.ties}`), h("td", {}, number(each.p_value)))))[0],
      h("p", { class: "muted" }, `Item by item over ${plural(found.items, "item")}.`)));
  root.append(...await besides([first, second].map(path), [first, second], signal));
  const items = h("section", {}, h("h2", {}, "Items that differ"), empty("Reading the answers of both…"));
  root.append(items);
  const answers = await Promise.all([first, second].map((id) => pages(`${run(id)}/trajectories`, "trajectories", signal, MOST_ANSWERS)));
  items.replaceChildren(h("h2", {}, "Items that differ"), ...differing(...answers));
}

// Details for each item whose mean reward differs, the largest difference first.
function differing(first, second) {
  const items = new Map();
  [first, second].forEach((answers, side) => {
    for (const each of answers) {
      const item = items.get(each.prompt_ordinal) ?? { prompt: each.prompt, reference: each.reference, sides: [[], []] };
      item.sides[side].push(each);
      items.set(each.prompt_ordinal, item);
    }
  });
  const found = [...items.entries()].filter(([, { sides }]) => sides[0].length && sides[1].length)
    .map(([ordinal, item]) => ({ ordinal, ...item, means: item.sides.map((answers) => mean(answers.map((each) => each.reward))) }))
    .filter(({ means }) => !means.includes(null) && means[0] !== means[1])
    .sort((a, b) => Math.abs(b.means[1] - b.means[0]) - Math.abs(a.means[1] - a.means[0]) || a.ordinal - b.ordinal);
  if (!found.length) return [empty("The stored answers of both got the same rewards.")];
  const shown = found.slice(0, MOST_ITEMS);
  return [h("p", { class: "muted" }, shown.length < found.length ? `The ${shown.length} that differ most, of ${found.length}.` : `${plural(found.length, "item")} got other rewards.`),
    ...shown.map((item) => {
      const details = h("details", { class: "trajectory changed", ontoggle: () => { if (details.open && details.children.length === 1) details.append(sides(item)); } },
        h("summary", {}, h("span", { class: `chip reward ${item.means[1] > item.means[0] ? "succeeded" : "failed"}` }, `${number(item.means[0], 2)} → ${number(item.means[1], 2)}`),
          h("span", { class: "muted" }, `item ${item.ordinal}`), h("span", { class: "excerpt" }, h("bdi", {}, middle(item.prompt, 160))), h("span", { class: "muted" }, item.means[1] > item.means[0] ? "better" : "worse")));
      return details;
    })];
}

function sides(item) {
  return h("div", { class: "body" }, h("h4", {}, "Prompt"), h("pre", { class: "text" }, item.prompt), h("h4", {}, "Reference"), h("pre", { class: "text" }, item.reference || "(none)"),
    h("div", { class: "side" }, item.sides.map((answers, side) => h("article", { class: "panel" }, h("h3", {}, side ? "Second" : "First"), answers.map((each) => [h("p", { class: "muted" }, `reward ${number(each.reward)}`), answer(each)])))));
}

function subject(evaluation) {
  if (!evaluation.checkpoint_run) return evaluation.model;
  return h("span", {}, h("a", { href: `#${run(evaluation.checkpoint_run).slice(3)}` }, evaluation.checkpoint_run),
    evaluation.checkpoint_step === null ? "" : `, step ${evaluation.checkpoint_step}`);
}

function interval(figure) {
  return figure.low === null || figure.low === undefined ? "" : `${number(figure.low)} to ${number(figure.high)}`;
}

function bar(score) {
  if (score < 0 || score > 1) return number(score); // A return is no share.
  return h("span", { class: "pair" }, h("progress", { max: 1, value: Math.max(0, Math.min(1, score)), "aria-label": `score ${number(score)}` }), number(score));
}
