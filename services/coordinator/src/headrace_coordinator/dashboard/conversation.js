// A conversation as its sides said it: roles, turns of the policy with their tokens and rewards, calls and their answers.

import { h } from "./dom.js";
import { number, plural } from "./format.js";
import { answer } from "./tokens.js";

const LONG = 4000; // Characters of what was given to the policy that are shown at once.

// All messages of a trajectory. What the policy sampled has its tokens coloured; everything else was given.
export function conversation(each) {
  let from = 0;
  let turn = 0;
  return h("ol", { class: "talk", "aria-label": "Conversation" }, each.messages.map((message) => {
    if (message.tokens === null) return h("li", { class: `given ${message.role === "tool" ? "tool" : ""}` }, head(message.party ? `${message.role} to ${message.party}` : message.role, h("span", { class: "muted" }, "given, no loss")), given(message));
    const tokens = { from, to: from + message.tokens };
    from = tokens.to;
    turn += 1;
    return h("li", { class: "own" },
      head(`${message.party || message.role}, turn ${turn}`, message.reward === null ? null : h("span", { class: "chip" }, `reward ${number(message.reward)}`),
        h("span", { class: "muted" }, `${plural(message.tokens, "token")} ${each.masked ? "without loss" : "with loss"}, version ${versionsOf(each, tokens).join(", ") || "?"}`)),
      answer(ofTurn(each, message, tokens, turn)), message.calls.map(call));
  }));
}

function head(who, ...more) {
  return h("p", { class: "who" }, h("b", {}, who), more);
}

function given(message) {
  const text = h("pre", { class: "text" }, message.content.slice(0, LONG) || "(nothing)");
  const images = message.images?.length ? h("p", {}, message.images.map((source, at) => h("img", { src: source, alt: `Image ${at + 1} of the message` }))) : null;
  if (message.content.length <= LONG) return [text, images];
  const more = h("button", { type: "button", onclick: () => { text.textContent = message.content; more.remove(); } }, `All ${message.content.length} characters`);
  return [text, more, images];
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
