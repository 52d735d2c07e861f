"""A video of one episode, frame by frame, as MP4 (H.264). Lives in a child; knows no environment.

The encoder is the ffmpeg that imageio-ffmpeg brings. What it writes is a file without a name, so that a child that is
killed leaves nothing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from typing import Any

import numpy as np

FRAMES_PER_S = 20
MAX_BYTES = 16 * 1024 * 1024
"""Of one video: it travels in one message."""


class NoVideo(Exception):
    """There is no video; the message says why, and what to do."""


class Film:
    """Takes (height, width, 3) uint8 frames of one size, then gives the video once."""

    def __init__(self) -> None:
        try:
            self._encode = importlib.import_module("imageio_ffmpeg").write_frames
        except ImportError as error:
            message = f"videos need imageio-ffmpeg: pip install 'headrace-simulator[video]' ({error})"
            raise NoVideo(message) from error
        self._file = os.memfd_create("video")
        self._encoder: Generator[None, Any, None] | None = None
        self._shape: tuple[int, ...] = ()

    def add(self, frame: np.ndarray) -> None:
        """Adds a frame. Raises NoVideo for one of another size, or when the encoder has ended."""
        if self._encoder is None:
            self._shape = frame.shape
            self._encoder = self._encode(
                f"/proc/{os.getpid()}/fd/{self._file}",
                (frame.shape[1], frame.shape[0]),
                fps=FRAMES_PER_S,
                codec="libx264",
                macro_block_size=2,
                ffmpeg_log_level="error",
                output_params=["-f", "mp4", "-threads", "1", "-movflags", "+faststart"],
            )
            self._encoder.send(None)
        if frame.shape != self._shape:
            raise NoVideo(f"its frames change their size: {self._shape}, then {frame.shape}")
        try:
            self._encoder.send(np.ascontiguousarray(frame))
        except OSError as error:
            raise NoVideo(f"ffmpeg ended: {error}") from error

    def finish(self) -> bytes:
        """The whole video, and its end. Raises NoVideo when it is larger than MAX_BYTES, or empty."""
        try:
            if self._encoder is not None:
                self._encoder.close()
            size = os.fstat(self._file).st_size
            if not 0 < size <= MAX_BYTES:
                raise NoVideo(f"the video of this episode has {size} bytes; 1 to {MAX_BYTES} can be sent")
            return os.pread(self._file, size, 0)
        finally:
            os.close(self._file)

    def drop(self) -> None:
        """Ends it without a video."""
        if self._encoder is not None:
            self._encoder.close()
        os.close(self._file)
