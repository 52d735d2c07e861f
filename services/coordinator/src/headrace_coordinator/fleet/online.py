"""What the coordinator knows of an online run: where clients reach it, their key, and what became of their sessions."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_MOST_LOST = 10_000
"""Ids of lost sessions that are kept, so that a client that asks again counts once."""


class OnlineSessions:
    """Sessions of one run, as long as this coordinator lives."""

    def __init__(self) -> None:
        self.key = ""
        """What clients show; empty until one has asked."""
        self.urls: dict[str, str] = {}
        """Endpoints of its rollouts, by incarnation."""
        self.ended: Counter[str] = Counter()
        """Sessions that are over: `taken`, `unrewarded`, `stale`, … as rollouts tell them, and `lost`."""
        self._told: Counter[str] = Counter()
        self._lost: dict[str, None] = {}

    def end(self, counts: Mapping[str, int]) -> None:
        """Some have ended at a rollout."""
        self.ended.update(counts)

    def lose(self, session: str) -> None:
        """A client was told that its session is lost; empty where it had not yet heard the id."""
        if session in self._lost:
            return
        self.ended["lost"] += 1
        if session:
            self._lost[session] = None
            if len(self._lost) > _MOST_LOST:
                del self._lost[next(iter(self._lost))]

    def figures(self) -> dict[str, float]:
        """The figures of a step: what ended since the last one, as `sessions_OUTCOME`; they begin anew."""
        news, self._told = self.ended - self._told, self.ended.copy()
        return {f"sessions_{outcome}": float(count) for outcome, count in sorted(news.items())}


def endpoint_key(directory: str | Path) -> str:
    """The key of the run with this directory; made the first time, and the same from then on."""
    path = Path(directory) / "endpoint-key"
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    key = f"sk-headrace-{secrets.token_urlsafe(32)}"
    part = path.with_suffix(".part")
    with os.fdopen(
        os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii"
    ) as file:
        file.write(key)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    return key
