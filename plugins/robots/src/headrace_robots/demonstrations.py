"""Demonstrations from LeRobot data sets of format v3: states, actions, images and tasks by episode.

Needs the extra `demonstrations`. Facts of the format are from huggingface/lerobot
`docs/source/lerobot-dataset-v3.mdx` at 0159312 and `src/lerobot/datasets/dataset_metadata.py` at 000c716. Cameras are
images in the parquet files, or videos beside them. Knows no policy.
Shapes: T steps of an episode, S numbers of a state, A of an action, H actions of a horizon.
"""

from __future__ import annotations

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
from headrace_modelkit.pictures import decode_image
from torch import Tensor

VERSION = "v3."
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
REWARD, SUCCESS, DONE = "next.reward", "next.success", "next.done"
"""Of a step, where they are stated: what its action earned, whether it succeeded, and whether it was the last."""
IMAGE = "observation.image"
"""Of a data set with one camera, which is called `image` here, or by this name as converted policies call it."""


class DemonstrationsNotReadable(ValueError):
    """A data set that cannot be read; the message says what to change."""


@dataclass(frozen=True)
class Demonstration:
    """One episode. `images` are (T, H, W, 3) uint8 by camera, of the cameras that were asked for."""

    task: str
    action_TA: Tensor
    state_TS: Tensor | None
    images: Mapping[str, Tensor]
    reward_T: Tensor | None = None
    success_T: Tensor | None = None
    """Whether each action led to success, where it is stated."""
    terminated: bool = False
    """Whether it ended by itself: next.done is true at its last step, and next.success too where there is one."""

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
        """Reads the metadata. `cameras` are names without "observation." and "images.".

        Raises DemonstrationsNotReadable.
        """
        self._directory = Path(directory)
        self._info = self._metadata()
        self._cameras = {camera: self._feature(camera) for camera in cameras}
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
        known = self._info["features"]
        told = [name for name in (STATE, REWARD, SUCCESS, DONE) if name in known]
        columns = [ACTION, "task_index", "frame_index", *told]
        columns += [self._cameras[camera] for camera in self._cameras if not self._filmed(camera)]
        table = self._table(name, columns, [("episode_index", "==", row["episode_index"])])
        table = table.sort_by("frame_index")
        if len(table) != int(row["length"]) or not len(table):
            raise self._problem(
                f"{name} holds {len(table)} steps of episode {row['episode_index']}, not {row['length']}"
            )
        where = f"{name}, episode {row['episode_index']}"
        if (task := self._tasks.get(table["task_index"][0].as_py())) is None:
            raise self._problem(f"{where} is of a task that meta/tasks.parquet does not list")
        return Demonstration(
            task=task,
            action_TA=self._numbers(table, ACTION, where),
            state_TS=self._numbers(table, STATE, where) if STATE in table.column_names else None,
            images={
                camera: self._frames(row, camera)
                if self._filmed(camera)
                else self._pictures(table, feature, where)
                for camera, feature in self._cameras.items()
            },
            reward_T=self._numbers(table, REWARD, where)[:, 0] if REWARD in told else None,
            success_T=self._numbers(table, SUCCESS, where)[:, 0] if SUCCESS in told else None,
            terminated=DONE in told
            and all(
                bool(np.asarray(table[name].to_pylist()[-1]).reshape(-1)[0])
                for name in (SUCCESS, DONE)
                if name in told
            ),
        )

    def listed(self) -> list[tuple[str, int]]:
        """(what its tasks are, steps) of each episode, from the metadata alone."""
        return [("; ".join(map(str, row.get("tasks") or [])), int(row["length"])) for row in self._episodes]

    @property
    def rewarded(self) -> bool:
        """Whether it states the reward of each step."""
        return REWARD in self._info["features"]

    @property
    def fps(self) -> float:
        """Steps a second that it states."""
        return float(self._info.get("fps") or 0)

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

    def _feature(self, camera: str) -> str:
        """The feature of a camera. Raises DemonstrationsNotReadable where there is none."""
        features = self._info["features"]
        known: dict[str, str] = {
            name.removeprefix(IMAGES): name for name in features if name.startswith(IMAGES)
        }
        if IMAGE in features:
            known = {"image": IMAGE, IMAGE: IMAGE, **known}
        if camera not in known:
            raise self._problem(f"there is no camera {camera!r}, only {list(known)}")
        return known[camera]

    def _check_camera(self, camera: str) -> None:
        kind = self._info["features"][self._cameras[camera]].get("dtype")
        if kind not in ("image", "video"):
            raise self._problem(f"camera {camera!r} is stored as {kind}, only images and videos are read")
        fps = self._info.get("fps")
        whole = isinstance(fps, int | float) and math.isfinite(fps) and fps > 0
        if kind == "video" and not (self._info.get("video_path") and whole):
            raise self._problem(
                f"camera {camera!r} is a video, and meta/info.json states no video_path or no fps above 0"
            )

    def _filmed(self, camera: str) -> bool:
        return bool(self._info["features"][self._cameras[camera]]["dtype"] == "video")

    def _frames(self, row: Mapping[str, Any], camera: str) -> Tensor:
        """(T, H, W, 3) of an episode, which is a stretch of a file with many."""
        key = self._cameras[camera]
        try:
            place = {part: row[f"videos/{key}/{part}"] for part in ("chunk_index", "file_index")}
            first_s = float(row[f"videos/{key}/from_timestamp"])
        except KeyError as error:
            raise self._problem(f"meta/episodes has no column {error}") from error
        if not math.isfinite(first_s):
            raise self._problem(
                f"meta/episodes begins episode {row['episode_index']} of {key} at {first_s} s"
            )
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

    def _numbers(self, table: Any, feature: str, where: str) -> Tensor:
        """(T, numbers) of a feature. Raises DemonstrationsNotReadable for what is no number as the trainer has them."""
        size, rows = self._size(feature), []
        for frame, cell in zip(table["frame_index"].to_pylist(), table[feature].to_numpy(), strict=True):
            try:
                with np.errstate(over="ignore"):  # too large for float32: it becomes infinite, and is refused
                    row = np.asarray(cell, np.float32).reshape(-1)
            except (TypeError, ValueError) as error:
                raise self._problem(
                    f"{where}, frame {frame}: {feature} is no row of numbers ({error})"
                ) from error
            if len(row) != size:
                raise self._problem(f"{where}, frame {frame}: {feature} has {len(row)} numbers, not {size}")
            if (wrong := ~np.isfinite(row)).any():
                place = int(wrong.argmax())
                raise self._problem(
                    f"{where}, frame {frame}: number {place} of {feature} is {row[place]}, which is not finite; "
                    "mend it, or leave the episode out"
                )
            rows.append(row)
        return torch.from_numpy(np.stack(rows))

    def _pictures(self, table: Any, feature: str, where: str) -> Tensor:
        """(T, H, W, 3) of a feature. Raises DemonstrationsNotReadable."""
        frames = []
        for frame, cell in zip(table["frame_index"].to_pylist(), table[feature].to_pylist(), strict=True):
            try:
                frames.append(np.asarray(decode_image((cell or {}).get("bytes") or b"")))
            except ValueError as error:
                raise self._problem(f"{where}, frame {frame} of {feature}: {error}") from error
            if frames[-1].shape != frames[0].shape:
                shapes = f"{frames[-1].shape}, the first one {frames[0].shape}"
                raise self._problem(f"{where}, frame {frame}: {feature} has the shape {shapes}")
        return torch.from_numpy(np.stack(frames))

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
