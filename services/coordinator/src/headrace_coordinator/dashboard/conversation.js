// A conversation as its sides said it: roles, turns of the policy with their tokens and rewards, calls and their answers.

import { h } from "./dom.js";
import { number, plural } from "./format.js";
import { answer } from "./tokens.js";

const LONG = 4000; // Characters of what was given to the policy that are shown at once.
const FOLDED = { lines: 12, characters: 1500 }; // A tool's answer beyond either is folded.
const OPEN = 3; // Branches of a session that are all open at once.
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
  const list = tree(said) ?? h("ol", { class: "talk", "aria-label": "Conversation" }, said.map(({ element }) => element));
  const found = said.filter(({ repeated }) => !repeated);
  return turn > 1 ? [figures(each, found), found.length >= SEARCHED ? bar(found) : null, list] : list;
}

// An agent's branches, each below the one that it begins as; null where there is one, or roles that speak in turns.
function tree(said) {
  let now = said.findLast(({ turn }) => turn)?.message.branch ?? null;
  const of = said.toReversed().map(({ message }) => (now = message.branch ?? now)).reverse();
  const branches = [...new Set(of)].map((number) => ({ number, all: said.filter((_, at) => of[at] === number), below: [], same: 0, from: null }));
  if (branches.length < 2 || of.filter((number, at) => at && number !== of[at - 1]).length !== branches.length - 1) return null;
  branches.forEach((branch, at) => {
    for (const before of branches.slice(0, at)) {
      const differs = branch.all.findIndex(({ message }, place) => !alike(message, before.all[place]?.message));
      if (differs > branch.same) Object.assign(branch, { same: differs, from: before });
    }
    for (const one of branch.all.slice(0, branch.same)) one.repeated = true;
    branch.from?.below.push(branch);
  });
  const list = (several) => h("ul", { class: "branches" }, several.map((branch) => item(branch)));
  const item = ({ number, all, same, from, below }) => {
    const own = all.slice(same);
    const turns = own.filter(({ turn }) => turn);
    const errors = own.filter(wrong).length;
    const gains = turns.map(({ message }) => message.reward).filter((reward) => reward !== null);
    const says = [plural(turns.length, "turn"), gains.length && `reward ${total(gains)}`, errors && plural(errors, "error"), from && `begins as branch ${from.number + 1} for ${plural(same, "message")}`];
    const talk = (several) => h("ol", { class: "talk", "aria-label": `Branch ${number + 1}` }, several.map(({ element }) => element));
    const before = same ? h("details", {}, h("summary", { class: "muted" }, `${plural(same, "message")} as in branch ${from.number + 1}`), talk(all.slice(0, same))) : null;
    return h("li", {}, h("details", { open: branches.length <= OPEN || number === branches[0].number }, h("summary", {}, h("b", {}, `Branch ${number + 1}`), h("span", { class: "muted" }, ` ${says.filter(Boolean).join("; ")}`)), before, talk(own)), below.length ? list(below) : null);
  };
  return list(branches.filter(({ from }) => !from));
}

function total(rewards) {
  return number(rewards.reduce((sum, reward) => sum + reward, 0));
}

function alike(one, other) {
  return other !== undefined && one.role === other.role && one.party === other.party && one.content === other.content;
}

// What the model read, with its special tokens, where the rollout noted it; made when it is opened.
export function read(each) {
  const branches = each.read ?? [];
  if (!branches.length) return null;
  const shown = (parts, at) => [branches.length > 1 ? h("h5", {}, `Branch ${at + 1}`) : null,
    h("pre", { class: "text", tabindex: "0", "aria-label": branches.length > 1 ? `Branch ${at + 1} as read` : "As read" }, parts.map((part, place) => (place % 2 ? h("mark", {}, part) : part)))];
  const details = h("details", { class: "read", ontoggle: () => { if (details.open && details.children.length === 1) details.append(...branches.flatMap(shown).filter(Boolean)); } },
    h("summary", {}, "As the model read it, with special tokens", branches.some((parts) => parts.length > 1) ? h("span", { class: "muted" }, "; what it sampled is marked") : null));
  return details;
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
    for (let up = found[at].element.closest("details"); up; up = up.parentElement.closest("details")) up.open = true;
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
