"""Demonstrations from LeRobot data sets of format v3: states, actions, images and tasks by episode.

Needs the extra `demonstrations`. Facts of the format are from huggingface/lerobot
`docs/source/lerobot-dataset-v3.mdx` at 0159312. Videos are not decoded: a data set keeps its cameras as images, or is
read without them. Knows no policy.
Shapes: T steps of an episode, S numbers of a state, A of an action, H actions of a horizon.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Demonstrations:
    """A data set's episodes, read from its parquet files one at a time."""

    def __init__(self, directory: Path | str, cameras: Sequence[str] = ()) -> None:
        """Reads the metadata. `cameras` are names without "observation.images.".

        Raises DemonstrationsNotReadable, also for cameras that are stored as videos.
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
        columns += [IMAGES + camera for camera in self._cameras]
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
            images={camera: _pictures(table[IMAGES + camera]) for camera in self._cameras},
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
        if kind != "image":
            raise self._problem(
                f"camera {camera!r} is stored as {kind}, only images are read; record it with use_videos=False"
            )

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
