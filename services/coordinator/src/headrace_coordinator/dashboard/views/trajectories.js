// The kept trajectories of a run: filtered by step and group, sorted by reward, one or a group at a time.

import { get, Refusal } from "../api.js";
import { strip } from "../charts.js";
import { conversation, read } from "../conversation.js";
import { empty, facts, h } from "../dom.js";
import { mean, middle, number, plural, scorerFact, scorers } from "../format.js";
import { answer } from "../tokens.js";
import { again, recorded } from "./episode.js";
import { rewards } from "./rewards.js";

const SIZE = 25;
const FINISHES = ["EOS", "STOP", "LENGTH", "TERMINATED", "TRUNCATED", "TIMED_OUT", "ERROR"];
const OF_TEXTS = ["EOS", "STOP", "LENGTH"];
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["best", "best reward first"], ["worst", "worst reward first"]];

export async function trajectories(root, context) {
  const { query } = context.place;
  const address = context.address ?? `#${context.path.slice(3)}/trajectories`;
  const most = context.run.spec.tracking?.trajectories_per_step;
  const kept = most === undefined ? "" : `; at most ${most} of a step are kept, in whole groups`;
  const tokens = [""];
  let token = "";
  const step = field("step", "Step");
  const prompt = field("prompt", "Group (prompt)");
  const search = h("input", { id: "text-search", type: "search", placeholder: "Text", "aria-label": "Text in prompt, answer or reference", value: query.get("search") ?? "" });
  const finish = choice("finish_reason", "Ended", ["embodied", "episodes"].includes(context.run.spec.workflow) ? FINISHES.filter((name) => !OF_TEXTS.includes(name)) : FINISHES);
  const failed = choice("failed", "Nothing from", [...scorers(context.run.spec).keys()]);
  const order = h("select", { id: "order", onchange: () => go() }, ORDERS.map(([name, label]) => h("option", { value: name }, label)));
  order.value = query.get("order") ?? "newest";
  const wrong = h("p", { class: "bad", role: "alert" });
  const count = h("p", { class: "muted", role: "status" });
  const list = h("div");
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Previous");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Next");
  const fresh = h("button", { type: "button", onclick: () => { tokens.length = 1; load(); } }, "Refresh");
  root.append(h("form", { class: "row filters", onsubmit: (event) => { event.preventDefault(); go(); } },
    search, step.element, prompt.element, finish.element, failed.element, h("span", { class: "pair" }, h("label", { for: "order" }, "Order"), order),
    h("button", { type: "submit", class: "main" }, "Show"), h("a", { class: "button", href: address }, "Clear"), fresh),
  wrong, count, list, h("div", { class: "row pager" }, back, on));

  const films = h("div");
  if (!context.address && context.run.spec.environment?.videos) {
    count.before(films);
    recorded(context.path, context.signal).then((panels) => films.append(...panels)).catch(() => {});
  }
  if (!context.address) rewards(context, (at) => go({ step: at })).then((spread) => spread && count.before(spread)).catch(() => {}); // Beside the list, never in its way.

  function choice(name, label, values) {
    const select = h("select", { id: name }, h("option", { value: "" }, "any"), values.map((each) => h("option", { value: each }, each)));
    select.value = query.get(name) ?? "";
    return { select, element: h("span", { class: "pair" }, h("label", { for: name }, label), select) };
  }

  // What the list is of, as the coordinator is asked.
  function only() {
    return { step: step.input.value, prompt: prompt.input.value, search: search.value.trim(), finish_reason: finish.select.value, failed: failed.select.value };
  }

  function field(name, label) {
    const input = h("input", { id: name, type: "number", min: 0, inputmode: "numeric", value: query.get(name) ?? "" });
    return { input, element: h("span", { class: "pair" }, h("label", { for: name }, label), input) };
  }

  function go(more = {}) {
    const wanted = { ...only(), order: order.value, ...more };
    const kept = new URLSearchParams(Object.entries(wanted).filter(([name, value]) => value !== "" && !(name === "order" && value === "newest")));
    const next = `${address}${kept.size ? `?${kept}` : ""}`;
    if (location.hash === next) load(); else location.hash = next;
  }

  function turn(by) {
    if (by > 0) tokens.push(token); else tokens.pop();
    load().then(() => count.scrollIntoView());
  }

  async function load() {
    wrong.textContent = "";
    let page;
    try {
      page = await get(`${context.path}/trajectories`, context.signal, {
        page_size: SIZE, page_token: tokens.at(-1), ...only(), order: order.value,
      });
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      wrong.textContent = [error.message, ...error.problems.map((each) => `${each.key}: ${each.problem}; ${each.fix}`)].join(". ");
      return;
    }
    token = page.next_page_token;
    const found = page.trajectories;
    count.textContent = `${plural(found.length, "trajectory").replace("trajectorys", "trajectories")} on page ${tokens.length}${kept}`;
    back.disabled = tokens.length === 1;
    on.disabled = !token;
    const side = prompt.input.value !== "" && found.length > 0;
    list.className = side ? "side" : "";
    const average = mean(found.map((each) => each.reward));
    if (!found.length) list.replaceChildren(empty(query.size ? "No trajectory matches." : "No trajectory is settled yet: the first ones come with the first committed step."));
    else list.replaceChildren(...found.map((each) => (side ? card(each, each.reward - average) : line(each))));
  }

  function line(each) {
    const details = h("details", { class: "trajectory", ontoggle: () => { if (details.open && details.children.length === 1) details.append(body(context, each, group(each))); } },
      h("summary", {}, rewardChip(each.reward), h("span", { class: "muted" }, `step ${each.step} · prompt ${each.prompt_ordinal} · sample ${each.sample_index}`),
        h("span", { class: "excerpt" }, h("bdi", {}, middle(each.prompt, 80)), h("b", {}, " → "), h("bdi", {}, said(each).slice(0, 160) || "(nothing)")),
        h("span", { class: "muted" }, `${plural(each.tokens, unit(each))}, ${each.finish_reason}`)));
    return details;
  }

  function group(each) {
    return h("button", { type: "button", onclick: () => { step.input.value = each.step; prompt.input.value = each.prompt_ordinal; go(); } }, "Its group side by side");
  }

  function card(each, apart) {
    return h("article", { class: "panel" }, h("h3", {}, rewardChip(each.reward), ` sample ${each.sample_index}`,
      h("span", { class: "muted" }, ` ${apart >= 0 ? "+" : "−"}${number(Math.abs(apart))} to the mean shown`)), body(context, each, null));
  }

  await load();
}

