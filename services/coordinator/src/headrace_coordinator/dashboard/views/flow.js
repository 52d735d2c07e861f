// The picture of a run's flow: where the slots of the step in hand stand, and what is behind.

import { get, repeat } from "../api.js";
import { h } from "../dom.js";
import { plural } from "../format.js";

const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
// From left to right: [field, title, what it is, whether things wait there].
const PLACES = [
  ["waiting", "To generate", "wait for a rollout", true],
  ["generating", "Generate", "at a rollout", false],
  ["scoring", "Score", "at a scorer, or until their group is whole", false],
  ["scored", "To learn", "scored, wait for the trainer", true],
  ["learned", "Learn", "at the trainer", false],
];

export function flow(context) {
  const places = PLACES.map(([field, title, about, queue]) => place(field, title, about, queue));
  const told = h("p", { class: "muted", role: "status" });
  const element = h("section", { class: "panel", hidden: true }, h("h2", {}, "Flow of the step in hand"),
    h("ol", { class: "flow" }, places.map((each) => each.element)), told);

  function update(found) {
    element.hidden = false;
    for (const each of places) each.update(found);
    told.textContent = found.slots ? sentence(found) : "No step is in hand.";
  }

  repeat(1000, context.signal, async () => {
    if (ENDED.includes(context.run.state)) { element.hidden = true; return; }
    update(await get(`${context.path}/flow`, context.signal));
  });
  return { element };
}

function place(field, title, about, queue) {
  const count = h("b", {}, "0");
  const who = h("span", { class: "why" });
  const element = h("li", { class: queue ? "queue" : "work" }, h("span", { class: "title" }, title), count, h("span", { class: "why" }, about), who);
  return {
    element,
    update(found) {
      count.textContent = found[field].toLocaleString("en");
      element.style.setProperty("--part", `${found.slots ? (100 * found[field]) / found.slots : 0}%`);
      element.classList.toggle("most", found[field] > 0 && field === most(found));
      who.textContent = field === "generating" ? Object.entries(found.holders).slice(0, 8).map(([name, held]) => `${name} ${held}`).join(", ") : "";
    },
  };
}

// The place, but the last one, where most slots are: what the step is behind with.
function most(found) {
  const open = PLACES.slice(0, -1).map(([field]) => field).sort((a, b) => found[b] - found[a]);
  return found[open[0]] ? open[0] : "";
}

const BEHIND = {
  waiting: "Generation is behind: slots wait for a rollout.",
  generating: "Generation is at work.",
  scoring: "Scoring is at work.",
  scored: "Learning is behind: scored groups wait for the trainer.",
  "": "The trainer has everything.",
};

function sentence(found) {
  const dropped = found.dropped ? ` ${plural(found.dropped, "slot")} dropped.` : "";
  return `Step ${found.step}: ${plural(found.slots, "slot")}. ${BEHIND[most(found)]}${dropped}`;
}
