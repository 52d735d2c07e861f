"""Runs, steps and certificates as tables and lines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from headrace_cli.output import state_text, table

if TYPE_CHECKING:
    from headrace.client import Certificate, Evaluation, Run, Step
    from headrace_schema.resources.evaluations import SuiteResultView
    from rich.console import RenderableType
    from rich.table import Table

STAGES = ("generate", "score", "learn", "sync", "switch", "protocol")
FILTERED = "FILTERED"
STEP_COLUMNS = ("step", "reward", "held-out", "tokens/s", "staleness", "wall s", *STAGES)
LEFT_OUT_FIRST = ("switch", "protocol", "staleness", "sync", "score", "tokens/s", "held-out")
"""Columns that a narrow terminal does without, in this order."""
OF_SAMPLED = ("generate", "score", "staleness")
"""Columns that a run whose data gives the answers has not."""
WIDE_COLUMNS = 112
WIDE = 100
"""Columns from which on the reason has room beside the figures."""
NARROW_COLUMNS = ("run", "state", "place", "step", "age")


def run_table(run: Run) -> Table:
    """Everything about one run that fits a screen."""
    counts, last = run.counts, run.last_step
    filtered = f" ({counts.filtered} of them filtered)" if counts.filtered else ""
    refilled = (
        f"{last.trained} slots trained, {last.refilled} groups refilled" if last and last.refilled else ""
    )
    rows: list[tuple[object, object]] = [
        ("run", run.id),
        ("name", run.spec.get("name", "")),
        ("tags", ", ".join(run.raw.get("tags", []))),
        ("note", run.raw.get("note", "")),
        (
            "owner",
            f"{run.owner}, visibility {run.visibility}" if run.raw.get("owner", "admin") != "admin" else "",
        ),
        ("state", state_text(run.state)),
        ("why", run.reason),
        ("place", f"{run.place} in the queue" if run.place else ""),
        ("priority", run.priority or ""),
        ("waits for", "\n".join(run.waiting_for)),
        ("works on", "\n".join(run.doing)),
        ("warning", "\n".join(run.warnings)),
        ("step", f"{run.step} of {run.steps}"),
        ("trainer", trainer_group(run)),
        ("layout", run.layout),
        ("forked from", origin(run)),
        ("policy", f"version {run.policy.number}, digest {run.policy.digest[:16]}" if run.policy else ""),
        *(
            ("held-out" if kind == "heldout" else kind, change(found) + confidence(found[-1]))
            for kind in kinds(run)
            if (found := evaluations(run, kind))
        ),
        ("episodes", episode_figures(heldout(run)[-1]) if heldout(run) else ""),
        (
            "slots",
            f"{counts.trained} trained, {counts.dropped} dropped{filtered}, {counts.duplicates} duplicates",
        ),
        ("last step", refilled),
        ("staleness", "" if counts.max_staleness is None else f"at most {counts.max_staleness} steps"),
        ("recoveries", run.recoveries or ""),
        ("engine restarts", run.engine_restarts or ""),
        ("warm-up", f"{run.warmup_steps} supervised steps" if run.warmup_steps else ""),
        ("pipeline", " → ".join(run.pipeline)),
        ("files", run.run_directory),
        ("exported to", run.export_path),
    ]
    return table(("", ""), [row for row in rows if str(row[1])])


def trainer_group(run: Run) -> str:
    """The ranks of a run's trainer group where they were changed, or are to be."""
    ranks, wanted = run.ranks, run.wanted_ranks
    if not wanted and ranks == run.spec.get("trainer", {}).get("ranks", ranks):
        return ""
    why = f": {run.ranks_reason}" if run.ranks_reason else ""
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f", {wanted} wanted" if wanted else "") + why


def origin(run: Run) -> str:
    """The run and the step that a fork continues from; empty for a run that is no fork."""
    if not run.forked_from:
        return ""
    if run.policy:
        return f"{run.forked_from} at step {run.first_step}"
    step = (run.spec.get("from_checkpoint") or {}).get("step")
    return f"{run.forked_from} at " + ("its newest checkpoint" if step is None else f"step {step}")


def sentence(run: Run) -> str:
    """Why a run is in its state: what it waits for, or the reason."""
    if run.waiting_for and not run.ended:
        return "waits for " + "; ".join(run.waiting_for)
    if run.doing and not run.ended:
        return "; ".join(run.doing)
    return run.reason


def has_given_answers(step: Step) -> bool:
    """Whether a step learned from answers of the data: none was generated, and none has a reward."""
    return step.reward_mean is None and "generate" not in step.stage_s and "loss" in step.figures


