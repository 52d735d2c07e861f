"""Videos and sounds of rows: how they are named, in which order prompts carry them, what is refused and where."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from data_parts import items_of, refusal
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.sources import open_source
from headrace_coordinator.projections.thumbnails import thumbnails
from headrace_coordinator.run.modality import Online, Texts
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_schema.problems import Impossible
from headrace_schema.rules.table import conflicts
from headrace_schema.sections.generating import DataSection
from PIL import Image
from submission_parts import FLEET, spec_of, submission_of


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    return file.getvalue()


VIDEO = video_file([np.full((16, 16, 3), shade, np.uint8) for shade in (0, 99)])
OTHER = video_file([np.full((16, 16, 3), shade, np.uint8) for shade in (50, 20)])
SOUND = sound_file(np.sin(np.arange(4000) / 5).astype(np.float32), form="flac")
STILL = png()
FILES = {"a.mp4": VIDEO, "b.mp4": OTHER, "a.flac": SOUND, "a.png": STILL}
NAMED = {"images": "image", "videos": "video", "audios": "audio"}


@pytest.fixture
def lines(tmp_path, lines):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return lines


def prompted(path, template="{question}", **named):
    section = DataSection(
        source="jsonl", options={"path": path, **(named or NAMED)}, prompt={"template": template}
    )
    dataset = Dataset.open(section, 0)
    return dataset, dataset.prompt(dataset.train_item(0))


def test_files_of_all_kinds_stand_where_their_marks_are(lines):
    row = {"image": "a.png", "video": ["a.mp4", "b.mp4"], "audio": "a.flac", "answer": "1"}
    (plain,) = items_of("jsonl", path=lines({**row, "question": "which?"}), **NAMED)
    assert plain.images == (STILL, VIDEO, OTHER, SOUND) and plain.metadata == {"answer": "1"}
    dataset, content = prompted(lines({**row, "question": "which?"}))
    assert content.chat[0]["content"] == "<image><video><video><audio>which?"
    assert dataset.images == ("audio", "image", "video")
    asked = {**row, "question": "<audio> or <video> and <image>, <video>?"}
    (marked,) = items_of("jsonl", path=lines(asked), **NAMED)
    assert marked.images == (SOUND, VIDEO, STILL, OTHER)
    _, content = prompted(lines({**row, "question": "?"}), "<video><audio>{question}<image><video>")
    assert content.images == (VIDEO, SOUND, STILL, OTHER)


def test_a_mark_of_a_kind_that_an_item_has_not_is_text(lines):
    (item,) = items_of(
        "jsonl", path=lines({"video": "a.mp4", "question": "<image> in <video>"}), videos="video"
    )
    assert item.images == (VIDEO,) and item.marks == ["video"]


def test_forms_of_others_and_parts_of_messages_have_them(lines):
    verl = {
        "prompt": [{"role": "user", "content": "<video>which?"}],
        "videos": [{"video": "a.mp4", "fps": 2}],
        "reward_model": {"ground_truth": "2"},
    }
    (item,) = items_of("jsonl", path=lines(verl), form="verl")
    assert (item.question, item.images) == ("<video>which?", (VIDEO,))
    parts = [
        {"type": "video", "video": "b.mp4"},
        {"type": "text", "text": " and "},
        {"type": "input_audio", "input_audio": {"path": "a.flac"}},
    ]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]}
    (item,) = items_of("jsonl", path=lines(row), form="openai")
    assert (item.question, item.images) == ("<video> and <audio>", (OTHER, SOUND))


def test_columns_of_datasets_are_read_as_their_files(tmp_path):
    made = datasets.Dataset.from_dict({"question": ["?"], "heard": [{"bytes": SOUND, "path": None}]})
    (tmp_path / "set").mkdir()
    made.cast_column("heard", datasets.Audio()).to_parquet(str(tmp_path / "set" / "train.parquet"))
    source = open_source("huggingface", {"dataset": str(tmp_path / "set"), "audios": "heard"})
    (item,) = source.items()
    assert item.images == (SOUND,)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"video": "gone.mp4"}, "has a video 'video' that cannot be read"),
        (
            {"video": "a.png"},
            "has an image as video 'video'; give a video, or name it under data.options.images",
        ),
        (
            {"image": "a.mp4"},
            "has a video as image 'image'; give an image, or name it under data.options.videos",
        ),
        ({"audio": "a.mp4"}, "has a video as audio 'audio'"),
        ({"video": "http://x/y.mp4"}, "has a URL as video 'video'; download it"),
        ({"video": "cut.mp4"}, "has a video 'video' that is broken"),
        ({"audio": ["a.flac"] * 33}, "has 33 sounds under 'audio'"),
        ({"video": "a.mp4", "question": "<video> <video>?"}, "has 2 marks <video> in its text for 1 videos"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(lines, tmp_path, row, words):
    (tmp_path / "cut.mp4").write_bytes(VIDEO[: len(VIDEO) // 2])
    none = {"image": None, "video": None, "audio": None, "question": "?"}
    found = refusal("jsonl", path=lines(none, {**none, **row}), **NAMED)
    assert words in found and "line 2 of" in found


def test_a_template_must_fit_the_kinds(lines):
    path = lines({"video": "a.mp4", "audio": "a.flac", "question": "?"})
    with pytest.raises(
        Impossible, match="it has 1 marks <audio>, and there are items with 1 videos and 1 sounds"
    ):
        prompted(path, "<audio>{question}", videos="video", audios="audio")


def test_a_family_that_reads_no_videos_is_refused_at_submission(lines, tmp_path):
    (tmp_path / "model.safetensors").touch()
    path = lines({"video": "a.mp4", "audio": "a.flac", "question": "?"})

    def refused(family, **named):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        data = {"source": "jsonl", "options": {"path": path, **named}}
        spec = spec_of(model={"path": str(tmp_path)}, data=data)
        return {each.key: (each.problem, each.fix) for each in conflicts(submission_of(spec, FLEET).resolved)}

    assert refused("qwen3_vl", videos="video") == {}
    reason, fix = refused("gemma3", videos="video")["model.path"]
    assert "the data has videos, and gemma3 is no family that reads them" in reason
    assert fix.startswith("name a model of qwen2_5_vl or ") and "gemma3" not in fix and "omni" in fix
    reason, fix = refused("qwen3_vl", audios="audio")["model.path"]
    assert (
        "has sounds" in reason
        and fix == "name a model of gemma4 or qwen2_5_omni_thinker or qwen3_omni_moe_thinker"
    )


def test_a_trainer_knows_of_texts_that_they_have_no_files(lines):
    row = {"video": "a.mp4", "question": "?"}
    shown, _ = prompted(lines(row), videos="video")
    plain, _ = prompted(lines({"question": "?"}), form="plain")
    workers = SimpleNamespace(spec=spec_of())
    assert Texts(workers, shown).sees and Texts(workers, shown).images == ("video",)
    assert not Texts(workers, plain).sees and Texts(workers, plain).images == ()
    assert Online(workers, plain).sees, "what clients show is not known"


def test_small_copies_are_of_images_alone():
    assert len(thumbnails([VIDEO, STILL, SOUND])) == 1
