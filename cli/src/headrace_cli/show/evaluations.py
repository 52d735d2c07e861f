"""Evaluations of suites for people: progress, figures with their intervals, lists, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from headrace_cli.output import state_text, table
from headrace_cli.show.runs import age, episode_figures

if TYPE_CHECKING:
    from headrace.client import Comparison, EvaluationRun
    from headrace_schema.resources.evaluations import SuiteResultView
    from rich.console import RenderableType

WIDE = 100
BAR = 40
"""Most columns of a bar."""


def progress_line(found: EvaluationRun) -> str:
    """State and progress on one line."""
    return f"evaluation {found.id} is {found.state}: {found.answers}/{found.answers_total} answers"


def progress_lines(found: EvaluationRun, width: int) -> list[str]:
    """State, a bar, and what it waits for; no line is longer than `width` columns."""
    share = found.answers / found.answers_total if found.answers_total else 0.0
    room = max(10, min(BAR, width - 8))
    bar = "#" * round(share * room) + "-" * (room - round(share * room))
    lines = [progress_line(found), f"[{bar}] {share:4.0%}", *([waiting(found)] if waiting(found) else [])]
    return [part for line in lines for part in wrap(line, width, break_on_hyphens=False)]


def waiting(found: EvaluationRun) -> str:
    """Its place in the queue and what it waits for; empty when it waits for nothing."""
    if not found.waiting_for or found.ended:
        return ""
    place = f"place {found.place} in the queue; " if found.place else ""
    return f"{place}waits for " + "; ".join(found.waiting_for)


def source(found: EvaluationRun) -> str:
    """What was evaluated."""
    if not found.checkpoint_run:
        return found.model
    policy = (found.spec.get("checkpoint") or {}).get("policy")
    return f"{found.checkpoint_run} at step {found.checkpoint_step}" + (
        f", policy {policy}" if policy else ""
    )


def result_table(found: EvaluationRun) -> RenderableType:
    """One evaluation with its figures."""
    from rich.console import Group

    head = [
        ("evaluation", found.id),
        ("state", state_text(found.state)),
        ("why", found.reason),
        ("of", source(found)),
        ("suite", f"{found.suite}, {found.items} items, {found.samples} answers each"),
        ("weights", found.weights_digest or "not read yet"),
        ("items", found.data_digest or "not opened yet"),
    ]
    parts: list[RenderableType] = [table(("", ""), head, narrow=True)]
    if (result := found.result) is not None:
        modes = [(each.mode, f"{each.score:.3f}", interval(each.low, each.high)) for each in result.modes]
        parts.append(table(("mode", f">{result.measure or 'score'}", "95% interval"), modes))
        if result.tasks:
            parts.append(_task_table(result))
        of = ("episodes", "actions") if result.tasks else ("answers", "tokens")
        parts.append(
            f"{result.answers} {of[0]} of {result.tokens_mean:.0f} {of[1]}; {result.truncated:.0%} cut by the limit"
            + (f"; {result.unanswered} not answered: {result.failure}" if result.unanswered else "")
        )
        parts.append(", ".join(f"{name} {value:.3f}" for name, value in result.parts.items()))
        if result.episodes:
            parts.append(episode_figures(result))
    return Group(*parts)


def _task_table(result: SuiteResultView) -> RenderableType:
    """The first mode's figure task by task; variants stand in a column where there are any."""
    varied = any(each.variant for each in result.tasks)
    rows = [
        (
            each.task,
            *([each.variant or "none"] if varied else []),
            each.items,
            f"{each.score:.3f}",
            interval(each.low, each.high),
        )
        for each in result.tasks
    ]
    names = ("task", *(["variant"] if varied else []), ">items", f">{result.modes[0].mode}", "95% interval")
    return table(names, rows)


def interval(low: float | None, high: float | None, sign: str = "") -> str:
    """An interval, or nothing where there is none."""
    return "" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"


def evaluations_list(found: Sequence[EvaluationRun], width: int) -> RenderableType:
    """Each evaluation with its state, progress and figures; `width` in columns."""
    if width < WIDE:
        return _narrow(found, width)
    rows = [
        (
            each.id,
            state_text(each.state),
            each.place or "",
            each.suite,
            f"{each.answers}/{each.answers_total}",
            figures(each),
            age(each.created_at),
            source(each),
        )
        for each in found
    ]
    return table(("evaluation", "state", ">place", "suite", ">answers", "figures", ">age", "of"), rows)


def _narrow(found: Sequence[EvaluationRun], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for each in found:
        parts.append(Text("  ").join([Text(each.id, style="bold"), state_text(each.state), Text(each.suite)]))
        what = figures(each) or waiting(each) or f"{each.answers}/{each.answers_total} answers"
        for line in (what, source(each)):
            parts += [Text(f"  {part}") for part in wrap(line, width - 2, break_on_hyphens=False)]
    return Group(*parts)


def figures(found: EvaluationRun) -> str:
    """The figures on one line; empty until there are any."""
    modes = found.result.modes if found.result else []
    return ", ".join(f"{each.mode} {each.score:.3f}" for each in modes)


def comparison_table(found: Comparison, width: int) -> RenderableType:
    """The differences, a row a mode, or a few lines a mode where that is too wide."""
    from rich.console import Group
    from rich.text import Text

    head = Text(f"{found.second} minus {found.first}, over {found.items} items")
    rows = [
        (
            each.mode,
            f"{each.first:.3f}",
            f"{each.second:.3f}",
            f"{each.difference:+.3f}",
            interval(each.low, each.high, "+"),
            f"{each.wins}/{each.losses}/{each.ties}",
            "" if each.p_value is None else f"{each.p_value:.3g}",
        )
        for each in found.differences
    ]
    names = ("mode", ">first", ">second", ">difference", "95% interval", "better/worse/same", ">p (McNemar)")
    if width >= WIDE:
        return Group(head, table(names, rows))
    lines = [table(("", ""), zip((name.lstrip(">") for name in names), row, strict=True)) for row in rows]
    return Group(head, *lines)
