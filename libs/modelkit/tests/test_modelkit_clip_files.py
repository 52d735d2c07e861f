"""Files of videos and sounds: which frames and samples are read, and what is refused by name."""

from __future__ import annotations

import io
import struct
import subprocess
import sys

import av
import numpy as np
import pytest
from clip_parts import FRAMES, GOOD, tone
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_schema import clips
from headrace_schema.clips import BadClip, Video, check_clip, samples_of
from headrace_schema.images import kind_of
from headrace_servicekit.image_files import BadImage, check_image
from PIL import Image


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_frames_are_those_that_were_written(form):
    video = Video.of(data := video_file(FRAMES, form=form))
    assert kind_of(data) == "video"
    assert video.times == pytest.approx([at / 4 for at in range(8)]) and video.seconds == pytest.approx(2.0)
    assert video.shown(4) == [0, 2, 4, 6] and video.shown(16) == [at // 2 for at in range(16)]
    found = list(video.frames([1, 5]))
    assert [np.array_equal(image, FRAMES[at]) for image, at in zip(found, (1, 5), strict=True)] == [True] * 2


def test_frames_of_uneven_times_are_chosen_by_their_times():
    video = Video.of(video_file(FRAMES, times=[0, 100, 150, 600, 900, 950, 1200, 1600]))
    assert video.times == pytest.approx([0, 0.1, 0.15, 0.6, 0.9, 0.95, 1.2, 1.6])
    assert video.seconds == pytest.approx(1.85), "the last one lasts a quarter of a second, as the file says"
    assert video.shown(4) == [0, 2, 4, 6], "those that are seen at 0, 0.46, 0.93 and 1.39 s"


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_the_display_matrix_is_applied(turn):
    corner = np.zeros((16, 24, 3), np.uint8)
    corner[:4, :4] = 255
    image = next(Video.of(video_file([corner, corner], turn=turn)).frames([0]))
    assert np.array_equal(image, np.rot90(corner, turn // 90))


def test_a_display_matrix_turns_as_the_format_says():
    """MP4: (a, b, c, d) take (x, y) to (ax + cy, bx + dy): here to the right becomes down, which is clockwise."""
    corner = np.zeros((16, 24, 3), np.uint8)
    corner[:4, :4] = 255
    data = video_file([corner, corner])
    one = 1 << 16
    shown = with_matrix(data, (0, one, -one, 0))
    assert np.array_equal(next(Video.of(shown).frames([0])), np.rot90(corner, -1))
    with pytest.raises(BadClip, match="mirrored or aslant; write it anew"):
        next(Video.of(with_matrix(data, (-one, 0, 0, one))).frames([0]))


def with_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 file with a, b, c and d of the matrix in its track's header."""
    start = data.index(b"tkhd") + 4 + 40
    a, b, c, d = matrix
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


@pytest.mark.parametrize(("form", "most"), [("wav", 1e-4), ("flac", 1e-4), ("mp3", 0.06)])
def test_sounds_are_read_at_the_rate_that_is_asked_for(form, most):
    data = sound_file(tone(440, 1.0), form=form)
    assert kind_of(data) == "audio"
    found = samples_of(data, 16_000)
    assert found.dtype == np.float32
    lag = 0 if form != "mp3" else int(np.argmax(np.correlate(found[:4000], tone(440, 0.1), "valid")))
    assert np.abs(found[lag : lag + 8000] - tone(440, 1.0)[:8000]).max() < most
    stereo = sound_file(np.stack([tone(440, 1.0, 44_100)] * 2, 1), rate=44_100)
    found = samples_of(stereo, 16_000)
    assert len(found) == pytest.approx(16_000, abs=64)
    assert np.abs(found[2000:8000] - tone(440, 1.0)[2000:8000]).max() < 0.01


def black(frames: int, height: int, width: int) -> bytes:
    return video_file([np.zeros((height, width, 3), np.uint8)] * frames, codec="libx264")


def cover() -> bytes:
    """A sound in MP4 with a picture of its record."""
    file, still = io.BytesIO(), io.BytesIO()
    Image.fromarray(FRAMES[0]).save(still, "PNG")
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(tone(400)[None, :1024], format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


BAD = {
    "broken": (GOOD[: len(GOOD) // 2], "a video that is broken"),
    "frames lost": (GOOD[:4000] + bytes(8000) + GOOD[12_000:], "a video that is broken|cannot be decoded"),
    "one frame": (video_file(FRAMES[:1]), "a video of one frame; give it as an image: ffmpeg"),
    "no pictures": (cover(), "a video without pictures: it has audio; give a file with pictures"),
    "AVI": (b"RIFF\0\0\0\0AVI LIST", "a video in AVI, which does not say when"),
    "broken sound": (sound_file(tone(400))[:30], "a sound that is broken .*; write it anew: ffmpeg"),
    "no samples": (sound_file(tone(400))[:44] + b"", "a sound (that is broken|of no samples)"),
    "silent": (sound_file(np.zeros(800, np.float32)), "a sound that is silent throughout; leave it out"),
    "long sound": (
        sound_file(np.ones(301 * 100, np.float32), rate=100, form="wav"),
        "a sound of more than the 300 s that are read; cut it: ffmpeg -i IN -t 300",
    ),
    "too many bytes": (GOOD + bytes(9 << 20), "a video of more bytes than the 8,388,608 that travel"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_not_read_are_named_with_a_way_out(case):
    data, words = BAD[case]
    with pytest.raises(BadImage) as caught:
        check_image(data)
    assert caught.match(words.removeprefix(f"{caught.value.what} ")) or pytest.fail(str(caught.value))
    assert words.startswith(caught.value.what) and caught.value.fix


def test_files_are_bounded_before_they_are_decoded(monkeypatch):
    large = black(2, 2400, 4096)  # of few bytes
    assert len(large) < 1 << 20
    with pytest.raises(
        BadClip, match=r"of 4096 x 2400 pixels, and 9,437,184 are read; make it smaller: ffmpeg"
    ):
        Video.of(large)
    many = black(30, 64, 64)
    monkeypatch.setattr(clips, "MOST_DECODED_PIXELS", 100_000)
    with pytest.raises(BadClip, match=r"of 122,880 pixels in all frames, and 100,000 are decoded"):
        Video.of(many)
    monkeypatch.setattr(clips, "MOST_VIDEO_FRAMES", 29)
    with pytest.raises(BadClip, match="of more than the 29 frames"):
        Video.of(many)
    monkeypatch.setattr(clips, "MOST_VIDEO_FRAMES", 30)
    monkeypatch.setattr(clips, "MOST_VIDEO_SECONDS", 5)
    with pytest.raises(BadClip, match=r"of 8 s, and 5 s are read; cut it: ffmpeg -i IN -t 5"):
        Video.of(many)


def test_frames_whose_size_the_header_hides_are_refused(monkeypatch):
    """The container says 64 x 64 and the stream another size: the decoder's own bound holds."""
    data = black(4, 256, 256)
    monkeypatch.setattr(clips, "MOST_FRAME_PIXELS", 128 * 128)
    monkeypatch.setattr(clips, "_check_size", lambda *_: None)
    with pytest.raises(BadClip, match=r"that is broken|cannot be decoded"):
        list(Video.of(data).frames([0]))


WALK = """
import resource, sys
from headrace_schema.clips import Video
video = Video.of(open(sys.argv[1], "rb").read())
next(video.frames([0]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(1 for _ in video.frames(range(120))) == 120
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_video_takes_the_memory_of_one_frame(tmp_path):
    """120 frames of 1280 x 720 pixels are 330 MB."""
    (tmp_path / "long.mp4").write_bytes(black(120, 720, 1280))
    told = subprocess.run(
        [sys.executable, "-c", WALK, tmp_path / "long.mp4"], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 60_000, "in KiB"


def test_check_reads_a_video_to_its_end():
    check_clip(GOOD)
    check_clip(video_file(FRAMES, codec="libvpx-vp9", form="webm"))
