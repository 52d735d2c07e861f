"""Tasks by name, from a folder in Harbor's form or a file in SWE-bench's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace_containers.tasks import harbor, swe
from headrace_containers.tasks.task import BadTask, Task

FORMS = "a folder of tasks in Harbor's form, or a .jsonl file in SWE-bench's"


class NoTasks(Exception):
    """A path leads to no tasks; the sentence says why."""


@dataclass
class TaskSet:
    """The tasks at a path; each is read when it is asked for."""

    path: Path
    names: tuple[str, ...]
    _folders: dict[str, Path] = field(default_factory=dict)
    _rows: dict[str, swe.Row] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> TaskSet:
        """Raises NoTasks, and BadTask for a line that is none."""
        try:
            return cls._at(path)
        except OSError as error:
            raise NoTasks(f"{path} cannot be read: {error.strerror or error}; give {FORMS}") from error

    @classmethod
    def _at(cls, path: Path) -> TaskSet:
        if path.is_dir():
            folders = {each.name: each for each in harbor.folders(path)}
            if not folders:
                raise NoTasks(f"{path} has no folder in it; give {FORMS}")
            return cls(path, tuple(folders), folders)
        if not path.is_file():
            raise NoTasks(f"there is no {path}; give {FORMS}")
        found: dict[str, swe.Row] = {}
        for number, row in swe.rows(path):
            if row.instance_id in found:
                reason = f"line {number} of {path.name} is a second {row.instance_id}"
                raise BadTask(row.instance_id, reason, "give each an instance_id of its own")
            found[row.instance_id] = row
        if not found:
            raise NoTasks(f"{path} is empty; give {FORMS}")
        return cls(path, tuple(found), _rows=found)

    def read(self, name: str) -> Task:
        """A task. Raises BadTask."""
        if name in self._folders:
            return harbor.read_task(self._folders[name])
        if name in self._rows:
            return swe.read_task(self._rows[name], self.path.parent)
        raise BadTask(name, f"{self.path} has no such task", "read data and environment from equal folders")

    def all(self) -> Iterator[Task | BadTask]:
        """Each task, or what is wrong with it."""
        for name in self.names:
            try:
                yield self.read(name)
            except BadTask as error:
                yield error
