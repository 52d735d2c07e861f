"""Videos and sounds: which frames and samples are read, what they become for a model, and what is refused by name."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_modelkit.presets.tiny_vision import plain_inputs, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import Pictures, language_inputs, rope_positions, rope_shift
from headrace_schema import clips
from headrace_schema.clips import BadClip, Video, check_clip, samples_of
from headrace_schema.images import READS, kind_of
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.image_files import BadImage, check_image
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

NOISE = np.random.default_rng(0)


def noisy(count: int, height: int = 16, width: int = 16) -> list[np.ndarray]:
    return [NOISE.integers(0, 255, (height, width, 3), dtype=np.uint8) for _ in range(count)]


def tone(hertz: int, seconds: float = 0.5, rate: int = 16_000) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


FRAMES = noisy(8)
GOOD = video_file(FRAMES)


# Files


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


# As a model reads them

WATCHES = [family for family, kinds in READS.items() if "video" in kinds]


@pytest.fixture(scope="module", params=WATCHES)
def directory(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_vision(directory, family=request.param, frames=2)
    return directory


def opened(directory, **video):
    section = ModelSection.model_validate({"path": str(directory), "dtype": "float32", "video": video})
    return load_tokenizer(section), section


def behind_its_end(positions_3L, spans):
    """Positions in which what follows a video begins behind its largest one, as Qwen2.5-VL was trained."""
    found = positions_3L.copy()
    for span in spans:
        end = span.start + span.image.tokens
        found[:, end:] += found[:, span.start : end].max() + 1 - found[0, end]
    return found


def test_a_prompt_of_all_kinds_is_read_as_transformers_reads_it(directory):
    codec, section = opened(directory, fps=4)
    reader, model = codec.images, load_model(section)
    still = io.BytesIO()
    Image.fromarray(FRAMES[0]).save(still, "PNG")
    files, text = [GOOD, video_file(noisy(4, 16, 24))], "b<video>c<video>"
    if not reader.family.startswith("glm"):  # whose forward takes no images beside videos
        files, text = [still.getvalue(), *files], f"a<image>{text}"
    if "audio" in reader.kinds:
        files, text = (
            [*files, sound_file(tone(440, 1.1)), sound_file(tone(700, 0.3))],
            f"{text}d<audio>e<audio>f",
        )
    ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=files)
    read = [reader.read(file) for file in files]
    spans = [
        reader.span(ids, start, data) for start, data in zip(reader.starts(ids, read), files, strict=True)
    ]
    tokens_BL, positions = torch.tensor([ids]), rope_positions(len(ids), spans)
    given = plain_inputs(reader, tokens_BL, read)
    expected, shift = positions_of(model, reader, tokens_BL, given, spans)
    assert (expected == positions).all() and shift == rope_shift(spans)
    pixels = "pixel_values_videos" if "pixel_values_videos" in given else "pixel_values"
    with torch.no_grad():
        whole = model(input_ids=tokens_BL, **given).logits
        placed = [(np.arange(span.image.tokens) + span.start, span.image) for span in spans]
        pictures = Pictures.of(placed, positions[:, None], reader)
        inputs = language_inputs(model.model, tokens_BL, pictures)
        found = model.lm_head(model.model.language_model(**inputs, use_cache=False).last_hidden_state)
        blind = model(input_ids=tokens_BL, **given | {pixels: 0.5 * given[pixels]})
    assert torch.allclose(softcapped(model, found), whole, atol=1e-5)
    assert not torch.allclose(blind.logits[:, -1], whole[:, -1], atol=1e-3), "the videos are seen"


def positions_of(model, reader, tokens_BL, given, spans):
    """(3, L) by the model's own class, and what a text behind them is shifted by."""
    length = tokens_BL.shape[1]
    if not hasattr(model.model, "get_rope_index"):
        return np.tile(np.arange(length), (3, 1)), 0
    told = {name: value for name, value in given.items() if not name.startswith("pixel_values")}
    if "audio" in reader.kinds:
        lengths = told.pop("feature_attention_mask").sum(1)
        told.pop("input_features")
        told |= {"audio_seqlens": lengths, "second_per_grids": told.pop("video_second_per_grid")}
        told.pop("num_audio_tokens", None)
    expected, shift = model.model.get_rope_index(tokens_BL, **told)
    found = expected[:, 0].numpy()
    if reader.family == "qwen2_5_vl":  # whose class begins a text within the times of the video before it
        found = behind_its_end(found, spans)
        shift = found.max() + 1 - length
    if reader.family == "qwen3_omni_moe_thinker":
        assert np.abs(found - found.round()).max() < 1e-4, "its times are rounded to whole positions"
        found, shift = found.round(), float(shift) + 1e-4
    return found, int(shift)


