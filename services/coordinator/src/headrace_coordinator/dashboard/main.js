// Chooses the view by the address's fragment, and keeps the bar at the top: theme, connection, token.

import { get, hasToken, Refusal, setToken, takeToken, watchLink } from "./api.js";
import { h } from "./dom.js";
import { redrawCharts } from "./charts.js";
import * as runs from "./views/runs.js";
import * as run from "./views/run.js";
import * as fleet from "./views/fleet.js";
import * as evaluations from "./views/evaluations.js";
import * as compare from "./views/compare.js";
import * as submit from "./views/submit.js";

const PAGES = { runs, run, evaluations, fleet, compare, submit };
const main = document.getElementById("main");
let leaving = new AbortController();
let shownPath = "";

// "#/runs/ID/proof?x=1" → {page, id, tab, query}
function parse(fragment) {
  const [path, query] = fragment.replace(/^#/, "").split("?");
  const [page = "runs", id, tab] = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { path, page: page === "runs" && id ? "run" : page || "runs", id, tab, query: new URLSearchParams(query ?? "") };
}

async function show() {
  const left = takeToken(location.hash);
  if (left) return location.replace(`#${left.startsWith("/") ? left : "/runs"}`);
  if (location.hash && !location.hash.startsWith("#/")) return; // A link within the page.
  const place = parse(location.hash || "#/runs");
  const view = PAGES[place.page] ?? runs;
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  mark(place.page === "run" ? "runs" : place.page);
  document.title = `${place.id ?? place.page[0].toUpperCase() + place.page.slice(1)} – Headrace`;
  main.replaceChildren();
  if (shownPath && shownPath !== place.path) main.focus();
  shownPath = place.path;
  try {
    await view.show(main, place, signal);
  } catch (error) {
    if (!signal.aborted) complain(error);
  }
}

function mark(page) {
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function complain(error) {
  if (error instanceof Refusal && error.status === 401) return askToken();
  main.prepend(h("section", { class: "panel bad", role: "alert" }, h("h1", {}, "This cannot be shown"),
    h("p", {}, error.message), h("p", {}, h("a", { href: "#/runs" }, "All runs"), " · ",
      h("button", { class: "quiet", onclick: show }, "Try again"))));
  if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
}

async function askToken() {
  if (document.getElementById("token")) return;
  leaving.abort();
  const input = h("input", { id: "token", type: "password", autocomplete: "off", required: true });
  const form = h("form", {
    class: "panel narrow",
    onsubmit: (event) => { event.preventDefault(); setToken(input.value.trim()); name(); show(); },
  }, h("h1", {}, "This coordinator needs a token"),
  h("p", {}, "Give your token (", h("code", {}, "headrace token create"), " makes it), one of your organisation's issuer, or the fleet's own: a local one has it in ", h("code", {}, "http-token"), " in its data directory. It stays in this tab, until the tab is closed."),
  h("label", { for: "token" }, "Token"), input, h("button", { type: "submit", class: "main" }, "Go on"));
  main.replaceChildren(form);
  input.focus();
  const health = await get("/healthz").catch(() => null);
  if (health?.login) form.append(h("p", {}, "or ", h("a", { href: "/login", class: "main" }, "log in with your organisation")));
}

// Whose token the page has; with a way to give another one.
const me = document.getElementById("me");
me.addEventListener("click", () => { setToken(""); me.hidden = true; askToken(); });
async function name() {
  const found = await get("/v1/me").catch(() => null); // The page itself asks for a token.
  me.hidden = !found || !hasToken();
  if (!found) return;
  me.textContent = found.name;
  me.title = `${found.scopes.join(", ") || "no scope"}${found.teams.length ? `; ${found.teams.join(", ")}` : ""}. Log out`;
}

const theme = document.getElementById("theme");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function themeNow() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}
function nameTheme() {
  theme.textContent = themeNow() === "dark" ? "Light" : "Dark";
  theme.setAttribute("aria-label", `Switch to the ${themeNow() === "dark" ? "light" : "dark"} theme`);
  redrawCharts();
}
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = themeNow() === "dark" ? "light" : "dark";
  localStorage.setItem("headrace-theme", document.documentElement.dataset.theme);
  nameTheme();
});
dark.addEventListener("change", nameTheme);

// What sticks below the bar begins at its lower edge.
const bar = document.querySelector(".top");
new ResizeObserver(() => document.documentElement.style.setProperty("--head", `${bar.offsetHeight}px`)).observe(bar);

const link = document.getElementById("link");
watchLink((away) => {
  link.textContent = away ? "Reconnecting…" : "";
  link.classList.toggle("away", away);
});
// While nothing else asks, somebody must notice that the coordinator is back.
setInterval(() => { if (link.textContent && !document.hidden) get("/healthz").catch(() => {}); }, 2000);

window.addEventListener("hashchange", show);
window.addEventListener("headrace-token", askToken);
window.addEventListener("unhandledrejection", (event) => {
  if (event.reason?.name === "AbortError") event.preventDefault();
});
nameTheme();
show().then(name);
