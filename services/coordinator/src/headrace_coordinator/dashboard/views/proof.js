// What proves a run's updates: counts of the slot ledger, certificates by version with rewinds, checkpoints.

import { get, post } from "../api.js";
import { empty, facts, h, table } from "../dom.js";
import { bytes, number, plural } from "../format.js";

const SIZE = 50;

export async function proof(root, context) {
  const { path, signal } = context;
  const counts = h("div");
  const staleness = h("section", { class: "panel", hidden: true });
  const ordinals = new Map();
  const ledger = h("div");
  const checkpoints = h("div");
  const tokens = [""];
  let token = "";
  const back = h("button", { type: "button", onclick: () => { tokens.pop(); certificates(); } }, "Previous");
  const on = h("button", { type: "button", onclick: () => { tokens.push(token); certificates(); } }, "Next");
  const fresh = h("button", { type: "button", class: "quiet", onclick: () => load() }, "Refresh");
  root.append(h("section", { class: "panel" }, h("div", { class: "row" }, h("h2", {}, "Audit"), fresh), counts), staleness,
    h("section", { class: "panel" }, h("h2", {}, "Version ledger"), h("p", { class: "muted" }, "A certificate for every update, the newest first. A version that a rewind abandoned is struck out; the one after it names its parent."), ledger, h("div", { class: "row pager" }, back, on)),
    h("section", { class: "panel" }, h("h2", {}, "Checkpoints"), checkpoints));

  async function load() {
    await context.look();
    showCounts(context.run);
    await Promise.all([certificates(), saved()]);
  }

  function showCounts(run) {
    const { counts: found } = run;
    counts.replaceChildren(h("p", { class: found.duplicates ? "bad" : "good" },
      found.duplicates ? `${plural(found.duplicates, "slot")} trained or dropped twice: this must not be.` : "No slot is trained or dropped twice."),
    facts([
      ["Slots trained", found.trained.toLocaleString("en")], ["Slots dropped", found.dropped.toLocaleString("en")],
      ["Duplicates", `${found.duplicates}`], ["Settled below slot", found.frontier.toLocaleString("en")],
      ["Worst staleness", found.max_staleness === null ? "–" : plural(found.max_staleness, "version")], ["Live version", run.policy ? `${run.policy.number}` : "–"],
      ["Digest of its weights", run.policy ? h("code", {}, run.policy.digest.slice(0, 16)) : "–"],
      ["Warm-up steps", `${run.warmup_steps}`],
    ]));
  }

  async function certificates() {
    const page = await get(`${path}/certificates`, signal, { page_size: SIZE, page_token: tokens.at(-1), order: "newest" });
    token = page.next_page_token;
    back.disabled = tokens.length === 1;
    on.disabled = !token;
    back.parentElement.hidden = back.disabled && on.disabled;
    showStaleness(staleness, page.certificates, ordinals);
    if (!page.certificates.length) return ledger.replaceChildren(empty("No update is committed yet."));
    const rows = page.certificates.flatMap((certificate, at) => {
      const { parent } = certificate.version;
      const before = page.certificates[at + 1]?.version.number;
      return [row(certificate), before !== undefined && parent !== before && h("tr", { class: "rewind" }, h("td", { colspan: 9 }, page.certificates[at + 1].live ? `goes on as version ${parent}, the same state restored` : `rewind: goes on from version ${parent}`))];
    });
    ledger.replaceChildren(table("Certificates", ["Version", "Parent", "Step", "Trained", "Dropped", "Tokens by version", "Staleness", "Log-prob mismatch", "KL to the trainer"], rows)[0]);
  }

  // A link shows no token: a click gets one that is good once.
  function download(address) {
    const link = h("a", { href: "#", download: "", onclick: async (event) => {
      event.preventDefault();
      const made = await post(`/v1/links?download=${encodeURIComponent(address)}`);
      location.assign(made.path);
    } }, "Download");
    return link;
  }

  async function saved() {
    const page = await get(`${path}/checkpoints`, signal, { page_size: 100 });
    if (!page.checkpoints.length) return checkpoints.replaceChildren(empty("There is no checkpoint yet."));
    checkpoints.replaceChildren(table("Checkpoints", ["Name", "Steps in it", "Version", "Size", "Digest", "Go on from it", "As a model", "Files"], page.checkpoints.map((each) =>
      h("tr", {}, h("td", {}, each.name), h("td", {}, `${each.step}`), h("td", {}, `${each.version.number}`), h("td", {}, bytes(each.size_bytes)), h("td", {}, h("code", {}, each.version.digest.slice(0, 12))),
        h("td", {}, h("a", { href: `#/submit?from=${encodeURIComponent(context.run.id)}&at=${each.step}` }, `Fork at step ${each.step}…`)),
        h("td", {}, h("code", {}, `headrace run export ${context.run.id} --at ${each.step}`)),
        h("td", {}, download(`${path}/checkpoints/${each.name}`)))))[0],
    h("p", { class: "muted" }, "They lie below ", h("code", {}, `${context.run.run_directory}/checkpoints`), context.run.export_path && [", the exported model in ", h("code", {}, context.run.export_path), " (", download(`${path}/export`), ")"], "."));
  }

  await load();
}

