// An answer with its tokens coloured: by log-prob, by advantage, or by the version that sampled each. Knows no run.

import { h } from "./dom.js";
import { number } from "./format.js";

const SPANS = 400; // Coloured pieces of one answer at most: a page stays small.
const MODES = [["log_prob", "log-prob"], ["advantage", "advantage"], ["ratio", "ratio"], ["version", "version"]];

// The answer's pieces: {text, from, to}, token numbers from `from` until before `to`. Tokens that end inside a
// character belong to the piece that it ends in. Null where the tokens' places are not known.
export function pieces(each) {
  const lengths = each.text_bytes ?? [];
  if (!lengths.length) return null;
  const bytes = new TextEncoder().encode(each.completion);
  const decoder = new TextDecoder();
  const found = [];
  let at = 0;
  let start = 0;
  let from = 0;
  lengths.forEach((length, index) => {
    at += length;
    if (length === 0 && index + 1 < lengths.length) return;
    if (at < bytes.length && (bytes[at] & 0xc0) === 0x80) return; // In the middle of a character.
    found.push({ text: decoder.decode(bytes.slice(start, at)), from, to: index + 1 });
    start = at;
    from = index + 1;
  });
  if (at < bytes.length) found.push({ text: decoder.decode(bytes.slice(start)), from, to: from });
  return found;
}

// Shows an answer; the choice of colours stands above it where there is one.
export function answer(each) {
  const found = pieces(each);
  if (!found) return [h("pre", { class: "text answer" }, each.completion || "(nothing)")];
  const told = h("p", { class: "muted told" });
  const text = h("pre", { class: "text answer tokens", tabindex: "0", "aria-label": "Answer" });
  const known = each.log_probs.filter((value) => value !== null);
  const modes = MODES.filter(([mode]) => (mode === "log_prob" ? known.length : mode === "advantage" ? each.advantage !== null : mode === "ratio" ? each.new_log_probs?.length : each.versions.length));
  const name = `colour-${each.step}-${each.prompt_ordinal}-${each.sample_index}`;
  const radio = ([mode, label], index) => h("label", {}, h("input", { type: "radio", name, value: mode, checked: index === 0, onchange: () => paint(mode) }), ` ${label}`);
  const choice = h("fieldset", { class: "colours" }, h("legend", { class: "hidden" }, "Colour tokens by"), h("span", { class: "muted" }, "Tokens coloured by"), modes.map(radio));
  const legend = h("span", { class: "muted" });
  choice.append(legend);

  function paint(mode) {
    const shade = SHADES[mode](each);
    const shown = joined(found, shade);
    text.replaceChildren(...shown.map((piece) => h("span", { class: piece.colour ? "token" : null, vars: piece.colour ? { "--shade": piece.colour } : {}, onpointerenter: () => { told.textContent = about(each, piece); } }, piece.text)));
    legend.textContent = LEGENDS[mode](each);
    told.textContent = "";
  }
  if (modes.length) paint(modes[0][0]);
  else text.textContent = each.completion;
  return [modes.length ? choice : null, text, told];
}

// Neighbours of one colour are one element, and more so the longer the answer is.
function joined(found, shade) {
  let result = [];
  for (let levels = 12; levels >= 1; levels -= 1) {
    result = [];
    for (const piece of found) {
      const colour = shade(piece, levels);
      const last = result.at(-1);
      if (last && last.colour === colour) result[result.length - 1] = { ...last, text: last.text + piece.text, to: piece.to };
      else result.push({ ...piece, colour });
    }
    if (result.length <= SPANS) return result;
  }
  return [...result.slice(0, SPANS), { ...result[SPANS], text: result.slice(SPANS).map((piece) => piece.text).join(""), colour: "", to: result.at(-1).to }];
}

const steps = (value, levels) => Math.round(value * levels) / levels;
const mix = (colour, part) => (part > 0 ? `color-mix(in srgb, var(${colour}) ${(part * 40).toFixed(0)}%, transparent)` : "");

const SHADES = {
  // The lowest of a piece: −4.4 nats is one chance in eighty.
  log_prob: (each) => (piece, levels) => {
    const values = each.log_probs.slice(piece.from, piece.to).filter((value) => value !== null);
    return values.length ? mix("--c2", steps(Math.min(1, -Math.min(...values) / 4.4), levels)) : "";
  },
  advantage: (each) => (piece, levels) => (piece.to > piece.from ? mix(each.advantage < 0 ? "--c2" : "--c1", steps(Math.min(1, Math.abs(each.advantage) / 2), levels)) : ""),
  // The furthest of a piece from 1; twice, or half, is the darkest.
  ratio: (each) => (piece, levels) => {
    const furthest = logRatios(each).slice(piece.from, piece.to).filter((value) => value !== null).reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
    return mix(furthest < 0 ? "--c2" : "--c1", steps(Math.min(1, Math.abs(furthest) / Math.LN2), levels));
  },
  version: (each) => (piece) => (piece.to > piece.from ? mix(`--c${(versionIndex(each, piece.from) % 8) + 1}`, 0.6) : ""),
};

const LEGENDS = {
  log_prob: (each) => {
    const known = each.log_probs.filter((value) => value !== null);
    return `the darker, the less likely: mean ${number(known.reduce((sum, value) => sum + value, 0) / known.length)}, lowest ${number(Math.min(...known))} nats${more(each)}`;
  },
  advantage: (each) => `${number(each.advantage)} for each token of this answer: ${each.advantage > 0 ? "made likelier" : each.advantage < 0 ? "made less likely" : "not moved"}`,
  ratio: (each) => {
    const ratios = logRatios(each).filter((value) => value !== null).map(Math.exp);
    return `probability under the version that the step made against that when it was sampled: ${number(Math.min(...ratios))} to ${number(Math.max(...ratios))}${more(each)}`;
  },
  version: (each) => each.versions.map(([version, count]) => `version ${version}: ${count} ${count === 1 ? "token" : "tokens"}`).join(", "),
};

// New log-prob minus the sampled one, of each token.
function logRatios(each) {
  return each.new_log_probs.map((value, at) => (value === null || (each.log_probs[at] ?? null) === null ? null : value - each.log_probs[at]));
}

function more(each) {
  return each.tokens > each.log_probs.length ? `; the first ${each.log_probs.length} of ${each.tokens} tokens` : "";
}

function versionIndex(each, token) {
  let left = token;
  return Math.max(0, each.versions.findIndex(([, count]) => { left -= count; return left < 0; }));
}

function about(each, piece) {
  if (piece.to <= piece.from) return "beyond the tokens that are kept";
  const values = each.log_probs.slice(piece.from, piece.to).map((value) => number(value));
  const where = piece.to - piece.from === 1 ? `token ${piece.from + 1}` : `tokens ${piece.from + 1} to ${piece.to}`;
  const version = each.versions[versionIndex(each, piece.from)]?.[0] ?? "?";
  const ratio = each.new_log_probs?.length ? `, ratio ${number(Math.exp(logRatios(each)[piece.from]))}` : "";
  return `${where}: log-prob ${values.slice(0, 6).join(", ")}${values.length > 6 ? ", …" : ""}${ratio}; sampled by version ${version}`;
}
