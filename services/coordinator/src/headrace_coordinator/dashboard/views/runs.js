// The list of runs: state, place in the queue, progress, rewards, tags, and columns of the reader's choice; filter,
// search, sort, seeds of one spec together. All of it is in the address, so a link shows the same.

import { get, repeat } from "../api.js";
import { save, sparkline, tableText } from "../charts.js";
import { columnPicker, columnsOf, conditions } from "../columns.js";
import { chip, empty, h, keyed, table } from "../dom.js";
import { clock, duration, mean, number, plural, ranged } from "../format.js";

const SIZE = 50;
const SHOWN = 8; // Runs that are compared at once.
const MOST = 1000; // So many of the newest runs are sorted or grouped.
const HEADS = [["", ""], ["Run", "id"], ["State", "state"], ["Algorithm", "algorithm"], ["Progress", "progress"], ["Reward", "reward_mean"], ["Reward by step", ""], ["Score", "score"], ["Created", "created_at"]];
const FALLING = new Set(["progress", "reward_mean", "score", "created_at"]);
const BY = { progress: (run) => run.step / run.steps };

export async function show(root, place, signal) {
  const { query } = place;
  const chosen = new Set();
  const tokens = [""];
  let from = 0; // Where the page begins among the sorted ones.
  const count = h("p", { class: "muted", role: "status" });
  const states = h("div", { class: "row chips", role: "group", "aria-label": "Filter by state" });
  const search = h("input", { type: "search", placeholder: "Search ids and tags", "aria-label": "Search run ids", value: query.get("search") ?? "" });
  const sort = h("select", { id: "sort", onchange: () => { remember(); first(); } });
  const grouped = h("input", { type: "checkbox", id: "grouped", onchange: () => { remember(); first(); } });
  grouped.checked = query.get("seeds") === "1";
  const where = h("input", { type: "search", id: "where", "aria-label": "Only runs where", placeholder: "Where: optimizer.lr>=1e-5, score>0.5", value: query.get("where") ?? "" });
  const wrong = h("p", { class: "bad", role: "alert" });
  let columns = columnsOf(query.get("columns"));
  const picker = columnPicker(columns, signal, (now) => { columns = now; remember(); frame(); first(); });
  const holder = h("div", {});
  let list;
  let body;
  let all = [];
  const heads = () => [...HEADS, ...columns.map((name) => [name, name])];
  frame();

  // The table with the columns of now.
  function frame() {
    const before = sort.value || (query.get("sort") ?? "");
    sort.replaceChildren(...heads().filter(([, key]) => key).map(([label, key]) => h("option", { value: key }, columns.includes(key) ? key : label.toLowerCase())));
    sort.value = heads().some(([, key]) => key && key === before) ? before : "created_at";
    [list, body] = table("Runs", heads().map(([label, key]) => (key
      ? h("button", { type: "button", class: "quiet", onclick: () => { sort.value = key; remember(); first(); } }, label) : label)));
    list.classList.add("runs");
    list.classList.toggle("own-columns", columns.length > 0);
    holder.replaceChildren(list);
  }
  const none = empty("");
  const compare = h("a", { class: "button", href: "#/compare", hidden: true }, "Compare");
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Newer");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Older");
  const pager = h("div", { class: "row pager" }, back, on);
  root.append(h("div", { class: "row head" }, h("h1", {}, "Runs"), h("span", { class: "pair" }, h("label", { for: "sort" }, "Sort by"), sort),
    h("label", { for: "grouped" }, grouped, " seeds together"), search, compare), states,
    h("div", { class: "row head" }, where, picker, h("button", { type: "button", onclick: () => saveTable() }, "CSV")), wrong, count, holder, none, pager);

  const wanted = () => ({ state: query.get("state") ?? "", search: search.value.trim() });
  let token = "";
  let timer = 0;
  let several = false; // Whether the page has runs of more than one owner.

  for (const field of [search, where]) {
    field.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => { remember(); first(); }, 200);
    });
  }

  function remember() {
    const { state, search: text } = wanted();
    const own = { state, search: text, sort: sort.value === "created_at" ? "" : sort.value, seeds: grouped.checked ? "1" : "", where: where.value.trim(), columns: columns.join(",") };
    const kept = new URLSearchParams(Object.entries(own).filter(([, value]) => value));
    history.replaceState(null, "", `#/runs${kept.size ? `?${kept}` : ""}`);
  }

  function first() {
    tokens.length = 1;
    from = 0;
    return load().catch(() => {}); // The next look, seconds later, tells what is wrong.
  }

  function turn(by) {
    if (ordered()) from += by * SIZE;
    else if (by > 0) tokens.push(token);
    else tokens.pop();
    load().then(() => list.scrollIntoView({ block: "nearest" }), () => {});
  }

  // Whether the page is of runs in another order than the coordinator lists them in.
  function ordered() {
    return grouped.checked || sort.value !== "created_at" || where.value.trim() !== "";
  }

  function choose(state) {
    if (state) query.set("state", state); else query.delete("state");
    remember();
    first();
  }

  async function load() {
    const { state, search: text } = wanted();
    const own = ordered();
    const only = conditions(where.value, HEADS.map(([, key]) => key).filter(Boolean));
    wrong.textContent = only.problem;
    const asked = [...new Set([...columns, ...only.columns])];
    const page = await get("/v1/run-summaries", signal, { page_size: own ? MOST : SIZE, page_token: own ? "" : tokens.at(-1), state, search: text, column: asked, evaluations: false });
    token = page.next_page_token;
    filters(page.states, state);
    several = new Set(page.summaries.map((run) => run.owner)).size > 1;
    const met = page.summaries.filter((run) => only.meets(run, valueOf));
    all = own ? inOrder(grouped.checked ? families(met) : met, sort.value) : met;
    const shown = own ? all.slice(from, from + SIZE) : all;
    const matching = where.value.trim() ? all.length : page.total;
    const which = own ? ` sorted by ${sort.selectedOptions[0].textContent}${page.total > MOST ? ` among the newest ${MOST.toLocaleString("en")}` : ""}` : "";
    count.textContent = matching === shown.length ? plural(matching, "run") + which
      : `${shown.length} of ${plural(matching, "run")}${which}, page ${own ? 1 + from / SIZE : tokens.length}`;
    keyed(body, shown, (item) => (item.seeds ? item.family : item.id), (item) => (item.seeds ? family(item) : row(item)));
    list.querySelectorAll("thead th").forEach((head, index) => {
      const sorted = heads()[index][1] === sort.value;
      if (sorted) head.setAttribute("aria-sort", falls(sort.value) ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
    });
    list.hidden = !shown.length;
    none.hidden = !list.hidden;
    const total = Object.values(page.states).reduce((sum, each) => sum + each, 0);
    none.replaceChildren(...(total ? ["No run matches."] : ["There is no run yet. ", h("a", { href: "#/submit" }, "Submit one"), " here, or with ", h("code", {}, "headrace run submit examples/tiny.yaml"), "."]));
    back.disabled = own ? !from : tokens.length === 1;
    on.disabled = own ? from + SIZE >= all.length : !token;
    [back.textContent, on.textContent] = own ? ["Previous", "Next"] : ["Newer", "Older"];
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
      h("td", { class: "name" }, h("a", { href: `#/runs/${encodeURIComponent(run.id)}`, "data-focus": run.id }, run.id), several && h("span", { class: "muted" }, ` ${run.owner}`), tagList(run.tags),
        (run.note || why) && h("div", { class: "why", title: [run.note, why].filter(Boolean).join("\n") }, [run.note, why].filter(Boolean).join(" · "))),
      h("td", { class: "state" }, chip(run.state), run.place && h("span", { class: "muted" }, ` place ${run.place}`)),
      h("td", { class: "algorithm" }, run.algorithm || "–"),
      h("td", { class: "progress" }, progress(run.step, run.steps)),
      h("td", { class: "reward" }, number(run.reward_mean)),
      h("td", { class: "sparks" }, sparkline(run.rewards, `mean reward over ${run.step} steps, now ${number(run.reward_mean)}`)),
      h("td", { class: "score" }, number(run.score)),
      h("td", { class: "when" }, clock(run.created_at), run.finished_at && run.started_at && h("div", { class: "muted" }, duration(run.finished_at - run.started_at))),
      ownCells([run]));
  }

  // Of several seeds numbers are their mean with spread, other values each once.
  function ownCells(runs) {
    return columns.map((name) => {
      const values = runs.map((run) => run.values[name]);
      const numbers = values.every((value) => typeof value === "number");
      return h("td", { class: "own" }, numbers ? ranged(values) : [...new Set(values.map((value) => (value === undefined || value === null ? "–" : `${value}`)))].join(", "));
    });
  }

  // What the table has of all runs that match, one a line.
  function saveTable() {
    const runs = all.flatMap((item) => (item.seeds ? item.runs : [item]));
    const keys = [...HEADS.map(([, key]) => key).filter((key) => key && key !== "progress"), "step", "steps", "seed"];
    save(new Blob([tableText([[...keys, ...columns], ...runs.map((run) => [...keys.map((key) => run[key]), ...columns.map((name) => run.values[name])])])], { type: "text/csv" }), "runs.csv");
  }

  // Runs whose specs differ in the seed alone: their means and ranges.
  function family(item) {
    const { runs } = item;
    const ids = runs.map((run) => run.id);
    return h("tr", { class: "family" },
      h("td", { class: "tick" }),
      h("td", { class: "name" }, h("a", { href: `#/compare?runs=${ids.slice(0, SHOWN).map(encodeURIComponent).join(",")}&seeds=1`, "data-focus": item.family }, item.id),
        h("div", { class: "why" }, runs.slice(0, SHOWN).map((run) => [h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, `seed ${run.seed}`), " "]), runs.length > SHOWN && `and ${runs.length - SHOWN} more`)),
      h("td", { class: "state" }, [...new Set(runs.map((run) => run.state))].map(chip)),
      h("td", { class: "algorithm" }, item.algorithm || "–"),
      h("td", { class: "progress" }, progress(item.step, item.steps)),
      h("td", { class: "reward" }, ranged(runs.map((run) => run.reward_mean))),
      h("td", { class: "sparks" }, sparkline(item.rewards, `mean reward of ${runs.length} seeds`)),
      h("td", { class: "score" }, ranged(runs.map((run) => run.score))),
      h("td", { class: "when" }, clock(item.created_at)), ownCells(runs));
  }

  function offer() {
    compare.hidden = chosen.size < 2;
    compare.textContent = `Compare ${chosen.size}`;
    compare.href = `#/compare?runs=${[...chosen].slice(0, SHOWN).map(encodeURIComponent).join(",")}`;
  }

  await repeat(3000, signal, load);
}

