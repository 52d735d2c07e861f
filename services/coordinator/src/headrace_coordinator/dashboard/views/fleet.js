// The fleet: instances, leases, devices by host, how many processes of each service; the coordinator's health.

import { get, health, pages, post, Refusal, repeat } from "../api.js";
import { chip, confirmed, empty, h, keyed, table } from "../dom.js";
import { bytes, clock, duration, plural } from "../format.js";

const KINDS = ["rollout", "trainer", "reward", "simulator"];

export async function show(root, place, signal) {
  const well = h("p", { class: "muted", role: "status" });
  const [instances, instanceRows] = table("Instances", ["Instance", "State", "Drain", "Run", "Devices", "Memory", "Busy", "Host", "Address"]);
  const [leases, leaseRows] = table("Leases", ["Epoch", "State", "Instance", "Run", "Stage", "Devices", "Expires in"]);
  const [used, usedRows] = table("Usage", ["Whose", "Runs", "Queued", "Devices", "Device-hours, 30 days", "Disk, GB", "Streams"]);
  const hosts = h("div");
  const noInstances = empty("No instance is registered. Start a fleet with ", h("code", {}, "headrace up"), ".");
  const noLeases = empty("Nobody holds a device.");
  const scale = h("div", { class: "row scale" });
  const said = h("p", { role: "status" });
  const logs = logPanel(signal);
  root.append(h("div", { class: "row head" }, h("h1", {}, "Fleet")), well,
    h("section", { class: "panel" }, h("h2", {}, "Services"), scale, said),
    h("section", { class: "panel" }, h("h2", {}, "Instances"), instances, noInstances),
    h("section", { class: "panel" }, h("h2", {}, "Devices"), hosts),
    h("section", { class: "panel" }, h("h2", {}, "Leases"), leases, noLeases),
    h("section", { class: "panel" }, h("h2", {}, "Usage"), used), logs.element);
  const told = h("p", { role: "status" });
  instances.after(told);
  const fields = KINDS.map((kind) => scaler(kind));
  scale.append(...fields.map((field) => field.element));

  function scaler(kind) {
    const running = h("span", { class: "muted" });
    const input = h("input", { type: "number", min: 0, max: 1024, id: `scale-${kind}`, required: true, oninput: () => { input.dataset.touched = "yes"; } });
    async function send(event) {
      event.preventDefault();
      said.className = "";
      try {
        const answer = await post(`/v1/services/${kind}:scale`, { count: Number(input.value) });
        delete input.dataset.touched;
        said.textContent = `${plural(answer.count, `${kind} process`).replace("processs", "processes")} wanted`;
      } catch (error) {
        if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
        refused(said, error);
      }
    }
    const element = h("form", { class: "pair", onsubmit: send }, h("label", { for: `scale-${kind}` }, kind, " ", running), input, h("button", { type: "submit" }, "Scale"));
    return { kind, element, update(count) { running.textContent = `(${count} now)`; if (!input.dataset.touched && document.activeElement !== input) input.value = count; } };
  }

  function refused(line, error) {
    line.className = "bad";
    line.textContent = [error.message, ...(error.problems ?? []).map((each) => `${each.problem}; ${each.fix}`)].join(": ");
  }

  async function drain(name, run) {
    const holds = run ? ` The run ${run} goes on without it; a trainer's state is saved first.` : "";
    if (!(await confirmed(`Drain ${name}?${holds} Its process ends, and its supervisor starts another.`, "Drain"))) return;
    told.className = "";
    try {
      await post(`/v1/instances/${encodeURIComponent(name)}:drain`);
      told.textContent = `${name} was told to drain`;
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      refused(told, error);
    }
  }

  const runLink = (run) => (run ? h("a", { href: `#/runs/${encodeURIComponent(run)}`, "data-focus": run }, run) : "–");

  function instanceRow(each) {
    return h("tr", {}, h("th", { scope: "row" }, each.name), h("td", {}, chip(each.state), each.silent > 0 && h("div", { class: "why" }, `silent for ${duration(each.silent)}`)),
      h("td", {}, h("button", { type: "button", class: "quiet", disabled: each.state !== "READY", "data-focus": `drain ${each.name}`, "aria-label": `Drain ${each.name}`, onclick: () => drain(each.name, each.run) }, "Drain…")),
      h("td", {}, runLink(each.run)), h("td", {}, each.devices.map(shortDevice).join(", ") || "–"),
      h("td", {}, each.memory), h("td", {}, each.busy), h("td", {}, shortHost(each.host)), h("td", {}, h("code", {}, each.address)));
  }

  function leaseRow(each) {
    return h("tr", {}, h("th", { scope: "row" }, `${each.epoch}`), h("td", {}, chip(each.state)), h("td", {}, each.instance), h("td", {}, runLink(each.run)),
      h("td", {}, each.stage), h("td", {}, each.devices.map(shortDevice).join(", ")), h("td", { class: "countdown", "data-until": each.until }));
  }

  function countdown() {
    for (const cell of leaseRows.querySelectorAll(".countdown")) {
      const left = Number(cell.dataset.until) - performance.now() / 1000;
      cell.textContent = left > 0 ? `${left.toFixed(0)} s` : "expiring";
    }
  }
  const timer = setInterval(countdown, 1000);
  signal.addEventListener("abort", () => clearInterval(timer));

  const until = new Map();
  repeat(30000, signal, async () => {
    const { usage } = await get("/v1/usage", signal);
    keyed(usedRows, usage.slice(0, 100), (each) => each.subject, usageRow);
  }).catch(() => {}); // The rest of the page says what is wrong.

  await repeat(2000, signal, async () => {
    const [found, held, state] = await Promise.all([pages("/v1/instances", "instances", signal), get("/v1/leases", signal, { page_size: 200 }), health(signal)]);
    well.textContent = state.status === "ok" ? `Coordinator: ok, epoch ${state.coordinator_epoch}, event loop ${state.loop_lag_ms.toFixed(0)} ms late at most` : `Coordinator: unhealthy: ${state.reason}`;
    well.className = state.status === "ok" ? "muted" : "bad";
    for (const field of fields) field.update(found.filter((each) => each.kind === field.kind && each.state !== "LOST").length);
    const shown = found.slice(0, 100).map((each) => ({ name: each.name, incarnation: each.incarnation, state: each.state, run: each.run, devices: each.devices, host: each.host, address: each.address, memory: bytes(each.resident_memory_bytes), busy: `${each.busy_cores.toFixed(1)} cores`, silent: Math.round(each.silent_for_s) }));
    keyed(instanceRows, shown, (each) => each.incarnation, instanceRow);
    instances.hidden = !found.length;
    noInstances.hidden = Boolean(found.length);
    const rows = held.leases.slice(0, 100).map((each) => {
      const ends = performance.now() / 1000 + each.expires_in_s;
      if (Math.abs((until.get(each.epoch) ?? 0) - ends) > 1) until.set(each.epoch, ends);
      return { epoch: each.epoch, state: each.state, instance: each.instance, run: each.run, stage: each.stage, devices: each.devices, until: until.get(each.epoch) };
    });
    keyed(leaseRows, rows, (each) => each.epoch, leaseRow);
    leases.hidden = !rows.length;
    noLeases.hidden = Boolean(rows.length);
    devices(hosts, held.devices, found);
    logs.offer(found.map((each) => each.name));
    countdown();
  });
}

