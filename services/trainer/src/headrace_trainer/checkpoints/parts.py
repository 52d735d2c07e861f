"""One rank's part of a checkpoint: its files, and how the leader learns that they are written.

Each rank copies what it has to host memory and writes it in the background into the directory that the leader has made.
A follower says with a report beside its files that they are complete; the leader waits for all reports. Nothing else
passes between them, so that training goes on meanwhile. Knows no lineages.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from headrace_modelkit.tensor_files import NEXT, whole
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.errors import ServiceError
from torch import Tensor

from headrace_trainer.checkpoints.files import Boxes, write_bytes, write_safetensors
from headrace_trainer.checkpoints.reader import RANDOM_STATE, StatePart

_log = get_logger(__name__)
LOOK_S = 0.02
STALLED_S = 120.0
"""A rank that has written nothing for so long has died or cannot write."""

Facts = Mapping[str, Mapping[str, object]]
"""Size and digest by file."""


@dataclass(frozen=True)
class StateCopy:
    """What a rank saves. `boxes`: which part of the whole a tensor is, where it is not all of it.

    `files` where its files are written already, in place: then it has no tensors.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    optimizer_steps: int
    boxes: Boxes = field(default_factory=dict)
    files: Mapping[str, dict[str, object]] = field(default_factory=dict)


def copy_state(
    weight_parts: Iterable[StatePart],
    moment_parts: Iterable[StatePart],
    optimizer_steps: int,
    *,
    in_place: bool,
    leads: bool,
) -> StateCopy:
    """What a rank saves: as it is now, or with `in_place` the state itself; the leader's with the random state."""
    weights: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for found, parts in ((weights, weight_parts), (optimizer, moment_parts)):
        for part in parts:
            key, number = part.name, 1
            while key in found:
                key, number = f"{part.name}{NEXT}{number}", number + 1
            own = part.value.detach()
            found[key] = own if in_place else own.to("cpu", copy=True)
            if part.box != whole(part.shape):
                boxes[key] = part.shape, tuple(first for first, _ in part.box)
    if leads:
        optimizer[RANDOM_STATE] = torch.get_rng_state()
    return StateCopy(weights, optimizer, optimizer_steps, boxes)


def part_files(part: int, parts: int) -> tuple[str, str]:
    """Names of a rank's files of weights and of optimizer state."""
    suffix = "" if parts == 1 else f"-{part + 1:05}-of-{parts:05}"
    return f"weights{suffix}.safetensors", f"optimizer{suffix}.safetensors"


def all_files(parts: int) -> list[str]:
    """Names of all ranks' files."""
    return [name for part in range(parts) for name in part_files(part, parts)]


def write_part(
    directory: Path,
    copy: StateCopy,
    part: int,
    parts: int,
    *,
    durable: bool = True,
    abandoned: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, object]]:
    """Writes a rank's files, unless they are written; size and digest of each. Raises OSError.

    Tensors of another device come to the host one by one.
    """
    if copy.files:
        return dict(copy.files)
    found = {}
    for name, tensors in zip(part_files(part, parts), (copy.weights, copy.optimizer), strict=True):
        found[name] = write_safetensors(
            directory / name,
            tensors,
            copy.boxes,
            durable=durable,
            abandoned=abandoned,
            value=partial(_on_host, tensors),
        )
    return found


def _on_host(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors[name].to("cpu")


class PartWriter:
    """Writes a follower's parts, one at a time. The write ends when the leader has removed its directory."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._directory = Path()

    def wait(self) -> None:
        """Until what is being written is: there is one copy of the state at a time."""
        if self._thread is not None:
            self._thread.join()

    def start(self, directory: Path, copy: StateCopy, part: int, parts: int, *, durable: bool) -> None:
        """Begins to write. Not a daemon: a process that ends in peace finishes its part first."""
        self.wait()
        arguments = directory, copy, part, parts, durable
        self._thread = threading.Thread(target=write_and_report, args=arguments, name="checkpoint part")
        self._thread.start()


def write_and_report(directory: Path, copy: StateCopy, part: int, parts: int, durable: bool) -> None:
    """Writes a follower's part and says so to the leader."""

    def abandoned() -> bool:
        return not directory.is_dir()

    body: dict[str, object]
    try:
        body = {"files": write_part(directory, copy, part, parts, durable=durable, abandoned=abandoned)}
    except (OSError, ServiceError) as error:
        body = {"error": str(error)}
        _log.error("checkpoint part failed", extra={"part": part, "reason": str(error)})
    write_report(directory, part, body)


def write_report(directory: Path, part: int, body: Mapping[str, object]) -> None:
    """Says to the leader that a rank's files are complete, or why they are not."""
    try:
        aside = directory / f".{_report(part)}"
        write_bytes(aside, json.dumps(body).encode())
        os.rename(aside, directory / _report(part))
    except OSError as error:  # The leader waits until nothing more is written.
        _log.error("no report of a checkpoint part", extra={"part": part, "reason": str(error)})


def collect_reports(
    directory: Path, parts: int, abandoned: Callable[[], bool], stalled_s: float = STALLED_S
) -> dict[str, dict[str, object]]:
    """Waits for the other ranks' reports, and removes them; size and digest of each file.

    Raises OSError when one of them could not write, has stopped writing, or `abandoned` says so.
    """
    found: dict[str, dict[str, object]] = {}
    missing = set(range(1, parts))
    seen, moved = -1, time.monotonic()
    while missing:
        for part in sorted(missing):
            path = directory / _report(part)
            if not path.exists():
                continue
            body = json.loads(path.read_text())
            if "error" in body:
                raise OSError(f"rank {part}: {body['error']}")
            found |= body["files"]
            path.unlink()
            missing.discard(part)
        if abandoned():
            raise OSError("the run was closed before it was written")
        if (size := _size(directory)) != seen:
            seen, moved = size, time.monotonic()
        elif time.monotonic() - moved > stalled_s:
            ranks = ", ".join(map(str, sorted(missing)))
            raise OSError(f"rank {ranks} has written nothing for {stalled_s:g} s")
        time.sleep(LOOK_S if missing else 0)
    return found


def _report(part: int) -> str:
    return f"part-{part:05}.json"


def _size(directory: Path) -> int:
    """Changes whenever a rank writes."""
    size = 0
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):  # a report gets its name meanwhile
            size += entry.stat().st_size + 1
    return size
