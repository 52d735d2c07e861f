"""What an engine did since the last look, as the metrics of the generate stage."""

from __future__ import annotations

import resource
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration
from headrace.common.v1 import common_pb2

from headrace_rollout.run import OpenedRun


class GenerateFigures:
    """Differences of one engine's counters."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def since_last(self, run: OpenedRun) -> common_pb2.StageMetrics | None:
        """The stage's figures since the last call; None when nothing was sampled."""
        now = asdict(run.engine.figures)
        figures = {name: value - self._before.get(name, 0) for name, value in now.items()}
        if not figures["sampled_tokens"]:
            return None
        self._before = now
        busy_s = figures["busy_s"]
        values = {
            "prefill_tokens": figures["prefill_tokens"],
            "shared_prompt_tokens": figures["shared_prompt_tokens"],
            "decode_steps": figures["decode_steps"],
            "mean_batch_rows": figures["decode_rows"] / max(1, figures["decode_steps"]),
            "tokens_per_second": figures["sampled_tokens"] / max(busy_s, 1e-9),
            "custody_trajectories": len(run.retention),
            "custody_bytes": run.retention.size_bytes,
        }
        wall_time = Duration()
        wall_time.FromNanoseconds(int(busy_s * 1e9))
        return common_pb2.StageMetrics(
            stage="generate",
            wall_time=wall_time,
            items=int(figures["samples"]),
            tokens=int(figures["sampled_tokens"]),
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            values=values,
        )
