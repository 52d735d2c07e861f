"""Checkpoints as transactions on disk: lineages, torn writes, what is live, what is damaged. Knows no gRPC.

checkpoints/model.json                  what an export of any of them needs to know of the run
checkpoints/lineage-E.json              base, number, store_id: made once, by O_EXCL, before anything is below it
checkpoints/lineage-E/step-N/           weights and optimizer, a file of each rank's; state, ledger, step manifest;
                                        the rename is the commit
checkpoints/.carried-K/                 the same, on its way from one trainer group to the next
checkpoints/lineage-E/step-N.damaged-K/ set aside: never listed, never deleted; the reason is in a file beside it
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.folders import open_below
from headrace_servicekit.logs import get_logger

from headrace_trainer.checkpoints.asides import Asides
from headrace_trainer.checkpoints.files import digest_bytes, digest_file, sync_directory, write_bytes
from headrace_trainer.checkpoints.parts import StateCopy, collect_reports, write_part
from headrace_trainer.checkpoints.reader import ReferenceFacts
from headrace_trainer.checkpoints.state import (
    FORMAT,
    LEDGER,
    MANIFEST,
    STATE,
    Damaged,
    FileFacts,
    Version,
    read_bytes,
    seal,
    unreadable,
)
from headrace_trainer.checkpoints.tree import NAME, CheckpointTree, Origin, Saved
from headrace_trainer.errors import Refusal, invalid

_log = get_logger(__name__)
MODEL = "model.json"
"""Of a run's directory of checkpoints: the same for all of them."""
HASHERS = 8
"""How many files are read at a time to be verified."""


@dataclass(frozen=True)
class Snapshot:
    """The leader's copy of its part of the training state, one of `parts`, and what else a checkpoint says."""

    version: Version
    copy: StateCopy
    lineage: Mapping[int, int]
    store_id: str
    ledger: bytes
    step_manifest: bytes = b""
    origin: Origin = field(default_factory=Origin)
    reference: ReferenceFacts | None = None
    base_model: ReferenceFacts | None = None
    algorithm_state: Mapping[str, float] = field(default_factory=dict)
    parts: int = 1


