"""Typed settings: the run's `reward` section, and those of the pool of children."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ScorerSection(Section):
    """One scorer with its weight."""

    name: str = Field(description="a registered scorer, or path/to/file.py:function")
    weight: float = 1.0
    options: dict[str, Any] = Field(default_factory=dict)


class RewardSection(Section):
    """What answers are worth: the spec's `reward` section."""

    scorers: list[ScorerSection] = Field(min_length=1)
    evaluation: list[ScorerSection] = Field(default_factory=list, description="default: the same scorers")
    timeout_s: PositiveFloat = 5.0
    failed_reward: float = 0.0
    truncated_reward: float | None = None

    def sets(self) -> dict[str, list[ScorerSection]]:
        """The scorers by the key of their set; `evaluation` only where it has scorers of its own."""
        own = {"evaluation": self.evaluation} if self.evaluation else {}
        return {"scorers": self.scorers, **own}


class PoolSettings(Section):
    """How children are run; from the environment, `HEADRACE_REWARD_<FIELD>`."""

    children: PositiveInt = Field(default_factory=lambda: min(4, os.cpu_count() or 1))
    batch: PositiveInt = Field(64, description="answers sent to a child at once")
    load_timeout_s: PositiveFloat = Field(120.0, description="limit of a child's start with its imports")
    memory_bytes: int = Field(16 * 1024**3, ge=0, description="address space of a child; 0: unlimited")
    remembered: PositiveInt = Field(65536, description="results kept for repeated requests, per run")
