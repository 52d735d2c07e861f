"""What came of a demo's run, as figures; and whether two ways to count agree. Knows no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headrace_cli.errors import CommandError
from headrace_cli.show.runs import heldout

if TYPE_CHECKING:
    from headrace.client import Certificate, Run, Step


@dataclass(frozen=True)
class Outcome:
    """One demo. Scores are means over the held-out items; None where there was no such evaluation."""

    run: str
    state: str
    eval_before: float | None
    eval_after: float | None
    baseline_prefill: float | None
    steps: int
    wall_s: float
    run_s: float
    up_s: float
    trained: int
    dropped: int
    duplicates: int
    max_staleness: int
    warmup_steps: int
    exact_before: float | None
    exact_after: float | None
    export_path: str
    stage_s: dict[str, float]
    protocol_share: float

    def to_json(self) -> dict[str, Any]:
        """All figures, rounded."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def outcome(run: Run, steps: Sequence[Step], wall_s: float, up_s: float) -> Outcome:
    """The figures of a run. The counts are the coordinator's, from certificates and slot ledger."""
    evaluations = heldout(run)
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    stage_s: dict[str, float] = {}
    for step in steps:
        for stage, seconds in step.stage_s.items():
            stage_s[stage] = stage_s.get(stage, 0.0) + seconds
    step_s = sum(step.wall_s for step in steps)
    return Outcome(
        run=run.id,
        state=run.state,
        eval_before=first.score if first else None,
        eval_after=last.score if last else None,
        baseline_prefill=run.baseline_prefill.score if run.baseline_prefill else None,
        steps=run.step,
        wall_s=wall_s,
        run_s=(run.finished_at or 0.0) - (run.started_at or run.created_at) if run.finished_at else 0.0,
        up_s=up_s,
        trained=run.counts.trained,
        dropped=run.counts.dropped,
        duplicates=run.counts.duplicates,
        max_staleness=run.counts.max_staleness,
        warmup_steps=run.warmup_steps,
        exact_before=_part(first.parts, "exact") if first else None,
        exact_after=_part(last.parts, "exact") if last else None,
        export_path=run.export_path,
        stage_s=stage_s,
        protocol_share=stage_s.get("protocol", 0.0) / step_s if step_s else 0.0,
    )


def _part(parts: dict[str, float], name: str) -> float | None:
    return parts.get(name)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def check_counts(run: Run, certificates: Sequence[Certificate]) -> None:
    """Counts the live certificates again; CommandError when the coordinator's counts say otherwise."""
    live = [item for item in certificates if item.live]
    slots = Counter((prompt, sample) for item in live for prompt, sample, _ in item.trained)
    counted = {
        "trained": sum(slots.values()),
        "duplicates": sum(times - 1 for times in slots.values()),
        "max_staleness": max((item.max_staleness for item in live), default=0),
    }
    shown = {name: getattr(run.counts, name) for name in counted}
    if counted != shown:
        raise CommandError(f"run {run.id}: the certificates say {counted}, the coordinator says {shown}")
