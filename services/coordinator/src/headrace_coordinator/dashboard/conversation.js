// A conversation as its sides said it: roles, turns of the policy with their tokens and rewards, calls and their answers.

import { h } from "./dom.js";
import { number, plural } from "./format.js";
import { answer } from "./tokens.js";

const LONG = 4000; // Characters of what was given to the policy that are shown at once.
const FOLDED = { lines: 12, characters: 1500 }; // A tool's answer beyond either is folded.
const SEARCHED = 6; // Messages from which on there is a bar to search them.
const WRONG = /^error: |Traceback \(most recent call last\)|\b(exit|exited|returned)[^\n]{0,20} (code|status)[ :]+[1-9]/m;

// All messages of a trajectory. What the policy sampled has its tokens coloured; everything else was given.
export function conversation(each) {
  let from = 0;
  let turn = 0;
  const said = each.messages.map((message) => {
    if (message.tokens === null) return { message, ...given(message) };
    const tokens = { from, to: from + message.tokens };
    from = tokens.to;
    turn += 1;
    const element = h("li", { class: "own" },
      head(`${message.party || message.role}, turn ${turn}`, message.reward === null ? null : h("span", { class: "chip" }, `reward ${number(message.reward)}`),
        h("span", { class: "muted" }, `${plural(message.tokens, "token")} ${each.masked ? "without loss" : "with loss"}, version ${versionsOf(each, tokens).join(", ") || "?"}`)),
      answer(ofTurn(each, message, tokens, turn)), message.calls.map(call));
    return { message, turn, tokens, element, reveal: () => {} };
  });
  const list = h("ol", { class: "talk", "aria-label": "Conversation" }, said.map(({ element }) => element));
  return turn > 1 ? [figures(each, said), said.length >= SEARCHED ? bar(said) : null, list] : list;
}

function wrong({ message }) {
  return message.tokens === null ? message.role !== "system" && WRONG.test(message.content) : message.calls.some(({ problem }) => problem);
}

// What each turn took and gave: folded, as a long conversation has many.
function figures(each, said) {
  const rows = said.flatMap((one, at) => {
    if (!one.turn) return [];
    const known = each.log_probs.slice(one.tokens.from, one.tokens.to).filter((value) => value !== null);
    const mean = known.length ? number(known.reduce((sum, value) => sum + value, 0) / known.length) : "–";
    const read = said.slice(said.findLastIndex(({ turn }, before) => before < at && turn) + 1, at).filter(({ message }) => message.tokens === null);
    const cells = [one.turn, one.message.tokens, mean, one.message.reward === null ? "–" : number(one.message.reward), one.message.calls.length || "–",
      read.reduce((sum, { message }) => sum + message.content.length, 0), [one, ...read].filter(wrong).length || "–"];
    return [h("tr", {}, cells.map((cell, index) => h(index ? "td" : "th", index ? {} : { scope: "row" }, String(cell))))];
  });
  const names = ["turn", "tokens", "mean log-prob", "reward", "calls", "characters read before it", "errors"];
  return h("details", { class: "turns" }, h("summary", {}, `${plural(rows.length, "turn")} in figures`),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Turns in figures" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))));
}

// Searches the messages, and goes from error to error.
function bar(said) {
  const errors = said.filter(wrong);
  const told = h("span", { class: "muted", role: "status" });
  const field = h("input", { type: "search", "aria-label": "Search this conversation", placeholder: "Search", onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); step(event.shiftKey ? -1 : 1); } } });
  let at = -1;

  function show(found, what) {
    at = found.length ? ((at % found.length) + found.length) % found.length : -1;
    for (const { element } of said) element.classList.remove("found");
    told.textContent = found.length ? `${what} ${at + 1} of ${found.length}` : `no ${what}`;
    if (!found.length) return;
    found[at].reveal();
    found[at].element.classList.add("found");
    found[at].element.scrollIntoView({ block: "center" });
  }

  let last = "";
  function step(by) {
    const term = field.value.toLowerCase();
    if (!term) return;
    at = term === last ? at + by : 0;
    last = term;
    show(said.filter(({ message }) => message.content.toLowerCase().includes(term)), "match");
  }

  let error = -1;
  function nextError() {
    error += 1;
    at = error;
    last = "";
    show(errors, "error");
  }
  return h("div", { class: "row talk-bar", role: "group", "aria-label": "Find in this conversation" }, field,
    h("button", { type: "button", onclick: () => step(-1) }, "Previous"), h("button", { type: "button", onclick: () => step(1) }, "Next"),
    errors.length ? h("button", { type: "button", onclick: nextError }, `Next error (${errors.length})`) : h("span", { class: "muted" }, "no errors"), told);
}

function head(who, ...more) {
  return h("p", { class: "who" }, h("b", {}, who), more);
}

// A message that was given: its element, and what shows all of it.
function given(message) {
  const lines = message.content.split("\n").length;
  const folds = message.role === "tool" && (lines > FOLDED.lines || message.content.length > FOLDED.characters);
  const text = h("pre", { class: "text", tabindex: folds ? "0" : null, "aria-label": folds ? "Tool's answer" : null }, message.content.slice(0, LONG) || "(nothing)");
  const images = message.images?.length ? h("p", {}, message.images.map((source, at) => h("img", { src: source, alt: `Image ${at + 1} of the message` }))) : null;
  const all = () => { text.textContent = message.content; more?.remove(); };
  const more = message.content.length > LONG ? h("button", { type: "button", onclick: all }, `All ${message.content.length} characters`) : null;
  const first = message.content.slice(0, 100).split("\n")[0];
  const body = folds ? h("details", {}, h("summary", {}, `${plural(lines, "line")}, ${plural(message.content.length, "character")}: ${first}`), text, more) : [text, more];
  const who = head(message.party ? `${message.role} to ${message.party}` : message.role, h("span", { class: "muted" }, "given, no loss"));
  const reveal = () => { if (folds) body.open = true; if (more?.isConnected) all(); };
  return { element: h("li", { class: `given ${message.role === "tool" ? "tool" : ""}` }, who, body, images), reveal };
}

function call(each) {
  if (each.problem) return h("p", { class: "call bad" }, `broken call: ${each.problem}`);
  return h("p", { class: "call" }, h("b", {}, `calls ${each.name}`), " ", h("code", {}, each.arguments_json));
}

// A turn as tokens.js knows an answer.
function ofTurn(each, message, { from, to }, turn) {
  return { ...each, completion: message.content, sample_index: `${each.sample_index}-${turn}`, tokens: message.tokens,
    log_probs: each.log_probs.slice(from, to), text_bytes: (each.text_bytes ?? []).slice(from, to), versions: cut(each.versions, from, to) };
}

function cut(versions, from, to) {
  let at = 0;
  const found = [];
  for (const [version, count] of versions) {
    const own = Math.min(at + count, to) - Math.max(at, from);
    if (own > 0) found.push([version, own]);
    at += count;
  }
  return found;
}

function versionsOf(each, { from, to }) {
  return [...new Set(cut(each.versions, from, to).map(([version]) => version))];
}
