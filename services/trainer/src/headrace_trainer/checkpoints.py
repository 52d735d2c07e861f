"""Checkpoints as transactions on disk: lineages, torn writes, what is live. Knows no gRPC and no training.

checkpoints/lineage-E.json        {base, number, store_id}: made once, by O_EXCL, before anything is below it
checkpoints/lineage-E/step-N/     weights, optimizer, state.json, ledger.json, step_manifest; the rename is the commit
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from headrace_servicekit.failpoints import failpoint_sync
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace_trainer.checkpoint_files import digest_file, sync_directory, write_bytes, write_safetensors
from headrace_trainer.errors import Refusal
from headrace_trainer.step import Version

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
STATE, LEDGER, MANIFEST = "state.json", "ledger.json", "step_manifest"
FORMAT = 1
_LINEAGE = re.compile(r"lineage-(\d+)\.json")
_NAME = re.compile(r"lineage-(\d+)/step-(\d+)")


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state in host memory. Tensors are whole, on the CPU, and nobody else's."""

    version: Version
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_steps: int
    lineage: Mapping[int, int]
    store_id: str
    ledger: bytes
    step_manifest: bytes = b""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, complete by its files' sizes."""

    name: str
    path: Path
    version: Version
    store_id: str
    size: int
    optimizer_steps: int
    lineage: Mapping[int, int]
    files: Mapping[str, Mapping[str, object]]

    def ledger(self) -> bytes:
        """The coordinator's bytes, verbatim."""
        return (self.path / LEDGER).read_bytes()


