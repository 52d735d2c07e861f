// A recorded episode: its frames, actions and rewards on one time line, which a slider, the video and the plots move.

import { file, get, post, Refusal } from "../api.js";
import { Chart } from "../charts.js";
import { h, table } from "../dom.js";
import { bytes, number, plural } from "../format.js";

const MOST_NUMBERS = 8; // Of an action, a line each.
const ENOUGH = 2; // HTMLMediaElement.HAVE_CURRENT_DATA

// The panel of what was recorded, of an evaluation or of a run's training; nothing where nothing was.
export async function recorded(path, signal, ...above) {
  const { videos } = await get(`${path}/videos`, signal);
  if (!videos.length) return [];
  const trained = videos[0].step !== null;
  const id = decodeURIComponent(path.split("/").at(-1));
  const row = (each) => h("tr", {}, trained && h("td", {}, `${each.step}`), h("td", {}, `${each.item}`), h("td", {}, `${each.sample}`), h("td", {}, each.success ? "yes" : "no"), h("td", {}, bytes(each.size_bytes)),
    h("td", {}, h("button", { type: "button", "aria-label": `Watch ${trained ? `step ${each.step}, ` : ""}item ${each.item}, sample ${each.sample}`, onclick: (event) => watch(event.currentTarget, `${path}/videos/${encodeURIComponent(each.name)}`, signal) }, "Watch"), " ", again(id, each.name)));
  const [list, body] = table("Videos", [...(trained ? ["Step"] : []), "Item", "Sample", "Success", "Size", ""]);
  const failures = h("input", { type: "checkbox", id: "failures-first", onchange: () => fill() });
  // Those that failed first, else as they were made.
  const fill = () => body.replaceChildren(...(failures.checked ? videos.toSorted((a, b) => a.success - b.success) : videos).map(row));
  failures.checked = true;
  fill();
  const failed = videos.filter((each) => !each.success).length;
  return [h("section", { class: "panel" }, h("h2", {}, "Videos"), ...above, h("div", { class: "row" }, h("span", { class: "muted" }, `${plural(videos.length, "episode")}, ${failed} without success`), h("label", { for: "failures-first" }, failures, " failures first")), list)];
}

// Plays an episode again with the newest checkpoint. `start`: words of its start state, or a video's name.
export function again(run, start) {
  return h("button", { type: "button", "aria-label": `Play again: ${start}`, onclick: async ({ currentTarget: button }) => {
    button.disabled = true;
    try {
      location.hash = `#/evaluations/${encodeURIComponent((await post(`/v1/evaluations:replay?${new URLSearchParams({ run, start })}`)).id)}`;
    } catch (error) {
      button.disabled = false;
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      button.nextElementSibling?.remove();
      button.after(h("p", { class: "bad", role: "alert" }, [error.message, ...(error.problems ?? []).map((each) => `${each.key}: ${each.problem}; ${each.fix}`)].join(". ")));
    }
  } }, "Play again");
}

// Episodes of two evaluations from the same start, where both are recorded: those in which one failed come first.
export async function besides(paths, names, signal) {
  const [first, second] = await Promise.all(paths.map(async (path) => (await get(`${path}/videos`, signal)).videos));
  const of = (each) => `${each.item}/${each.sample}`;
  const others = new Map(second.map((each) => [of(each), each]));
  const pairs = first.filter((each) => others.has(of(each))).map((each) => [each, others.get(of(each))])
    .sort((a, b) => order(a) - order(b));
  if (!pairs.length) return [];
  const place = h("div", {});
  const word = (each) => h("td", {}, each.success ? "success" : "failure");
  const rows = pairs.map((pair) => h("tr", {}, h("td", {}, `${pair[0].item}`), h("td", {}, `${pair[0].sample}`), pair.map(word),
    h("td", {}, h("button", { type: "button", "aria-label": `Watch both, item ${pair[0].item}, sample ${pair[0].sample}`, onclick: () => both(pair) }, "Watch both"))));

  async function both(pair) {
    for (const shown of place.querySelectorAll(".episode")) shown.end();
    try {
      const made = await Promise.all(pair.map((each, at) => opened(`${paths[at]}/videos/${encodeURIComponent(each.name)}`, signal)));
      const videos = made.map((each) => each.querySelector("video"));
      const play = h("button", { type: "button", class: "main", onclick: () => videos.forEach((each) => { each.currentTime = 0; each.play().catch(() => {}); }) }, "Play both from the start"); // A browser without H.264 plays nothing.
      place.replaceChildren(h("div", { class: "row" }, h("h3", {}, `Item ${pair[0].item}, sample ${pair[0].sample}`), play),
        h("div", { class: "side" }, made.map((each, at) => h("article", { class: "panel" }, h("h3", {}, `${names[at]}: ${pair[at].success ? "success" : "failure"}`), each))));
      place.scrollIntoView({ block: "nearest" });
    } catch (error) {
      if (!signal.aborted) place.replaceChildren(h("p", { class: "reason bad", role: "alert" }, error.message));
    }
  }

  return [h("section", { class: "panel pairs" }, h("h2", {}, "Videos of both, from the same start"), table("Videos of both", ["Item", "Sample", ...names, ""], rows)[0], place)];
}

