"""Sets damaged checkpoints aside by name, keeps why, and remembers what has not been reported yet."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from headrace_servicekit.logs import get_logger

from headrace_trainer.checkpoints.files import write_bytes

_log = get_logger(__name__)


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint: the name it had, why, and the name it has now ("" where it was left in its place)."""

    name: str
    reason: str
    set_aside_as: str


class Asides:
    """Damaged checkpoints below `root`. Those of a `foreign` run stay in their place. Safe between threads."""

    def __init__(self, root: Path, *, foreign: bool) -> None:
        self._root = root
        self._foreign = foreign
        self._lock = threading.Lock()
        self._reports: list[SetAside] = []
        self.stuck: dict[str, str] = {}
        """Damaged, and not to be renamed: name and why."""

    def take_reports(self) -> list[SetAside]:
        """What was found damaged since the last call."""
        with self._lock:
            found, self._reports = self._reports, []
        return found

    def put(self, name: str, reason: str) -> SetAside:
        """Renames a damaged checkpoint, and reports it. One that cannot be renamed is never listed again."""
        with self._lock:
            aside = ""
            if name in self.stuck:
                return SetAside(name, self.stuck[name], "")
            if not self._foreign:
                try:
                    aside = self._rename(name, reason)
                except FileNotFoundError:
                    return SetAside(name, reason, "")  # pruned, or set aside by another thread
                except OSError as error:
                    reason = f"{reason}; it cannot be renamed: {error.strerror}"
                    self.stuck[name] = reason
            report = SetAside(name, reason, aside)
            self._reports.append(report)
        _log.warning(
            "damaged checkpoint", extra={"checkpoint": name, "reason": reason, "set_aside_as": aside}
        )
        return report

    def _rename(self, name: str, reason: str) -> str:
        taken = 1
        while (self._root / f"{name}.damaged-{taken}").exists():
            taken += 1
        aside = f"{name}.damaged-{taken}"
        os.rename(self._root / name, self._root / aside)
        try:
            write_bytes(self._root / f"{aside}.reason.txt", f"{name}: {reason}\n".encode())
        except OSError as error:
            _log.warning("no reason written", extra={"checkpoint": aside, "reason": str(error)})
        return aside