function rewardChip(reward) {
  return h("span", { class: `chip reward ${reward > 0.5 ? "succeeded" : reward > 0 ? "paused" : "failed"}` }, number(reward));
}

// What the rollout says of a robot's episode: {return, success, steps, error}; null for an answer in words.
function episode(each) {
  try {
    const found = JSON.parse(each.completion);
    return found && ["return", "success", "steps"].every((key) => key in found) ? found : null;
  } catch {
    return null;
  }
}

function said(each) {
  const found = episode(each);
  if (!found) return each.completion;
  if (found.error) return `episode lost: ${found.error}`;
  const ended = found.success === null ? "ended" : found.success ? "succeeded" : "did not succeed";
  return `episode ${ended} after ${plural(found.steps, "step")}, return ${number(found.return)}`;
}

function unit(each) {
  return episode(each) ? "action" : "token";
}

function body({ path, run: { spec } }, each, action) {
  const parts = Object.entries(each.parts);
  const robot = episode(each);
  return h("div", { class: "body" },
    h("h4", {}, robot || each.messages?.length ? "Begins with" : "Prompt"), h("pre", { class: "text" }, each.prompt),
    each.images?.length ? h("p", {}, each.images.map((source, at) => h("img", { src: source, alt: `Image ${at + 1} of the prompt` }))) : null,
    read(each),
    robot ? [h("h4", {}, "Episode"), h("p", {}, said(each))]
      : each.messages?.length ? [h("h4", {}, "Conversation"), conversation(each)] : [h("h4", {}, "Answer"), answer(each)],
    each.log_probs?.length && !each.text_bytes?.length ? logProbs(each) : null,
    robot ? null : [h("h4", {}, "Reference"), h("pre", { class: "text" }, each.reference || "(none)")],
    facts([
      ["Reward", number(each.reward)],
      ...(each.advantage === null || each.advantage === undefined ? [] : [["Advantage", number(each.advantage)]]),
      ...parts.map(([name, value]) => scorerFact(spec, name, value)),
      [robot ? "Actions" : "Tokens", `${each.tokens}`],
      ...Object.entries(each.figures ?? {}).map(([name, value]) => [`Agent: ${name}`, number(value)]),
      ["Finish reason", each.finish_reason],
      ["Attempt", `${each.attempt}`],
      ["Trained on version", `${each.version}`],
      ...(robot ? [["Its start state", again(decodeURIComponent(path.split("/").at(-1)), each.prompt)]] : []),
      ["Sampled by", each.versions?.length ? each.versions.map(([version, count]) => `version ${version} (${plural(count, unit(each))})`).join(", ") : "–"],
    ]), action);
}

function logProbs(each) {
  const values = each.log_probs;
  const known = values.filter((value) => value !== null);
  const average = mean(values);
  const lowest = values.indexOf(Math.min(...known));
  const told = h("p", { class: "muted", "aria-live": "off" });
  const rest = () => { told.textContent = `mean ${number(average)}, lowest ${number(values[lowest])} at ${unit(each)} ${lowest + 1}${each.tokens > values.length ? `; the first ${values.length} of ${plural(each.tokens, unit(each))}` : ""}`; };
  rest();
  const versionAt = (index) => {
    let left = index;
    for (const [version, count] of each.versions ?? []) { if (left < count) return version; left -= count; }
    return "?";
  };
  const cells = strip(values, `log-prob of each ${unit(each)}: ${told.textContent}`, (index) => {
    told.textContent = `${unit(each)} ${index + 1}: log-prob ${number(values[index])}, version ${versionAt(index)}`;
  });
  cells.addEventListener("pointerleave", rest);
  return h("div", {}, h("h4", {}, `Log-prob of each ${unit(each)}${unit(each) === "token" ? ", nats" : ""}`), h("div", { class: "strips" }, cells), told);
}
