"""What people say of runs: tags and a note, in a file of each run's directory. Knows no state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_schema.changing import RunLabels
from headrace_schema.resources.views import RunView
from headrace_servicekit.folders import replace_below
from pydantic import ValidationError

NAME = "labels.json"


class Labels:
    """The labels of all runs below `runs_directory`, kept in memory too: lists are searched by tag."""

    def __init__(self, runs_directory: Path) -> None:
        self._runs = runs_directory
        self._found = {path.parent.name: _read(path) for path in runs_directory.glob(f"*/{NAME}")}

    def tags(self, run: str) -> list[str]:
        """The tags of a run."""
        return list(self._found.get(run, {}).get("tags", []))

    def shown(self, run: RunView) -> RunView:
        """A run's view with its labels."""
        found = self._found.get(run.id)
        return run.model_copy(update=found) if found else run

    def change(self, run: str, change: RunLabels) -> None:
        """Replaces what `change` gives; returns once that is durable. OSError where the disk refuses."""
        given = change.model_dump(exclude_none=True)
        if "tags" in given:
            given["tags"] = list(dict.fromkeys(given["tags"]))
        found = self._found.get(run, {}) | given
        with replace_below(self._runs, self._runs / run / NAME, synced=True) as file:
            file.write(json.dumps(found).encode())
        self._found[run] = found

    def forget(self, run: str) -> None:
        """Forgets the labels of a deleted run."""
        self._found.pop(run, None)


def _read(path: Path) -> dict[str, Any]:
    """Nothing for a damaged file: a note is not worth a coordinator that does not start."""
    try:
        return RunLabels.model_validate_json(path.read_bytes()).model_dump(exclude_none=True)
    except (OSError, ValidationError):
        return {}
