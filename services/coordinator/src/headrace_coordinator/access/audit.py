"""What was done over HTTP: who, when, from where, what, and with which outcome. Never a secret.

One line of JSON an entry in a file that only the coordinator's user reads, rotated by size; with a collector of
OpenTelemetry also sent there as log records. An entry has fields that the coordinator made, none that a caller wrote:
no body, no header, no query, and of a path the route's pattern and the id of a run that is there.
"""

from __future__ import annotations

import json
import logging
import os
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from headrace_servicekit.tracing import log_handler

from headrace_coordinator.domain.access import Principal

FOLDER, FILE = "audit", "audit.jsonl"
MOST_BYTES, KEPT = 32 << 20, 20
"""Of a file, and files beside the one that is written."""
STRANGERS_PER_S = 10.0
"""Entries a second of requests without a good token; the others are counted in the next one."""
log = logging.getLogger(__name__)


class _ClosedFiles(RotatingFileHandler):
    """Files that are appended to, and that only this user opens."""

    def _open(self) -> Any:
        folder = Path(self.baseFilename).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that refuses stops no request; the log says so."""
        log.error("the audit of %s is not written", record.getMessage()[:200], exc_info=True)


class Audit:
    """Writes entries, below the data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._log = logging.Logger("headrace.audit", logging.INFO)  # of no tree: nothing else writes it
        self._strangers, self._since, self._left_out = STRANGERS_PER_S, time.monotonic(), 0
        folder = data_dir / FOLDER
        handler = _ClosedFiles(folder / FILE, maxBytes=MOST_BYTES, backupCount=KEPT, delay=True)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._log.addHandler(handler)
        if (shipped := log_handler()) is not None:
            self._log.addHandler(shipped)

    def record(
        self,
        caller: Principal,
        peer: str,
        method: str,
        route: str,
        run: str,
        status: int,
        seconds: float,
    ) -> None:
        """Writes one entry; `run` is the id of a run that is there, or empty."""
        left_out = 0
        if status == 401:
            now = time.monotonic()
            self._strangers = min(STRANGERS_PER_S, self._strangers + (now - self._since) * STRANGERS_PER_S)
            self._since = now
            if self._strangers < 1.0:
                self._left_out += 1
                return
            self._strangers -= 1.0
            left_out, self._left_out = self._left_out, 0
        entry = {
            "time": round(time.time(), 3),
            "who": caller.name,
            "token": caller.token,
            "from": peer,
            "what": f"{method} {route}",
            "run": run,
            "status": status,
            "outcome": "done" if status < 400 else "refused" if status < 500 else "failed",
            "seconds": round(seconds, 3),
        } | ({"left_out": left_out} if left_out else {})
        self._log.info(json.dumps(entry), extra={"attributes": entry})

    def close(self) -> None:
        """Ends writing."""
        for handler in list(self._log.handlers):
            self._log.removeHandler(handler)
            handler.close()
