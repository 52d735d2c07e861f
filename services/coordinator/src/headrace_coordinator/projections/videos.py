"""The videos of an evaluation's episodes: files in its directory, whose names say whose they are. Synchronous."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace_coordinator.data.items import DataItem

FOLDER = "videos"
MEDIA_TYPE = "video/mp4"
_NAME = re.compile(r"(\d{1,9})-(\d{1,9})-[a-z0-9-]*-(success|failure)\.mp4")
_LONGEST = 80


@dataclass(frozen=True)
class Video:
    """One file. `item` and `sample` are those of its transcript."""

    name: str
    item: int
    sample: int
    success: bool
    size_bytes: int = 0

    @classmethod
    def of(cls, index: int, sample: int, item: DataItem, *, success: bool) -> Video:
        """The video of an item's episode."""
        what = re.sub(r"[^a-z0-9]+", "-", item.question.lower()).strip("-")[-_LONGEST:]
        name = f"{index:04d}-{sample}-{what}-{'success' if success else 'failure'}.mp4"
        return cls(name, index, sample, success)


def write_videos(directory: Path, videos: Iterable[tuple[Video, bytes]]) -> None:
    """Writes the files, each by a rename; one that is made again replaces itself. Raises OSError."""
    folder = directory / FOLDER
    for video, content in videos:
        folder.mkdir(exist_ok=True)
        aside = folder / f".{video.name}.partial"
        aside.write_bytes(content)
        aside.rename(folder / video.name)


def list_videos(directory: Path) -> list[Video]:
    """The videos there are, in the order of items. Raises OSError."""
    folder = directory / FOLDER
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            item, sample = int(match[1]), int(match[2])
            found.append(Video(path.name, item, sample, match[3] == "success", path.stat().st_size))
    return sorted(found, key=lambda video: (video.item, video.sample))
