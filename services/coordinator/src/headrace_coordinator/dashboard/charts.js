// Plots: uPlot with this page's colours, and sparklines as SVG. Knows no run.

import { h, svg } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 190;
const charts = new Set();
const root = document.documentElement;

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

export function seriesColour(index) {
  return `--c${(index % 8) + 1}`;
}

export function redrawCharts() {
  for (const chart of charts) chart.plot.redraw(false, true);
}

const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0) for (const chart of charts) if (chart.frame === entry.target) chart.plot.setSize({ width, height: HEIGHT });
  }
});

// A panel with a plot over steps. `lines`: [{label, fill, points, band}]; `set(steps, columns)` gives it data.
export class Chart {
  constructor(title, lines, { stacked = false, signal } = {}) {
    this.title = title;
    this.lines = lines;
    this.stacked = stacked;
    this.frame = h("div", { class: "plot" });
    this.says = h("p", { class: "hidden" });
    this.element = h("section", { class: "panel chart" }, h("h3", {}, title), this.frame, this.says);
    this.plot = new window.uPlot(this.options(), [[], ...lines.map(() => [])], this.frame);
    charts.add(this);
    sizes.observe(this.frame);
    signal?.addEventListener("abort", () => { sizes.unobserve(this.frame); charts.delete(this); this.plot.destroy(); });
  }

  options() {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
    };
    const whole = (_, values) => values.map((value) => (Number.isInteger(value) ? value : ""));
    return {
      width: 320,
      height: HEIGHT,
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 } },
      legend: { live: true },
      hooks: { setCursor: [(plot) => this.idle(plot)] },
      padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...axis, values: whole, space: 50, size: 30 }, { ...axis, size: 56, space: 28, values: (_, values) => values.map((v) => number(v)) }],
      series: [{ label: "step" }, ...this.lines.map((line, index) => this.series(line, index))],
      bands: this.bands(),
    };
  }

  series(line, index) {
    const name = line.colour ?? seriesColour(index);
    return {
      label: line.label,
      stroke: () => colour(name),
      width: line.faint ? 0.5 : 1.75,
      fill: this.stacked ? () => `${colour(name)}55` : undefined,
      points: { show: line.points ?? ((plot) => plot.data[0].length < 3), size: 6 },
      spanGaps: true,
      value: (plot, value, serie, point) => (point === null ? "–" : number(this.columns?.[serie - 1]?.[point])),
    };
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.stacked) return [0, high > 0 ? high * 1.05 : 1];
    // uPlot cannot divide an axis whose ends are equal to it: as far apart as rounding, or next to nothing.
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (size < 1e-9) return low < 0 ? [-1, 1] : [0, 1];
    if (high - low < 1e-5 * size) return [low - size / 2, high + size / 2];
    return window.uPlot.rangeNum(low, high, 0.08, true);
  }

  // The legend shows the newest values while nothing is pointed at.
  idle(plot) {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  }

  bands() {
    if (this.stacked) return this.lines.slice(1).map((_, index) => ({ series: [index + 2, index + 1] }));
    const edge = this.lines.findIndex((line) => line.band);
    return edge < 0 ? [] : [{ series: [edge + 1, edge + 2], fill: () => `${colour(this.lines[edge].colour)}22` }];
  }

  set(steps, columns) {
    this.columns = columns;
    this.plot.setData([steps, ...(this.stacked ? stack(columns) : columns)]);
    this.idle(this.plot);
    const last = this.lines.map((line, index) => `${line.label} ${number(newest(columns[index]))}`);
    this.says.textContent = `${this.title} at step ${steps.at(-1) ?? "–"}: ${last.join(", ")}`;
  }
}

export function newest(column) {
  return column.findLast((value) => value !== null);
}

function stack(columns) {
  const sums = columns[0]?.map(() => 0) ?? [];
  return columns.map((column) => column.map((value, index) => (sums[index] += value ?? 0)));
}

// A small line of values without axes.
export function sparkline(values, label) {
  const known = values.filter((value) => value !== null);
  const picture = svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label });
  if (known.length < 2) return picture;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = values.map((value, index) => value === null ? null
    : `${((index / (values.length - 1)) * 100).toFixed(1)},${(22 - ((value - low) / span) * 20).toFixed(1)}`);
  picture.append(svg("polyline", { points: points.filter(Boolean).join(" ") }));
  return picture;
}

// Values as coloured cells: low ones warm, high ones cold; `say(index)` tells what is under the pointer.
export function strip(values, label, say) {
  const CELL = 7;
  const canvas = h("canvas", { class: "strip", role: "img", "aria-label": label });
  const draw = () => {
    const across = Math.max(1, Math.floor((canvas.parentElement?.clientWidth || 300) / CELL));
    const scale = window.devicePixelRatio || 1;
    const rows = Math.ceil(values.length / across);
    canvas.width = across * CELL * scale;
    canvas.height = rows * 14 * scale;
    canvas.style.width = `${across * CELL}px`;
    canvas.style.height = `${rows * 14}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    values.forEach((value, index) => {
      pen.fillStyle = value === null ? "#888" : `hsl(${Math.max(0, 200 + 45 * Math.max(value, -4.4))} 70% 50%)`;
      pen.fillRect((index % across) * CELL, Math.floor(index / across) * 14, CELL - 1, 12);
    });
    canvas.onpointermove = (event) => {
      const index = Math.floor(event.offsetY / 14) * across + Math.floor(event.offsetX / CELL);
      if (index < values.length) say(index);
    };
  };
  new ResizeObserver(draw).observe(canvas);
  requestAnimationFrame(draw);
  return canvas;
}
