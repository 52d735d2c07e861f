"""Pages over a run's trajectory files: the last line of a slot, and only of the last version of its step."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from headrace_schema.views import TrajectoryListView, TrajectoryView
from pydantic import ValidationError

from headrace_coordinator.projections.lines import read_lines
from headrace_coordinator.projections.trajectories import NAME, decode_slot, full_files, number_of

PAGE_SIZE = 50
Position = tuple[int, int]


class PageTokenError(ValueError):
    """A page token that this list did not give."""


def read_trajectories(
    directory: Path, page_token: str = "", page_size: int = PAGE_SIZE, *, step: int | None = None
) -> TrajectoryListView:
    """A page of live trajectories, oldest first; those of one step where `step` says so.

    A token stays valid while the file grows and is rotated; PageTokenError when it is none.
    """
    number, offset = position = _parse(page_token)
    files = [(number_of(path), path) for path in full_files(directory)]
    files.append((files[-1][0] + 1 if files else 1, directory / NAME))
    live = _live_lines(files, step)
    page: list[TrajectoryView] = []
    for index, path in files:
        if index < number:
            continue
        for end, line in read_lines(path, offset if index == number else 0):
            view = _view(line) if (index, end) in live else None
            if view is None:
                continue
            if len(page) == page_size:
                return TrajectoryListView(trajectories=page, next_page_token=f"{position[0]}.{position[1]}")
            page.append(view)
            position = (index, end)
    return TrajectoryListView(trajectories=page)


def _parse(token: str) -> Position:
    if not token:
        return 0, 0
    found = re.fullmatch(r"(\d{1,9})\.(\d{1,15})", token, re.ASCII)
    if not found:
        raise PageTokenError(token)
    return int(found[1]), int(found[2])


def _view(line: bytes) -> TrajectoryView | None:
    try:
        return TrajectoryView.model_validate_json(line)
    except ValidationError:
        return None


def _live_lines(files: list[tuple[int, Path]], step: int | None) -> set[Position]:
    """Ends of the lines to show. A later line replaces its slot's earlier one; a later version its step's."""
    versions: dict[int, int] = {}
    slots: dict[tuple[int, int, int], tuple[int, Position]] = {}
    for number, path in files:
        for end, line in read_lines(path):
            try:
                slot = decode_slot(line)
            except msgspec.DecodeError:
                continue
            if step is None or slot.step == step:
                versions[slot.step] = slot.version
                slots[slot.step, slot.prompt_ordinal, slot.sample_index] = slot.version, (number, end)
    return {place for (at, _, _), (version, place) in slots.items() if version == versions[at]}