class CheckpointDirectory:
    """The checkpoints of one run. A `foreign` one is of another run: it is read and never written.

    Safe to use from several threads: what changes a directory is one rename. `asides` reports what was
    found damaged.
    """

    def __init__(self, run_directory: Path, *, foreign: bool = False) -> None:
        self.run = run_directory.name if foreign else ""
        self.root = run_directory / "checkpoints"
        self.asides = Asides(self.root, foreign=foreign)
        self._tree = CheckpointTree(self.root)

    def live(self) -> list[Saved]:
        """Intact checkpoints of the newest lineage and what it stands on, newest first; damaged ones are set aside.

        Intact by state and sizes: digests are compared where content is used. Raises Refusal
        CHECKPOINT_UNREADABLE.
        """
        saved, damaged = self._scan()
        for name, reason in damaged.items():
            self.asides.put(name, reason)
        return saved

    def open(self, name: str) -> Saved:
        """A live checkpoint by name, its files verified. Raises Refusal NOT_FOUND or CHECKPOINT_DAMAGED."""
        saved = self._find(name)
        self.verify(saved)
        return saved

    def verify(self, saved: Saved) -> None:
        """Compares all digests. Raises Refusal CHECKPOINT_DAMAGED, after it is set aside."""
        with ThreadPoolExecutor(HASHERS) as pool:
            digests = {file: pool.submit(digest_file, saved.path / file) for file in saved.files}
        for file, facts in saved.files.items():
            try:
                found = digests[file].result()
            except OSError as error:
                raise self._refusal(saved.name, unreadable(saved.path / file, error)) from error
            if found != facts.digest:
                raise self._refusal(saved.name, _other_digest(file, facts, found))

    def ledger(self, name: str) -> bytes:
        """The coordinator's bytes, verbatim. Raises as `open`."""
        saved = self._find(name)
        facts = saved.files[LEDGER]
        try:
            data = read_bytes(saved.path / LEDGER)
        except (Damaged, Refusal) as error:
            raise self._refusal(name, error) from error
        if (found := digest_bytes(data)) != facts.digest:
            raise self._refusal(name, _other_digest(LEDGER, facts, found))
        return data

    def holds(self, saved: Saved) -> bool:
        """Whether a checkpoint is still there and intact by state and sizes."""
        try:
            return self._tree.read(saved.name) == saved
        except Damaged:
            return False

    def new_lineage(self, origin: Origin, number: int, store_id: str) -> int:
        """Claims the next lineage for what follows from `origin`. Raises OSError."""
        self._make(self.root)
        claim = {
            "base_checkpoint": origin.checkpoint,
            "base_run": origin.run,
            "reserved_numbers": [number],
            "store_id": store_id,
        }
        lineage = max(self._tree.lineages(), default=0) + 1
        while True:
            try:
                write_bytes(self.root / f"lineage-{lineage}.json", seal(claim))
                break
            except FileExistsError:
                lineage += 1  # torn, or another incarnation was faster: its lineage is the older one
        self._make(self.root / f"lineage-{lineage}")
        sync_directory(self.root)
        return lineage

    def keep_model(self, model: Mapping[str, object]) -> None:
        """Writes what `model` reads, where it is another. Raises OSError."""
        body = json.dumps(model, sort_keys=True).encode()
        with suppress(OSError):
            if (self.root / MODEL).read_bytes() == body:
                return
        aside = self.root / f".{MODEL}.{uuid.uuid4().hex[:8]}.partial"
        try:
            write_bytes(aside, body)
            os.rename(aside, self.root / MODEL)
        finally:
            aside.unlink(missing_ok=True)
        sync_directory(self.root)

    def model(self) -> dict[str, Any]:
        """What `keep_model` was given. Raises OSError and ValueError."""
        found: dict[str, Any] = json.loads((self.root / MODEL).read_bytes())
        return found

    def new_aside(self, lineage: int, ordinal: int) -> Path:
        """A directory in which all ranks write their parts of a checkpoint, for `write`. Raises OSError."""
        aside = self.root / f"lineage-{lineage}" / f".step-{ordinal}.{uuid.uuid4().hex[:8]}.partial"
        self._make(aside)
        return aside

    def _make(self, folder: Path) -> None:
        """Makes a folder below the run's, with those above it, and follows no link. Raises OSError."""
        os.close(open_below(self.root.parents[1], folder, os.O_RDONLY | os.O_DIRECTORY, make=True))

    def new_carried(self) -> Path:
        """A directory for the state that goes from one trainer group to the next. Raises OSError."""
        carried = self.root / f".carried-{uuid.uuid4().hex[:8]}"
        self._make(carried)
        return carried

    def write(
        self,
        lineage: int,
        snapshot: Snapshot,
        abandoned: Callable[[], bool] = lambda: False,
        aside: Path | None = None,
    ) -> Saved:
        """Writes a checkpoint aside and renames it into place, unless it is there already.

        The other ranks write theirs into `aside`. On OSError nothing of it is visible, nor when `abandoned` says so
        before the rename.
        """
        parent = self.root / f"lineage-{lineage}"
        name = f"lineage-{lineage}/step-{snapshot.version.ordinal}"
        try:
            if (existing := self._existing(name, snapshot.version)) is not None:
                return existing
            aside = aside or self.new_aside(lineage, snapshot.version.ordinal)
            write_state(aside, snapshot, abandoned)
            sync_directory(aside)
            failpoint_sync("trainer.checkpoint.before_rename")
            if abandoned():
                raise OSError("the run was closed before it was written")
            os.rename(aside, self.root / name)
            sync_directory(parent)
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
        try:
            return self._tree.read(name)
        except Damaged as error:
            raise OSError(f"it is not as it was written: {error}") from error

    def prune(self, lineage: int, keep: int, retained: Collection[str] = ()) -> None:
        """Deletes all but the `keep` newest intact live checkpoints, the `retained` ones and damaged live ones.

        Damaged ones are to be set aside. Only the holder of the newest lineage may; called by another it
        does nothing.
        """
        if lineage != max(self._tree.lineages(), default=0):
            return
        saved, damaged = self._scan()
        kept = {*(found.name for found in saved[:keep]), *damaged, *self.asides.stuck, *retained}
        for directory in self.root.glob("lineage-*/step-*"):
            name = f"{directory.parent.name}/{directory.name}"
            if NAME.fullmatch(name) and name not in kept:
                _remove(directory)

    def sweep(self) -> None:
        """Removes what writes and removals that were cut off left behind. Nothing may be in flight here."""
        for pattern in ("lineage-*/.step-*", ".carried-*"):
            for directory in self.root.glob(pattern):
                shutil.rmtree(directory, ignore_errors=True)

    def _find(self, name: str) -> Saved:
        saved, damaged = self._scan()
        if name in damaged:
            raise self._refusal(name, Damaged(damaged[name]))
        for found in saved:
            if found.name == name:
                return found
        names = ", ".join(found.name for found in saved) or "none"
        raise Refusal("NOT_FOUND", f"no live checkpoint {name!r}; there are {names}", "not_found")

    def _scan(self) -> tuple[list[Saved], dict[str, str]]:
        saved, damaged = self._tree.scan()
        return [found for found in saved if found.name not in self.asides.stuck], damaged

    def _existing(self, name: str, version: Version) -> Saved | None:
        """The checkpoint of this version, when it is written already; what stands in its place is set aside."""
        if not (self.root / name).exists():
            return None
        try:
            found = self._tree.read(name)
        except Damaged as error:
            self.asides.put(name, str(error))
            return None
        if found.version != version:
            raise OSError(f"it exists, of version {found.version.number}")
        return found

    def _refusal(self, name: str, error: Exception) -> Refusal:
        """What to raise for a checkpoint that failed a check; it is set aside when it is damaged."""
        if isinstance(error, Refusal):
            return error
        aside = self.asides.put(name, str(error))
        where = f"it is now {aside.set_aside_as}" if aside.set_aside_as else "it was left in its place"
        return Refusal(
            "CHECKPOINT_DAMAGED",
            f"{self.run + ': ' if self.run else ''}{name}: {error}; {where}; restore an older checkpoint",
            checkpoint=name,
            set_aside_as=aside.set_aside_as,
        )


