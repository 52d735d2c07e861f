"""Sections of what answers are worth."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat

from headrace_schema.base import Section


class ScorerSection(Section):
    """One scorer with its weight."""

    name: str = Field(description="a built-in scorer, or path/to/file.py:function")
    weight: float = Field(default=1.0, description="factor of its score; 0: shown, not counted")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the scorer")


class RewardSection(Section):
    """What answers are worth."""

    scorers: list[ScorerSection] = Field(
        min_length=1, description="the reward is the sum of weights times scores"
    )
    evaluation: list[ScorerSection] = Field(
        default_factory=list, description="scorers of held-out answers; default: the same scorers"
    )
    timeout_s: PositiveFloat = Field(
        default=5.0, description="limit of one answer; beyond it the answer failed"
    )
    load_timeout_s: PositiveFloat = Field(
        default=120.0, le=3600.0, description="limit of a scorer's import, such as that of a reward model"
    )
    failed_reward: float = Field(
        default=0.0, description="reward of an answer that makes a scorer fail or run out of time"
    )
    truncated_reward: float | None = Field(
        default=None, description="reward of answers cut by the length limit; none: scored"
    )

    @property
    def opening_s(self) -> float:
        """The longest that loading all scorers and trying them with a blank answer may take, in seconds."""
        count = sum(map(len, self.sets().values()))
        return count * (self.load_timeout_s + self.timeout_s)

    def sets(self) -> dict[str, list[ScorerSection]]:
        """The scorers by the key of their set; `evaluation` only where it has scorers of its own."""
        own = {"evaluation": self.evaluation} if self.evaluation else {}
        return {"scorers": self.scorers, **own}
