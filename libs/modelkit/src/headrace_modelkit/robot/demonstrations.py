"""Demonstrations from LeRobot data sets of format v3: states, actions, images and tasks by episode.

Needs the extra `demonstrations`. Facts of the format are from huggingface/lerobot
`docs/source/lerobot-dataset-v3.mdx` at 0159312 and `src/lerobot/datasets/dataset_metadata.py` at 000c716. Cameras are
images in the parquet files, or videos beside them. Knows no policy.
Shapes: T steps of an episode, S numbers of a state, A of an action, H actions of a horizon.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor

VERSION = "v3."
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."


class DemonstrationsNotReadable(ValueError):
    """A data set that cannot be read; the message says what to change."""


@dataclass(frozen=True)
class Demonstration:
    """One episode. `images` are (T, H, W, 3) uint8 by camera, of the cameras that were asked for."""

    task: str
    action_TA: Tensor
    state_TS: Tensor | None
    images: Mapping[str, Tensor]

    def horizons(self, length: int) -> tuple[Tensor, Tensor]:
        """(T, H, A) next `length` actions of each step, the last one repeated, and which of them there are."""
        steps = len(self.action_TA)
        places_TH = torch.arange(steps)[:, None] + torch.arange(length)
        return self.action_TA[places_TH.clamp(max=steps - 1)], places_TH < steps

    def stacked(self, moments: int) -> Demonstration:
        """The same, of which each step shows its last `moments`, the newest last, as an environment stacks them.

        What was before the first step is the first one. Numbers of states and channels come one moment after the other.
        """
        places_TM = (torch.arange(len(self.action_TA))[:, None] + torch.arange(1 - moments, 1)).clamp(min=0)
        state_TS = None if self.state_TS is None else self.state_TS[places_TM].flatten(1)
        images = {
            name: image[places_TM].permute(0, 2, 3, 1, 4).flatten(3) for name, image in self.images.items()
        }
        return replace(self, state_TS=state_TS, images=images)


class Demonstrations:
    """A data set's episodes, read from its parquet files one at a time."""

    def __init__(self, directory: Path | str, cameras: Sequence[str] = ()) -> None:
        """Reads the metadata. `cameras` are names without "observation.images.".

        Raises DemonstrationsNotReadable.
        """
        self._directory = Path(directory)
        self._info = self._metadata()
        self._cameras = tuple(cameras)
        for camera in cameras:
            self._check_camera(camera)
        self._tasks = {int(row["task_index"]): _task(row) for row in self._rows("meta/tasks.parquet")}
        files = sorted((self._directory / "meta" / "episodes").glob("chunk-*/file-*.parquet"))
        names = [str(file.relative_to(self._directory)) for file in files]
        self._episodes = [row for name in names for row in self._rows(name)]
        if not self._episodes:
            raise self._problem("meta/episodes lists no episode")

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self._episodes)

    def __iter__(self) -> Iterator[Demonstration]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Demonstration:
        """The episode at this place of the metadata. Raises DemonstrationsNotReadable."""
        row = self._episodes[index]
        place = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        name = str(self._info["data_path"]).format(**place)
        columns = [ACTION, "task_index", "frame_index", *([STATE] if STATE in self._info["features"] else [])]
        columns += [IMAGES + camera for camera in self._cameras if not self._filmed(camera)]
        table = self._table(name, columns, [("episode_index", "==", row["episode_index"])])
        table = table.sort_by("frame_index")
        if len(table) != int(row["length"]) or not len(table):
            raise self._problem(
                f"{name} holds {len(table)} steps of episode {row['episode_index']}, not {row['length']}"
            )
        return Demonstration(
            task=self._tasks[table["task_index"][0].as_py()],
            action_TA=_numbers(table[ACTION]),
            state_TS=_numbers(table[STATE]) if STATE in table.column_names else None,
            images={
                camera: self._frames(row, camera)
                if self._filmed(camera)
                else _pictures(table[IMAGES + camera])
                for camera in self._cameras
            },
        )

    @property
    def action_size(self) -> int:
        """A."""
        return self._size(ACTION)

    @property
    def state_size(self) -> int:
        """S; 0 where the episodes have no states."""
        return self._size(STATE) if STATE in self._info["features"] else 0

    def _size(self, feature: str) -> int:
        return math.prod(int(extent) for extent in self._info["features"][feature]["shape"])

    def _metadata(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = json.loads((self._directory / "meta" / "info.json").read_text())
        except (OSError, ValueError) as error:
            raise self._problem(f"meta/info.json cannot be read: {error}") from error
        version = str(info.get("codebase_version"))
        if not version.startswith(VERSION):
            raise self._problem(
                f"its format is {version}, only v3 is read; convert it with lerobot's convert_dataset_v21_to_v30"
            )
        if ACTION not in info.get("features", {}) or "data_path" not in info:
            raise self._problem("meta/info.json states no data_path, or no feature named action")
        return info

    def _check_camera(self, camera: str) -> None:
        features = self._info["features"]
        kind = features.get(IMAGES + camera, {}).get("dtype")
        if kind is None:
            known = [name.removeprefix(IMAGES) for name in features if name.startswith(IMAGES)]
            raise self._problem(f"there is no camera {camera!r}, only {known}")
        if kind not in ("image", "video"):
            raise self._problem(f"camera {camera!r} is stored as {kind}, only images and videos are read")
        if kind == "video" and not (self._info.get("video_path") and self._info.get("fps")):
            raise self._problem(
                f"camera {camera!r} is a video, and meta/info.json states no video_path or no fps"
            )

    def _filmed(self, camera: str) -> bool:
        return bool(self._info["features"][IMAGES + camera]["dtype"] == "video")

    def _frames(self, row: Mapping[str, Any], camera: str) -> Tensor:
        """(T, H, W, 3) of an episode, which is a stretch of a file with many."""
        key = IMAGES + camera
        try:
            place = {part: row[f"videos/{key}/{part}"] for part in ("chunk_index", "file_index")}
            first_s = float(row[f"videos/{key}/from_timestamp"])
        except KeyError as error:
            raise self._problem(f"meta/episodes has no column {error}") from error
        name = str(self._info["video_path"]).format(video_key=key, **place)
        length, fps = int(row["length"]), float(self._info["fps"])
        frames: dict[int, np.ndarray] = {}
        try:
            with av.open(str(self._directory / name)) as film:
                stream = film.streams.video[0]
                stream.thread_type = "AUTO"
                assert stream.time_base is not None
                film.seek(max(0, int((first_s - 0.5 / fps) / stream.time_base)), stream=stream)
                for frame in film.decode(stream):
                    number = round((frame.time - first_s) * fps) if frame.time is not None else -1
                    if 0 <= number < length:
                        frames[number] = frame.to_ndarray(format="rgb24")
                    if number >= length - 1:
                        break
        except (av.FFmpegError, OSError, IndexError) as error:
            raise self._problem(f"{name} cannot be read: {error}") from error
        if len(frames) < length:
            raise self._problem(
                f"{name} has {len(frames)} frames of episode {row['episode_index']}, which has {length} steps"
            )
        return torch.from_numpy(np.stack([frames[number] for number in range(length)]))

    def _rows(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._table(name, None, None).to_pylist()
        return rows

    def _table(self, name: str, columns: list[str] | None, filters: Any) -> Any:
        try:
            return pq.read_table(self._directory / name, columns=columns, filters=filters)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise self._problem(f"{name} cannot be read: {error}") from error

    def _problem(self, reason: str) -> DemonstrationsNotReadable:
        return DemonstrationsNotReadable(f"LeRobot data set {str(self._directory)!r}: {reason}")


def _task(row: Mapping[str, Any]) -> str:
    # pandas writes the task as its index, under a name of its own unless it has one.
    return str(next(value for name, value in row.items() if name != "task_index"))


def _numbers(column: Any) -> Tensor:
    found = torch.tensor(np.stack(column.to_numpy()), dtype=torch.float32)
    return found if found.dim() == 2 else found[:, None]


def _pictures(column: Any) -> Tensor:
    frames = [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB")) for cell in column.to_pylist()]
    return torch.from_numpy(np.stack(frames))
