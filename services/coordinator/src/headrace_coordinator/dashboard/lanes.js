// Spans of time on lanes, drawn on a canvas: zoomed, moved, and walked through with the keyboard. Knows no run.

import { h } from "./dom.js";

const ROW = { name: 15, hold: 13, work: 20, gap: 10 };
const LANE = ROW.name + ROW.hold + ROW.work + ROW.gap;
const AXIS = 22;
const SHORTEST_S = 0.01;
const TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// lanes: [{name, holds: [span], work: [span]}], a span: {start, end, colour, label, text}; times in seconds.
export class Lanes {
  constructor(label, say, signal) {
    this.say = say;
    this.lanes = [];
    this.steps = [];
    this.marks = [];
    this.low = this.high = this.start = this.end = 0;
    this.chosen = null;
    this.element = h("canvas", {
      class: "lanes", tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": label,
      onkeydown: (event) => this.key(event), onpointermove: (event) => this.point(event), onpointerdown: (event) => this.grab(event),
      onpointerup: () => { this.held = null; }, onwheel: (event) => this.wheel(event), onblur: () => this.draw(), onfocus: () => this.draw(),
    });
    const sizes = new ResizeObserver(() => this.draw());
    sizes.observe(this.element);
    const themes = new MutationObserver(() => this.draw());
    themes.observe(document.documentElement, { attributes: true });
    const system = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => this.draw();
    system.addEventListener("change", redraw);
    signal.addEventListener("abort", () => { sizes.disconnect(); themes.disconnect(); system.removeEventListener("change", redraw); });
  }

  // `steps`, `marks`: [{at, label}], the beginnings of steps and what happened between. Shows everything, unless the user has zoomed in to something that is still there.
  set(lanes, start, end, steps = [], marks = []) {
    const whole = this.low === this.start && this.high === this.end;
    Object.assign(this, { lanes, start, end, steps, marks });
    this.chosen = null;
    this.element.style.height = `${lanes.length * LANE + 2 * AXIS}px`;
    if (whole || this.high <= start || this.low >= end) this.all(); else this.draw();
  }

  all() {
    this.show(this.start, this.end);
  }

  zoom(factor, at = this.chosen ? (this.chosen.start + this.chosen.end) / 2 : (this.low + this.high) / 2) {
    this.show(at - (at - this.low) / factor, at + (this.high - at) / factor);
  }

  move(part) {
    const by = (this.high - this.low) * part;
    this.show(this.low + by, this.high + by);
  }

  show(low, high) {
    const size = Math.min(Math.max(high - low, SHORTEST_S), Math.max(this.end - this.start, SHORTEST_S));
    this.low = Math.min(Math.max(low, this.start), Math.max(this.end - size, this.start));
    this.high = this.low + size;
    this.draw();
  }

  key(event) {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (step) this.walk(...step);
    else if (event.key === "+" || event.key === "=") this.zoom(2);
    else if (event.key === "-") this.zoom(0.5);
    else if (event.key === "Home") this.all();
    else return;
    event.preventDefault();
  }

  // Chooses the next span of the lane, or the one of the next lane that is nearest in time.
  walk(down, right) {
    const lanes = this.lanes.map((lane) => [...lane.holds, ...lane.work].sort((a, b) => a.start - b.start));
    let at = lanes.findIndex((spans) => spans.includes(this.chosen));
    if (at < 0) this.chosen = lanes.flat()[0] ?? null;
    else if (right) {
      const spans = lanes[at];
      this.chosen = spans[Math.min(Math.max(spans.indexOf(this.chosen) + right, 0), spans.length - 1)];
    } else {
      at = Math.min(Math.max(at + down, 0), lanes.length - 1);
      const apart = (span) => Math.abs(span.start - this.chosen.start);
      this.chosen = lanes[at].reduce((best, span) => (best === null || apart(span) < apart(best) ? span : best), null) ?? this.chosen;
    }
    if (!this.chosen) return;
    this.say(this.chosen.text);
    const { start, end } = this.chosen;
    if (end < this.low || start > this.high) this.show(start - (this.high - this.low) / 2, start + (this.high - this.low) / 2);
    else this.draw();
  }

  grab(event) {
    this.held = { x: event.offsetX, low: this.low };
    this.element.setPointerCapture(event.pointerId);
  }

  point(event) {
    if (this.held && event.buttons) {
      const by = ((this.held.x - event.offsetX) / this.element.clientWidth) * (this.high - this.low);
      this.show(this.held.low + by, this.held.low + by + this.high - this.low);
      return;
    }
    const span = this.under(event.offsetX, event.offsetY);
    if (span) this.say(span.text);
  }