def _remove(directory: Path) -> None:
    """Deletes a checkpoint; a reader sees all of it or nothing."""
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.removed")
    try:
        os.rename(directory, aside)
    except OSError as error:
        _log.warning("checkpoint not removed", extra={"checkpoint": str(directory), "reason": str(error)})
        return
    shutil.rmtree(aside, ignore_errors=True)


def _other_digest(file: str, facts: FileFacts, found: str) -> Damaged:
    return Damaged(f"{file}: expected digest {facts.digest}, found {found}")


def write_state(
    directory: Path,
    snapshot: Snapshot,
    abandoned: Callable[[], bool] = lambda: False,
    *,
    durable: bool = True,
) -> dict[str, object]:
    """Writes the leader's part and waits for the others'; last the state, which has sizes and digests of all files.

    What `state.json` says. Raises OSError.
    """
    parts = snapshot.parts
    files: dict[str, dict[str, object]] = {
        **write_part(directory, snapshot.copy, 0, parts, durable=durable, abandoned=abandoned),
        **collect_reports(directory, parts, abandoned),
        LEDGER: write_bytes(directory / LEDGER, snapshot.ledger),
        MANIFEST: write_bytes(directory / MANIFEST, snapshot.step_manifest),
    }
    state = _state(snapshot, files)
    write_bytes(directory / STATE, seal(state))
    return state


def _state(snapshot: Snapshot, files: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": vars(snapshot.version),
        "lineage": {str(number): ordinal for number, ordinal in snapshot.lineage.items()},
        "optimizer_steps": snapshot.copy.optimizer_steps,
        "store_id": snapshot.store_id,
        "torch": torch.__version__,
        "base": snapshot.origin.checkpoint,
        "base_run": snapshot.origin.run,
        "files": files,
        **({"reference": vars(snapshot.reference)} if snapshot.reference else {}),
        **({"base_model": vars(snapshot.base_model)} if snapshot.base_model else {}),
        **({"algorithm_state": dict(snapshot.algorithm_state)} if snapshot.algorithm_state else {}),
    }


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
