// A form over a JSON Schema: sections fold, empty fields keep their default, what is no plain value is JSON.

import { h } from "./dom.js";

export class Form {
  constructor(schema, start) {
    this.schema = schema;
    this.fields = new Map();
    this.element = h("div", { class: "sections" });
    this.set(start);
  }

  set(start) {
    this.fields.clear();
    const plain = [];
    const sections = [];
    for (const [name, given] of Object.entries(this.schema.properties)) {
      const kind = resolve(given, this.schema);
      if (kind.properties) sections.push(this.section(name, kind, start[name] ?? {}, this.schema.required?.includes(name) || name in start, given));
      else plain.push(this.field(name, kind, start[name], this.schema.required?.includes(name)));
    }
    this.element.replaceChildren(h("fieldset", { class: "panel" }, h("legend", {}, "Run"), plain), ...sections);
  }

  section(path, kind, start, open, given) {
    const inner = Object.entries(kind.properties).map(([name, each]) => {
      const resolved = resolve(each, this.schema);
      const value = start?.[name];
      return resolved.properties && !resolved.nullable
        ? this.section(`${path}.${name}`, resolved, value ?? {}, Boolean(value && Object.keys(value).length), each)
        : this.field(`${path}.${name}`, resolved, value, kind.required?.includes(name));
    });
    const about = given.description ?? kind.description;
    return h("details", { class: "panel section", open }, h("summary", {}, h("b", {}, path), about && h("span", { class: "muted" }, ` ${about.split("\n")[0]}`)), inner);
  }

  field(path, kind, start, required) {
    const id = `field-${path}`;
    const problem = h("p", { class: "bad", id: `${id}-problem` });
    const input = this.input(id, kind, start, required);
    input.setAttribute("aria-describedby", `${id}-about ${id}-problem`);
    this.fields.set(path, { input, kind, problem });
    return h("div", { class: "field" }, h("label", { for: id }, path.split(".").at(-1), required && h("span", { class: "muted" }, " (required)")), input,
      h("p", { class: "muted about", id: `${id}-about` }, kind.description ?? ""), problem);
  }

  input(id, kind, start, required) {
    const shown = start === undefined ? "" : start;
    const choices = kind.enum ?? (kind.const !== undefined ? [kind.const] : kind.type === "boolean" ? [true, false] : null);
    const standard = kind.default === undefined ? "" : kind.default === null ? "none" : JSON.stringify(kind.default);
    if (choices) {
      const select = h("select", { id }, h("option", { value: "" }, standard ? `default: ${standard}` : required ? "choose" : "default"),
        choices.map((each) => h("option", { value: JSON.stringify(each) }, String(each))));
      select.value = shown === "" ? "" : JSON.stringify(shown);
      return select;
    }
    if (kind.type === "string") return h("input", { id, type: "text", placeholder: standard, value: shown, autocomplete: "off", spellcheck: "false" });
    if (kind.type === "integer" || kind.type === "number") return h("input", { id, type: "text", inputmode: "decimal", placeholder: standard, value: shown === null ? "" : String(shown) });
    return h("textarea", { id, rows: shown === "" ? 1 : 2, placeholder: standard, spellcheck: "false", value: shown === "" ? "" : JSON.stringify(shown) });
  }

  // Keys whose text is no value of their kind.
  wrong() {
    return [...this.fields].flatMap(([key, { input, kind }]) => {
      try {
        read(input.value, kind);
        return [];
      } catch {
        return [{ key, problem: "is not JSON", fix: "write a list as [1, 2] and an object as {\"key\": 1}" }];
      }
    });
  }

  value() {
    const spec = {};
    for (const [path, { input, kind }] of this.fields) {
      if (input.value.trim() === "") continue;
      const keys = path.split(".");
      let place = spec;
      for (const key of keys.slice(0, -1)) place = place[key] ??= {};
      place[keys.at(-1)] = read(input.value, kind);
    }
    for (const name of this.schema.required ?? []) spec[name] ??= {};
    return spec;
  }

  // The field of a key, or of the nearest key above it: reward.scorers.0.name → reward.scorers.
  find(key) {
    for (let path = key; path; path = path.slice(0, Math.max(0, path.lastIndexOf(".")))) {
      const found = this.fields.get(path.replace(/\[.*$/, ""));
      if (found) return found;
    }
    return null;
  }

  has(key) {
    return Boolean(this.find(key)) && !this.element.hidden;
  }

  mark(key, text) {
    const field = this.find(key);
    if (!field) return;
    field.problem.textContent = text;
    field.input.setAttribute("aria-invalid", "true");
  }

  clear() {
    for (const { input, problem } of this.fields.values()) {
      problem.textContent = "";
      input.removeAttribute("aria-invalid");
    }
  }

  focus(key) {
    const { input } = this.find(key);
    for (let up = input.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    input.focus();
  }
}

function read(text, kind) {
  const trimmed = text.trim();
  if (trimmed === "") return undefined;
  if (kind.type === "string" && !kind.enum) return text;
  if (kind.type === "integer" || kind.type === "number") return Number.isFinite(Number(trimmed)) ? Number(trimmed) : trimmed; // The coordinator says what is wrong with it.
  return JSON.parse(trimmed);
}

// Follows $ref, and takes the one kind that is not null.
function resolve(given, schema) {
  let kind = given;
  if (given.anyOf) {
    const others = given.anyOf.filter((each) => each.type !== "null");
    kind = others.length === 1 ? { ...resolve(others[0], schema), nullable: true } : { nullable: true };
  } else if (given.allOf) kind = resolve(given.allOf[0], schema);
  if (kind.$ref) kind = { ...schema.$defs[kind.$ref.split("/").at(-1)] };
  const { description, default: standard } = given;
  return { ...kind, ...(description ? { description } : {}), ...(standard !== undefined ? { default: standard } : {}) };
}

// What the schema says of a key such as reward.scorers; null for one that it does not describe.
export function about(schema, path) {
  let kind = schema;
  for (const name of path.split(".")) {
    const inner = kind.properties ? kind : resolve(kind.items ?? {}, schema);
    if (!inner.properties?.[name]) return null;
    kind = resolve(inner.properties[name], schema);
  }
  const choices = kind.enum ? `one of ${kind.enum.join(", ")}` : kind.const ?? kind.type ?? "";
  const bounds = [["at least", kind.minimum], ["above", kind.exclusiveMinimum], ["at most", kind.maximum]].filter(([, value]) => value !== undefined).map(([word, value]) => `${word} ${value}`);
  const standard = kind.default === undefined ? [] : [`default ${JSON.stringify(kind.default)}`];
  const keys = kind.properties ?? resolve(kind.items ?? {}, schema).properties ?? {};
  return { description: kind.description, kind: [choices, ...bounds, ...standard].filter(Boolean).join(", "), keys: Object.keys(keys) };
}

// A spec without what is a default anyway.
export function without(spec, schema, kind = schema) {
  const found = {};
  for (const [name, value] of Object.entries(spec)) {
    const each = kind.properties?.[name] ? resolve(kind.properties[name], schema) : {};
    if (value === null || JSON.stringify(each.default) === JSON.stringify(value)) continue;
    if (each.properties && !Array.isArray(value)) {
      const inner = without(value, schema, each);
      if (Object.keys(inner).length) found[name] = inner;
    } else found[name] = value;
  }
  return found;
}
