"""Pages over a run's trajectory files: the last line of each slot, of the last version of its step."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from headrace_schema.resources.overviews import RewardsView
from headrace_schema.resources.views import TrajectoryListView, TrajectoryView
from pydantic import ValidationError

from headrace_coordinator.projections.lines import read_lines
from headrace_coordinator.projections.trajectories import NAME, Slot, full_files, number_of

PAGE_SIZE = 50
BINS = 12
"""Number of bins in a histogram of rewards."""
SCANS_KEPT = 12
"""Files whose lines are cached. A file that grows is read again; a rotated one is not."""
LISTS_KEPT = 4
Order = Literal["oldest", "newest", "best", "worst"]


class PageTokenError(ValueError):
    """The page token is not one of this list's."""


class _Rewarded(Slot, frozen=True):
    reward: float | None


class _Text(Slot, frozen=True):
    prompt: str = ""
    completion: str = ""
    reference: str = ""
    finish_reason: str = ""
    parts: dict[str, float | None] = msgspec.field(default_factory=dict)


class Filter(NamedTuple):
    """Which trajectories a list is of; what is empty or None does not matter."""

    step: int | None = None
    prompt: int | None = None
    search: str = ""
    """Part of the prompt, the answer or the reference; case is ignored."""
    finish_reason: str = ""
    failed: str = ""
    """Name of a scorer that gave nothing, or less."""

    def reads_text(self) -> bool:
        """Whether lines must be read whole."""
        return bool(self.search or self.finish_reason or self.failed)

    def takes(self, line: _Text) -> bool:
        """Whether a line is of the list, by what must be read of it."""
        if self.finish_reason and line.finish_reason != self.finish_reason:
            return False
        if self.failed and (line.parts.get(self.failed) or 0.0) > 0:
            return False
        wanted = self.search.lower()
        return any(wanted in text.lower() for text in (line.prompt, line.completion, line.reference))


class _File(NamedTuple):
    """A file as it is now, as a cache key: its lines are the same as long as no field changes."""

    number: int
    path: Path
    inode: int
    size: int


class _TrajectoryLine(NamedTuple):
    """Where a line is (number of its file, end and length in bytes), and its slot."""

    file: int
    end: int
    length: int
    slot: _Rewarded


_decode = msgspec.json.Decoder(_Rewarded).decode
_decode_text = msgspec.json.Decoder(_Text).decode


def _by_reward(line: _TrajectoryLine) -> float:
    reward = line.slot.reward
    return float("-inf") if reward is None else reward


def _by_place(line: _TrajectoryLine) -> tuple[int, int]:
    return line.file, line.end


# Sorting is stable: of equal rewards the oldest comes first.
_SORTS: dict[str, Callable[[list[_TrajectoryLine]], list[_TrajectoryLine]]] = {
    "oldest": lambda lines: lines,
    "newest": lambda lines: lines[::-1],
    "best": lambda lines: sorted(lines, key=_by_reward, reverse=True),
    "worst": lambda lines: sorted(lines, key=_by_reward),
}


def read_trajectories(
    directory: Path,
    page_token: str = "",
    page_size: int = PAGE_SIZE,
    *,
    only: Filter = Filter(),  # noqa: B008 - it cannot change
    order: Order = "oldest",
) -> TrajectoryListView:
    """A page of the live trajectories that `only` takes.

    A token stays valid while the file grows and is rotated. PageTokenError for a token that is not of this list.
    """
    files = _files(directory)
    lines = _ordered(tuple(files.values()), only, order)
    page: list[TrajectoryView] = []
    last = ""
    for line in lines[_start(lines, page_token, order) :]:
        view = _view(files[line.file].path, line)
        if view is None:
            continue
        if len(page) == page_size:
            return TrajectoryListView(trajectories=page, next_page_token=last)
        page.append(view)
        last = f"{line.file}.{line.end}"
    return TrajectoryListView(trajectories=page)


