"""The small JSON files of a checkpoint: `state.json` and `lineage-E.json`, sealed with a digest of themselves.

Knows no directories and no tensors.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_trainer.checkpoints.files import digest_bytes
from headrace_trainer.checkpoints.parts import all_files
from headrace_trainer.checkpoints.reader import ReferenceFacts
from headrace_trainer.errors import Refusal

STATE, LEDGER, MANIFEST = "state.json", "ledger.json", "step_manifest"
FORMAT = 2

Facts = TypeVar("Facts", bound=BaseModel)
_LOST = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}

Count = Annotated[int, Field(ge=0)]


class Damaged(Exception):
    """A file of a checkpoint is not as it was written; the text names the file, what was expected and found."""


@dataclass(frozen=True)
class Version:
    """A policy version; see PolicyVersion in the contracts."""

    number: int
    parent: int
    ordinal: int
    digest: str = ""


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileFacts(_Facts):
    """A file as it was written; `digest` is its xxh3-128."""

    size: Count
    digest: str


class State(_Facts):
    """What `state.json` says. `base` and `base_run` are those of the lineage's claim; `files` are the parts of all
    ranks that wrote it, the ledger and the manifest.

    `reference` is the reference model that the run was compared with, where there was one; `base_model` the frozen
    one beside which its adapters stand; `algorithm_state` is `Algorithm.state`.
    """

    format: Literal[2]
    version: Version
    lineage: dict[int, int]
    optimizer_steps: Count
    store_id: str
    torch: str
    files: dict[str, FileFacts]
    base: str
    base_run: str
    reference: ReferenceFacts | None = None
    base_model: ReferenceFacts | None = None
    algorithm_state: dict[str, float] = Field(default_factory=dict)
    digest: str


class Claim(_Facts):
    """What `lineage-E.json` says: the checkpoint that the lineage began with, "" for the initial model.

    `base_run` is the name of the run that made it, "" for this one.
    """

    base_checkpoint: str
    reserved_numbers: list[int]
    store_id: str
    base_run: str
    digest: str


def seal(body: Mapping[str, object]) -> bytes:
    """A JSON object with a digest of itself, written so that every byte of it counts."""
    return _dump({**body, "digest": _digest(body)})


def read_state(path: Path) -> State:
    """A checkpoint's `state.json`. Raises Damaged, and Refusal CHECKPOINT_UNREADABLE."""
    body = _object(path)
    state = _parse(State, body, path.name)
    _check_seal(body, path.name)
    parts = (len(state.files) - 2) // 2
    expected = [*all_files(parts), LEDGER, MANIFEST]
    if set(state.files) != set(expected):
        raise Damaged(f"{path.name} lists {', '.join(sorted(state.files))}; expected {', '.join(expected)}")
    return state


def read_claim(path: Path) -> Claim:
    """A lineage's claim. Raises Damaged, and Refusal CHECKPOINT_UNREADABLE."""
    body = _object(path)
    claim = _parse(Claim, body, path.name)
    _check_seal(body, path.name)
    return claim


def read_bytes(path: Path) -> bytes:
    """A small file. Raises Damaged where it is lost, Refusal CHECKPOINT_UNREADABLE where it cannot be read now."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def file_size(path: Path) -> int:
    """Bytes of a file. Raises as `read_bytes`."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> Exception:
    """What a failed read means: the file is lost, or only out of reach for now (no permission, no handles)."""
    if error.errno in _LOST:
        return Damaged(f"{path.name} is missing or cannot be read ({error.strerror})")
    return Refusal("CHECKPOINT_UNREADABLE", f"{path}: {error.strerror}; make it readable", "unavailable")


def _parse(kind: type[Facts], body: dict[str, Any], name: str) -> Facts:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Damaged(f"{name} is not as it was written: {where}: {first['msg']}") from error


def _object(path: Path) -> dict[str, Any]:
    data = read_bytes(path)
    try:
        found = json.loads(data)
    except ValueError as error:
        raise Damaged(f"{path.name} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise Damaged(f"{path.name} is no JSON object")
    return found


def _check_seal(body: dict[str, Any], name: str) -> None:
    found = _digest({key: value for key, value in body.items() if key != "digest"})
    if found != body["digest"]:
        raise Damaged(f"{name}: expected digest {body['digest']}, found {found}")


def _digest(body: Mapping[str, object]) -> str:
    return digest_bytes(_dump(body))


def _dump(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
