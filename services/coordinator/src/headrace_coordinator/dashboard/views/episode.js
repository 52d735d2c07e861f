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
  return [h("section", { class: "panel" }, h("h2", {}, "Videos"), ...above, table("Videos", [...(trained ? ["Step"] : []), "Item", "Sample", "Success", "Size", ""], videos.map(row))[0])];
}

// Shows the episode below the table that the button is in; at another press, hides it.
async function watch(button, path, signal) {
  const panel = button.closest("section");
  const shown = panel.querySelector(".episode");
  shown?.end();
  if (shown?.path === path) return;
  button.disabled = true;
  try {
    const [steps, url] = await Promise.all([get(`${path}/steps`, signal), file(path, signal)]);
    panel.append(episode(path, steps, url, signal));
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