def read_rewards(directory: Path, steps: int, bins: int = BINS) -> RewardsView:
    """Counts of the live trajectories' rewards in bins of equal width, of the newest `steps` steps."""
    found: dict[int, list[float]] = {}
    for line in _ordered(tuple(_files(directory).values()), Filter(), "oldest"):
        if line.slot.reward is not None:
            found.setdefault(line.slot.step, []).append(line.slot.reward)
    shown = sorted(found)[-steps:]
    rewards = [reward for step in shown for reward in found[step]]
    if not rewards:
        return RewardsView(steps=[], edges=[], counts=[])
    low, high = min(rewards), max(rewards)
    width = (high - low) / bins or 1.0 / bins  # all equal: one bin of a range of 1
    counts = []
    for step in shown:
        counted = Counter(min(bins - 1, int((reward - low) / width)) for reward in found[step])
        counts.append([counted[each] for each in range(bins)])
    return RewardsView(steps=shown, edges=[low + width * each for each in range(bins + 1)], counts=counts)


def _start(lines: list[_TrajectoryLine], token: str, order: Order) -> int:
    """Index of the first line behind the one that a token names, which may be gone where the order is by place."""
    if not token:
        return 0
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,15})", token, re.ASCII)
    if not found:
        raise PageTokenError(token)
    place = int(found[1]), int(found[2])
    if order == "oldest":
        return bisect.bisect_right(lines, place, key=_by_place)
    if order == "newest":
        return bisect.bisect_right(lines, (-place[0], -place[1]), key=lambda line: (-line.file, -line.end))
    for index, line in enumerate(lines):
        if _by_place(line) == place:
            return index + 1
    raise PageTokenError(token)


def _view(path: Path, line: _TrajectoryLine) -> TrajectoryView | None:
    try:
        with path.open("rb") as file:
            file.seek(line.end - line.length)
            return TrajectoryView.model_validate_json(file.read(line.length))
    except (OSError, ValidationError):
        return None


def _files(directory: Path) -> dict[int, _File]:
    """The existing files by number, oldest first."""
    paths = {number_of(path): path for path in full_files(directory)}
    paths[max(paths, default=0) + 1] = directory / NAME
    found: dict[int, _File] = {}
    for number, path in paths.items():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        found[number] = _File(number, path, status.st_ino, status.st_size)
    return found


@lru_cache(LISTS_KEPT)
def _ordered(files: tuple[_File, ...], only: Filter, order: Order) -> list[_TrajectoryLine]:
    lines = _live_lines(files, only.step, only.prompt)
    if only.reads_text():
        taken = {place for file in files for place in _taken(file, only)}
        lines = [line for line in lines if _by_place(line) in taken]
    return _SORTS[order](lines)


def _taken(file: _File, only: Filter) -> Iterator[tuple[int, int]]:
    """Places (number of the file, end) of the lines that a filter takes by their text."""
    for end, line in read_lines(file.path):
        try:
            if only.takes(_decode_text(line)):
                yield file.number, end
        except msgspec.DecodeError:
            continue


def _live_lines(files: tuple[_File, ...], step: int | None, prompt: int | None) -> list[_TrajectoryLine]:
    """Lines of the live lineage, oldest first: the last line of each slot, of the last version of each step."""
    versions: dict[int, int] = {}
    slots: dict[tuple[int, int, int], _TrajectoryLine] = {}
    for file in files:
        for end, length, slot in _scan(file):
            versions[slot.step] = slot.version
            if (step is None or slot.step == step) and (prompt is None or slot.prompt_ordinal == prompt):
                key = slot.step, slot.prompt_ordinal, slot.sample_index
                slots[key] = _TrajectoryLine(file.number, end, length, slot)
    live = [line for line in slots.values() if line.slot.version == versions[line.slot.step]]
    return sorted(live, key=_by_place)


@lru_cache(SCANS_KEPT)
def _scan(file: _File) -> list[tuple[int, int, _Rewarded]]:
    """(end, length, slot) of each whole line."""
    found: list[tuple[int, int, _Rewarded]] = []
    for end, line in read_lines(file.path):
        try:
            found.append((end, len(line), _decode(line)))
        except msgspec.DecodeError:
            continue  # A torn line; the file's writer has closed it off.
    return found
