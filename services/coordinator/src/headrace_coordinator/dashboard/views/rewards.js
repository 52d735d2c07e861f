// How rewards are spread, by step: a column for each step, darker where more of its trajectories lie.

import { get } from "../api.js";
import { h } from "../dom.js";
import { number, plural } from "../format.js";

const ROW = 9;

export async function rewards(context, open) {
  const found = await get(`${context.path}/rewards`, context.signal);
  if (found.steps.length < 2) return null;
  const { steps, edges, counts } = found;
  const bins = edges.length - 1;
  const told = h("p", { class: "muted told", role: "status" }, `Rewards from ${number(edges[0])} below to ${number(edges[bins])} above, steps ${steps[0]} to ${steps.at(-1)}.`);
  const canvas = h("canvas", {
    class: "heat", height: bins * ROW, role: "img", "aria-label": `Histogram of rewards by step: ${steps.map((step, index) => `step ${step} ${counts[index].join(" ")}`).slice(-3).join("; ")}`,
    onpointermove: (event) => say(...under(event)), onclick: (event) => open(steps[under(event)[0]]),
  });

  function under(event) {
    const column = Math.floor((event.offsetX / canvas.clientWidth) * steps.length);
    const row = Math.floor((event.offsetY / canvas.clientHeight) * bins);
    return [Math.min(Math.max(column, 0), steps.length - 1), Math.min(Math.max(bins - 1 - row, 0), bins - 1)];
  }

  function say(column, bin) {
    told.textContent = `Step ${steps[column]}: ${plural(counts[column][bin], "trajectory").replace("trajectorys", "trajectories")} with a reward from ${number(edges[bin])} to ${number(edges[bin + 1])}. A click shows the step.`;
  }

  function draw() {
    canvas.width = canvas.clientWidth || 600;
    const pen = canvas.getContext("2d");
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--c1").trim();
    const width = canvas.width / steps.length;
    counts.forEach((column, index) => {
      const most = Math.max(...column, 1);
      column.forEach((count, bin) => {
        pen.globalAlpha = count / most;
        pen.fillRect(index * width, (bins - 1 - bin) * ROW, Math.max(width - 1, 1), ROW - 1);
      });
    });
  }
  const sizes = new ResizeObserver(draw);
  sizes.observe(canvas);
  context.signal.addEventListener("abort", () => sizes.disconnect());
  return h("section", { class: "panel" }, h("h2", {}, "Rewards by step"), canvas, told);
}
