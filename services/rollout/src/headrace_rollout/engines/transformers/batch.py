"""The running trajectories as arrays, one row each, so that a token costs no Python per row.

Row i here is row i of the cache. Knows no model and no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_rollout.engines.samples import Finish
from headrace_rollout.engines.trajectory import RunningTrajectory
from headrace_rollout.engines.transformers.drafting import History
from headrace_rollout.engines.transformers.sampling import uniforms

_TOKEN_STEP = 64
_AHEAD = 16
"""Uniforms of a row that are drawn at once: of one token they would cost as much."""


class Batch:
    """Rows 0 to `count` run; `length` counts cached tokens, `sampled` the answer's, prefix included; `shift` is what
    images add to a token's position.
    """

    def __init__(self, rows: int) -> None:
        self.trajectories: list[RunningTrajectory] = []
        self.routes: list[list[bytes]] = []
        """Of each row's cached tokens, in pieces; empty lists where none are recorded."""
        self._histories: list[tuple[History, int] | None] = []
        """Made for rows that draft, with how many sampled tokens they hold."""
        self.read: list[list[Tensor]] = []
        """Of each row, (T, F) each: what a head that drafts has yet to read of the newest cached tokens."""
        self.tokens = np.zeros((rows, _TOKEN_STEP), dtype=np.int64)
        self.log_probs = np.zeros((rows, _TOKEN_STEP), dtype=np.float32)
        self.length, self.sampled, self.limit, self.sent, self.chunk, self.held_back, self.shift = (
            np.zeros(rows, dtype=np.int64) for _ in range(7)
        )
        self.seed, self.prompt, self.sample = (np.zeros(rows, dtype=np.int64) for _ in range(3))
        self.drawn, self.drawn_from = np.zeros((rows, _AHEAD), np.float32), np.zeros(rows, np.int64)
        """Uniforms of each row, and the number of sampled tokens before the first of them."""
        self.has_stop = np.zeros(rows, dtype=bool)
        # (rows, vocabulary) ids met so far; made when the first penalised trajectory joins.
        self.seen = np.zeros((rows, 0), dtype=bool)

    @property
    def count(self) -> int:
        """Running rows."""
        return len(self.trajectories)

    def join(
        self, trajectory: RunningTrajectory, length: int, vocabulary: int, routes: bytes = b"", shift: int = 0
    ) -> None:
        """Adds a row whose context of `length` tokens is cached, with these routes.

        `shift`: what images add to the number of tokens before a token to make its position.
        """
        row, prefix = self.count, trajectory.prefix
        self.trajectories.append(trajectory)
        self.routes.append([routes])
        self._histories.append(None)
        self.read.append([])
        given = len(prefix.token_ids)
        self._widen(max(given, 1))
        self.tokens[row, :given] = prefix.token_ids
        self.log_probs[row, :given] = prefix.log_probs
        self.length[row], self.sampled[row], self.sent[row], self.limit[row] = (
            length,
            given,
            trajectory.sent,
            trajectory.limit,
        )
        self.shift[row] = shift
        # Without chunks nothing is sent before the end.
        self.chunk[row] = trajectory.stream.chunk_tokens or np.iinfo(np.int64).max // 2
        self.seed[row] = trajectory.stream.seed
        self.prompt[row], self.sample[row] = trajectory.key.prompt_ordinal, trajectory.key.sample_index
        self.drawn_from[row] = -_AHEAD
        self.has_stop[row] = trajectory.matcher is not None
        self.held_back[row] = trajectory.matcher.held_back if trajectory.matcher else 0
        if trajectory.stream.distribution.repetition_penalty != 1.0 and not self.seen.shape[1]:
            self.seen = np.zeros((self.seen.shape[0], vocabulary), dtype=bool)
        if self.seen.shape[1]:
            self.seen[row] = False
            self.seen[row, trajectory.context_ids()] = True

    def history(self, row: int) -> History:
        """What a row's context was and what it has sampled."""
        known, end = self._histories[row], int(self.sampled[row])
        if known is None:
            known = self._histories[row] = (History(self.trajectories[row].prompt_ids), 0)
        history, had = known
        history.add(self.tokens[row, had:end].tolist())
        self._histories[row] = (history, end)
        return history

    def uniforms(self, first: int, tokens: int = 1) -> NDArray[np.float32]:
        """The next uniforms of each row from `first` on, `tokens` a row, one row behind the other."""
        rows = slice(first, self.count)
        if (self.sampled[rows] - self.drawn_from[rows]).max(initial=0) + tokens > _AHEAD:
            keys = [each[rows].repeat(_AHEAD) for each in (self.seed, self.prompt, self.sample)]
            position = self.sampled[rows, None] + np.arange(_AHEAD)
            found = uniforms(keys[0], keys[1], keys[2], position.ravel())
            self.drawn[rows], self.drawn_from[rows] = found.reshape(-1, _AHEAD), self.sampled[rows]
        place = (self.sampled[rows] - self.drawn_from[rows])[:, None] + np.arange(tokens)
        drawn: NDArray[np.float32] = self.drawn[np.arange(first, self.count)[:, None], place].ravel()
        return drawn

    def append(
        self,
        first: int,
        tokens_NT: NDArray[np.int64],
        log_probs_NT: NDArray[np.float32],
        counts: NDArray[np.int64] | int = 1,
    ) -> None:
        """Adds to each row from `first` on the given number of its sampled tokens."""
        rows = np.arange(first, self.count)
        start = self.sampled[rows]
        self._widen(int(start.max()) + tokens_NT.shape[1])
        for place in range(tokens_NT.shape[1]):  # what lies behind a row's count is written over later
            self.tokens[rows, start + place] = tokens_NT[:, place]
            self.log_probs[rows, start + place] = log_probs_NT[:, place]
        self.sampled[rows] += counts
        if self.seen.shape[1]:
            self.seen[rows, tokens_NT[:, 0]] = True

    def last_tokens(self) -> NDArray[np.int64]:
        """The newest token of each row."""
        rows = np.arange(self.count)
        return self.tokens[rows, self.sampled[rows] - 1]

    def tail(self, row: int, count: int) -> list[int]:
        """The newest `count` ids of a row's answer."""
        end = int(self.sampled[row])
        ids: list[int] = self.tokens[row, max(0, end - count) : end].tolist()
        return ids

    def due(self, first: int) -> NDArray[np.int64]:
        """Rows from `first` on that have a full chunk which no stop string can still cut."""
        rows = slice(first, self.count)
        ready = self.sampled[rows] - self.held_back[rows] - self.sent[rows] >= self.chunk[rows]
        return np.flatnonzero(ready) + first

    def ended(self, first: int, eos_ids: NDArray[np.int64]) -> dict[int, tuple[Finish, int | None]]:
        """Rows from `first` on whose newest token is the last: why, and how many tokens are kept (None: all)."""
        rows = slice(first, self.count)
        full = self.sampled[rows] >= self.limit[rows]
        found: dict[int, tuple[Finish, int | None]] = {
            int(row) + first: (Finish.LENGTH, None) for row in np.flatnonzero(full)
        }
        for row in np.flatnonzero(self.has_stop[rows]) + first:
            if (kept := self._before_stop(int(row))) is not None:
                found[int(row)] = (Finish.STOP, kept)
        for row in np.flatnonzero((self.last_tokens()[rows, None] == eos_ids).any(1)) + first:
            found[int(row)] = (Finish.EOS, None)
        return found

    def _before_stop(self, row: int) -> int | None:
        matcher = self.trajectories[row].matcher
        if matcher is None or not matcher.hit(self.tail(row, matcher.window)):
            return None
        return matcher.kept(self.answer(row)[0])

    def answer(self, row: int, count: int | None = None) -> tuple[list[int], list[float]]:
        """Ids and log-probs of a row, the first `count` or all."""
        end = int(self.sampled[row]) if count is None else count
        return self.tokens[row, :end].tolist(), self.log_probs[row, :end].tolist()

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drops rows; the last rows fill the holes. Returns (targets, sources) of the moves."""
        gone = set(rows)
        left = self.count - len(gone)
        targets = sorted(row for row in gone if row < left)
        sources = [row for row in range(left, self.count) if row not in gone]
        for array in self._arrays():
            array[targets] = array[sources]
        for target, source in zip(targets, sources, strict=True):
            self.trajectories[target] = self.trajectories[source]
            self.routes[target] = self.routes[source]
            self._histories[target] = self._histories[source]
            self.read[target] = self.read[source]
        del self.trajectories[left:], self.routes[left:], self._histories[left:], self.read[left:]
        return targets, sources

    def _arrays(self) -> list[NDArray[Any]]:
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _widen(self, tokens: int) -> None:
        have = self.tokens.shape[1]
        if tokens > have:
            more = ((0, 0), (0, max(tokens - have, have)))
            self.tokens = np.pad(self.tokens, more)
            self.log_probs = np.pad(self.log_probs, more)
