"""How many samples an engine decodes together: half as many, once, after its device had no memory left."""

from __future__ import annotations

KEY = "rollout.max_concurrency"


class Rows:
    """`most` rows at once. `lower` says what else makes an engine need less memory, for people."""

    def __init__(self, most: int, lower: str) -> None:
        self.most = self._wanted = most
        self._lower = lower

    def without_memory(self, reason: str) -> str:
        """What to say of a failure for want of memory; it begins with KEY where the run ends for it.

        The samples are made again: with half as many rows the first time, so that the same is not repeated as it was.
        """
        if self.most == self._wanted > 1:
            self.most //= 2
            how = f"it goes on with {self.most} samples at once, half as many (write {KEY}: {self.most} to begin so)"
            return f"{reason}; {how}"
        return f"{KEY}: {reason}; it is not tried again: lower {KEY} (now {self.most}) or {self._lower}"
