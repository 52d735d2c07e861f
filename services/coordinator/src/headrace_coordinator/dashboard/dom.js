// Makes elements. All text goes through text nodes, so nothing that a run says can become markup.

const SVG = "http://www.w3.org/2000/svg";

// h("a", {class: "x", href: "#", onclick: f, vars: {"--part": "40%"}}, "text", element, …)
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Lets `parent` show one element for each item. An element is made again only when its item has changed, so that
// focus, selection and open details survive an update.
export function keyed(parent, items, keyOf, make) {
  const old = parent.keyedItems ?? new Map();
  const now = new Map();
  items.forEach((item, index) => {
    const key = keyOf(item);
    const text = JSON.stringify(item);
    let entry = old.get(key);
    if (!entry || entry.text !== text) entry = { text, element: remade(entry?.element, make(item)) };
    now.set(key, entry);
    if (parent.children[index] !== entry.element) parent.insertBefore(entry.element, parent.children[index] ?? null);
  });
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  parent.keyedItems = now;
}

// Puts an element in another's place; the focus stays on the control with the same data-focus.
function remade(before, after) {
  if (!before) return after;
  const focused = before.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  before.replaceWith(after);
  if (focused) [...after.querySelectorAll("[data-focus]")].find((each) => each.dataset.focus === focused)?.focus();
  return after;
}

export function chip(state) {
  return h("span", { class: `chip ${state.toLowerCase()}` }, state);
}

// [the table in its frame, its body]. A cell carries its column's head: on a narrow screen a row is a card of both.
export function table(caption, heads, ...rows) {
  const head = h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)));
  const body = h("tbody", {}, rows);
  const name = (row) => [...row.cells].forEach((cell, index) => { if (cell.colSpan === 1) cell.dataset.head = heads[index]?.textContent ?? heads[index] ?? ""; });
  [...body.rows].forEach(name);
  new MutationObserver((changes) => changes.forEach((change) => change.addedNodes.forEach(name))).observe(body, { childList: true });
  return [h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, head), body)), body];
}

// [name, value], or [name, value, what a tooltip of the name says].
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value, title]) => h("div", {}, h("dt", { title }, name), h("dd", {}, value))));
}

export function empty(text, ...more) {
  return h("p", { class: "empty" }, text, ...more);
}

// Asks before something that cannot be undone; resolves to whether the user agreed.
export function confirmed(question, verb) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": question, onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); } },
      h("form", { method: "dialog" }, h("p", {}, question),
        h("div", { class: "row" },
          h("button", { value: "yes", class: "danger", type: "button", onclick: () => dialog.close("yes") }, verb),
          h("button", { value: "no", type: "button", autofocus: true, onclick: () => dialog.close("no") }, "Back"))));
    document.body.append(dialog);
    dialog.showModal();
  });
}
