// Plots: uPlot with this page's colours, and sparklines as SVG. Knows no run.

import { h, svg } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 150;
const charts = new Set();
const root = document.documentElement;
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

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

// A panel with a plot. `lines`: [{label, colour, points, faint, band, dash, right}], those with `right` on an axis of
// their own; `look`: {label of x, smoothing from 0 to 1, log, what is `marked`}. `set(xs, columns, marks)` gives it data, and places on x
// to mark.
export class Chart {
  constructor(title, lines, { look = { label: "step", smoothing: 0, log: false }, signal } = {}) {
    this.title = title;
    this.lines = lines;
    this.look = look;
    this.marks = [];
    this.frame = h("div", { class: "plot" });
    this.says = h("p", { class: "hidden" });
    const take = (kind, save) => h("button", { type: "button", class: "quiet", "aria-label": `${title} as ${kind}`, onclick: save }, kind);
    this.element = h("section", { class: "panel chart" },
      h("div", { class: "chart-head" }, h("h3", {}, title), h("span", { class: "takes" }, take("CSV", () => this.saveTable()), take("PNG", () => this.savePicture()))),
      this.frame, this.says);
    this.plot = new window.uPlot(this.options(), [[], ...lines.map(() => [])], this.frame);
    charts.add(this);
    sizes.observe(this.frame);
    signal?.addEventListener("abort", () => this.end());
  }

  end() {
    if (!charts.delete(this)) return;
    sizes.unobserve(this.frame);
    this.plot.destroy();
  }

  options() {
    const axis = {
      stroke: () => colour("--muted"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1, size: 4 },
      font: "12px system-ui, sans-serif",
    };
    const steps = (values) => values.map((value) => (Number.isInteger(value) ? value : ""));
    const along = (_, values) => (this.look.label === "step" ? steps(values) : values.map((value) => short.format(value)));
    const height = { ...axis, size: 56, space: 28, values: (_, values) => values.map((value) => (value === null ? "" : number(value))) };
    const scale = { distr: this.look.log ? 3 : 1, range: (_, low, high) => this.range(low, high) };
    const right = this.lines.some((line) => line.right);
    return {
      width: 320,
      height: HEIGHT,
      cursor: { sync: { key: `by ${this.look.label}` }, drag: { x: true, y: false }, points: { size: 6 } },
      legend: { live: true },
      hooks: { setCursor: [(plot) => this.idle(plot)], draw: [(plot) => this.under(plot)] },
      padding: [8, 12, 0, 0],
      scales: { x: { time: false }, y: scale, ...(right ? { right: scale } : {}) },
      axes: [{ ...axis, values: along, space: 50, size: 30 }, height, ...(right ? [{ ...height, scale: "right", side: 1, grid: { show: false } }] : [])],
      series: [{ label: this.look.label, value: (_, value) => (value === null ? "–" : short.format(value)) }, ...this.lines.map((line, index) => this.series(line, index))],
      bands: this.bands(),
    };
  }

  // What is drawn, before smoothing: a line for each place on x.
  saveTable() {
    const rows = [[this.look.label, ...this.lines.map((line) => line.label)], ...this.plot.data[0].map((x, at) => [x, ...this.columns.map((column) => column[at])])];
    save(new Blob([tableText(rows)], { type: "text/csv" }), `${this.title}.csv`);
  }

  // The plot on the page's ground, with its title and the names of its curves.
  savePicture() {
    const drawn = this.plot.ctx.canvas;
    const scale = window.devicePixelRatio || 1;
    const [head, foot] = [26 * scale, 22 * scale];
    const canvas = h("canvas", { width: drawn.width, height: drawn.height + head + foot });
    const pen = canvas.getContext("2d");
    pen.fillStyle = colour("--panel");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(drawn, 0, head);
    pen.textBaseline = "middle";
    const write = (text, x, y, style, weight = "") => {
      pen.font = `${weight} ${12 * scale}px system-ui, sans-serif`;
      pen.fillStyle = colour(style);
      pen.fillText(text, x, y);
      return pen.measureText(text).width;
    };
    write(this.title, 8 * scale, head / 2, "--text", "600");
    let x = 8 * scale;
    this.lines.forEach((line, index) => { x += write(line.label, x, head + drawn.height + foot / 2, line.colour ?? seriesColour(index)) + 14 * scale; });
    canvas.toBlob((blob) => save(blob, `${this.title}.png`));
  }

