"""Where a fork's checkpoint may be read from: the directory of another run, beside this run's own."""

from __future__ import annotations

from pathlib import Path

from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.errors import Refusal, invalid


def foreign_checkpoints(own: Path, source: str) -> CheckpointDirectory:
    """Another run's checkpoints, to be read alone. Raises Refusal INVALID or NOT_FOUND.

    `source` must be a directory beside `own`, by its plain path: nothing on the way may be a link.
    """
    path = Path(source)
    where = f"source_run_directory {source!r}"
    if not path.is_absolute() or ".." in path.parts or path.parent != own.parent or not path.name:
        raise invalid(f"{where}: give the absolute path of a run's directory below {str(own.parent)!r}")
    if path == own:
        raise invalid(f"{where} is this run's own directory: leave it empty")
    checkpoints = path / "checkpoints"
    if not checkpoints.is_dir():
        raise Refusal("NOT_FOUND", f"{where} has no checkpoints: name a run that has saved one", "not_found")
    if checkpoints.resolve() != own.parent.resolve() / path.name / "checkpoints":
        raise invalid(f"{where} is or holds a link to another place: name the run's directory itself")
    return CheckpointDirectory(path, foreign=True)
