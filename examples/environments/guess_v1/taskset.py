"""The tasks: a secret number each, and what a game is worth."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    """A row: which number is to be guessed."""

    secret: int


class GuessTask(vf.Task[GuessData]):
    """A game, and its rewards."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 for the secret, 0 for another number, -0.5 for none."""
        said = trace.last_reply
        return float(said == str(self.data.secret)) if said in ("1", "2", "3") else -0.5

    @vf.metric
    async def first(self, trace: vf.Trace) -> float:
        """Whether the first guess was right."""
        said = trace.assistant_messages
        return float(bool(said) and said[0].content == str(self.data.secret))


class GuessConfig(vf.TasksetConfig):
    """Options of the taskset."""

    rows: int = 512


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """As many rows as the options say."""

    def load(self) -> Iterator[GuessTask]:
        """One after the other."""
        for row in range(self.config.rows):
            yield GuessTask(GuessData(prompt="?", secret=1 + row % 3), self.config.task)
