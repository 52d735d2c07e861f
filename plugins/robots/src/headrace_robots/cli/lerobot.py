"""Writes episodes as a LeRobot data set of format v3, which the trainer, lerobot and pandas read.

Facts of the format are from huggingface/lerobot `docs/source/lerobot-dataset-v3.mdx` at 0159312 and
`src/lerobot/datasets/dataset_metadata.py` at 000c716. Needs pyarrow, and av for videos.
Knows no simulator. Shapes: T steps of an episode, S numbers of a state, A of an action.
"""

from __future__ import annotations

import io
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace_robots.cli.statistics import Statistics, episode_statistics, merged

VERSION = "v3.0"
IMAGES = "observation.images."
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CODEC = "libx264"
QUALITY = {"crf": "18", "g": "2"}
"""Close to lossless, and every second frame a key frame: moments are read out of order."""
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
FPS = 10
"""Steps a second that are stated: simulators tell none, and the format wants one."""
IMAGE_ROWS = 64
"""Rows of a group with pictures: who wants one of them reads a group."""
COUNTERS = ("frame_index", "episode_index", "index", "task_index")


@dataclass
class EpisodeData:
    """One episode: a row a step. `images_T` are PNG files by camera, of `image_shapes` (H, W, 3).

    `rewards`, `successes` and `ends` are those of the steps' actions; none where these are not what was done.
    """

    task: str
    states: list[np.ndarray] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    images: dict[str, list[bytes]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    successes: list[bool] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        """T."""
        return len(self.actions)


def write_data_set(
    directory: Path,
    episodes: Sequence[EpisodeData],
    image_shapes: Mapping[str, tuple[int, ...]],
    *,
    videos: bool = False,
) -> None:
    """Writes the directory aside and renames it into place; it must not exist.

    With `videos` the pictures of a camera are one H.264 file.
    """
    aside = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}.partial")
    tasks = list(
        dict.fromkeys(episode.task for episode in episodes)
    )  # numbered as LeRobot does: as they come
    try:
        for folder in ("data/chunk-000", "meta/episodes/chunk-000"):
            (aside / folder).mkdir(parents=True)
        table = _frames(episodes, tasks, images=not videos)
        rows = None if videos or not image_shapes else IMAGE_ROWS
        pq.write_table(table, aside / DATA.format(chunk_index=0, file_index=0), row_group_size=rows)
        known = _written(table, episodes)
        pq.write_table(_episode_rows(episodes, known, [*image_shapes] if videos else []), aside / EPISODES)
        for camera, shape in image_shapes.items() if videos else ():
            _write_video(aside, camera, shape, [png for each in episodes for png in each.images[camera]])
        pq.write_table(_task_rows(tasks), aside / "meta" / "tasks.parquet")
        _write_json(aside / "meta" / "info.json", _info(episodes, tasks, image_shapes, videos=videos))
        _write_json(aside / "meta" / "stats.json", _plain(merged(known)))
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _frames(episodes: Sequence[EpisodeData], tasks: Sequence[str], *, images: bool) -> pa.Table:
    frames = [np.arange(len(episode)) for episode in episodes]
    numbers = [np.full(len(episode), number) for number, episode in enumerate(episodes)]
    kinds = [np.full(len(episode), tasks.index(episode.task)) for episode in episodes]
    frame, total = np.concatenate(frames), sum(map(len, episodes))
    columns: dict[str, Any] = {"action": _vectors(episodes, "actions")}
    if episodes[0].states:
        columns["observation.state"] = _vectors(episodes, "states")
    for camera in episodes[0].images if images else ():
        cells = [{"bytes": png, "path": None} for episode in episodes for png in episode.images[camera]]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns[f"{IMAGES}{camera}"] = pa.array(cells, kind)
    if episodes[0].rewards:
        rewards = [reward for episode in episodes for reward in episode.rewards]
        columns["next.reward"] = pa.array(np.array(rewards, np.float32))
        for column, name in (("next.success", "successes"), ("next.done", "ends")):
            flags = [flag for episode in episodes for flag in getattr(episode, name)]
            columns[column] = pa.array(flags, pa.bool_())
    columns["timestamp"] = pa.array((frame / FPS).astype(np.float32))
    counters = (frame, np.concatenate(numbers), np.arange(total), np.concatenate(kinds))
    columns |= {
        name: pa.array(values.astype(np.int64)) for name, values in zip(COUNTERS, counters, strict=True)
    }
    return pa.table(columns)


def _vectors(episodes: Sequence[EpisodeData], name: str) -> Any:
    rows = np.concatenate([np.stack(getattr(episode, name)) for episode in episodes]).astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def _write_video(directory: Path, camera: str, shape: Sequence[int], images: Sequence[bytes]) -> None:
    """One file with all episodes, one after the other."""
    import av
    from PIL import Image

    key = f"{IMAGES}{camera}"
    path = directory / VIDEO.format(video_key=key, chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True)
    with av.open(str(path), "w") as film:
        stream = film.add_stream(CODEC, rate=FPS, options=QUALITY)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = shape[:2]
        stream.pix_fmt = _pixels(shape)
        for number, png in enumerate(images):
            picture = np.asarray(Image.open(io.BytesIO(png), formats=("PNG",)))
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = number
            film.mux(stream.encode(frame))
        film.mux(stream.encode(None))


