"""A suite of start states: how often a robot policy succeeds in tasks, always in the same episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.sections.generating import DataSection, PromptSection
from headrace_schema.sections.scoring import RewardSection, ScorerSection
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.suites.base import Suite

FIRST_SEED = 1_000_000
"""Beyond the seeds that a run trains on, unless its `data.options` say otherwise."""


class Episodes(Suite):
    """Start states of tasks, judged by success, or by return where there is none.

    Its keys are those of a run's environment and start states.
    """

    environment: EnvironmentSection = Field(
        description="as a run's `environment`: backend, tasks, options, count, …"
    )
    starts: Annotated[int, Field(strict=True, ge=2)] = Field(default=48, description="start states of a task")
    first_seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = Field(
        default=FIRST_SEED, description="seeds of a task's start states begin here"
    )
    init_states: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0,
        description="initial states that the environment lists for a task (LIBERO: 50); 0: seeds alone",
    )
    only: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None, description="this start state of each task alone, counted from 0; default: all"
    )
    videos: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="record the first so many episodes of each task and variant"
    )

    @override
    def acts_in(self) -> EnvironmentSection:
        return self.environment

    @override
    def data(self) -> DataSection:
        own = self.model_dump(include={"starts", "first_seed", "init_states", "only"})
        options = {"tasks": self.environment.tasks, **own}
        return DataSection(source="episodes", options=options, prompt=PromptSection(chat=False))

    @override
    def task_of(self, item: DataItem) -> tuple[str, str]:
        return self.environment.variant_of(item.metadata["task"])

    @override
    def recorded(self, items: Sequence[DataItem]) -> frozenset[int]:
        seen: Counter[str] = Counter()
        found = set()
        for index, item in enumerate(items):
            seen[item.metadata["task"]] += 1
            if seen[item.metadata["task"]] <= self.videos:
                found.add(index)
        return frozenset(found)

    @override
    def key(self, data_key: str) -> str:
        return data_key.replace("data.options.", "suite.options.", 1).replace("data.", "suite.options.", 1)

    @override
    def reward(self) -> RewardSection:
        """1 for an episode in which the task succeeds; the return where the environment never says it."""
        return RewardSection(scorers=[ScorerSection(name="episode", options={"of": "outcome"})])
