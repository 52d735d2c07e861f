"""What lies in a run's checkpoint directory: lineages, what each stands on, and which checkpoints are live.

Reads and never writes. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace_servicekit.logs import get_logger

from headrace_trainer.checkpoints.reader import ReferenceFacts
from headrace_trainer.checkpoints.state import (
    STATE,
    Claim,
    Damaged,
    FileFacts,
    Version,
    file_size,
    read_claim,
    read_state,
)

_log = get_logger(__name__)
NAME = re.compile(r"lineage-([1-9]\d*)/step-(0|[1-9]\d*)")
"""Of a checkpoint: lineage and step."""
_LINEAGE = re.compile(r"lineage-([1-9]\d*)(?:\.json)?")
_STEP = re.compile(r"step-(0|[1-9]\d*)")


@dataclass(frozen=True)
class Origin:
    """What a run's weights came from: a checkpoint by name ("": the initial model), of this run or of `run`."""

    checkpoint: str = ""
    run: str = ""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk whose state is sound and whose files are there in their sizes."""

    name: str
    path: Path
    version: Version
    store_id: str
    size: int
    optimizer_steps: int
    lineage: Mapping[int, int]
    files: Mapping[str, FileFacts]
    origin: Origin
    reference: ReferenceFacts | None = None
    base_model: ReferenceFacts | None = None
    algorithm_state: Mapping[str, float] = field(default_factory=dict)
    digest: str = ""
    """Of its state, which has those of all files."""


class CheckpointTree:
    """The files below `root`; none may lead out of it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def scan(self) -> tuple[list[Saved], dict[str, str]]:
        """Intact live checkpoints, newest first, and what is wrong with the damaged ones by name."""
        found: list[Saved] = []
        damaged: dict[str, str] = {}
        lineages = self.lineages()
        bound: int | None = None
        current = max(lineages, default=None)
        while current is not None:
            own: list[Saved] = []
            for step in sorted((s for s in self.steps(current) if bound is None or s <= bound), reverse=True):
                name = f"lineage-{current}/step-{step}"
                try:
                    own.append(self.read(name))
                except Damaged as error:
                    damaged[name] = str(error)
            found += own
            base = _base(lineages[current], own)
            # A base is older than what stands on it: anything else is a damaged file, and ends the chain.
            current, bound = base if base and base[0] < current and base[0] in lineages else (None, None)
        return found, damaged

    def lineages(self) -> dict[int, Claim | None]:
        """Lineage → its claim, None where that cannot be read and checkpoints say what it stands on."""
        found: dict[int, Claim | None] = {}
        for path in self._root.glob("lineage-*"):
            if not (match := _LINEAGE.fullmatch(path.name)):
                continue
            number = int(match[1])
            try:
                found[number] = read_claim(self._root / f"lineage-{number}.json")
            except Damaged as error:
                # A torn claim without checkpoints was never used: its holder died before it could write below it.
                if any(self.steps(number)):
                    found[number] = None
                    _log.warning("damaged lineage", extra={"lineage": number, "reason": str(error)})
        return found

    def steps(self, lineage: int) -> Iterator[int]:
        for path in (self._root / f"lineage-{lineage}").glob("step-*"):
            if match := _STEP.fullmatch(path.name):
                yield int(match[1])

    def read(self, name: str) -> Saved:
        """A checkpoint whose state is sound and whose files have their sizes. Raises Damaged."""
        path = self._root / name
        self._check_inside(path / STATE)
        state = read_state(path / STATE)
        size = file_size(path / STATE)
        for file, facts in state.files.items():
            self._check_inside(path / file)
            if (found := file_size(path / file)) != facts.size:
                raise Damaged(f"{file}: expected {facts.size} bytes, found {found}")
            size += facts.size
        if path.name != f"step-{state.version.ordinal}":
            raise Damaged(f"{STATE}: expected step {path.name[5:]}, found {state.version.ordinal}")
        return Saved(
            name=name,
            path=path,
            version=state.version,
            store_id=state.store_id,
            size=size,
            optimizer_steps=state.optimizer_steps,
            lineage=state.lineage,
            files=state.files,
            origin=Origin(state.base, state.base_run),
            reference=state.reference,
            base_model=state.base_model,
            algorithm_state=state.algorithm_state,
            digest=state.digest,
        )

    def _check_inside(self, path: Path) -> None:
        if not path.resolve().is_relative_to(self._root.parent.resolve() / self._root.name):
            raise Damaged(f"{path.name} is a link out of the run's directory")


def _base(claim: Claim | None, own: list[Saved]) -> tuple[int, int] | None:
    """Lineage and step that a lineage stands on in the same run."""
    origin = own[0].origin if own else Origin()
    if claim is not None:
        origin = Origin(claim.base_checkpoint, claim.base_run)
    match = None if origin.run else NAME.fullmatch(origin.checkpoint)
    return (int(match[1]), int(match[2])) if match else None
