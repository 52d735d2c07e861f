"""Writes an episode as a Rerun recording: an `.rrd` file for the viewer of https://rerun.io. Needs rerun-sdk.

Knows no coordinator. Shapes: K executed actions of A numbers, T chunks of at most C actions, S numbers of a state.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from headrace_servicekit.rpc.episodes import IMAGE, STATE, Episode

APPLICATION = "headrace"
STEP, TIME = "step", "time"
"""Timelines: executed actions so far, and the moment of the video at which they were done."""


def can_write() -> bool:
    """Whether rerun-sdk is installed."""
    return find_spec("rerun") is not None


def write_rrd(path: Path, episode: Episode, video: bytes, *, name: str) -> None:
    """Writes the file aside and renames it into place. Raises OSError.

    `video` is the episode's MP4 file, with a frame of the start and one behind each action. Action k stands at step
    k, what it led to (reward, success, frame) at step k + 1, what the policy read at the step of its chunk. The
    viewer keeps recordings apart by `name`.
    """
    rerun = _rerun()
    rerun.set_strict_mode(True)
    recording = rerun.RecordingStream(APPLICATION, recording_id=name)
    aside = path.with_name(f".{path.name}.partial")
    recording.save(aside)
    asset = rerun.AssetVideo(contents=video, media_type="video/mp4")
    moments_ns = asset.read_frame_timestamps_nanos()
    recording.log("video", asset, static=True)
    frames = np.arange(min(len(moments_ns), episode.steps + 1))
    shown = rerun.VideoFrameReference.columns_nanos(moments_ns[frames])
    recording.send_columns("video", _times(frames, moments_ns), shown)
    for entity, (steps, values) in _series(episode).items():
        rows = values.reshape(len(values), -1).astype(np.float64)
        columns = rerun.Scalars.columns(scalars=rows.ravel()).partition([rows.shape[1]] * len(rows))
        recording.send_columns(entity, _times(steps, moments_ns), columns)
    for entity, steps, pictures in _pictures(episode):
        files = rerun.EncodedImage.columns(
            blob=[_png(each) for each in pictures], media_type=["image/png"] * len(pictures)
        )
        recording.send_columns(entity, _times(steps, moments_ns), files)
    recording.disconnect()
    aside.rename(path)


def _rerun() -> Any:
    return importlib.import_module("rerun")


def _times(steps: np.ndarray, moments_ns: np.ndarray) -> list[Any]:
    rerun = _rerun()
    last = len(moments_ns) - 1
    durations = moments_ns[np.minimum(steps, last)].astype("timedelta64[ns]")
    return [rerun.TimeColumn(STEP, sequence=steps), rerun.TimeColumn(TIME, duration=durations)]


def _series(episode: Episode) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    """Numbers by entity: the steps at which they stand, (N,), and their rows, (N, …)."""
    executed = np.arange(episode.steps)
    rewards_K = episode.rewards_TC[episode.valid_TC]
    found = {
        "action": (executed, episode.executed_TCA[episode.valid_TC]),
        "reward": (executed + 1, rewards_K),
        "return": (executed + 1, np.cumsum(rewards_K, dtype=np.float64)),
        "success": (executed + 1, episode.successes_TC[episode.valid_TC]),
    }
    if STATE in episode.observation and episode.observation[STATE].size:
        found["observation/state"] = _read(episode, STATE)
    if episode.values_T is not None and np.isfinite(episode.values_T).all():
        found["value"] = _chunk_starts(episode), episode.values_T
    return found


def _pictures(episode: Episode) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Entity, steps and (N, height, width, 3) uint8 images of each camera that the policy saw."""
    for name in episode.observation:
        if name.startswith(IMAGE):
            yield f"observation/{name}", *_read(episode, name)


def _read(episode: Episode, name: str) -> tuple[np.ndarray, np.ndarray]:
    """An observation before each chunk, and the one behind an episode that was cut."""
    steps, rows = _chunk_starts(episode), episode.observation[name]
    if name in episode.final_observation:
        steps = np.append(steps, episode.steps)
        rows = np.concatenate([rows, episode.final_observation[name][None]])
    return steps, rows


def _chunk_starts(episode: Episode) -> np.ndarray:
    lengths = episode.valid_TC.sum(axis=1)
    starts: np.ndarray = np.cumsum(lengths) - lengths
    return starts


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
