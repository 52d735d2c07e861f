"""The calls of one session and what became of them, as files of the run's directory: durable before they count.

A call is kept until no checkpoint that a run may go back to lacks it; its outcome for as long as the run is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from headrace_schema.sessions import Failure, Operation, Result
from pydantic import TypeAdapter

_OPERATION: TypeAdapter[Operation] = TypeAdapter(Operation)
_RESULT: TypeAdapter[Result] = TypeAdapter(Result)
FOLDER, CLOSED, NAMED = "calls", "closed", "named.json"
MOST_READ = 8
"""Calls that are not read from their files again."""
STEPS = ("optim_step", "load")
"""Calls behind which no gradient waits for a step any more."""


class Unknown(Exception):
    """Weights that there are not; the message says what there is."""


class Journal:
    """Numbers count from 1. What is read and written here is done in a thread of the caller's."""

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory / FOLDER
        self._newest: dict[int, Operation] = {}
        """Calls that were kept last, as long as nobody has read them."""
        self.kinds: dict[int, str] = {}
        """Of all calls that were accepted."""
        self.outcomes: dict[int, bool] = {}
        """Whether a call that was executed has a result; false: it failed."""
        self.closed = False
        """No call is accepted any more."""
        self.named: dict[str, dict[str, Any]] = {}
        """Checkpoints that were saved by name: `checkpoint`, `step`, `version`, `size_bytes`, `created`."""
        if self._directory.exists():
            self._read()

    def _read(self) -> None:
        for path in self._directory.glob("*.json"):
            number, _, rest = path.name.partition(".")
            if not number.isdigit():
                continue
            kind, state = rest.split(".")[:2]
            self.kinds[int(number)] = kind
            if (
                state in ("ok", "failed") and path.stat().st_size
            ):  # a power cut leaves an empty one: see `settle`
                self.outcomes[int(number)] = state == "ok"
        self.closed = (self._directory / CLOSED).exists()
        if (path := self._directory / NAMED).exists():
            self.named = json.loads(path.read_text())

    @property
    def end(self) -> int:
        """The highest number up to which all calls are there."""
        last = getattr(self, "_end", 0)
        while last + 1 in self.kinds:
            last += 1
        self._end = last
        return last

    def keep(self, seq: int, operation: Operation) -> None:
        """Writes a call."""
        self._write(f"{seq:08d}.{operation.kind}.call.json", operation.model_dump_json())
        self.kinds[seq] = operation.kind
        self._newest[seq] = operation
        while len(self._newest) > MOST_READ:
            self._newest.pop(next(iter(self._newest)))

    def call(self, seq: int) -> Operation:
        """A call that is kept."""
        if (operation := self._newest.pop(seq, None)) is not None:
            return operation
        path = self._directory / f"{seq:08d}.{self.kinds[seq]}.call.json"
        return _OPERATION.validate_json(path.read_bytes())

    def settle(self, seq: int, result: Result) -> None:
        """Writes what became of a call."""
        state = "failed" if isinstance(result, Failure) else "ok"
        name = f"{seq:08d}.{self.kinds[seq]}.{state}.json"
        self._write(name, result.model_dump_json(), durable=False)  # one that a power cut loses is made again
        self.outcomes[seq] = state == "ok"

    def result(self, seq: int) -> Result | None:
        """What became of a call; None before it was executed."""
        if seq not in self.outcomes:
            return None
        state = "ok" if self.outcomes[seq] else "failed"
        path = self._directory / f"{seq:08d}.{self.kinds[seq]}.{state}.json"
        return _RESULT.validate_json(path.read_bytes())

    def position(self, terminal: int) -> int:
        """The call behind which a session stands that has trained or dropped its first `terminal` gradients."""
        counted = pending = 0
        for seq in range(1, self.end + 1) if terminal else ():
            kind, ok = self.kinds[seq], self.outcomes.get(seq)
            if kind == "forward_backward" and ok:
                pending += 1
            elif kind in STEPS and not (kind == "load" and ok is False):
                counted, pending = counted + pending, 0
                if counted >= terminal:
                    return seq
        return 0

    def prune(self, seq: int) -> None:
        """No run goes back behind call `seq` any more: the calls up to it are deleted, their outcomes stay."""
        for path in sorted(self._directory.glob("*.call.json")):
            if int(path.name.partition(".")[0]) > seq:
                break
            if int(path.name.partition(".")[0]) in self.outcomes:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Accepts no call any more."""
        self._write(CLOSED, "")
        self.closed = True

    def name(self, name: str, checkpoint: dict[str, Any] | None) -> None:
        """Names a checkpoint, or with None forgets a name."""
        named = {key: value for key, value in self.named.items() if key != name}
        self.named = named if checkpoint is None else {**named, name: checkpoint}
        self._write(NAMED, json.dumps(self.named))

    def _write(self, name: str, text: str, *, durable: bool = True) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path, part = self._directory / name, self._directory / f".{name}.part"
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.rename(path)
        if not durable:
            return
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def saved_by_name(run_directory: Path, own: Journal, checkpoint: str) -> tuple[Path, dict[str, Any]]:
    """The directory of the session that saved a checkpoint, NAME or SESSION/NAME, and its entry. Raises Unknown.

    `own`: the journal of the session with `run_directory`, which NAME alone means.
    """
    session, _, name = checkpoint.rpartition("/")
    directory, journal = run_directory.parent / (session or run_directory.name), own
    if directory != run_directory:
        journal = Journal(directory)
    if name not in journal.named:
        has = f"it has {', '.join(sorted(journal.named))}" if journal.named else "it has none"
        raise Unknown(f"session {directory.name} has no checkpoint {name!r}; {has}")
    return directory, journal.named[name]
