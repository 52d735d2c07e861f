// A run's events, newest first: live ones at the top, older ones on demand. Of steps that follow each other the newest
// is shown, so that what happened to devices and people is not lost among them.

import { get } from "../api.js";
import { h } from "../dom.js";
import { clock, eventText, isGrave, isStep } from "../format.js";

const SHOWN = 120;

export function eventLog(context) {
  const list = h("ol", { class: "events folded", reversed: true });
  const filter = h("input", { type: "checkbox", id: "grave", onchange: () => list.classList.toggle("grave-only", filter.checked) });
  const steps = h("input", { type: "checkbox", id: "every-step", onchange: () => list.classList.toggle("folded", !steps.checked) });
  const more = h("button", { type: "button", class: "quiet", onclick: () => older() }, "Older events");
  const element = h("section", { class: "panel" }, h("div", { class: "row" }, h("h2", {}, "Events and notes"),
    h("label", { for: "grave" }, filter, " only notes and trouble"), h("label", { for: "every-step" }, steps, " every step")), list, more);
  let token = "";
  let last = 0;

  async function older() {
    const page = await get(`${context.path}/newest-events`, context.signal, { page_size: 40, page_token: token });
    token = page.next_page_token;
    more.hidden = !token;
    if (!last && page.events.length) last = page.events[0].id;
    list.append(...page.events.map(line));
    while (list.children.length > SHOWN) list.firstElementChild.remove();
  }

  context.onEvent((event) => {
    if (event.id <= last) return;
    last = event.id;
    list.prepend(line(event));
    if (list.children.length > SHOWN) {
      list.lastElementChild.remove();
      token = list.lastElementChild.dataset.event;
      more.hidden = false;
    }
  });
  return { element, load: older, newest: () => last };
}

function line(event) {
  return h("li", { class: isGrave(event) ? "grave" : isStep(event) ? "step" : event.type === "noted" ? "note" : null, "data-event": event.id },
    h("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)), h("span", {}, eventText(event)));
}
