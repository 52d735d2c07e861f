"""What an engine did since the last look, as the metrics of the generate stage."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import asdict

from headrace.common.v1 import common_pb2

from headrace_rollout.runs.opened import OpenedRun, RobotRun, TextRun
from headrace_rollout.wire import duration_of


class GenerateFigures:
    """Differences of one engine's counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, run: OpenedRun) -> common_pb2.StageMetrics | None:
        """The stage's figures since the last call; None when nothing was sampled."""
        now = asdict(run.engine.figures) if isinstance(run, TextRun | RobotRun) else {}
        figures = {name: value - self._before.get(name, 0) for name, value in now.items()}
        metrics = _text(figures) if isinstance(run, TextRun) else _episodes(figures)
        if not metrics.items and not metrics.tokens:
            return None
        self._before = now
        metrics.stage = "generate"
        metrics.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        metrics.values["retained_trajectories"] = len(run.retention)
        metrics.values["retained_bytes"] = run.retention.size_bytes
        return metrics


def _text(figures: Mapping[str, float]) -> common_pb2.StageMetrics:
    busy_s = figures["busy_s"]
    values = {
        "prefill_tokens": figures["prefill_tokens"],
        "shared_prompt_tokens": figures["shared_prompt_tokens"],
        "moved_tokens": figures["moved_tokens"],
        "decode_steps": figures["decode_steps"],
        "mean_batch_rows": figures["decode_rows"] / max(1, figures["decode_steps"]),
        "tokens_per_second": figures["sampled_tokens"] / max(busy_s, 1e-9),
    }
    samples, tokens = int(figures["samples"]), int(figures["sampled_tokens"])
    return common_pb2.StageMetrics(wall_time=duration_of(busy_s), items=samples, tokens=tokens, values=values)


def _episodes(figures: Mapping[str, float]) -> common_pb2.StageMetrics:
    values = {
        "environment_steps": figures["environment_steps"],
        "policy_calls": figures["policy_calls"],
        "mean_batch_rows": figures["chunks"] / max(1, figures["policy_calls"]),
    }
    policy_s, episodes = figures["policy_s"], int(figures["episodes"])
    return common_pb2.StageMetrics(wall_time=duration_of(policy_s), items=episodes, values=values)
