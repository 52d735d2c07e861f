// A run's timeline: a lane for each device, who held it above, what was done there below, coloured by stage.

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { empty, h, table } from "../dom.js";
import { clock, duration, number, plural } from "../format.js";
import { Lanes } from "../lanes.js";

const COLOURS = { generate: "--c1", learn: "--c2", evaluate: "--c3", sync: "--c4", score: "--c6", checkpoint: "--c7", switch: "--c8", prefill: "--c5", simulate: "--c9" };
const COUNTS = [5, 20, 50, 200];
const MOST_DEVICES = 8;
const NOWHERE = "no device";

export async function timeline(root, context) {
  const told = h("p", { class: "muted told", role: "status" });
  const lanes = new Lanes("Devices over time. Left and Right go from span to span, Up and Down from device to device, plus and minus zoom, Home shows all.", (text) => { told.textContent = text; }, context.signal);
  const count = h("select", { id: "steps", onchange: () => load() }, COUNTS.map((each) => h("option", { value: each }, `${each} steps`)));
  count.value = innerWidth < 720 ? "5" : "20"; // as many as can be told apart
  const button = (text, onclick) => h("button", { type: "button", onclick }, text);
  const older = button("Older steps", () => { before = shown.parts[0]?.start ?? null; load(); });
  const newest = button("Newest steps", () => { before = null; load(); });
  const about = h("p", { class: "muted" });
  const legend = h("ul", { class: "legend" });
  const busy = h("div", { class: "charts one" });
  const sums = h("details", { class: "sums" }, h("summary", {}, "As a table"));
  const nothing = empty("Nobody has held a device for this run yet. Its lanes appear with the first lease.");
  const panel = h("section", { class: "panel" }, about,
    h("div", { class: "row" }, h("span", { class: "pair" }, h("label", { for: "steps" }, "Show"), count), older, newest,
      button("Zoom in", () => lanes.zoom(2)), button("Zoom out", () => lanes.zoom(0.5)), button("Earlier", () => lanes.move(-0.5)), button("Later", () => lanes.move(0.5)), button("All", () => lanes.all())),
    legend, lanes.element, told, busy, sums);
  panel.hidden = nothing.hidden = true; // Until it is known which: what stands below must not move under a click.
  root.append(panel, nothing);
  let before = null;
  let shown = { parts: [], work: [], holds: [] };

  async function load() {
    shown = await get(`${context.path}/timeline`, context.signal, { steps: count.value, before });
    const { rewinds } = await get(`${context.path}/curves`, context.signal, { points: 2 });
    const start = shown.parts[0]?.start ?? shown.holds[0]?.start ?? 0;
    const end = before === null ? Math.max(shown.parts.at(-1)?.end ?? 0, shown.holds.some((each) => each.end === null) ? Date.now() / 1000 : 0, start + 0.1) : shown.parts.at(-1)?.end ?? start + 0.1;
    const found = lanesOf(shown, start, end);
    panel.hidden = !found.length;
    nothing.hidden = Boolean(found.length);
    if (!found.length) return;
    const steps = shown.parts.filter((part) => part.kind === "step");
    about.textContent = `${steps.length ? `Steps ${steps[0].step} to ${steps.at(-1).step}, ` : ""}${duration(end - start)} from ${clock(start)}. Above in each lane: who holds the device; below: what is done there.${waits(shown.tail)}${recovered(rewinds.filter((each) => each.time >= start && each.time <= end))}`;
    older.disabled = !shown.older;
    newest.disabled = before === null;
    const stages = [...new Set(found.flatMap((lane) => [...lane.holds, ...lane.work].map((span) => span.stage)))].sort();
    legend.replaceChildren(...stages.map((stage) => h("li", {}, h("i", { vars: { "--mark": `var(${colourOf(stage)})` } }), stage)));
    sums.replaceChildren(sums.firstChild, table("Seconds by device and stage", ["Device", "Held by", ...stages, "At work"], rows(found, stages, start, end))[0]);
    utilisation(steps, found.filter((lane) => lane.device !== NOWHERE).slice(0, MOST_DEVICES));
    lanes.set(found, start, end, steps.map((part) => ({ at: part.start, label: `${part.step}` })), rewinds.map((each) => ({ at: each.time })));
  }

  let chart = null;
  // How much of each step each device worked.
  function utilisation(steps, found) {
    const names = found.map((lane) => lane.name).join();
    if (!chart || chart.names !== names) {
      chart?.end();
      chart = steps.length && found.length ? new Chart("Utilisation: share of each step in which a device works, %", found.map((lane) => ({ label: lane.name })), { signal: context.signal }) : null;
      if (chart) chart.names = names;
      busy.replaceChildren(...(chart ? [chart.element] : []));
    }
    const share = (lane, { start, end }) => 100 * covered(lane.work.filter((span) => span.end > start && span.start < end).map((span) => ({ start: Math.max(span.start, start), end: Math.min(span.end, end) }))) / (end - start);
    chart?.set(steps.map((part) => part.step), found.map((lane) => steps.map((part) => (part.end > part.start ? share(lane, part) : null))));
  }

  let asked = false;
  context.onEvent((event) => {
    if (asked || before !== null || !["step_committed", "evaluated", "run_released", "run_state_changed"].includes(event.type)) return;
    asked = true;
    setTimeout(() => { asked = false; if (!context.signal.aborted) load().catch(() => {}); }, 1000); // The next event asks again.
  });
  await load();
  const { events } = await get(`${context.path}/newest-events`, context.signal, { page_size: 1 });
  await context.follow(events[0]?.id ?? 0);
}

