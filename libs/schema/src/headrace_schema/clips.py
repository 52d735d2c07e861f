"""Videos and sounds as files: what is read, within bounds, and what is refused, with the reason and a way out.

PyAV is an extra of those who read them, imported when one comes, as Pillow is for the frames. A file is read as what
its first bytes say and as nothing else: FFmpeg follows no list of other files.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace_schema.images import MOST_IMAGE_RATIO, kind_of

MOST_VIDEO_SECONDS = 600
MOST_VIDEO_FRAMES = 10_000
"""Of a file, which are decoded up to the last one that is shown."""
MOST_FRAME_PIXELS = 4096 * 2304
"""Width times height of a frame."""
MOST_DECODED_PIXELS = 4_000_000_000
"""Of all frames of a file together: what decoding takes time for."""
MOST_AUDIO_SECONDS = 300
_CONTAINERS = {
    b"\x1a\x45\xdf\xa3": "matroska",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"RIFF": "wav",
    b"ID3": "mp3",
}
_DISPLAY_MATRIX = "DISPLAYMATRIX"
_SHORTER = "cut it: ffmpeg -i IN -t {seconds} OUT"
_WRITE_VIDEO = "write it anew: ffmpeg -i IN -c:v libx264 -pix_fmt yuv420p OUT.mp4"
_WRITE_AUDIO = "write it anew: ffmpeg -i IN OUT.wav"


class BadClip(ValueError):
    """What a video or a sound is, as it follows "a video", and what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix = reason, fix


@dataclass(frozen=True)
class Video:
    """A file with the times of its frames, in seconds from the first one on, in order; they need not be even."""

    data: bytes
    times: Sequence[float]
    seconds: float
    """From the first frame to the end of the last one."""
    stamps: Sequence[int]
    """Of the frames, as the file counts time."""

    @classmethod
    def of(cls, data: bytes) -> Video:
        """Reads no frame. Raises BadClip, and ImportError without PyAV."""
        with _opened(data, "video") as (container, stream):
            codec = stream.codec_context
            pixels = codec.width * codec.height
            _check_size(codec.width, codec.height)
            stamps, ends = list[int](), list[int]()
            for packet in container.demux(stream):
                if packet.size and not packet.is_discard:
                    if packet.pts is None:
                        raise BadClip("whose frames have no times", _WRITE_VIDEO)
                    stamps.append(packet.pts)
                    ends.append(packet.pts + (packet.duration or 0))
                if len(stamps) > MOST_VIDEO_FRAMES:
                    reason = f"of more than the {MOST_VIDEO_FRAMES:,} frames that are read"
                    raise BadClip(reason, "leave some out: ffmpeg -i IN -r 10 OUT.mp4")
            if not stamps:
                raise BadClip("of no frames", "leave it out")
            if len(stamps) == 1:
                raise BadClip("of one frame", "give it as an image: ffmpeg -i IN OUT.png")
            stamps.sort()
            unit = float(stream.time_base)
            last = max(max(ends), stamps[-1] + (0 if max(ends) > stamps[-1] else _step(stamps)))
            seconds = (last - stamps[0]) * unit
        if seconds > MOST_VIDEO_SECONDS:
            reason = f"of {seconds:,.0f} s, and {MOST_VIDEO_SECONDS} s are read"
            raise BadClip(reason, _SHORTER.format(seconds=MOST_VIDEO_SECONDS))
        if stamps[-1] == stamps[0]:
            raise BadClip("of no length: all its frames have one time", _WRITE_VIDEO)
        _check_decoded(pixels * len(stamps))
        return cls(data, [(stamp - stamps[0]) * unit for stamp in stamps], seconds, stamps)

    def shown(self, count: int) -> list[int]:
        """The frames that are seen at `count` even times from the beginning on."""
        found, at = [], 0
        for turn in range(count):
            time = turn * self.seconds / count + 1e-6
            while at + 1 < len(self.times) and self.times[at + 1] <= time:
                at += 1
            found.append(at)
        return found

    def frames(self, wanted: Sequence[int]) -> Iterator[Any]:
        """These frames, in order, as RGB images of Pillow, turned as the file says; one in memory at a time.

        Raises BadClip where one of them cannot be decoded.
        """
        left, decoded = sorted({self.stamps[each] for each in wanted}), 0
        with _opened(self.data, "video") as (container, stream):
            for frame in container.decode(stream):
                if not left:
                    return
                _check_size(frame.width, frame.height)
                decoded += frame.width * frame.height
                _check_decoded(decoded)
                if frame.is_corrupt:
                    raise BadClip("that is broken: a frame is not whole", _WRITE_VIDEO)
                if frame.pts == left[0]:
                    left.pop(0)
                    yield _turned(frame)
        if left:
            raise BadClip(f"of which {len(left)} frames cannot be decoded", _WRITE_VIDEO)


