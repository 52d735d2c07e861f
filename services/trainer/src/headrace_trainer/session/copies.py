"""A run's state outside of its checkpoints: carried from one trainer group into the next, or exported.

The next group may have another number of ranks: each of them reads its own parts of what all ranks before it wrote.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace_servicekit.folders import open_below
from safetensors import SafetensorError
from torch import Tensor

from headrace_trainer.algorithms._base import judge_of
from headrace_trainer.backends.policies import Gathered
from headrace_trainer.checkpoints.directory import write_state
from headrace_trainer.checkpoints.files import digest_file
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.state import STATE, Damaged, State, read_state
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.kinds._base import RunKind
from headrace_trainer.learning.step import Phase, StepState, Version, held_version
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.session.saving import RunCheckpoints

CARRIED = "carried"
"""Stands for a checkpoint's name in the restore round that takes up what was carried."""
_EXPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Carried:
    """A recorded version between two groups: the state of its steps, and its tensors in a directory of the run.

    The directory is a checkpoint's, which every rank of the old group has written and every rank of the new one reads.
    """

    state: StepState
    directory: Path
    saved: State

    @classmethod
    def read(cls, state: StepState, directory: Path) -> Carried:
        """Of what was written. Raises Refusal CARRY_FAILED."""
        try:
            return cls(state, directory, read_state(directory / STATE))
        except Damaged as error:
            raise carry_failed(directory, error) from error

    @property
    def version(self) -> Version:
        """The version that it is."""
        return held_version(self.state)

    def open(self) -> StateReader:
        """Its tensors, for a restore round. Raises Refusal CARRIED_MISMATCH where a file is not as it was written."""
        try:
            for name, facts in self.saved.files.items():
                if (found := digest_file(self.directory / name)) != facts.digest:
                    raise Damaged(f"{name}: expected digest {facts.digest}, found {found}")
            return StateReader.of_checkpoint(self.directory, self.saved.files, self.saved.optimizer_steps)
        except (Damaged, OSError, ValueError) as error:
            raise Refusal("CARRIED_MISMATCH", f"{self.directory}: {error}; restore a checkpoint") from error

    def mismatch(self, found: str) -> Refusal:
        """The new group's weights have another digest."""
        return Refusal(
            "CARRIED_MISMATCH",
            f"version {self.version.number} has the digest {found} in the new trainer group and had "
            f"{self.version.digest}; restore a checkpoint",
        )

    def drop(self) -> None:
        """Deletes its files."""
        shutil.rmtree(self.directory, ignore_errors=True)


def write_carried(
    state: StepState, rounds: Rounds, checkpoints: RunCheckpoints, below: Callable[[Path], str]
) -> Carried:
    """Writes the recorded version into the run's directory, each rank its part; `below` names it to the others.

    Raises Refusal NOT_OPEN, NOT_RECORDED, CONFLICT inside a step, or CARRY_FAILED.
    """
    check_carried(state)
    directory: Path | None = None
    carried: Carried | None = None
    try:
        directory = checkpoints.directory.new_carried()
        copy = rounds.snapshot(below(directory), durable=False)
        held = checkpoints.snapshot(rounds.rank, copy, held_version(state), state.lineage, b"")
        write_state(directory, held, durable=False)
        carried = Carried.read(state, directory)
    except OSError as error:
        raise carry_failed(directory or checkpoints.directory.root, error) from error
    finally:
        if carried is None and directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
    return carried


def carry_failed(directory: Path, error: Exception) -> Refusal:
    """The state could not be written."""
    return Refusal(
        "CARRY_FAILED", f"{directory}: {error}; free the disk, or restore a checkpoint", "exhausted"
    )


def check_carried(state: StepState) -> None:
    """Raises Refusal unless the run is between two steps with a recorded version."""
    held_version(state)
    if state.phase is Phase.COMMITTED:
        raise Refusal("NOT_RECORDED", "the committed version is not recorded: call RecordStep first")
    if state.phase is Phase.ACCUMULATING:
        raise Refusal("CONFLICT", "a step attempt is open: commit or abort it before the group changes")


def export_run(rounds: Rounds, directory: Path, name: str) -> Path:
    """Writes the held weights below a run's directory; where.

    Raises Refusal INVALID for a name that cannot be, and EXPORT_FAILED where the disk refuses.
    """
    if not _EXPORT_NAME.fullmatch(name) or name == "checkpoints":
        raise invalid(
            f"name {name[:100]!r}: give a directory's name of letters, digits, '.', '_' and '-' that begins with a "
            "letter or digit and is not 'checkpoints'"
        )
    kind, target = rounds.rank.kind, directory / name
    config = rounds.rank.config
    lora = config.trainer.lora is not None or bool(config.policies)
    what: Gathered = "judge" if judge_of(rounds.rank.algorithms[""]) else "all" if lora else "merged"
    rounds.gather(lambda tensors: _export(kind, tensors, target), what)
    return target


def _export(kind: RunKind, tensors: Iterator[tuple[str, Tensor]], target: Path) -> None:
    size = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal size
        for name, tensor in tensors:
            size += tensor.nbytes
            yield name, tensor

    counting = counted()
    try:
        os.close(open_below(target.parents[1], target.parent, os.O_RDONLY | os.O_DIRECTORY))
        kind.export(counting, target)
    except (OSError, SafetensorError) as error:
        for _, tensor in tensors:  # The other ranks take part up to the last one.
            size += tensor.nbytes
        free = shutil.disk_usage(next(each for each in target.parents if each.exists())).free
        raise Refusal(
            "EXPORT_FAILED",
            f"{target} cannot be written: {error}; the model has up to {size:,} bytes, and {free:,} are free there",
            "exhausted",
        ) from error