// Tokens by how many steps their version lags behind the base that they were learned at. A version's ordinal is known
// from its own certificate, or from the one that names it as parent: `ordinals` keeps those of pages seen before.
function showStaleness(panel, certificates, ordinals) {
  for (const { version } of certificates) {
    ordinals.set(version.number, version.ordinal);
    ordinals.set(version.parent, version.ordinal - 1);
  }
  const tokens = [];
  for (const { live, version, tokens_by_version: sources, max_staleness: worst } of certificates) {
    for (const [source, count] of live ? Object.entries(sources) : []) {
      const known = ordinals.get(Number(source));
      const lag = known === undefined ? worst : version.ordinal - 1 - known;
      tokens[lag] = (tokens[lag] ?? 0) + count;
    }
  }
  const total = tokens.reduce((sum, count) => sum + (count ?? 0), 0);
  panel.hidden = tokens.length < 2 || !total;
  if (panel.hidden) return;
  const mean = tokens.reduce((sum, count, lag) => sum + lag * (count ?? 0), 0) / total;
  const rows = Array.from(tokens, (count = 0, lag) => h("tr", {},
    h("th", { scope: "row" }, plural(lag, "step")), h("td", {}, count.toLocaleString("en")), h("td", {}, `${number((100 * count) / total, 1)} %`),
    h("td", {}, h("progress", { max: 1, value: count / total, "aria-label": `share of tokens that lag ${plural(lag, "step")}` }))));
  panel.replaceChildren(h("h2", {}, "Staleness"),
    h("p", { class: "muted" }, `Steps that trained tokens lag behind the weights they were learned at, over the updates below: ${number(mean, 2)} in the mean.`),
    table("Tokens by staleness", ["Lag", "Tokens", "Share", ""], rows)[0]);
}

function mismatch({ log_prob_mismatch_bits: bits, log_prob_mismatch_mean: mean }) {
  return Number.isInteger(bits) ? plural(bits, "bit") : number(mean, 5);
}

function row(certificate) {
  const { version } = certificate;
  const reasons = {};
  for (const [, , reason] of certificate.dropped) reasons[reason] = (reasons[reason] ?? 0) + 1;
  const why = Object.entries(reasons).map(([reason, count]) => `${reason} ${count}`).join(", ");
  const sources = Object.entries(certificate.tokens_by_version).map(([source, count]) => `${source}: ${count.toLocaleString("en")}`).join(", ");
  return h("tr", { class: certificate.live ? null : "abandoned" },
    h("th", { scope: "row", title: `digest ${version.digest}` }, `${version.number}`, !certificate.live && h("span", { class: "muted" }, " abandoned")),
    h("td", {}, `${version.parent}`), h("td", {}, `${version.ordinal}`),
    h("td", { title: `set digest ${certificate.set_digest}` }, `${certificate.trained.length}`),
    h("td", {}, `${certificate.dropped.length}`, why && h("div", { class: "why" }, why)),
    h("td", {}, sources || "–"), h("td", {}, number(certificate.max_staleness)), h("td", {}, mismatch(certificate)),
    h("td", {}, number(certificate.log_prob_mismatch_kl, 6)));
}
