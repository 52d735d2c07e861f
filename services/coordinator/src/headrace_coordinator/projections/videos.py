"""Recorded episodes of an evaluation or of training: a video and a file of the episode's arrays. Synchronous.

Both are in the run's directory; a video's name tells its episode.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_servicekit.folders import read_below, replace_below

from headrace_coordinator.data.builtin.episodes import slug
from headrace_coordinator.data.items import DataItem

if TYPE_CHECKING:
    from headrace_servicekit.rpc.episodes import Episode

FOLDER = "videos"
MEDIA_TYPE = "video/mp4"
EPISODE_MEDIA_TYPE = "application/x-protobuf"
_NAME = re.compile(r"(?:s(\d{1,9})-)?(\d{1,12})-(\d{1,9})-([a-z0-9-]*)-(success|failure)\.mp4")


@dataclass(frozen=True)
class Video:
    """One file. `item` and `sample` are those of its transcript; `step` is None in an evaluation."""

    name: str
    item: int
    sample: int
    success: bool
    size_bytes: int = 0
    step: int | None = None

    @classmethod
    def of(cls, index: int, sample: int, item: DataItem, *, success: bool, step: int | None = None) -> Video:
        """The video of an item's episode."""
        of = "" if step is None else f"s{step:06d}-"
        name = f"{of}{index:04d}-{sample}-{slug(item.question)}-{'success' if success else 'failure'}.mp4"
        return cls(name, index, sample, success, step=step)


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
        for name, content in _files(recording):
            with replace_below(directory.parent, folder / name) as file:
                file.write(content)


def _files(recording: Recording) -> Iterator[tuple[str, bytes]]:
    """(name, content) of both files, the video last: a listed video has its episode."""
    yield episode_name(recording.video.name), recording.episode
    yield recording.video.name, recording.content


def read_episode(path: Path) -> Episode:
    """A written episode RUN/videos/NAME, as far as it was kept. Raises OSError, and ValueError where it holds none."""
    from google.protobuf.message import DecodeError  # gRPC comes with it, which the API starts without
    from headrace.common.v1 import common_pb2 as common
    from headrace_servicekit.rpc.episodes import decode_episode
    from headrace_servicekit.rpc.errors import ServiceError

    try:
        with read_below(path.parents[2], path) as file:
            return decode_episode(common.ActionSegment.FromString(file.read()))
    except (DecodeError, ServiceError) as error:
        raise ValueError(f"{path.name} holds no episode: {error}") from error


def start_of(name: str) -> str:
    """What a video's name says of its start state; "" where it is none's."""
    match = _NAME.fullmatch(name)
    return match[4] if match else ""


def list_videos(directory: Path) -> list[Video]:
    """The videos there are, in the order of items. Raises OSError."""
    folder = directory / FOLDER
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            continue
        if match := _NAME.fullmatch(path.name):
            step = None if match[1] is None else int(match[1])
            item, sample, success = int(match[2]), int(match[3]), match[5] == "success"
            found.append(Video(path.name, item, sample, success, path.stat().st_size, step))
    return sorted(found, key=lambda video: (video.step or 0, video.item, video.sample))


def keep_within(directory: Path, limit_bytes: int) -> None:
    """Removes the oldest videos with their episodes until what is left fits; the newest stays. Raises OSError."""
    folder, left = directory / FOLDER, list_videos(directory)
    sizes = {video.name: video.size_bytes + _size(folder / episode_name(video.name)) for video in left}
    while len(left) > 1 and sum(sizes[video.name] for video in left) > limit_bytes:
        name = left.pop(0).name
        for each in (name, episode_name(name)):
            (folder / each).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
