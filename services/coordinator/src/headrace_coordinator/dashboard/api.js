// Asks the coordinator. Keeps the token for this tab alone; goes on after the coordinator was away.

const TOKEN = "headrace-token";
const PAUSES_MS = [500, 1000, 2000, 5000];
const SILENT_MS = 35000; // The coordinator sends a comment every 10 s: after so long the connection is dead.
const watchers = new Set();
let away = false;

export class Refusal extends Error {
  constructor(status, body) {
    super(body.message ?? `the coordinator answered ${status}`);
    this.status = status;
    this.reason = body.reason ?? "";
    this.problems = body.problems ?? [];
  }
}

// Takes `token=…` out of the address's fragment; returns the path that is left.
export function takeToken(fragment) {
  const parts = fragment.replace(/^#/, "").split("&");
  const given = parts.find((part) => part.startsWith("token="));
  if (!given) return null;
  sessionStorage.setItem(TOKEN, decodeURIComponent(given.slice(6)));
  return parts.filter((part) => part !== given).join("&") || "/runs";
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

export function hasToken() {
  return Boolean(sessionStorage.getItem(TOKEN));
}

// Calls back with true while the coordinator does not answer.
export function watchLink(callback) {
  watchers.add(callback);
  callback(away);
}

function setAway(value) {
  if (value === away) return;
  away = value;
  for (const callback of watchers) callback(away);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store" });
  } catch (error) {
    if (error.name !== "AbortError") setAway(true);
    throw error;
  }
  setAway(response.status === 503 && path !== "/healthz");
  return response;
}

async function read(response) {
  const text = await response.text();
  let body = {};
  try {
    body = JSON.parse(text);
  } catch {
    body = { message: text.slice(0, 200) || response.statusText };
  }
  if (response.ok) return body;
  if (response.status === 401) window.dispatchEvent(new Event("headrace-token"));
  throw new Refusal(response.status, body);
}

export async function get(path, signal, query = {}) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of [value].flat()) if (each !== "" && each !== null && each !== undefined) asked.append(name, each);
  }
  const text = asked.toString();
  return read(await send(text ? `${path}?${text}` : path, { signal }));
}

// A file as a URL of this page: an element's own request carries no token. The signal's end frees it.
export async function file(path, signal) {
  const response = await send(path, { signal });
  if (!response.ok) await read(response);
  const url = URL.createObjectURL(await response.blob());
  signal.addEventListener("abort", () => URL.revokeObjectURL(url), { once: true });
  return url;
}

export async function health(signal) {
  return (await send("/healthz", { signal })).json();
}

// A write under a key of its own. Repeated while the connection fails: the key makes that harmless.
export async function post(path, body) {
  const options = { method: "POST", headers: { "Idempotency-Key": key() } };
  if (body !== undefined) {
    const text = typeof body === "string"; // A spec as YAML.
    options.headers["Content-Type"] = text ? "application/yaml" : "application/json";
    options.body = text ? body : JSON.stringify(body);
  }
  for (let tries = 0; ; tries += 1) {
    try {
      return await read(await send(path, options));
    } catch (error) {
      const again = error instanceof TypeError || error.status === 503;
      if (!again || tries >= PAUSES_MS.length) throw error;
      await pause(PAUSES_MS[tries]);
    }
  }
}

function key() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

// Events of a run with ids above `after`, each once, over lost connections; ends when the run has ended.
export async function stream(run, after, onEvent, signal) {
  let last = after;
  let tries = 0;
  while (!signal.aborted) {
    try {
      const response = await send(`/v1/runs/${encodeURIComponent(run)}/events?after=${last}`, { signal });
      if (!response.ok) await read(response);
      for await (const event of parts(response.body, signal)) {
        tries = 0;
        if (event.id <= last) continue;
        last = event.id;
        onEvent(event);
      }
      const now = await get(`/v1/runs/${encodeURIComponent(run)}`, signal);
      if (["SUCCEEDED", "FAILED", "CANCELLED"].includes(now.state)) return;
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && error.status !== 503) throw error;
    }
    await pause(PAUSES_MS[Math.min(tries, PAUSES_MS.length - 1)], signal);
    tries += 1;
  }
}

// Events of a stream (WHATWG HTML, section 9.2) that the coordinator writes: one line of data an event.
async function* parts(body, signal) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (!signal.aborted) {
      const { done, value } = await within(reader.read(), SILENT_MS);
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").find((line) => line.startsWith("data: "));
        if (data) yield JSON.parse(data.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // The connection may be gone already.
  }
}

function within(promise, ms) {
  let timer;
  const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error("the stream is silent")), ms); });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

// Calls `work` now and every `ms` while the page is visible; failures of the connection are tried again.
export async function repeat(ms, signal, work) {
  while (!signal.aborted) {
    try {
      if (!document.hidden) await work();
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refusal && error.status !== 503) throw error;
      if (!(error instanceof TypeError || error instanceof Refusal)) throw error;
    }
    await pause(ms, signal);
  }
}

// All entries of a paged list, at most `most`.
export async function pages(path, name, signal, most = 1000) {
  const found = [];
  let token = "";
  do {
    const page = await get(path, signal, { page_size: Math.min(200, most), page_token: token });
    found.push(...page[name]);
    token = page.next_page_token;
  } while (token && found.length < most);
  return found;
}
