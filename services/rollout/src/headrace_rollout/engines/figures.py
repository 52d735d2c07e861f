"""What an engine has done, in counts and in times."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass


@dataclass
class Figures:
    """What an engine has done since it was built."""

    busy_s: float = 0.0
    decode_steps: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    shared_prompt_tokens: int = 0
    moved_tokens: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of those that were drafted."""
    samples: int = 0
    restarts: int = 0
    """Times that an engine's own processes were started again."""
    asleep_bytes: int = 0
    """What these kept of their GPUs, summed over their sleeps."""


class Prefills:
    """When an engine computed prompts, by `time.perf_counter()`: written in its thread, read in others.

    Only the newest `KEPT` spans are kept: callers ask for those since their last message.
    """

    KEPT = 4096

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=self.KEPT)
        self._lock = threading.Lock()

    def add(self, start: float, end: float) -> None:
        """Prompts were computed from `start` to `end`, and this model decoded nothing."""
        with self._lock:
            self._spans.append((start, end))

    def ended_after(self, mark: float) -> list[tuple[float, float]]:
        """(start, end) of those that ended later, in order."""
        with self._lock:
            return [span for span in self._spans if span[1] > mark]


class BusyTime:
    """Seconds in which at least one of several things was at work: `begin` and `end` are called for each."""

    def __init__(self) -> None:
        self._open = 0
        self._since = self._total = 0.0

    def begin(self) -> None:
        """Something begins to work."""
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1

    def end(self) -> None:
        """Something ends its work."""
        self._open -= 1
        if not self._open:
            self._total += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._total + (time.perf_counter() - self._since if self._open else 0.0)