// How often the trainer waited for the longest answers of its step, and what would end that.
function waits(tail) {
  if (!tail?.waited) return "";
  const ends = tail.enough === null ? "no algorithm.max_staleness up to 16" : `an algorithm.max_staleness of about ${tail.enough}`;
  return ` The trainer waited for a tail in ${tail.waited} of ${plural(tail.steps, "step")}, at most ${duration(tail.longest_s)}; ${ends} would end that (now ${tail.max_staleness}).`;
}

function recovered(rewinds) {
  return rewinds.length ? ` ${plural(rewinds.length, "recovery").replace("recoverys", "recoveries")} (dashed): ${rewinds.map((each) => `back to step ${each.step} at ${clock(each.time)}`).join(", ")}.` : "";
}

function colourOf(stage) {
  return COLOURS[stage] ?? "--muted";
}

function lanesOf(shown, start, end) {
  const lanes = new Map();
  const hosts = new Set([...shown.holds, ...shown.work].flatMap((each) => each.devices).map((device) => device.slice(0, device.lastIndexOf("/"))));
  const lane = (device) => {
    if (!lanes.has(device)) lanes.set(device, { device, name: device === NOWHERE ? NOWHERE : hosts.size > 1 ? device.slice(-24) : device.slice(device.lastIndexOf("/") + 1), holds: [], work: [] });
    return lanes.get(device);
  };
  for (const each of shown.holds) {
    const until = each.end ?? end;
    const text = `${each.instance} held ${each.devices.length > 1 ? `${each.devices.length} devices` : "it"} to ${each.stage} for ${duration(until - each.start)}, lease ${each.epoch}${each.end === null ? ", and still does" : `: ${each.cause}`}`;
    for (const device of each.devices) put(lane(device).holds, each, until, each.instance, text);
  }
  for (const each of shown.work) {
    const text = `${each.stage}, step ${each.step}: ${duration(each.end - each.start)}, ${duration(each.start - start)} after the beginning`;
    for (const device of each.devices.length ? each.devices : [NOWHERE]) put(lane(device).work, each, each.end, `${each.stage} ${each.step}`, text);
  }
  const last = (name) => (name === NOWHERE ? 1 : 0);
  return [...lanes.values()].sort((a, b) => last(a.device) - last(b.device) || a.device.localeCompare(b.device, "en", { numeric: true }))
    .map((each) => ({ ...each, ...named(each) }));

  function put(list, each, until, label, text) {
    list.push({ start: Math.max(each.start, start), end: Math.min(until, end), stage: each.stage, colour: colourOf(each.stage), label, text, holder: each.instance });
  }
  function named(each) {
    const say = (span) => ({ ...span, text: `${each.name}: ${span.text}` });
    return { holds: each.holds.map(say), work: each.work.map(say) };
  }
}

// Length of the union of spans, in seconds.
function covered(spans) {
  let total = 0;
  let end = -Infinity;
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    total += Math.max(0, span.end - Math.max(span.start, end));
    end = Math.max(end, span.end);
  }
  return total;
}

function rows(found, stages, start, end) {
  return found.map((lane) => {
    const holders = [...new Set(lane.holds.map((span) => span.holder))];
    const held = holders.map((name) => `${name} ${duration(covered(lane.holds.filter((span) => span.holder === name)))}`);
    return h("tr", {}, h("th", { scope: "row" }, lane.name), h("td", {}, held.slice(0, 4).join(", ") + (held.length > 4 ? ` and ${plural(held.length - 4, "other")}` : "") || "–"),
      stages.map((stage) => h("td", {}, number(covered(lane.work.filter((span) => span.stage === stage)), 1))),
      h("td", {}, `${number((100 * covered(lane.work)) / (end - start), 0)}%`));
  });
}