// The newest lines of one instance's log; asked for by the user alone.
function logPanel(signal) {
  const which = h("select", { id: "log-instance" }, h("option", { value: "" }, "choose"));
  const level = h("select", { id: "log-level" }, ["debug", "info", "warning", "error"].map((each) => h("option", { value: each, selected: each === "info" }, each)));
  const search = h("input", { type: "search", placeholder: "Search the log", "aria-label": "Search the log" });
  const list = h("ol", { class: "events log" });
  const said = h("p", { class: "muted", role: "status" }, "Choose an instance to see the end of its log.");
  const element = h("section", { class: "panel" }, h("h2", {}, "Logs"),
    h("form", { class: "row", onsubmit: (event) => { event.preventDefault(); load(); } },
      h("span", { class: "pair" }, h("label", { for: "log-instance" }, "Instance"), which), h("span", { class: "pair" }, h("label", { for: "log-level" }, "Least level"), level), search, h("button", { type: "submit" }, "Show")),
    said, h("div", { tabindex: "0", role: "region", "aria-label": "Log" }, list));
  const follow = h("input", { type: "checkbox", id: "log-follow" });
  follow.checked = true;
  element.querySelector("form").append(h("label", { for: "log-follow" }, follow, " live"));
  which.addEventListener("change", () => load());
  level.addEventListener("change", () => load());

  let seen = "";
  async function load() {
    if (!which.value) return;
    try {
      const { instance, lines } = await get(`/v1/instances/${encodeURIComponent(which.value)}/logs`, signal, { level: level.value, lines: 200, search: search.value.trim() });
      const about = search.value.trim() && ` with “${search.value.trim()}”`;
      said.textContent = lines.length ? `The newest ${plural(lines.length, "line")} of ${instance}${about}, newest first` : `${instance} has logged nothing of this level${about} lately`;
      const now = JSON.stringify([instance, lines]);
      if (now === seen) return; // What somebody has selected stays selected.
      seen = now;
      list.replaceChildren(...lines.reverse().map((line) => h("li", { class: ["error", "critical", "warning"].includes(line.level) ? "grave" : null },
        h("time", {}, clock(line.time), " ", line.level), h("span", {}, line.text))));
    } catch (error) {
      if (!(error instanceof Refusal || error instanceof TypeError)) throw error;
      list.replaceChildren();
      seen = "";
      said.textContent = error.message;
    }
  }

  repeat(2000, signal, async () => { if (follow.checked) await load(); });
  return { element, offer(names) {
    const chosen = which.value;
    const wanted = ["coordinator", "launcher", ...names].filter((name, index, all) => all.indexOf(name) === index).sort();
    if (wanted.length + 1 === which.options.length && wanted.every((name, index) => which.options[index + 1].value === name)) return;
    which.replaceChildren(which.options[0], ...wanted.map((name) => h("option", { value: name }, name)));
    which.value = chosen;
  } };
}

