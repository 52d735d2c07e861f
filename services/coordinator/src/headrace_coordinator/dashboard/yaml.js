// Writes a spec as YAML, and finds the line of a key in one. Reading it is the coordinator's work.

// A value that YAML reads as it stands: a word, a path or a number; all else is JSON, which YAML reads too.
function scalar(value) {
  if (typeof value === "string" && /^[A-Za-z_./~$][\w./~$-]*$/.test(value) && !/^(true|false|null|yes|no|on|off|y|n|~)$/i.test(value) && !/^\.(inf|nan)$|^[.\d]/i.test(value)) return value;
  return JSON.stringify(value);
}

const isPlain = (value) => value === null || typeof value !== "object" || !Object.keys(value).length;

export function yamlOf(value, indent = "") {
  return Object.entries(value).map(([name, each]) => {
    if (isPlain(each) || (Array.isArray(each) && JSON.stringify(each).length < 90)) return `${indent}${scalar(name)}: ${isPlain(each) ? scalar(each) : JSON.stringify(each)}\n`;
    if (Array.isArray(each)) return `${indent}${scalar(name)}:\n${each.map((item) => `${indent}  - ${JSON.stringify(item)}\n`).join("")}`;
    return `${indent}${scalar(name)}:\n${yamlOf(each, `${indent}  `)}`;
  }).join("");
}

// Of each line: where it begins, how far it is indented, and the path of the key that it begins.
function lines(text) {
  const open = [];
  let at = 0;
  return text.split("\n").map((line) => {
    const start = at;
    at += line.length + 1;
    const found = /^(\s*)(?:- +)?["']?([\w.-]+)["']?\s*:/.exec(line);
    if (!found) return { start, line, path: "" };
    const indent = found[1].length;
    while (open.length && open.at(-1).indent >= indent) open.pop();
    open.push({ indent, name: found[2] });
    return { start, line, path: open.map((each) => each.name).join(".") };
  });
}

// [number from 1, start, end] of the line of a key, or of the nearest key above it that has one; null for none.
export function lineOf(text, key) {
  const all = lines(text);
  for (let path = key.replace(/\[\d+\]/g, ""); path; path = path.slice(0, Math.max(0, path.lastIndexOf(".")))) {
    const place = all.findIndex((each) => each.path === path);
    if (place >= 0) return [place + 1, all[place].start, all[place].start + all[place].line.length];
  }
  return null;
}

// The path of the key at a place in the text.
export function keyAt(text, place) {
  return lines(text).findLast((each) => each.start <= place && each.path)?.path ?? "";
}
