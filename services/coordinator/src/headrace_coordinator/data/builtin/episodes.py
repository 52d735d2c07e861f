"""Where episodes begin: start states of a run's tasks, by seed or by initial state. Knows no simulator.

A start state is an item like a question: held-out ones are never trained on, every epoch has each other one once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from headrace_schema.problems import Impossible, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource

MOST = 1_000_000


class Episodes(DataSource):
    """Start states of tasks: `starts` seeds of each, or its initial states."""

    tasks: list[str] = Field(default_factory=list, description="default: environment.tasks")
    starts: Annotated[int, Field(strict=True, ge=2)] = Field(
        default=4096, description="start states of a task, held-out ones included"
    )
    first_seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)] = Field(
        default=0, description="seeds of a task's start states begin here"
    )
    init_states: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0,
        description="initial states that the environment lists for a task (LIBERO: 50); 0: seeds alone",
    )

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields the start states of one task after the other."""
        if not self.tasks:
            raise Impossible(
                [problem("data.options.tasks", "names no task", "set environment.tasks, or name tasks here")]
            )
        if len(self.tasks) * self.starts > MOST:
            reason = f"{len(self.tasks)} tasks of {self.starts} start states are more than {MOST:,}"
            fix = f"the nearest valid value is {max(2, MOST // len(self.tasks))}"
            raise Impossible([problem("data.options.starts", reason, fix)])
        for task in self.tasks:
            for number in range(self._count):
                yield self._start(task, number)

    @property
    def _count(self) -> int:
        return min(self.starts, self.init_states) if self.init_states else self.starts

    def _start(self, task: str, number: int) -> DataItem:
        start: dict[str, Any] = {"task": task, "seed": self.first_seed + number}
        place = f"seed {start['seed']}"
        if self.init_states:
            start["init_state"] = number
            place = f"initial state {number}"
        return DataItem(f"{task}, {place}", "", {"task": task}, start)