def softcapped(model, logits):
    most = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits if most is None else most * torch.tanh(logits / most)


def test_a_sound_is_heard_alike_whatever_stands_beside_it(directory):
    """Also one that is shorter than a chunk of a tower, where that fills all up to the longest."""
    codec, section = opened(directory)
    reader = codec.images
    if "audio" not in reader.kinds:
        return
    model, files = load_model(section), [sound_file(tone(440, 0.3)), sound_file(tone(700, 1.2))]
    text = "".join(f"<audio>{at}" for at in range(2))

    def heard(text: str, files: list[bytes]) -> torch.Tensor:
        ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=files)
        read = [reader.read(file) for file in files]
        placed = [
            (np.arange(image.tokens) + start, image)
            for start, image in zip(reader.starts(ids, read), read, strict=True)
        ]
        pictures = Pictures.of(placed, np.tile(np.arange(len(ids)), (3, 1, 1)), reader)
        with torch.no_grad():
            found = language_inputs(model.model, torch.tensor([ids]), pictures)["inputs_embeds"][0]
        return found[placed[0][0][read[0].slots]]

    assert torch.allclose(heard("<audio>0", files[:1]), heard(text, files), atol=1e-6)


def patches_of(video: dict, family: str) -> torch.Tensor:
    return video["pixel_values" if family == "internvl" else "pixel_values_videos"]


def test_frames_become_the_patches_that_the_familys_video_processor_makes(directory):
    """Its own function over the same frames; its class cannot be made without torchvision."""
    codec, _ = opened(directory, frames=8)
    own, patches = codec.images._processor.image_processor, codec.images.read(GOOD).inputs
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (own.image_mean, own.image_std))
    frames = (torch.from_numpy(np.stack(FRAMES)).permute(0, 3, 1, 2) / 255 - mean) / std
    found = patches_of(patches, codec.images.family)
    if codec.images.family == "internvl":  # of one size, which these have
        assert torch.allclose(found, frames, atol=1e-6)
        return
    if codec.images.family == "gemma4":
        assert patches["num_frames_per_video"].tolist() == [8] and found.shape[0] == 8
        assert found.shape[1] == 70 * 2 * 2, "no more tokens than a frame has, where an image may have more"
        return
    expected, *grid = Qwen3VLVideoProcessor.patchify(SimpleNamespace(), frames[None], 4, 2, 2)
    assert patches["video_grid_thw"].tolist() == [grid] == [[4, 4, 4]]
    assert torch.allclose(found, expected[0], atol=1e-6)


def frames_of(video) -> int:
    if "video_grid_thw" in video.inputs:
        return int(video.inputs["video_grid_thw"][0, 0]) * 2
    return len(video.inputs.get("video_position_ids", video.inputs.get("pixel_values")))


STAMPS = {
    "internvl": lambda times: [f"Frame{at + 1}: " for at in range(len(times))],
    "gemma4": lambda times: [f"00:{int(time):02} " for time in times],
    "glm46v": lambda times: [f">{time:.1f} seconds" for time in times[::2]],
    **dict.fromkeys(("glm4v", "glm4v_moe"), lambda times: [f">{int(time)}" for time in times[::2]]),
}
"""What a prompt says of the times of frames."""


