"""The file of a run's trajectories: a sample of each step, rotated by size, each line written once over restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace_coordinator.projections.lines import LineFile, read_lines

NAME = "trajectories.jsonl"
LOG_PROBS_KEPT = 1024
"""Tokens of an answer whose log-prob and place in the text are kept."""
T = TypeVar("T")
Key = tuple[int, int, int, int, int]


class Slot(msgspec.Struct, frozen=True):
    """What identifies a line; its other fields are not decoded."""

    step: int
    version: int
    prompt_ordinal: int
    sample_index: int
    attempt: int

    @property
    def key(self) -> Key:
        """The identity as a tuple."""
        return self.step, self.version, self.prompt_ordinal, self.sample_index, self.attempt


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `CallView`."""

    name: str
    arguments_json: str = ""
    problem: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `MessageView`."""

    role: str
    content: str
    tokens: int | None = None
    reward: float | None = None
    calls: list[Call] = []
    party: str = ""
    branch: int | None = None
    images: list[str] = []
    files: list[bytes] = []
    """Its images, until a line is written: `with_thumbnails`."""


class SettledTrajectory(Slot, frozen=True, omit_defaults=True):
    """A settled trajectory as a line: the fields of `TrajectoryView`, without validation."""

    prompt: str
    completion: str
    reference: str
    reward: float
    parts: dict[str, float]
    finish_reason: str
    tokens: int
    versions: list[tuple[int, int]] = []
    log_probs: list[float] = []
    new_log_probs: list[float] = []
    text_bytes: list[int] = []
    advantage: float | None = None
    detail: str = ""
    stage_rewards: dict[str, float] = {}
    messages: list[Message] = []
    masked: bool = False
    images: list[str] = []
    figures: dict[str, float] = {}
    read: list[list[str]] = []


encode_line = msgspec.json.Encoder().encode
decode_slot = msgspec.json.Decoder(Slot).decode


class TrajectoryFile:
    """Writes at most `per_step` lines of a (step, version), in whole groups; keeps `kept_files` full files."""

    def __init__(self, directory: Path, per_step: int, file_bytes: int, kept_files: int) -> None:
        self._directory, self._per_step = directory, per_step
        self._file_bytes, self._kept_files = file_bytes, kept_files
        self._file = LineFile(directory / NAME)
        self._written = _keys(directory / NAME)
        self._counts = Counter((step, version) for step, version, *_ in self._written)

    def append(self, views: list[SettledTrajectory]) -> None:
        """Appends what is new and fits the cap: whole groups, evenly over those of the call."""
        new = {view.key: view for view in views}
        by_step: dict[tuple[int, int], list[SettledTrajectory]] = {}
        for key in sorted(new.keys() - self._written):
            by_step.setdefault(key[:2], []).append(new[key])
        chosen = [
            view
            for step, found in by_step.items()
            for view in whole_groups(found, self._per_step - self._counts[step], _prompt)
        ]
        if not chosen:
            return
        self._rotate()
        self._file.append([encode_line(view) for view in chosen])
        for view in chosen:
            self._written.add(view.key)
            self._counts[view.step, view.version] += 1

    def _rotate(self) -> None:
        if self._file.size() < self._file_bytes:
            return
        full = full_files(self._directory)
        number = number_of(full[-1]) + 1 if full else 1
        self._file.path.rename(self._directory / f"trajectories-{number:06d}.jsonl")
        self._file = LineFile(self._directory / NAME)
        for old in full_files(self._directory)[: -self._kept_files or None]:
            old.unlink()
        # A restart can repeat steps of the last file alone: older keys are not needed any more.
        newest = max(step for step, *_ in self._written)
        self._written = {key for key in self._written if key[0] >= newest - 1}
        self._counts = Counter({step: n for step, n in self._counts.items() if step[0] >= newest - 1})


def full_files(directory: Path) -> list[Path]:
    """Rotated files, oldest first."""
    return sorted(directory.glob("trajectories-[0-9]*.jsonl"), key=number_of)


def number_of(path: Path) -> int:
    """Number of a rotated file."""
    return int(path.stem.removeprefix("trajectories-"))


def _keys(path: Path) -> set[Key]:
    found: set[Key] = set()
    for _, line in read_lines(path):
        try:
            found.add(decode_slot(line).key)
        except msgspec.DecodeError:
            continue  # A torn line; the LineFile has closed it off.
    return found


def _prompt(view: SettledTrajectory) -> int:
    return view.prompt_ordinal


def is_kept(place: int, groups: int, size: int, room: int) -> bool:
    """Whether `whole_groups` may give the slot at `place` of a step of `groups` groups of `size`."""
    group, member = divmod(place, size)
    if room < size:
        return group % groups == 0 and _is_spread(member, size, room)
    return _is_spread(group, groups, room // size)


def _is_spread(place: int, count: int, room: int) -> bool:
    """Whether the view at `place` is among `_spread`'s `room` of `count` views; also for places beyond `count`."""
    return count <= room or (room > 0 and -(-place * room // count) * count // room == place)


def whole_groups(views: list[T], room: int, group_of: Callable[[T], int]) -> list[T]:
    """At most `room` of the views: whole groups at even distances, so that no prompt of a step is preferred.

    Where not even one group fits: members of the first group, at even distances.
    """
    if len(views) <= room:
        return views
    groups: dict[int, list[T]] = {}
    for view in views:
        groups.setdefault(group_of(view), []).append(view)
    members = list(groups.values())
    fit = room // max(map(len, members))
    if fit:
        return [view for group in _spread(members, fit) for view in group]
    return _spread(members[0], room)


def _spread(views: list[T], room: int) -> list[T]:
    """`room` of the views at even distances, so that neither the first prompts nor short answers are preferred."""
    if room <= 0 or len(views) <= room:
        return views[: max(room, 0)]
    return [views[index * len(views) // room] for index in range(room)]