def steps_table(steps: Sequence[Step], evaluations: Sequence[Evaluation], width: int) -> Table:
    """One line a step; held-out where that version was evaluated. Columns are left out that do not fit."""
    scores = {item.step: item.score for item in evaluations}
    narrow = width < WIDE_COLUMNS
    cells = {
        column: [_step_cell(item, column, scores) for item in steps] for column in (*STEP_COLUMNS, "loss")
    }
    needs = {column: max(map(len, (column, *cells[column]))) + (1 if narrow else 3) for column in cells}
    columns = [column for column in STEP_COLUMNS if column != "held-out" or scores]
    if steps and all(map(has_given_answers, steps)):
        columns = ["loss" if each == "reward" else each for each in columns if each not in OF_SAMPLED]
    for column in LEFT_OUT_FIRST:
        if column in columns and sum(needs[each] for each in columns) >= width:
            columns.remove(column)
    rows = list(zip(*(cells[column] for column in columns), strict=True))
    return table([f">{column}" for column in columns], rows, narrow=narrow)


def measured(value: float | None, form: str = "") -> str:
    """A figure; a dash for one that was not measured."""
    return "–" if value is None or value != value else f"{value:{form}}"


def _step_cell(step: Step, column: str, scores: dict[int, float]) -> str:
    if column in STAGES:
        return measured(step.stage_s.get(column), ".2f")
    score = scores.get(step.step)
    return {
        "step": str(step.step),
        "reward": measured(step.reward_mean, ".3f"),
        "loss": measured(step.figures.get("loss"), ".4f"),
        "held-out": "" if score is None else f"{score:.3f}",
        "tokens/s": measured(step.tokens_per_s, ",.0f"),
        "staleness": measured(step.max_staleness),
        "wall s": f"{step.wall_s:.2f}",
    }[column]


POLICY_FIGURES = (
    "reward_mean",
    "loss",
    "grad_norm",
    "entropy",
    "learning_rate",
    "log_prob_mismatch_mean",
    "tokens",
)


def policies_table(steps: Sequence[Step]) -> Table | None:
    """Figures of each policy in the newest step; None where one policy learns."""
    figures = steps[-1].figures if steps else {}
    names = dict.fromkeys(name.partition("/")[0] for name in figures if "/" in name)
    if not names:
        return None
    shown = [{each: figures.get(f"{name}/{each}") for each in POLICY_FIGURES} for name in names]
    rows = [
        (name, *("" if value is None else f"{value:.4g}" for value in found.values()))
        for name, found in zip(names, shown, strict=True)
    ]
    return table(("policy", *(f">{each.replace('_', ' ')}" for each in POLICY_FIGURES)), rows)


def step_line(step: Step, steps: int, heldout: dict[int, float]) -> str:
    """One step as a line of a log."""
    score, given = heldout.get(step.step), has_given_answers(step)
    shown = [stage for stage in STAGES if not given or stage not in OF_SAMPLED]
    stages = " ".join(f"{stage}={measured(step.stage_s.get(stage), '.2f')}" for stage in shown)
    if given:
        loss = f"step {step.step}/{steps} loss={step.figures['loss']:.4f}"
        heard = f" held-out={score:.3f}" if score is not None else ""
        return f"{loss}{heard} tokens/s={measured(step.tokens_per_s, '.0f')} wall={step.wall_s:.2f}s {stages}"
    return (
        f"step {step.step}/{steps} reward={measured(step.reward_mean, '.3f')}"
        + (f" held-out={score:.3f}" if score is not None else "")
        + f" tokens/s={measured(step.tokens_per_s, '.0f')} staleness={measured(step.max_staleness)}"
        + f" wall={step.wall_s:.2f}s {stages}"
    )


CERTIFICATE_COLUMNS = (
    *(">step", ">version", ">attempt", "live", ">trained", ">dropped", ">filtered", ">refilled"),
    *(">tokens", ">staleness", ">mismatch", ">its KL", "set digest"),
)


MINOR = {"attempt", "filtered", "refilled", "set digest"}
"""Columns of certificates that a terminal below `ALL_COLUMNS` does not show."""
ALL_COLUMNS = 136


def _mismatch(mean: float | None, bits: int | None) -> str:
    if mean is None:
        return "not compared"
    return f"{mean:.2g}" if bits is None else f"{bits} bits"


def certificates_table(certificates: Sequence[Certificate], width: int = ALL_COLUMNS) -> Table:
    """One line an update; versions by their numbers, as everywhere, and the attempts of a step from 1."""
    attempts = Counter[int]()
    rows = []
    for item in certificates:
        attempts[item.step] += 1
        mean, kl = item.log_prob_mismatch_mean, item.log_prob_mismatch_kl
        rows.append(
            (
                item.step,
                item.version.number,
                attempts[item.step],
                "yes" if item.live else "abandoned",
                len(item.trained),
                len(item.dropped),
                sum(reason == FILTERED for _, _, reason in item.dropped),
                item.refilled,
                item.tokens,
                measured(item.max_staleness),
                _mismatch(mean, item.log_prob_mismatch_bits),
                "" if kl is None else f"{kl:.2g}",
                item.set_digest[:16],
            )
        )
    narrow = width < ALL_COLUMNS
    shown = [at for at, name in enumerate(CERTIFICATE_COLUMNS) if not narrow or name.lstrip(">") not in MINOR]
    headers = [CERTIFICATE_COLUMNS[at] for at in shown]
    return table(headers, [[row[at] for at in shown] for row in rows], narrow=narrow)