  series(line, index) {
    const name = line.colour ?? seriesColour(index);
    return {
      label: line.label,
      scale: line.right ? "right" : "y",
      stroke: () => colour(name),
      width: line.faint ? 0.5 : 1.75,
      dash: line.dash,
      points: { show: line.points ?? ((plot) => plot.data[0].length < 3), size: 6 },
      spanGaps: true,
      value: (plot, value, serie, point) => (point === null ? "–" : number(this.columns?.[serie - 1]?.[point])),
    };
  }

  range(low, high) {
    if (this.look.log) return low > 0 ? window.uPlot.rangeLog(low, high, 10, false) : [0.1, 1];
    if (low === null || high === null) return [0, 1];
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

  // What is drawn beside the curves: recoveries, and the measured values of curves that are smoothed.
  under(plot) {
    const { ctx: pen, bbox: { left, top, width, height } } = plot;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    pen.strokeStyle = colour("--warn");
    pen.lineWidth = window.devicePixelRatio;
    pen.setLineDash([4, 4]);
    pen.beginPath();
    for (const mark of this.marks) {
      const at = Math.round(plot.valToPos(mark, "x", true));
      pen.moveTo(at, top);
      pen.lineTo(at, top + height);
    }
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 0.3;
    if (this.look.smoothing) this.lines.forEach((line, index) => this.raw(plot, pen, line, index));
    pen.restore();
  }

  raw(plot, pen, line, index) {
    if (line.points === true || !plot.series[index + 1].show) return;
    pen.strokeStyle = colour(line.colour ?? seriesColour(index));
    pen.beginPath();
    shown(this.columns[index], this.look.log).forEach((value, point) => {
      if (value !== null) pen.lineTo(plot.valToPos(plot.data[0][point], "x", true), plot.valToPos(value, line.right ? "right" : "y", true));
    });
    pen.stroke();
  }

  bands() {
    const edge = this.lines.findIndex((line) => line.band);
    return edge < 0 ? [] : [{ series: [edge + 1, edge + 2], fill: () => `${colour(this.lines[edge].colour)}22` }];
  }

  set(xs, columns, marks = []) {
    this.columns = columns;
    this.marks = marks;
    // Few points, such as scores, are shown as they are.
    const smooth = (column, index) => (this.lines[index].points === true ? column : smoothed(column, this.look.smoothing));
    this.plot.setData([xs, ...columns.map((column, index) => shown(smooth(column, index), this.look.log))]);
    this.idle(this.plot);
    const last = this.lines.map((line, index) => `${line.label} ${number(newest(columns[index]))}`);
    const marked = marks.length ? `; ${this.look.marked ?? "recoveries at"} ${marks.map((mark) => number(mark)).join(", ")}` : "";
    this.says.textContent = `${this.title} at ${this.look.label} ${xs.at(-1) ?? "–"}: ${last.join(", ")}${marked}`;
  }
}

// Rows as RFC 4180 has them.
export function tableText(rows) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function newest(column) {
  return column.findLast((value) => value !== null);
}

// A mean that forgets: each value weighs `by` of the one after it. The first ones are not drawn to zero.
export function smoothed(column, by) {
  if (!by) return column;
  let mean = 0;
  let weight = 0;
  return column.map((value) => {
    if (value === null) return null;
    mean = by * mean + (1 - by) * value;
    weight = by * weight + (1 - by);
    return mean / weight;
  });
}

// A logarithmic axis has no place for what is not above 0.
function shown(column, log) {
  return log ? column.map((value) => (value > 0 ? value : null)) : column;
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