class CheckpointDirectory:
    """The checkpoints of one run."""

    def __init__(self, run_directory: Path) -> None:
        self.root = run_directory / "checkpoints"

    def live(self) -> list[Saved]:
        """Complete checkpoints of the newest lineage and what it stands on, newest first."""
        found: list[Saved] = []
        lineages = self._lineages()
        bound: int | None = None
        current = max(lineages, default=None)
        while current is not None:
            steps = sorted((s for s in self._steps(current) if bound is None or s <= bound), reverse=True)
            found += [saved for step in steps if (saved := self._read(f"lineage-{current}/step-{step}"))]
            base = _NAME.fullmatch(lineages.get(current, ""))
            # A base is older than what stands on it: anything else is a damaged file, and ends the chain.
            current, bound = (int(base[1]), int(base[2])) if base and int(base[1]) < current else (None, None)
        return found

    def open(self, name: str) -> Saved:
        """A live checkpoint by name, its files verified. Raises Refusal NOT_FOUND or CHECKPOINT_DAMAGED."""
        saved = next((saved for saved in self.live() if saved.name == name), None)
        if saved is None:
            names = ", ".join(found.name for found in self.live()) or "none"
            raise Refusal("NOT_FOUND", f"no live checkpoint {name!r}; there are {names}", "not_found")
        for file, facts in saved.files.items():
            if digest_file(saved.path / file) != facts["digest"]:
                raise Refusal(
                    "CHECKPOINT_DAMAGED",
                    f"{name}/{file} is not as it was written (digest); restore an older checkpoint",
                    "data_loss",
                )
        return saved

    def new_lineage(self, base: str, number: int, store_id: str) -> int:
        """Claims the next lineage for what follows from `base` ("" for the initial model)."""
        self.root.mkdir(parents=True, exist_ok=True)
        claim = {"base_checkpoint": base, "reserved_numbers": [number], "store_id": store_id}
        body = json.dumps(claim).encode()
        lineage = max(self._lineages(), default=0) + 1
        while True:
            try:
                write_bytes(self.root / f"lineage-{lineage}.json", body)
                break
            except FileExistsError:
                lineage += 1  # torn, or another incarnation was faster: its lineage is the older one
        (self.root / f"lineage-{lineage}").mkdir(exist_ok=True)
        sync_directory(self.root)
        return lineage

    def write(self, lineage: int, snapshot: Snapshot) -> Saved:
        """Writes a checkpoint aside and renames it into place. On OSError nothing of it is visible."""
        parent = self.root / f"lineage-{lineage}"
        name = f"lineage-{lineage}/step-{snapshot.version.ordinal}"
        aside = parent / f".step-{snapshot.version.ordinal}.{uuid.uuid4().hex[:8]}.partial"
        try:
            aside.mkdir(parents=True)
            files = {
                WEIGHTS: write_safetensors(aside / WEIGHTS, snapshot.weights),
                OPTIMIZER: write_safetensors(aside / OPTIMIZER, snapshot.optimizer),
                LEDGER: write_bytes(aside / LEDGER, snapshot.ledger),
                MANIFEST: write_bytes(aside / MANIFEST, snapshot.step_manifest),
            }
            write_bytes(aside / STATE, json.dumps(_state(snapshot, files)).encode())
            sync_directory(aside)
            failpoint_sync("trainer.checkpoint.before_rename")
            os.rename(aside, self.root / name)
            sync_directory(parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        saved = self._read(name)
        assert saved is not None
        return saved

    def prune(self, lineage: int, keep: int) -> None:
        """Deletes all but the `keep` newest live checkpoints, and everything of dead lineages.

        Only the holder of the newest lineage may; called by another it does nothing.
        """
        if lineage != max(self._lineages(), default=0):
            return
        kept = {saved.name for saved in self.live()[:keep]}
        for directory in self.root.glob("lineage-*/*step-*"):
            own = directory.parent.name == f"lineage-{lineage}"
            partial = directory.name.startswith(".")
            name = f"{directory.parent.name}/{directory.name}"
            if name not in kept and not (own and partial):
                shutil.rmtree(directory, ignore_errors=True)

    def _lineages(self) -> dict[int, str]:
        """Lineage → name of its base."""
        if not self.root.is_dir():
            return {}
        found = {}
        for path in self.root.iterdir():
            match = _LINEAGE.fullmatch(path.name)
            # A torn claim was never used: its holder died before it could write below it.
            if match and isinstance(base := _json(path).get("base_checkpoint"), str):
                found[int(match[1])] = base
        return found

    def _steps(self, lineage: int) -> Iterator[int]:
        for path in (self.root / f"lineage-{lineage}").glob("step-*"):
            if path.name[5:].isdigit():
                yield int(path.name[5:])

    def _read(self, name: str) -> Saved | None:
        """A checkpoint whose files are all there in the sizes they were written with, or None."""
        path = self.root / name
        state = _json(path / STATE)
        if state.get("format") != FORMAT:
            return None
        files = state["files"]
        sizes = {file: _size(path / file) for file in files}
        if any(sizes[file] != files[file]["size"] for file in files):
            return None
        return Saved(
            name=name,
            path=path,
            version=Version(**state["version"]),
            store_id=state["store_id"],
            size=sum(sizes.values()) + _size(path / STATE),
            optimizer_steps=state["optimizer_steps"],
            lineage={int(number): ordinal for number, ordinal in state["lineage"].items()},
            files=files,
        )


class CheckpointReader:
    """Tensors of a checkpoint, read one at a time from mapped files. See `StateReader`."""

    def __init__(self, saved: Saved) -> None:
        self._weights = _open_tensors(saved.path / WEIGHTS)
        self._optimizer = _open_tensors(saved.path / OPTIMIZER)
        self.optimizer_steps = saved.optimizer_steps

    def weight(self, name: str) -> Tensor:
        """fp32 weight, or a buffer in its own type."""
        return self._tensor(self._weights, name)

    def moment(self, kind: str, name: str) -> Tensor:
        """fp32 optimizer moment."""
        return self._tensor(self._optimizer, f"{kind}/{name}")

    def random_state(self) -> Tensor:
        """State of torch's CPU generator."""
        return self._tensor(self._optimizer, "random_state")

    def _tensor(self, file: Any, name: str) -> Tensor:
        try:
            found: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise Refusal(
                "CHECKPOINT_DAMAGED",
                f"it has no tensor {name!r}: it is of another model",
                "data_loss",
            ) from error
        return found


def _open_tensors(path: Path) -> Any:
    opened: Any = safe_open(path, framework="pt", device="cpu")
    return opened.__enter__()


def _state(snapshot: Snapshot, files: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": vars(snapshot.version),
        "lineage": {str(number): ordinal for number, ordinal in snapshot.lineage.items()},
        "optimizer_steps": snapshot.optimizer_steps,
        "store_id": snapshot.store_id,
        "torch": torch.__version__,
        "files": files,
    }


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where the file is absent or torn."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