@pytest.mark.parametrize(
    ("video", "frames"),
    [({}, 4), ({"fps": 4}, 8), ({"fps": 30}, 32), ({"frames": 6}, 6), ({"fps": 4, "max_frames": 4}, 4)],
)
def test_frames_are_chosen_by_rate_or_count_within_a_bound(directory, video, frames):
    codec, _ = opened(directory, **video)
    found = codec.images.read(GOOD)  # of two seconds
    assert frames_of(found) == frames
    times = [at / 4 for at in Video.of(GOOD).shown(frames)]
    seconds = found.inputs.get("second_per_grid_ts", found.inputs.get("video_second_per_grid"))
    if seconds is not None:  # positions know what a patch lasts
        unit = 1 / 25 if codec.images.family == "qwen3_omni_moe_thinker" else 0
        assert float(seconds[0]) == pytest.approx(2 * 2.0 / frames, abs=unit / 2 + 1e-6)
    elif (stamps := STAMPS.get(codec.images.family)) is not None:
        at = 0
        for stamp in stamps(times):
            at = found.text.index(stamp, at) + len(stamp)
    else:  # the middle of each patch's frames
        stamps = [f"{(one + two) / 2:.1f} seconds" for one, two in zip(times[::2], times[1::2], strict=True)]
        assert [part.partition(">")[0] for part in found.text.split("<") if "seconds" in part] == stamps


def test_large_frames_are_made_smaller(directory):
    codec, _ = opened(directory, frames=2, max_pixels=1024)
    found = codec.images.read(video_file(noisy(2, 64, 128)))
    if "video_grid_thw" not in found.inputs:  # of as many tokens as any frame
        assert len(found.slots) == (2 * 4 if codec.images.family == "internvl" else 2 * 55)
        return
    grid = found.inputs["video_grid_thw"][0].tolist()
    assert (grid[0] == 1 and grid[1] * grid[2] * 16 <= 1024 and grid[2] == 2 * grid[1]) or grid == [1, 4, 10]


def test_fps_and_frames_are_a_choice():
    with pytest.raises(ValueError, match="give fps or frames, not both"):
        ModelSection.model_validate({"path": "m", "video": {"fps": 1, "frames": 2}})


def test_what_a_family_does_not_read_is_named(tmp_path):
    write_tiny_vision(tmp_path, family="gemma3")
    codec, _ = opened(tmp_path)
    with pytest.raises(ValueError, match="a video is not read by gemma3, which reads: image"):
        codec.images.read(GOOD)
    codec.encode_prompt(chat=[{"role": "user", "content": "<video> is text here"}])
    with pytest.raises(ValueError, match="a sound is not read by gemma3"):
        codec.images.read(sound_file(tone(440)))


def test_a_gemma_4_without_a_tower_for_sounds_says_so_and_one_with_it_hears_30_seconds(tmp_path):
    write_tiny_vision(tmp_path, family="gemma4")
    long = sound_file(tone(440, 30.5, 8000), rate=8000)
    with pytest.raises(
        ValueError, match=r"a sound of 30\.5 s, and gemma4 hears 30 s; cut it: ffmpeg -i IN -t 30"
    ):
        opened(tmp_path)[0].images.read(long)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"audio_config": None}))
    with pytest.raises(ValueError, match="a sound is not read by gemma4, which reads: image, video"):
        opened(tmp_path)[0].images.read(long)


def test_marks_must_be_of_the_files_kinds(directory):
    codec, _ = opened(directory)
    with pytest.raises(ValueError, match="image where video come"):
        codec.images.expand(codec.images.placeholders["image"], [codec.images.read(GOOD)])


def test_check_reads_a_video_to_its_end():
    check_clip(GOOD)
    check_clip(video_file(FRAMES, codec="libvpx-vp9", form="webm"))


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_whole_omni_checkpoint_is_refused_with_the_way_to_its_thinker(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(
        ModelNotReadable, match=r"has a talker beside .* take its thinker out, as docs/vision.md"
    ):
        load_model(ModelSection(path=str(tmp_path)))
