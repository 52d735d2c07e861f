"""An episode as it is recorded. Knows no environment and no policy.

Shapes: T chunks, C actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

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
        moments = self._moments
        seen, drawn = [each[0] for each in moments], [each[1:3] for each in moments]
        executed_TCA = np.stack([each.executed_BCA[at] for each, at in drawn])
        rewards_TC = np.zeros(executed_TCA.shape[:2], np.float32)
        valid_TC, successes_TC = np.zeros(rewards_TC.shape, np.bool_), np.zeros(rewards_TC.shape, np.bool_)
        for moment, (*_, shown, row) in enumerate(moments):
            length = shown.executed[row]
            valid_TC[moment, :length] = True
            rewards_TC[moment, :length] = shown.rewards_NC[row, :length]
            successes_TC[moment, :length] = shown.successes_NC[row, :length]
        intervened_TC, author = self._put_in_place(executed_TCA)
        arrays, last = final
        return Episode(
            observation={name: np.stack([each[name][row] for each, row in seen]) for name in seen[0][0]},
            sampled={
                name: np.stack([each.sampled[name][at] for each, at in drawn]) for name in drawn[0][0].sampled
            },
            executed_TCA=executed_TCA,
            valid_TC=valid_TC,
            log_probs_TCA=np.stack([each.log_probs_BCA[at] for each, at in drawn]),
            rewards_TC=rewards_TC,
            successes_TC=successes_TC,
            terminated=self.terminated,
            truncated=self.truncated,
            values_T=np.stack([each.values_B[at] for each, at in drawn]),
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
