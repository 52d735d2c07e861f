"""The transcripts of a suite's evaluation: all its trajectories in files, read again as answers with their figures.

An item's index is the prompt ordinal. Synchronous; knows no suite: `extract` returns the choice in an answer's text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from headrace_coordinator.domain.episode_figures import Told, told_of
from headrace_coordinator.projections.lines import read_lines
from headrace_coordinator.projections.trajectories import NAME, SettledTrajectory, TrajectoryFile, full_files

FILE_BYTES = 64 * 1024 * 1024
EVERYTHING = 2**40
CUT = ("LENGTH", "TRUNCATED", "TIMED_OUT")
"""An answer with all the tokens, or an episode with all the steps, that the spec allows."""
LONGEST_CHOICE = 500
"""Characters of a choice that are compared."""
Extract = Callable[[str], str]
Key = tuple[int, int]


class Answer(msgspec.Struct, frozen=True):
    """What the figures need of an answer."""

    reward: float
    parts: dict[str, float]
    choice: str
    tokens: int
    cut: bool
    failure: str = ""
    """Why it counts for nothing: an environment, an engine or a scorer failed at it."""
    episode: Told | None = None
    """What its rollout says of it, where it is an episode."""


class Transcripts:
    """Writes answers. OSError when the disk refuses: the same call may be repeated."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = TrajectoryFile(directory, EVERYTHING, FILE_BYTES, EVERYTHING)

    def append(self, answers: list[SettledTrajectory]) -> None:
        """Writes those of the answers that the files do not have yet."""
        self._file.append(answers)


def answer_of(line: SettledTrajectory, extract: Extract) -> Answer:
    """The figures of a transcript."""
    choice = extract(line.completion)[:LONGEST_CHOICE]
    cut, episode = line.finish_reason in CUT, told_of(line.completion)
    return Answer(line.reward, line.parts, choice, line.tokens, cut, line.detail, episode)


def read_answers(directory: Path, extract: Extract) -> dict[Key, Answer]:
    """Answers by (index of the item, sample). OSError when a file cannot be read."""
    found: dict[Key, Answer] = {}
    for path in (*full_files(directory), directory / NAME):
        for line in _lines(path):
            found[line.prompt_ordinal, line.sample_index] = answer_of(line, extract)
    return found


def _lines(path: Path) -> Iterable[SettledTrajectory]:
    decode = msgspec.json.Decoder(SettledTrajectory).decode
    for _, line in read_lines(path):
        try:
            yield decode(line)
        except msgspec.DecodeError:
            continue  # A torn line: its answer is made again.
