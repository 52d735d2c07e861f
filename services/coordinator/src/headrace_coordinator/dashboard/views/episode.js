// A recorded episode: its frames, actions and rewards on one time line, which a slider, the video and the plots move.

import { file, get } from "../api.js";
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
  const row = (each) => h("tr", {}, trained && h("td", {}, `${each.step}`), h("td", {}, `${each.item}`), h("td", {}, `${each.sample}`), h("td", {}, each.success ? "yes" : "no"), h("td", {}, bytes(each.size_bytes)),
    h("td", {}, h("button", { type: "button", "aria-label": `Watch ${trained ? `step ${each.step}, ` : ""}item ${each.item}, sample ${each.sample}`, onclick: (event) => watch(event.currentTarget, `${path}/videos/${encodeURIComponent(each.name)}`, signal) }, "Watch")));
  const [list, body] = table("Videos", [...(trained ? ["Step"] : []), "Item", "Sample", "Success", "Size", ""]);
  const failures = h("input", { type: "checkbox", id: "failures-first", onchange: () => fill() });
  // Those that failed first, else as they were made.
  const fill = () => body.replaceChildren(...(failures.checked ? videos.toSorted((a, b) => a.success - b.success) : videos).map(row));
  failures.checked = true;
  fill();
  const failed = videos.filter((each) => !each.success).length;
  return [h("section", { class: "panel" }, h("h2", {}, "Videos"), ...above, h("div", { class: "row" }, h("span", { class: "muted" }, `${plural(videos.length, "episode")}, ${failed} without success`), h("label", { for: "failures-first" }, failures, " failures first")), list)];
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
  return episode(path, steps, url, signal);
}

// Shows the episode below the table that the button is in; at another press, hides it.
async function watch(button, path, signal) {
  const panel = button.closest("section");
  const shown = panel.querySelector(".episode");
  shown?.end();
  if (shown?.path === path) return;
  button.disabled = true;
  try {
    panel.append(await opened(path, signal));
  } catch (error) {
    if (signal.aborted) return;
    panel.append(h("p", { class: "episode reason bad", role: "alert" }, error.message));
    panel.lastChild.end = () => panel.lastChild.remove();
  } finally {
    button.disabled = false;
  }
}

function episode(path, steps, url, signal) {
  const last = steps.actions.length; // The frame behind the last action.
  const over = new AbortController();
  signal.addEventListener("abort", () => over.abort());
  const video = h("video", { src: url, controls: true, muted: true, playsinline: true, "aria-label": "Video of the episode" });
  const slider = h("input", { type: "range", min: 0, max: last, value: 0 });
  const says = h("p", { class: "says", "aria-live": "polite" });
  const lost = h("p", { class: "muted", hidden: true }, "This browser does not play the video (H.264): the steps are below.");
  const size = Math.min(steps.actions[0]?.length ?? 0, MOST_NUMBERS);
  const look = { label: "step", smoothing: 0, log: false, marked: "shown is step" };
  const actions = new Chart(size < (steps.actions[0]?.length ?? 0) ? `Actions (the first ${size} numbers)` : "Actions", Array.from({ length: size }, (_, index) => ({ label: `${index}` })), { look, signal: over.signal });
  const valued = steps.values ? [{ label: "value", right: true, points: true }] : [];
  const rewards = new Chart("Rewards", [{ label: "reward" }, { label: "return", right: true }, ...valued], { look, signal: over.signal });
  const returns = steps.rewards.reduce((sums, reward) => [...sums, reward + (sums.at(-1) ?? 0)], []);
  const xs = Array.from({ length: last + 1 }, (_, index) => index);
  const behind = (values) => [null, ...values]; // What action k led to stands at step k + 1.
  const values = xs.map(() => null);
  steps.values?.forEach((value, chunk) => { values[steps.chunk_starts[chunk]] = value; });

  function show(step) {
    slider.value = step;
    const chunk = steps.chunk_starts.findLastIndex((start) => start <= step);
    const now = step < last ? `action ${steps.actions[step].map((value) => number(value)).join(", ")}` : steps.truncated ? "cut by the limit of steps" : "the end";
    const got = step ? `reward ${number(steps.rewards[step - 1])}, return ${number(returns[step - 1])}${steps.successes[step - 1] ? ", success" : ""}` : "the start";
    says.textContent = `Step ${step} of ${last}, chunk ${chunk + 1}: ${got}; ${now}`;
    actions.set(xs, Array.from({ length: size }, (_, index) => [...steps.actions.map((action) => action[index]), null]), [step]);
    rewards.set(xs, [behind(steps.rewards), behind(returns), ...(steps.values ? [values] : [])], [step]);
  }

  function seek(step) {
    video.pause();
    if (video.readyState >= ENOUGH) video.currentTime = ((step + 0.5) / (last + 1)) * video.duration;
    show(step);
  }

  // The video has a frame of the start and one behind each action.
  video.addEventListener("timeupdate", () => {
    if (!video.paused || video.ended) show(Math.min(last, Math.floor((video.currentTime / video.duration) * (last + 1))));
  });
  video.addEventListener("error", () => { video.hidden = true; lost.hidden = false; });
  slider.addEventListener("input", () => seek(Number(slider.value)));
  for (const { plot } of [actions, rewards]) plot.over.addEventListener("click", () => { if (plot.cursor.idx !== null) seek(plot.cursor.idx); });
  const element = h("div", { class: "episode" }, h("div", { class: "film" }, video, lost, h("label", { class: "row" }, `Step, of ${plural(last, "action")}`, slider), says), h("div", { class: "charts one" }, actions.element, rewards.element));
  element.path = path;
  element.end = () => { over.abort(); video.src = ""; element.remove(); };
  show(0);
  return element;
}
