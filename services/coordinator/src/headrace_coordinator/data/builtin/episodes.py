"""Where episodes begin: start states of a run's tasks, by seed or by initial state. Knows no simulator.

A start state is an item like a question: held-out ones are never trained on, every epoch has each other one once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from headrace_schema.problems import Impossible, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource

MOST = 1_000_000
_LONGEST = 80


def slug(words: str) -> str:
    """Words as a part of a file's name: the last 80 characters."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[-_LONGEST:]


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
    only: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        default=None, description="this start state of each task alone, counted from 0; default: all"
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
        if self.only is not None and self.only >= self._count:
            fix = f"the nearest valid value is {self._count - 1}"
            raise Impossible([problem("data.options.only", f"there are {self._count} start states", fix)])
        for task in self.tasks:
            for number in range(self._count) if self.only is None else (self.only,):
                yield self._start(task, number)

    def named(self, words: str) -> tuple[str, int] | None:
        """(task, number) of the start state whose words these are, or their `slug`; None: there is no such."""
        found = re.search(r"(\d+)$", words)
        number = -1 if found is None else int(found[1]) - (0 if self.init_states else self.first_seed)
        if not 0 <= number < self._count:
            return None
        wanted = slug(words)
        return next(
            ((task, number) for task in self.tasks if slug(self._start(task, number).question) == wanted),
            None,
        )

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