export function tagList(tags) {
  return tags?.length ? h("div", {}, tags.map((tag) => h("span", { class: "tag" }, tag))) : null;
}

function falls(key) {
  return FALLING.has(key) || key.startsWith("figures.") || key.startsWith("scores.");
}

// A column of a run, or of seeds the mean of theirs.
function valueOf(item, key) {
  if (BY[key]) return BY[key](item);
  if (key in item) return item[key];
  if (!item.seeds) return item.values[key];
  const values = item.runs.map((run) => run.values[key]);
  return values.every((value) => typeof value === "number") ? mean(values) : values[0];
}

function inOrder(items, key) {
  const of = (item) => valueOf(item, key);
  const sign = falls(key) ? -1 : 1;
  const missing = (value) => value === null || value === undefined || value === "";
  return [...items].sort((a, b) => {
    const [one, other] = [of(a), of(b)];
    if (missing(one) || missing(other)) return missing(one) - missing(other);
    return sign * (typeof one === "number" && typeof other === "number" ? one - other : `${one}`.localeCompare(`${other}`, "en", { numeric: true }));
  });
}

// Runs of one spec with several seeds as one item each; a run that has no sibling stays itself.
function families(runs) {
  const found = new Map();
  for (const run of runs) found.set(run.family, [...(found.get(run.family) ?? []), run]);
  return [...found].map(([name, members]) => {
    if (members.length < 2) return { ...members[0], family: null };
    const [newest] = members;
    const points = Math.max(...members.map((run) => run.rewards.length));
    return {
      ...newest, family: name, seeds: true, runs: members, id: `${newest.id.replace(/-[^-]*$/, "")}, ${members.length} seeds`,
      step: Math.min(...members.map((run) => run.step)), reward_mean: mean(members.map((run) => run.reward_mean)), score: mean(members.map((run) => run.score)),
      rewards: Array.from({ length: points }, (_, index) => mean(members.map((run) => run.rewards[index] ?? null))),
    };
  });
}

export function progress(step, steps, word = "step") {
  return h("div", { class: "bar", role: "progressbar", "aria-valuenow": step, "aria-valuemin": 0, "aria-valuemax": steps, "aria-label": `${word} ${step} of ${steps}`, vars: { "--part": `${Math.min(100, (100 * step) / steps)}%` } },
    h("span", {}, `${step} / ${steps}`));
}
