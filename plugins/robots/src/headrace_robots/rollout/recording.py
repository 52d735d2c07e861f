"""An episode as it is recorded. Knows no environment and no policy.

Shapes: T chunks, C actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from headrace_rollout.environments.outcomes import Shown
from headrace_servicekit.rpc.episodes import Episode

from headrace_robots.rollout.model import Decisions, Seen


@dataclass
class Recording:
    """An episode that goes on."""

    terminated: bool = False
    truncated: bool = False
    success_reported: bool = False
    """Whether the environment said at any action whether it succeeded."""
    _moments: list[tuple[Seen, Decisions, int, Shown, int]] = field(default_factory=list)
    """Of each chunk: what was seen, what was drawn and its row, and how it went and its row."""

    @property
    def chunks(self) -> int:
        """Chunks so far."""
        return len(self._moments)

    @property
    def success(self) -> bool | None:
        """Whether any action succeeded; None where the environment never said."""
        successes = (shown.successes_NC[row] for *_, shown, row in self._moments)
        return any(each.any() for each in successes) if self.success_reported else None

    @property
    def success_at_end(self) -> bool | None:
        """Whether the last action succeeded; None where the environment never said."""
        *_, shown, row = self._moments[-1]
        return bool(shown.successes_NC[row, shown.executed[row] - 1]) if self.success_reported else None

    @property
    def ended(self) -> bool:
        """Whether nothing more happens in it."""
        return self.terminated or self.truncated

    def add(self, seen: Seen, decisions: Decisions, at: int, shown: Shown, row: int) -> None:
        """What was seen, what was drawn, and how the chunk went."""
        self.terminated = shown.terminated[row]
        self.truncated = shown.truncated[row] and not self.terminated
        self.success_reported = self.success_reported or shown.reported[row]
        self._moments.append((seen, decisions, at, shown, row))

    def episode(self, final: Seen) -> Episode:
        """The whole episode; `final` is what came behind its last action, and is kept where it was cut."""
        seen, drawn, rows, went, places = zip(*self._moments, strict=True)
        executed_TCA = _gathered([each.executed_BCA for each in drawn], rows)
        length = executed_TCA.shape[1]
        executed_T = np.array([each.executed[row] for each, row in zip(went, places, strict=True)])
        intervened_TC, author = self._put_in_place(executed_TCA)
        arrays, last = final
        columns, at = zip(*seen, strict=True)
        return Episode(
            observation={name: _gathered([each[name] for each in columns], at) for name in columns[0]},
            sampled={
                name: _gathered([each.sampled[name] for each in drawn], rows) for name in drawn[0].sampled
            },
            executed_TCA=executed_TCA,
            valid_TC=np.arange(length) < executed_T[:, None],
            log_probs_TCA=_gathered([each.log_probs_BCA for each in drawn], rows),
            rewards_TC=_gathered([_padded(each.rewards_NC, length) for each in went], places).astype(
                np.float32
            ),
            successes_TC=_gathered([_padded(each.successes_NC, length) for each in went], places),
            terminated=self.terminated,
            truncated=self.truncated,
            values_T=_gathered([each.values_B for each in drawn], rows),
            final_observation={name: array[last] for name, array in arrays.items()} if self.truncated else {},
            intervened_TC=intervened_TC,
            author=author,
        )

    def _put_in_place(self, executed_TCA: np.ndarray) -> tuple[np.ndarray | None, str]:
        """Puts what a person did in place of the policy's actions: where, (T, C), and who it was; None for nowhere."""
        intervened_TC, author = None, ""
        for moment, (*_, shown, row) in enumerate(self._moments):
            if shown.done_NCA is not None:
                if intervened_TC is None:
                    intervened_TC = np.zeros(executed_TCA.shape[:2], np.bool_)
                theirs = np.flatnonzero(np.isfinite(shown.done_NCA[row]).all(1))
                executed_TCA[moment, theirs] = shown.done_NCA[row, theirs]
                intervened_TC[moment, theirs], author = True, shown.author
        return intervened_TC, author


def _gathered(arrays: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """One row of each. (It costs a third of stacking them.)"""
    return np.concatenate([array[row : row + 1] for array, row in zip(arrays, rows, strict=True)])


def _padded(executed_NK: np.ndarray, length: int) -> np.ndarray:
    """With zeros for the actions of a chunk that were not executed."""
    missing = length - executed_NK.shape[1]
    return np.pad(executed_NK, ((0, 0), (0, missing))) if missing else executed_NK
