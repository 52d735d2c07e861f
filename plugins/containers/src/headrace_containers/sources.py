"""Data sources of coding tasks, for the coordinator: each item is a task that simulators have in containers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from headrace_coordinator.data import DataItem, DataSource
from headrace_schema.problems import Impossible, problem
from pydantic import Field, PrivateAttr
from typing_extensions import override

from headrace_containers.tasks.proving import read_proofs, unproven
from headrace_containers.tasks.reading import NoTasks, TaskSet
from headrace_containers.tasks.task import BadTask, Task

KEY = "data.options"
_MOST_PROBLEMS = 10
Unproven = Literal["refuse", "leave_out", "allow"]


class _Tasks(DataSource):
    unproven: Unproven = Field(
        default="refuse",
        description="of a task that `headrace tasks prove` has not proven, or which its proof shows to be useless: "
        "refuse the run, leave the task out, or learn from it all the same",
    )
    exclude: list[str] = Field(default_factory=list, description="names of tasks that are left out")
    _left_out: dict[str, int] = PrivateAttr(default_factory=dict)

    @property
    def _path(self) -> Path:
        return Path(os.path.expanduser(getattr(self, "path")))  # noqa: B009  # a field of each subclass

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields a task an item, sorted by name in a folder and as they stand in a file."""
        try:
            tasks, proofs = TaskSet.at(self._path), read_proofs(self._path)
        except (NoTasks, OSError, ValueError) as error:
            raise Impossible([problem(f"{KEY}.path", str(error), "correct the path or the file")]) from error
        except BadTask as error:
            raise Impossible([problem(f"{KEY}.path", f"{error.task}: {error.reason}", error.fix)]) from error
        if strange := sorted({*self.exclude} - {*tasks.names}):
            raise Impossible([problem(f"{KEY}.exclude", f"there is no task {strange[0]}", "remove it")])
        self._left_out.clear()
        wrong, found = [], list[Task]()
        for task in tasks.all():
            name = task.task if isinstance(task, BadTask) else task.name
            if name in self.exclude:
                continue
            why = (task.reason, task.fix) if isinstance(task, BadTask) else unproven(task, proofs)
            if isinstance(task, Task) and (why is None or self.unproven == "allow"):
                found.append(task)
            elif why is not None and self.unproven == "leave_out":
                self._left_out[why[0]] = self._left_out.get(why[0], 0) + 1
            elif why is not None:
                wrong.append(
                    problem(f"{KEY}.path", f"{name}: {why[0]}", f"{why[1]}, or name it in {KEY}.exclude")
                )
        if wrong:
            raise Impossible(wrong[:_MOST_PROBLEMS])
        for each in found:
            metadata = {"name": each.name, "digest": each.digest}
            yield DataItem(each.instruction, "", {}, metadata, id=each.name)

    @override
    def left_out(self) -> dict[str, int]:
        """Tasks that are not proven, by reason."""
        return dict(self._left_out)

    @override
    def fingerprint(self) -> str:
        """Newest time of change, and number, of the files."""
        path = self._path
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        try:
            states = [each.stat() for each in files]
        except OSError:
            return "unreadable"
        return f"{max(each.st_mtime_ns for each in states)}-{max(each.st_ctime_ns for each in states)}-{len(states)}"


class Harbor(_Tasks):
    """A folder of tasks in Harbor's form: each has task.toml, instruction.md, environment and tests."""

    path: str = Field(description="folder of tasks, as the coordinator sees it")


class Swe(_Tasks):
    """A file in SWE-bench's form: repository, commit, and tests that must pass and must stay so."""

    path: str = Field(description=".jsonl file with one task a line, as the coordinator sees it")
