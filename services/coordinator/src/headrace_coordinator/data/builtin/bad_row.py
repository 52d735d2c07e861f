"""What a row of a source is refused with."""

from __future__ import annotations


class BadRow(ValueError):
    """What is wrong with a row, and how to mend it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason, self.fix = reason, fix
