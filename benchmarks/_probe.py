"""How fast this machine is at the moment: a fixed piece of work on one core, and on two at once, under a second.

A machine whose host has other guests changes its speed within minutes, by a half, and nothing in it says so. The probe
is most of what a step is: matrix products and Python, in processes of their own, one on each core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any, Self

ALONE_S, TOGETHER_S, WARM_S = 0.25, 0.35, 1.0
FIRST = 5
"""Probes at the start, which say how well the probe repeats itself."""


@dataclass(frozen=True)
class Speed:
    """Rounds of work a second: of one core alone, and of two at once, both together."""

    one: float
    two: float

    @property
    def figure(self) -> float:
        """One number: the geometric mean of a core's speed alone and beside a busy neighbour."""
        return float((self.one * self.two / 2) ** 0.5)


class Probe:
    """Two processes that wait until they are asked."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))[:2]
        self._workers = [
            subprocess.Popen(
                [sys.executable, __file__, str(core)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for core in cores
        ]
        self.seen: list[Speed] = []
        self._ask(self._workers, WARM_S)
        for _ in range(FIRST):
            self.look()
        self.spread = spread([speed.figure for speed in self.seen])

    def look(self) -> Speed:
        """The speed now."""
        alone = self._ask(self._workers[:1], ALONE_S)
        speed = Speed(alone, self._ask(self._workers, TOGETHER_S))
        self.seen.append(speed)
        return speed

    @property
    def usual(self) -> float:
        """The median of all that was seen."""
        return median(speed.figure for speed in self.seen)

    def _ask(self, workers: list[Any], seconds: float) -> float:
        for worker in workers:
            worker.stdin.write(f"{seconds}\n")
            worker.stdin.flush()
        return sum(float(worker.stdout.readline()) for worker in workers)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
            worker.wait()


def spread(values: list[float]) -> float:
    """Greatest over least, less 1."""
    return max(values) / min(values) - 1


def _serve(core: int) -> None:
    import torch

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rows, weights = torch.randn(256, 384), torch.randn(1152, 384)
    for line in sys.stdin:
        rounds, began, seconds = 0, time.perf_counter(), float(line)
        while (spent := time.perf_counter() - began) < seconds:
            torch.nn.functional.linear(rows, weights)
            sum(number * number for number in range(20_000))
            rounds += 1
        print(rounds / spent, flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