def _pixels(shape: Sequence[int]) -> str:
    """Colours at half the sides, which are then even numbers."""
    return "yuv444p" if shape[0] % 2 or shape[1] % 2 else "yuv420p"


def _plain(statistics: Statistics) -> dict[str, Any]:
    return {
        feature: {kind: row.tolist() for kind, row in kinds.items()} for feature, kinds in statistics.items()
    }


def _episode_rows(
    episodes: Sequence[EpisodeData], known: Sequence[Statistics], filmed: Sequence[str]
) -> pa.Table:
    ends = np.cumsum([len(episode) for episode in episodes]).tolist()
    count = len(episodes)
    return pa.table(
        {
            "episode_index": list(range(count)),
            "tasks": [[episode.task] for episode in episodes],
            "length": [len(episode) for episode in episodes],
            "dataset_from_index": [0, *ends[:-1]],
            "dataset_to_index": ends,
            **{
                f"{kind}/{part}_index": [0] * count
                for kind in ("data", "meta/episodes")
                for part in ("chunk", "file")
            },
            **{
                f"videos/{IMAGES}{camera}/{part}": values
                for camera in filmed
                for part, values in (
                    ("chunk_index", [0] * count),
                    ("file_index", [0] * count),
                    ("from_timestamp", [start / FPS for start in (0, *ends[:-1])]),
                    ("to_timestamp", [end / FPS for end in ends]),
                )
            },
            **{
                f"stats/{feature}/{kind}": [each[feature][kind].tolist() for each in known]
                for feature, kinds in known[0].items()
                for kind in kinds
            },
        }
    )


def _task_rows(tasks: Sequence[str]) -> pa.Table:
    """As pandas writes a frame whose index is the task."""
    index = "__index_level_0__"
    table = pa.table({"task_index": list(range(len(tasks))), index: list(tasks)})
    columns = [
        {"name": name, "field_name": stored, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, stored, kind, numpy in (
            ("task_index", "task_index", "int64", "int64"),
            (None, index, "unicode", "object"),
        )
    ]
    named = {"index_columns": [index], "column_indexes": [], "columns": columns}
    return table.replace_schema_metadata({"pandas": json.dumps(named)})


def _info(
    episodes: Sequence[EpisodeData],
    tasks: Sequence[str],
    image_shapes: Mapping[str, tuple[int, ...]],
    *,
    videos: bool,
) -> dict[str, Any]:
    features = {"action": _feature("float32", (len(episodes[0].actions[0]),))}
    if episodes[0].states:
        features["observation.state"] = _feature("float32", (len(episodes[0].states[0]),))
    for camera in episodes[0].images:
        shape = image_shapes[camera]
        kind, axes = "video" if videos else "image", ["height", "width", "channels"]
        features[f"{IMAGES}{camera}"] = feature = _feature(kind, shape, axes)
        if videos:
            feature["info"] = {
                "video.height": shape[0],
                "video.width": shape[1],
                "video.channels": shape[2],
                "video.codec": "h264",
                "video.pix_fmt": _pixels(shape),
                "video.fps": FPS,
                "video.g": int(QUALITY["g"]),
                "video.crf": int(QUALITY["crf"]),
                "video.is_depth_map": False,
                "has_audio": False,
            }
    if episodes[0].rewards:
        features["next.reward"] = _feature("float32", (1,))
        features |= {name: _feature("bool", (1,)) for name in ("next.success", "next.done")}
    features["timestamp"] = _feature("float32", (1,))
    features |= {name: _feature("int64", (1,)) for name in COUNTERS}
    return {
        "codebase_version": VERSION,
        "robot_type": None,
        "total_episodes": len(episodes),
        "total_frames": sum(map(len, episodes)),
        "total_tasks": len(tasks),
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA,
        "video_path": VIDEO if videos else None,
        "features": features,
    }


def _feature(kind: str, shape: Sequence[int], names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "names": names}


def _written(table: pa.Table, episodes: Sequence[EpisodeData]) -> list[Statistics]:
    """Statistics of each episode: of its rows, and of its pictures, whether they are in the table or in films."""
    columns = {}
    for name in table.column_names:
        if not name.startswith(IMAGES):
            cells = np.stack(table[name].to_numpy(zero_copy_only=False).tolist())
            columns[name] = cells.reshape(len(table), -1)
    found, first = list[Statistics](), 0
    for episode in episodes:
        numbers = {name: rows[first : first + len(episode)] for name, rows in columns.items()}
        pictures = {f"{IMAGES}{camera}": files for camera, files in episode.images.items()}
        found.append(episode_statistics(numbers, pictures))
        first += len(episode)
    return found


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")
