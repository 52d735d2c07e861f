"""A user's scorer that a test can hold: a run stands still after exactly so many answers, however fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.waiting import wait_for

WITHOUT_END = 10**9
SCORER = '''
import os, pathlib, time

HERE = pathlib.Path(__file__).parent


def score(prompt, completion, reference, metadata):
    """Share of right characters, and a little for brevity: answers of a group differ."""
    value = sum(a == b for a, b in zip(completion, reference)) / max(len(reference), 1)
    if metadata or completion:
        number = passed()
        while number > int(allowed := (HERE / "allowed").read_text()):
            (HERE / "held").write_text(allowed)
            time.sleep(0.02)
    return value - 0.05 * len(completion)


def passed():
    counter = os.open(HERE / "passed", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(counter, b".")
        return os.lseek(counter, 0, os.SEEK_CUR)
    finally:
        os.close(counter)
'''


class Gate:
    """Lets so many answers through; the others wait in the reward service's children."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o777)  # as root, users' code is another user
        self._directory = directory
        (directory / "gate.py").write_text(SCORER)
        self.open()

    @property
    def reward(self) -> dict[str, Any]:
        """The spec's `reward` section; held-out answers do not pass the gate."""
        name = f"{self._directory / 'gate.py'}:score"
        return {"scorers": [{"name": name}], "evaluation": [{"name": "exact"}], "timeout_s": 900.0}

    def hold_after(self, answers: int) -> None:
        """Lets `answers` more through and then none."""
        self._allow(self.passed + answers)

    def open(self) -> None:
        """Lets everything through."""
        self._allow(WITHOUT_END)

    def wait_until_held(self, timeout_s: float = 240.0) -> None:
        """Returns when an answer waits, and not for a number that was allowed before."""
        allowed, held = ((self._directory / name) for name in ("allowed", "held"))
        wait_for(
            lambda: held.exists() and held.read_text() == allowed.read_text(),
            "an answer to wait at the gate",
            timeout_s,
        )

    @property
    def passed(self) -> int:
        """Answers that came so far, those that wait included."""
        counter = self._directory / "passed"
        return counter.stat().st_size if counter.exists() else 0

    def _allow(self, answers: int) -> None:
        aside = self._directory / "allowed.new"
        aside.write_text(str(answers))
        aside.replace(self._directory / "allowed")