  // Only with Ctrl, as a map does: without it the wheel scrolls the page.
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.low + (event.offsetX / this.element.clientWidth) * (this.high - this.low));
  }

  under(x, y) {
    const lane = this.lanes[Math.floor((y - AXIS) / LANE)];
    if (!lane) return null;
    const within = ((y - AXIS) % LANE) - ROW.name;
    const spans = within < 0 ? [] : within < ROW.hold ? lane.holds : lane.work;
    const time = this.low + (x / this.element.clientWidth) * (this.high - this.low);
    const slack = (2 / this.element.clientWidth) * (this.high - this.low);
    return spans.findLast((span) => span.start - slack <= time && time <= span.end + slack) ?? null;
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || this.high <= this.low) return;
    const scale = window.devicePixelRatio || 1;
    this.element.width = Math.round(width * scale);
    this.element.height = Math.round(height * scale);
    const pen = this.element.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const x = (time) => ((time - this.low) / (this.high - this.low)) * width;
    this.ticks(pen, x, height);
    this.begins(pen, x, height);
    this.lanes.forEach((lane, index) => {
      const top = AXIS + index * LANE;
      pen.fillStyle = colour("--text");
      pen.fillText(lane.name, 2, top + ROW.name / 2);
      pen.fillStyle = colour("--soft");
      pen.fillRect(0, top + ROW.name, width, ROW.hold + ROW.work);
      for (const span of lane.holds) this.bar(pen, span, x, top + ROW.name, ROW.hold, true);
      for (const span of lane.work) this.bar(pen, span, x, top + ROW.name + ROW.hold, ROW.work, false);
    });
  }

  bar(pen, span, x, y, height, held) {
    const left = Math.max(x(span.start), -2);
    const right = Math.min(x(span.end), this.element.clientWidth + 2);
    if (right < 0 || left > this.element.clientWidth) return;
    const width = Math.max(right - left, 1);
    const fill = colour(span.colour);
    pen.globalAlpha = held ? 0.28 : 0.9;
    pen.fillStyle = fill;
    pen.fillRect(left, y + 1, width > 3 ? width - 0.5 : width, height - 2);
    pen.globalAlpha = 1;
    if (span === this.chosen && document.activeElement === this.element) {
      pen.strokeStyle = colour("--text");
      pen.lineWidth = 2;
      pen.strokeRect(left, y + 1, width, height - 2);
    }
    const room = Math.min(right, this.element.clientWidth) - Math.max(left, 0) - 8;
    const label = [span.label, span.label?.split(" ")[0]].find((each) => each && pen.measureText(each).width <= room);
    if (!label) return;
    pen.fillStyle = held ? colour("--text") : colour("--back");
    pen.fillText(label, Math.max(left, 0) + 4, y + height / 2 + 0.5);
  }

  // Numbers of the steps above the lanes, as many as have room; dashed lines where the run recovered.
  begins(pen, x, height) {
    let free = 0;
    for (const { at, label } of this.steps) {
      const place = x(at);
      if (at < this.low || at > this.high) continue;
      pen.fillStyle = colour("--line");
      pen.fillRect(Math.round(place), AXIS - 6, 1, height - 2 * AXIS + 6);
      if (place < free) continue;
      pen.fillStyle = colour("--muted");
      pen.fillText(label, place + 3, AXIS / 2);
      free = place + pen.measureText(label).width + 10;
    }
    pen.strokeStyle = colour("--warn");
    pen.setLineDash([5, 4]);
    for (const { at } of this.marks.filter((mark) => mark.at >= this.low && mark.at <= this.high)) {
      pen.beginPath();
      pen.moveTo(x(at), 0);
      pen.lineTo(x(at), height - AXIS);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  ticks(pen, x, height) {
    const span = this.high - this.low;
    const every = TICKS.find((tick) => (span / tick) * 76 <= this.element.clientWidth) ?? 86400 * Math.ceil(span / 86400 / 5);
    pen.strokeStyle = colour("--line");
    for (let at = Math.ceil((this.low - this.start) / every) * every; this.start + at <= this.high; at += every) {
      const place = Math.round(x(this.start + at)) + 0.5;
      pen.beginPath();
      pen.moveTo(place, 0);
      pen.lineTo(place, height - AXIS + 4);
      pen.stroke();
      pen.fillStyle = colour("--muted");
      pen.fillText(sinceStart(at, every), Math.min(place + 2, this.element.clientWidth - 44), height - AXIS / 2 + 2);
    }
  }
}

function sinceStart(seconds, every) {
  if (every < 1) return `${seconds.toFixed(2)} s`;
  if (seconds < 60 && every < 60) return `${Math.round(seconds)} s`;
  const two = (value) => String(value).padStart(2, "0");
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60) % 60;
  return whole >= 3600 ? `${Math.floor(whole / 3600)}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
