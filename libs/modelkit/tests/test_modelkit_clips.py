"""Videos and sounds as a model reads them: which frames are chosen, and what they become."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from clip_parts import FRAMES, GOOD, noisy, tone
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_modelkit.presets.tiny_vision import plain_inputs, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.vision import Pictures, language_inputs, rope_positions, rope_shift
from headrace_schema.clips import Video
from headrace_schema.images import READS
from headrace_schema.sections.generating import ModelSection
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

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


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_whole_omni_checkpoint_is_refused_with_the_way_to_its_thinker(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(
        ModelNotReadable, match=r"has a talker beside .* take its thinker out, as docs/vision.md"
    ):
        load_model(ModelSection(path=str(tmp_path)))