function order([one, other]) {
  return one.success !== other.success ? 0 : one.success ? 2 : 1;
}

async function opened(path, signal) {
  const [steps, url] = await Promise.all([get(`${path}/steps`, signal), file(path, signal)]);
  const frames = steps.actions.length + 1;
  return episode(path, steps, film(url, (step, video) => ((step + 0.5) / frames) * video.duration, (s, video) => Math.floor((s / video.duration) * frames)), signal);
}

// The demonstrations that a run's policy imitates.
export async function demonstrations(root, { path, run, signal }) {
  const tokens = [""];
  const told = h("p", { class: "muted wrap" });
  const [list, body] = table("Demonstrations", ["Episode", "Task", "Steps", ""]);
  const back = h("button", { type: "button", onclick: () => turn(-1) }, "Previous");
  const on = h("button", { type: "button", onclick: () => turn(1) }, "Next");
  root.append(h("section", { class: "panel" }, h("h2", {}, "Demonstrations"), told, list, h("div", { class: "row pager" }, back, on)));
  let token = "";

  function turn(by) {
    if (by > 0) tokens.push(token); else tokens.pop();
    load().catch(() => {});
  }

  async function load() {
    const page = await get(`${path}/demonstrations`, signal, { page_token: tokens.at(-1) });
    token = page.next_page_token;
    told.textContent = `${plural(page.total, "episode")} of ${page.directory}; ${run.spec.trainer?.warmup?.episodes ? `the first ${run.spec.trainer.warmup.episodes} are imitated` : "all are imitated"}.`;
    body.replaceChildren(...page.demonstrations.map((each) => h("tr", {}, h("td", {}, `${each.episode}`), h("td", { class: "wrap" }, each.task), h("td", {}, `${each.steps}`),
      h("td", {}, h("button", { type: "button", "aria-label": `Watch demonstration ${each.episode}`, onclick: (event) => watch(event.currentTarget, `${path}/demonstrations/${each.episode}`, signal, (place) => demonstration(place, each, page.fps, signal)) }, "Watch")))));
    back.disabled = tokens.length === 1;
    on.disabled = !token;
    back.parentElement.hidden = back.disabled && on.disabled;
  }
  await load();
}

async function demonstration(path, each, fps, signal) {
  const steps = await get(`${path}/steps`, signal);
  const screens = await Promise.all(each.cameras.map(async ({ name, film: filmed, from_s: from }) => {
    const last = each.steps - 1;
    const label = `Camera ${name}`;
    if (!filmed) return pictures(label, (step) => file(`${path}/pictures/${encodeURIComponent(name)}/${Math.min(step, last)}`, signal));
    const url = await file(`${path}/films/${encodeURIComponent(name)}`, signal);
    return film(url, (step) => from + (Math.min(step, last) + 0.5) / fps, (s) => Math.floor((s - from) * fps), label);
  }));
  return episode(path, steps, joined(screens), signal);
}

// `secondOf` a step, `stepOf` a second of the film.
function film(url, secondOf, stepOf, label = "Video of the episode") {
  const video = h("video", { src: url, controls: true, muted: true, playsinline: true, "aria-label": label });
  const lost = h("p", { class: "muted", hidden: true }, "This browser does not play the video (H.264): the steps are below.");
  video.addEventListener("error", () => { video.hidden = true; lost.hidden = false; });
  return {
    elements: [video, lost],
    seek(step) {
      video.pause();
      if (video.readyState >= ENOUGH) video.currentTime = secondOf(step, video);
      else video.addEventListener("loadeddata", () => { if (video.paused) video.currentTime = secondOf(step, video); }, { once: true });
    },
    follow(show) {
      video.addEventListener("timeupdate", () => { if (!video.paused || video.ended) show(stepOf(video.currentTime, video), () => video.pause()); });
    },
    end() { video.src = ""; },
  };
}