def heldout(run: Run) -> list[Evaluation]:
    """Evaluations of held-out items, oldest first."""
    return evaluations(run, "heldout")


def kinds(run: Run) -> list[str]:
    """What a run is evaluated on: its held-out items, and each set of evaluation.data."""
    return list(dict.fromkeys(["heldout", *(item.kind for item in run.evaluations)]))


def evaluations(run: Run, kind: str | None = None) -> list[Evaluation]:
    """Evaluations of a kind, or of all kinds, oldest first."""
    found = (item for item in run.evaluations if kind in (None, item.kind))
    return sorted(found, key=lambda item: item.step)


def change(found: list[Evaluation]) -> str:
    """First and last score, and of what they are."""
    scores = [item.score for item in found]
    if not scores:
        return ""
    what = f" {found[-1].measure}" if found[-1].measure else ""
    return (f"{scores[0]:.3f}" if len(scores) == 1 else f"{scores[0]:.3f} → {scores[-1]:.3f}") + what


def episode_figures(found: Evaluation | SuiteResultView) -> str:
    """Figures of held-out episodes, and what a reader has to know of them; empty where there are none."""
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in found.episodes.items())
    return f"{shown} ({found.note})" if found.note else shown


def confidence(evaluation: Evaluation) -> str:
    """95% interval and pass@k, where an evaluation has them: " (95%: 0.612 to 0.784; pass@4 0.910)"."""
    parts = []
    if evaluation.score_low is not None and evaluation.score_high is not None:
        parts.append(f"95%: {evaluation.score_low:.3f} to {evaluation.score_high:.3f}")
    parts += [f"pass@{k} {share:.3f}" for k, share in evaluation.pass_at.items() if k != "1"]
    return f" ({'; '.join(parts)})" if parts else ""


def age(since: float) -> str:
    """Time since a moment, for people."""
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def runs_list(runs: Sequence[Run], width: int) -> RenderableType:
    """Each run with its state, place in the queue, progress, and why or what it waits for; `width` in columns."""
    return _table(runs) if width >= WIDE else _lines(runs, width)


def columns_table(runs: Sequence[Run], columns: Sequence[str]) -> RenderableType:
    """Each run with its state, progress and its values of columns; "–" where it has none."""
    from headrace_schema.resources.overviews import columns_of

    rows = []
    for run in runs:
        found = columns_of(run, columns)
        values = [found.get(name) for name in columns]
        shown = [
            "–" if value is None else f"{value:.6g}" if isinstance(value, float) else value
            for value in values
        ]
        rows.append((run.id, state_text(run.state), f"{run.step}/{run.steps}", *map(str, shown)))
    return table(("run", "state", ">step", *(f">{name}" for name in columns)), rows)


def _table(runs: Sequence[Run]) -> RenderableType:
    ranked = any(run.priority for run in runs)
    owned = len({run.owner for run in runs}) > 1
    rows = [
        (
            run.id,
            *([run.owner] if owned else []),
            state_text(run.state),
            run.place or "",
            *([run.priority] if ranked else []),
            f"{run.step}/{run.steps}",
            change(heldout(run)),
            age(run.created_at),
            sentence(run),
        )
        for run in runs
    ]
    priority = [">priority"] if ranked else []
    owner = ["owner"] if owned else []
    return table(("run", *owner, "state", ">place", *priority, ">step", "held-out", ">age", "why"), rows)


def _lines(runs: Sequence[Run], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = [_cells(run) for run in runs]
    widths = [max(len(row[i]) for row in (NARROW_COLUMNS, *rows)) for i in range(len(NARROW_COLUMNS))]
    parts = [Text("  ".join(_padded(NARROW_COLUMNS, widths)), style="bold")]
    for run, cells in zip(runs, rows, strict=True):
        name, state, *rest = _padded(cells, widths)
        parts.append(Text("  ").join([Text(name), state_text(state, run.state), Text("  ".join(rest))]))
        why = sentence(run) + (f" (priority {run.priority})" if run.priority else "")
        # Wrapped here: a console that writes to a file wraps nothing.
        parts += [Text(f"  {line}", style="dim") for line in wrap(why, width - 2, break_on_hyphens=False)]
    return Group(*parts)


def _cells(run: Run) -> tuple[str, ...]:
    place = str(run.place) if run.place else ""
    return run.id, run.state, place, f"{run.step}/{run.steps}", age(run.created_at)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
