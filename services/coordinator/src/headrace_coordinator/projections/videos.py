"""Recorded episodes of an evaluation: a video and a file of the episode's arrays for each. Synchronous.

Both are in the evaluation's directory; a video's name tells its episode.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from headrace.common.v1 import common_pb2 as common
from headrace_servicekit.rpc.episodes import Episode, decode_episode
from headrace_servicekit.rpc.errors import ServiceError

from headrace_coordinator.data.items import DataItem

FOLDER = "videos"
MEDIA_TYPE = "video/mp4"
EPISODE_MEDIA_TYPE = "application/x-protobuf"
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


@dataclass(frozen=True)
class Recording:
    """A recorded episode: its video, an MP4 file, and `episode`, its `headrace.common.v1.ActionSegment`."""

    video: Video
    content: bytes
    episode: bytes


def episode_name(video: str) -> str:
    """Name of the file that has the episode of a video."""
    return f"{video.removesuffix('.mp4')}.episode"


def write_recordings(directory: Path, recordings: Iterable[Recording]) -> None:
    """Writes the files, each by a rename; writing a recording again replaces its files. Raises OSError."""
    folder = directory / FOLDER
    for recording in recordings:
        folder.mkdir(exist_ok=True)
        for name, content in _files(recording):
            aside = folder / f".{name}.partial"
            aside.write_bytes(content)
            aside.rename(folder / name)


def _files(recording: Recording) -> Iterator[tuple[str, bytes]]:
    """(name, content) of both files, the video last: a listed video has its episode."""
    yield episode_name(recording.video.name), recording.episode
    yield recording.video.name, recording.content


def read_episode(path: Path) -> Episode:
    """A written episode, as far as it was kept. Raises OSError, and ValueError where the file holds none."""
    try:
        return decode_episode(common.ActionSegment.FromString(path.read_bytes()))
    except (DecodeError, ServiceError) as error:
        raise ValueError(f"{path.name} holds no episode: {error}") from error


def list_videos(directory: Path) -> list[Video]:
    """The videos there are, in the order of items. Raises OSError."""
    folder = directory / FOLDER
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            item, sample = int(match[1]), int(match[2])
            found.append(Video(path.name, item, sample, match[3] == "success", path.stat().st_size))
    return sorted(found, key=lambda video: (video.item, video.sample))