// A picture a step: the newest that was asked for comes next.
function pictures(label, fetched) {
  const shown = h("img", { alt: label });
  let wanted = null;
  let busy = false;
  async function turn() {
    busy = true;
    while (wanted !== null) {
      const step = wanted;
      wanted = null;
      const url = await fetched(step).catch(() => "");
      if (url) shown.src = url;
    }
    busy = false;
  }
  return { elements: [shown], seek(step) { wanted = step; if (!busy) turn(); }, follow() {}, end() { wanted = null; } };
}

function joined(screens) {
  return {
    elements: screens.flatMap((each) => each.elements),
    seek: (step) => screens.forEach((each) => each.seek(step)),
    follow: (show) => screens.forEach((each) => each.follow(show)),
    end: () => screens.forEach((each) => each.end()),
  };
}

async function watch(button, path, signal, make = (place) => opened(place, signal)) {
  const panel = button.closest("section");
  const shown = panel.querySelector(".episode");
  shown?.end();
  if (shown?.path === path) return;
  button.disabled = true;
  try {
    panel.append(await make(path));
  } catch (error) {
    if (signal.aborted) return;
    panel.append(h("p", { class: "episode reason bad", role: "alert" }, error.message));
    panel.lastChild.end = () => panel.lastChild.remove();
  } finally {
    button.disabled = false;
  }
}

// `screen` shows a step: a film, or pictures.
function episode(path, steps, screen, signal) {
  const last = steps.actions.length;
  const over = new AbortController();
  signal.addEventListener("abort", () => over.abort());
  const slider = h("input", { type: "range", min: 0, max: last, value: 0 });
  const says = h("p", { class: "says", "aria-live": "polite" });
  const size = Math.min(steps.actions[0]?.length ?? 0, MOST_NUMBERS);
  const look = { label: "step", smoothing: 0, log: false, marked: "shown is step" };
  const actions = new Chart(size < (steps.actions[0]?.length ?? 0) ? `Actions (the first ${size} numbers)` : "Actions", Array.from({ length: size }, (_, index) => ({ label: `${index}` })), { look, signal: over.signal });
  const valued = steps.values ? [{ label: "value", right: true, points: true }] : [];
  const earned = steps.rewards.length > 0;
  const rewards = new Chart("Rewards", [{ label: "reward" }, { label: "return", right: true }, ...valued], { look, signal: over.signal });
  const returns = steps.rewards.reduce((sums, reward) => [...sums, reward + (sums.at(-1) ?? 0)], []);
  const chunked = steps.chunk_starts.length < last;
  const xs = Array.from({ length: last + 1 }, (_, index) => index);
  const behind = (values) => [null, ...values]; // What action k led to stands at step k + 1.
  const values = xs.map(() => null);
  steps.values?.forEach((value, chunk) => { values[steps.chunk_starts[chunk]] = value; });

  function show(step) {
    slider.value = step;
    const chunk = steps.chunk_starts.findLastIndex((start) => start <= step);
    const now = step < last ? `action ${steps.actions[step].map((value) => number(value)).join(", ")}` : steps.truncated ? "cut by the limit of steps" : "the end";
    const got = step && earned ? `reward ${number(steps.rewards[step - 1])}, return ${number(returns[step - 1])}${steps.successes[step - 1] ? ", success" : ""}` : step ? "" : "the start";
    says.textContent = `Step ${step} of ${last}, ${chunked ? `chunk ${chunk + 1}: ` : ""}${[got, now].filter(Boolean).join("; ")}`;
    actions.set(xs, Array.from({ length: size }, (_, index) => [...steps.actions.map((action) => action[index]), null]), [step]);
    if (earned) rewards.set(xs, [behind(steps.rewards), behind(returns), ...(steps.values ? [values] : [])], [step]);
  }

  function seek(step) {
    screen.seek(step);
    show(step);
  }

  screen.follow((step, stop) => {
    if (step > last) stop();
    show(Math.max(0, Math.min(last, step)));
  });
  slider.addEventListener("input", () => seek(Number(slider.value)));
  for (const { plot } of [actions, rewards]) plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) seek(plot.cursor.idx); });
  const element = h("div", { class: "episode" }, h("div", { class: "film" }, screen.elements, h("label", { class: "row" }, `Step, of ${plural(last, "action")}`, slider), says), h("div", { class: "charts one" }, actions.element, earned && rewards.element));
  element.path = path;
  element.end = () => { over.abort(); screen.end(); element.remove(); };
  seek(0);
  return element;
}
