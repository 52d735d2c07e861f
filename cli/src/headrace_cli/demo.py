"""What a demo needs beside a fleet: a preset's spec and model, the figures of its run, and the report of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.markup import escape

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.start import last_lines
from headrace_cli.launcher.tether import tether
from headrace_cli.output import table
from headrace_cli.show.runs import STAGES, heldout

if TYPE_CHECKING:
    from headrace.client import Certificate, Run, Step
    from rich.console import Console

PRESETS = {
    "tiny": "making a tiny model and its tokenizer",
    "smollm2": "unpacking SmolLM2-135M-Instruct (the first time takes a minute)",
}
SIDE_BY_SIDE = {"tiny"}
"""Presets that are faster with a core for each side than with all cores in turn; see docs/performance.md."""
MAKING_S = 900.0
SHOWN_ANSWERS = 6
CHAT_ROLES = frozenset({"system", "user", "assistant"})


def example(preset: str) -> Path:
    """The run spec of a preset: beside the package in a wheel, in the repository otherwise."""
    if preset not in PRESETS:
        raise user_error("--preset", f"{preset!r} is not one", f"use {' or '.join(PRESETS)}")
    here = Path(__file__).resolve()
    for folder in (here.parent / "examples", here.parents[3] / "examples"):
        if (folder / f"{preset}.yaml").is_file():
            return folder / f"{preset}.yaml"
    raise CommandError(f"examples/{preset}.yaml is missing from the installation; reinstall headrace")


def placement(preset: str, devices: int) -> list[str]:
    """The override that takes the faster placement for a preset on so many devices."""
    return ["placement.mode=disaggregated"] if preset in SIDE_BY_SIDE and devices > 1 else []


class ModelMaker:
    """Makes a preset's model in a child process, unless it is there; leaving the block ends the child."""

    def __init__(self, preset: str, data_dir: DataDir, models: Path) -> None:
        self.directory = models / preset
        self.sentence = PRESETS[preset]
        self._log = data_dir.log_file(f"model-{preset}")
        self._child: subprocess.Popen[bytes] | None = None
        if not self.is_there:
            self._child = self._start(preset)

    @property
    def is_there(self) -> bool:
        """Whether the model directory is complete: its weights are written last."""
        return any(self.directory.glob("*.safetensors")) and (self.directory / "config.json").is_file()

    def _start(self, preset: str) -> subprocess.Popen[bytes]:
        """Without the fleet's mark: the launcher, which starts meanwhile, kills what carries it."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"headrace_modelkit.presets.{preset}", str(self.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=tether(),
            )

    def wait(self) -> Path:
        """The model's directory once it is made; CommandError with the end of the log when that fails."""
        if self._child is None:
            return self.directory
        try:
            status = self._child.wait(timeout=MAKING_S)
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"making the model took longer than {MAKING_S:g} s; see {self._log}"
            ) from error
        if status or not self.is_there:
            words = "\n".join(last_lines(self._log, 12))
            raise CommandError(f"the model could not be made; {self._log} ends with:\n{words}")
        return self.directory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child and self._child.poll() is None:
            self._child.kill()
            self._child.wait()


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
    run_s: float | None
    up_s: float
    trained: int
    dropped: int
    duplicates: int
    max_staleness: int | None
    warmup_steps: int
    exact_before: float | None
    exact_after: float | None
    export_path: str
    stage_s: dict[str, float]
    protocol_share: float | None

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
        run_s=run.finished_at - (run.started_at or run.created_at) if run.finished_at else None,
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
        protocol_share=stage_s["protocol"] / step_s if step_s and "protocol" in stage_s else None,
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
        "max_staleness": max(
            (item.max_staleness for item in live if item.max_staleness is not None), default=None
        ),
    }
    shown = {name: getattr(run.counts, name) for name in counted}
    if counted != shown:
        raise CommandError(f"run {run.id}: the certificates say {counted}, the coordinator says {shown}")


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
    lines = [line.strip() for line in _plain(str(example.get("prompt", ""))).split("\n")]
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
        + ("" if result.max_staleness is None else f"at most {result.max_staleness} steps stale ")
        + "(counted from certificates and slot ledger)"
    )
    stages = ", ".join(
        f"{stage} {result.stage_s[stage]:.1f} s" for stage in STAGES if stage in result.stage_s
    )
    if stages:
        share = result.protocol_share
        own = "" if share is None else f"; protocol {share:.1%} of the steps' wall time"
        lines.append(f"time: {stages}{own}")
    run_s = "" if result.run_s is None else f", {result.run_s:.0f} s of them the run"
    lines.append(f"took {result.wall_s:.0f} s in all{run_s}")
    if result.export_path:
        lines.append(f"model: {escape(result.export_path)} (a Hugging Face directory)")
    return lines


def _learned(run: Run, result: Outcome) -> list[str]:
    evaluations = heldout(run)
    if result.eval_before is None or result.eval_after is None or len(evaluations) < 2:
        return ["held-out: not evaluated"]
    count = evaluations[-1].answers
    lines = [
        f"held-out score {result.eval_before:.3f} → {result.eval_after:.3f} over {count} answers, "
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