// What a user or team uses, beside its quotas.
function usageRow(each) {
  const of = (name, digits = 0) => `${each[name].toFixed(digits)}${name in each.limits ? ` of ${each.limits[name]}` : ""}`;
  return h("tr", {}, h("td", {}, each.subject), ...[["runs"], ["queued"], ["devices"], ["device_hours", 1], ["disk_gb", 2], ["streams"]].map(([name, digits]) => h("td", {}, of(name, digits))));
}

// "BOOT-ID/cpu:0" is long; people know their devices by the last part.
function shortDevice(name) {
  return name.slice(name.lastIndexOf("/") + 1);
}

function shortHost(name) {
  return name.length > 24 ? `${name.slice(0, 8)}…` : name;
}

function devices(root, found, instances) {
  const use = new Map(instances.flatMap((each) => each.gpus.map((gpu) => [gpu.device, `${(100 * gpu.busy).toFixed(0)}% busy, ${bytes(gpu.used_memory_bytes)} in use`])));
  const hostOf = new Map(instances.flatMap((each) => each.devices.map((device) => [device, each.host])));
  const groups = new Map();
  for (const device of found.slice(0, 256)) {
    const host = hostOf.get(device.name) ?? device.name.split("/")[0];
    groups.set(host, [...(groups.get(host) ?? []), { ...device, use: use.get(device.name) }]);
  }
  const items = [...groups].map(([host, list]) => ({ host, list }));
  keyed(root, items.length ? items : [{ host: "", list: [] }], (item) => item.host, ({ host, list }) => host
    ? h("div", {}, h("h3", { title: host }, `Host ${shortHost(host)}`), h("ul", { class: "devices" }, list.map((device) =>
      h("li", { class: device.state.toLowerCase() }, h("b", {}, shortDevice(device.name)), " ", device.state, h("div", { class: "why" }, [[device.holder, device.reason].filter(Boolean).join(": "), device.use].filter(Boolean).join(", "))))))
    : empty("There is no device."));
}
