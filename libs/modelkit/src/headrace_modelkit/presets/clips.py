"""Made videos and sounds, as files: for tests, and for the data of examples. Needs PyAV, imported when one is made."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SOUNDS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame"}


def video_file(
    frames: Sequence[NDArray[np.uint8]],
    *,
    rate: int = 4,
    times: Sequence[int] | None = None,
    turn: int = 0,
    form: str = "mp4",
    codec: str = "libx264rgb",
) -> bytes:
    """A video of RGB frames (height, width, 3), without loss by default.

    `times` of the frames are in 1 / 1000 s and need not be even; `turn` is written as the display's rotation.
    """
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        untyped: Any = container
        stream = untyped.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "rgb24" if codec == "libx264rgb" else "yuv420p"
        stream.options = {"crf": "0", "preset": "ultrafast", "bf": "0"} if "264" in codec else {}
        stream.codec_context.time_base = Fraction(1, 1000)
        if turn:
            stream.set_display_rotation(turn)
        for at, values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(values, format="rgb24")
            frame.pts, frame.time_base = (times[at] if times else at * 1000 // rate), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def sound_file(samples: NDArray[np.float32], *, rate: int = 16_000, form: str = "wav") -> bytes:
    """A sound of samples from -1 to 1, of one channel; (samples, channels) of several."""
    import av

    file = io.BytesIO()
    values = np.atleast_2d(samples.T).T
    with av.open(file, "w", format=form) as container:
        untyped: Any = container
        layout = "mono" if values.shape[1] == 1 else "stereo"
        stream = untyped.add_stream(_SOUNDS[form], rate=rate, layout=layout)
        packed = (values.clip(-1, 1) * 32767).astype(np.int16).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        frame.time_base = Fraction(1, rate)
        resampler = av.AudioResampler(stream.format.name, layout, rate, stream.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode())
    return file.getvalue()
