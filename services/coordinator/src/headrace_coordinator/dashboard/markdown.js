// Notes in a small Markdown: headings, lists, code, bold, emphasis, links. It makes elements and no markup, so that
// nothing in a note runs; a link goes to http, https or a place of this page.

import { h } from "./dom.js";

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\(((?:https?:\/\/|#\/)[^\s)]+)\)|(https?:\/\/[^\s<>"')]+)/g;

function inline(text) {
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, bold, emphasis, label, target, address] = match;
    found.push(text.slice(at, match.index));
    if (code) found.push(h("code", {}, code));
    else if (bold) found.push(h("strong", {}, bold));
    else if (emphasis) found.push(h("em", {}, emphasis));
    else found.push(h("a", { href: target ?? address, rel: "noopener noreferrer" }, label ?? address));
    at = match.index + whole.length;
  }
  return [...found, text.slice(at)];
}

// A note as elements.
export function markdown(text) {
  const root = h("div", { class: "note" });
  let list = null;
  let code = null;
  for (const line of text.split("\n")) {
    if (code) {
      if (/^```/.test(line)) code = null;
      else code.append(`${line}\n`);
      continue;
    }
    const item = line.match(/^\s*(?:[-*]|(\d+)\.)\s+(.*)$/);
    if (item) {
      const kind = item[1] ? "ol" : "ul";
      if (list?.localName !== kind) root.append(list = h(kind));
      list.append(h("li", {}, inline(item[2])));
      continue;
    }
    list = null;
    const heading = line.match(/^#{1,6}\s+(.*)$/);
    if (/^```/.test(line)) root.append(code = h("pre", { class: "text" }));
    else if (heading) root.append(h("h4", {}, inline(heading[1])));
    else if (line.trim()) root.append(h("p", {}, inline(line)));
  }
  return root;
}