def check_clip(data: bytes) -> None:
    """Reads a video or a sound once. Raises BadClip, and ImportError without PyAV."""
    if kind_of(data) == "audio":
        samples_of(data, 16_000)
        return
    video = Video.of(data)
    for _ in video.frames([0, len(video.stamps) - 1]):
        pass


def samples_of(data: bytes, rate: int) -> Any:
    """float32 (samples,) of a sound, of one channel at `rate` Hz. Raises BadClip, and ImportError without PyAV."""
    import av
    import numpy as np

    found: list[Any] = []
    seconds = 0.0
    with _opened(data, "audio") as (container, stream):
        resampler = av.AudioResampler(format="fltp", rate=rate)
        for frame in itertools.chain(container.decode(stream), [None]):
            if frame is not None:
                seconds += frame.samples / frame.sample_rate
                if seconds > MOST_AUDIO_SECONDS:
                    reason = f"of more than the {MOST_AUDIO_SECONDS} s that are read"
                    raise BadClip(reason, _SHORTER.format(seconds=MOST_AUDIO_SECONDS))
            found += [part.to_ndarray().mean(0) for part in resampler.resample(frame)]
    samples = np.concatenate(found) if found else np.zeros(0, np.float32)
    if not samples.size:
        raise BadClip("of no samples", "leave it out")
    if not samples.any():
        raise BadClip("that is silent throughout", "leave it out, or record it again")
    return samples


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container of a file and its first stream of that kind. What FFmpeg cannot read becomes BadClip."""
    import av

    anew = _WRITE_VIDEO if kind == "video" else _WRITE_AUDIO
    name = next((name for start, name in _CONTAINERS.items() if data.startswith(start)), "")
    name = name or ("mov" if data[4:8] == b"ftyp" else "mp3")
    if data[8:12] == b"AVI ":
        raise BadClip("in AVI, which does not say when its frames are shown", anew)
    try:
        with av.open(io.BytesIO(data), format=name) as container:
            streams = [
                each
                for each in container.streams
                if each.type == kind and not each.disposition & av.stream.Disposition.attached_pic
            ]
            if not streams:
                others = " and ".join(sorted({each.type for each in container.streams})) or "nothing"
                what = "pictures" if kind == "video" else "sound"
                raise BadClip(f"without {what}: it has {others}", f"give a file with {what}")
            codec = streams[0].codec_context
            codec.thread_count = 1
            if kind == "video":
                codec.options = {"max_pixels": str(MOST_FRAME_PIXELS)}
            yield container, streams[0]
    except BadClip:
        raise
    except (av.FFmpegError, EOFError, OverflowError, ValueError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise BadClip(f"that is broken ({why})", anew) from error


def _check_size(width: int, height: int) -> None:
    if not width or not height:
        raise BadClip("that does not say how large its frames are", _WRITE_VIDEO)
    if width * height > MOST_FRAME_PIXELS or max(width, height) > MOST_IMAGE_RATIO * min(width, height):
        reason = f"of {width} x {height} pixels, and {MOST_FRAME_PIXELS:,} are read"
        raise BadClip(reason, "make it smaller: ffmpeg -i IN -vf scale=640:-2 OUT.mp4")


def _check_decoded(pixels: int) -> None:
    if pixels > MOST_DECODED_PIXELS:
        reason = f"of {pixels:,} pixels in all frames, and {MOST_DECODED_PIXELS:,} are decoded"
        raise BadClip(reason, "make it smaller: ffmpeg -i IN -vf scale=640:-2 OUT.mp4")


def _step(stamps: Sequence[int]) -> int:
    """What a last frame lasts that does not say it: what frames last on average."""
    return max(1, round((stamps[-1] - stamps[0]) / (len(stamps) - 1)))


def _turned(frame: Any) -> Any:
    """The image of a frame, turned counterclockwise as its display matrix says."""
    image, turn = frame.to_image(), 0
    for each in frame.side_data:
        if each.type.name == _DISPLAY_MATRIX:
            values = memoryview(bytes(each)).cast("i")
            turn = round(frame.rotation) % 360
            if turn % 90 or values[0] * values[4] - values[1] * values[3] < 0:
                raise BadClip("that is shown mirrored or aslant", _WRITE_VIDEO)
    return image.rotate(turn, expand=True) if turn else image
