"""What a demo says at its end: answers before and after, scores with their baselines, and the counts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from headrace_cli.demo.outcome import Outcome
from headrace_cli.output import table
from headrace_cli.show.runs import STAGES, heldout

if TYPE_CHECKING:
    from headrace.client import Run
    from rich.console import Console

SHOWN_ANSWERS = 6
CHAT_ROLES = frozenset({"system", "user", "assistant"})


def print_report(console: Console, run: Run, result: Outcome) -> None:
    """Prints the whole report."""
    rows = answers(run)
    if rows:
        console.print(table(("held-out question", "right", "before", "after"), rows, title="Answers"))
    for line in sentences(run, result):
        console.print(line)


def answers(run: Run) -> list[tuple[str, str, str, str]]:
    """(question, reference, answer before, answer after) of held-out items shown in both evaluations."""
    evaluations = heldout(run)
    if len(evaluations) < 2:
        return []
    before = {_question(item): item for item in evaluations[0].examples}
    rows = []
    for item in evaluations[-1].examples:
        earlier = before.get(_question(item))
        if earlier:
            reference = str(item.get("reference", ""))
            rows.append((_question(item), reference, _answer(earlier), _answer(item)))
    return rows[:SHOWN_ANSWERS]


def _question(example: dict[str, Any]) -> str:
    """The last line of a prompt that is not the chat template's own."""
    lines = [line.strip() for line in _plain(str(example.get("prompt", ""))).splitlines()]
    return next((line for line in reversed(lines) if line and line not in CHAT_ROLES), "")


def _answer(example: dict[str, Any], characters: int = 40) -> str:
    text = " ".join(_plain(str(example.get("completion", ""))).split())
    return (text if len(text) <= characters else text[: characters - 1] + "…") or "(nothing)"


def _plain(text: str) -> str:
    """Text without a tokenizer's special tokens."""
    return re.sub(r"<\|\w+\|>|</?s>", "", text)


def sentences(run: Run, result: Outcome) -> list[str]:
    """The figures in words, with rich's markup."""
    lines = [*_learned(run, result), ""]
    if result.warmup_steps:
        lines.append(
            f"warm-up: {result.warmup_steps} supervised steps came first; 'before' is measured after them"
        )
    lines.append(
        f"slots: {result.trained} trained, {result.dropped} dropped, {result.duplicates} trained twice; "
        f"at most {result.max_staleness} steps stale (counted from certificates and slot ledger)"
    )
    stages = ", ".join(
        f"{stage} {result.stage_s[stage]:.1f} s" for stage in STAGES if stage in result.stage_s
    )
    if stages:
        lines.append(f"time: {stages}; protocol {result.protocol_share:.1%} of the steps' wall time")
    lines.append(f"took {result.wall_s:.0f} s in all, {result.run_s:.0f} s of them the run")
    if result.export_path:
        lines.append(f"model: {escape(result.export_path)} (a Hugging Face directory)")
    return lines


def _learned(run: Run, result: Outcome) -> list[str]:
    evaluations = heldout(run)
    if result.eval_before is None or result.eval_after is None or len(evaluations) < 2:
        return ["held-out: not evaluated"]
    count = evaluations[-1].answers
    lines = [
        f"held-out score [bold]{result.eval_before:.3f} → {result.eval_after:.3f}[/] over {count} answers, "
        f"after {result.steps} steps"
    ]
    if result.exact_before is not None and result.exact_after is not None:
        lines.append(f"exact match    {result.exact_before:.3f} → {result.exact_after:.3f}")
    if result.baseline_prefill is not None:
        verdict = "beats" if result.eval_after > result.baseline_prefill else "does not beat"
        lines += [
            f"baseline       {result.baseline_prefill:.3f}: the untrained model with its answer begun for it "
            "(baseline_prefill)",
            f"Much of what it learns is to answer at all; the trained model {verdict} that baseline.",
        ]
    return lines
