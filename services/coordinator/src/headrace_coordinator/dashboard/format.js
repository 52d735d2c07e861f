// Numbers, times and events as words.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : digits });
}

// A text on one line, without its middle where it is longer than `most` characters.
export function middle(text, most) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length <= most ? line : `${line.slice(0, most / 2).trimEnd()} … ${line.slice(-most / 2).trimStart()}`;
}

// "0.4 ± 0.05 (0.3 to 0.5)": the mean of what is known with its standard deviation (n − 1), and its range.
export function ranged(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return number(known[0]);
  const middle = mean(known);
  const spread = Math.sqrt(known.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (known.length - 1));
  return `${number(middle)} ± ${number(spread)} (${number(Math.min(...known))} to ${number(Math.max(...known))})`;
}

// The mean of what is known; null where nothing is.
export function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// "success_at_end": "Success at end".
export function spoken(name) {
  const words = name.replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

// The scorers of a spec by their short names, as parts have them (schema/sections/scoring.py): a file's name, with the
// folders that tell two of one name apart. {"judge.py:score": "/home/me/judge.py:score"}
export function scorers(spec) {
  const { scorers: trained, evaluation, stages } = spec?.reward ?? {};
  const full = [...new Set([...(trained ?? []), ...(evaluation ?? []), ...Object.values(stages ?? {}).flat()].map((each) => each.name))];
  const end = (name, folders) => (name.includes(".py:") ? name.split("/").slice(-folders - 1).join("/") : name);
  return new Map(full.map((name) => {
    const alike = full.filter((each) => end(each, 0) === end(name, 0));
    let folders = 0;
    while (folders < name.split("/").length && new Set(alike.map((each) => end(each, folders))).size < alike.length) folders += 1;
    return [end(name, folders), name];
  }));
}

// A fact of a part; the tooltip has the path of its scorer, where that has one.
export function scorerFact(spec, part, value) {
  const found = [...scorers(spec)].find(([short]) => `/${part}/`.includes(`/${short}/`));
  return [`Scorer ${part}`, number(value), found && found[1] !== found[0] ? found[1] : null];
}

// Facts of an evaluation's episodes beside its score; none where it has no episodes.
export function episodeFacts(view) {
  if (!view) return [];
  const figures = Object.entries(view.episodes).filter(([name]) => name !== view.measure);
  return [...figures.map(([name, value]) => [spoken(name), number(value)]), ...(view.note ? [["Note", view.note]] : [])];
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || seconds < 0) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${seconds < 10 ? number(seconds, 1) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  return date.toLocaleString([], today ? { timeStyle: "medium" } : { dateStyle: "medium", timeStyle: "short" });
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
  return `${number(count, unit ? 1 : 0)} ${units[unit]}`;
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

const EVENTS = {
  run_submitted: () => "submitted",
  run_admitted: (data) => `admitted: ${plural(data.rollouts.length, "rollout")}, ${plural(data.trainers.length, "trainer")}`,
  run_released: () => "released its instances and devices",
  run_state_changed: (data) => data.state + (data.reason ? `: ${data.reason}` : ""),
  run_intent_changed: (data) => `wanted: ${data.intent} (by ${data.author})${data.reason ? `: ${data.reason}` : ""}`,
  ranks_wanted: (data) => `trainer group of ${plural(data.ranks, "rank")} wanted (by ${data.author})`,
  trainers_changed: (data) => `trainer group changes to ${plural(data.ranks, "rank")}: ${data.reason}`,
  trainer_group_formed: (data) => `trainer group of ${plural(data.trainers.length, "rank")} formed`,
  step_opened: (data) => `step ${data.step + 1} begins` + (data.attempt > 1 ? ` (attempt ${data.attempt})` : ""),
  step_committed: (data) => `step ${data.view.step} committed: version ${data.view.version}, reward ${number(data.view.reward_mean)}`,
  step_skipped: (data) => `step ${data.step + 1} made no version: every slot was dropped`,
  step_aborted: (data) => `step ${data.step + 1}, attempt ${data.attempt} aborted: ${data.reason}`,
  group_dropped: (data) => `${data.detail ? `${data.detail}; ` : ""}group of prompt ${data.prompt} dropped (${data.reason})`,
  evaluated: (data) => `${data.view.kind} evaluation after step ${data.view.step}: ${number(data.view.score)}`,
  version_restored: (data) => data.checkpoint ? `${data.recovery ? "rewound to" : data.source_run ? "begins at" : "goes on from"} step ${data.ordinal} (${data.checkpoint}), version ${data.number}` : `initial model is version ${data.number}`,
  checkpoint_saved: (data) => `checkpoint ${data.name} saved`,
  checkpoint_failed: (data) => `checkpoint failed: ${data.reason}`,
  checkpoint_set_aside: (data) => `checkpoint ${data.name} set aside: ${data.reason}`,
  dataset_opened: (data) => `data opened: ${data.digest.slice(0, 12)}`,
  model_exported: (data) => `model exported to ${data.path}`,
  run_recovering: (data) => `recovers: ${data.reason}`,
  stage_ended: (data) => `${data.what}: ${duration(data.seconds)}`,
  noted: (data) => data.text,
  death_charged: (data) => data.text,
  scorer_failed: (data) => data.text,
  warned: (data) => Object.values(data.warnings).map((text) => `warning: ${text}`).join("; ") || "no warning holds any more",
};
const GRAVE = new Set(["run_recovering", "step_aborted", "checkpoint_failed", "checkpoint_set_aside", "group_dropped", "step_skipped", "death_charged", "scorer_failed", "warned"]);

export function eventText(event) {
  try {
    const say = EVENTS[event.type];
    if (say) return say(event.data);
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // An event of another release lacks a field: shown as it is.
  }
  return `${event.type} ${JSON.stringify(event.data).slice(0, 300)}`;
}

export function isStep(event) {
  return event.type.startsWith("step_") && !isGrave(event);
}

export function isGrave(event) {
  if (event.type === "group_dropped" && event.data.reason === "FILTERED") return false;
  if (event.type === "noted") return !event.data.plain;
  return GRAVE.has(event.type) || (event.type === "version_restored" && event.data.recovery === true);
}
