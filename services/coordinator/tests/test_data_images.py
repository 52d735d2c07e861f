"""Images of rows: how they are written, what is refused and where, how prompts carry them."""

import base64
import gzip
import io
import json
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_parts import items_of, refusal
from headrace.rollout.v1 import rollout_pb2
from headrace_coordinator.data.builtin.pictures import image_of
from headrace_coordinator.data.builtin.values import BadRow
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.packed import PackedItems
from headrace_coordinator.data.sources import open_source
from headrace_coordinator.run.step.dispatch import by_size
from headrace_schema.problems import Impossible
from headrace_schema.references import keep_closed
from headrace_schema.rules.table import conflicts
from headrace_schema.sections.generating import DataSection
from PIL import Image
from submission_parts import FLEET, spec_of, submission_of


def png(seed=0, mode="RGB", size=(12, 10)):
    values = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).convert(mode).save(file, "TIFF" if mode == "CMYK" else "PNG")
    return file.getvalue()


def transparent():
    file = io.BytesIO()
    Image.new("LA", (12, 10)).save(file, "PNG")
    return file.getvalue()


def encoded(data):
    return base64.b64encode(data).decode()


def opened(path, template="{question}", **prompt):
    options = {"path": path, "images": "image"}
    return Dataset.open(
        DataSection(source="jsonl", options=options, prompt={"template": template, **prompt}), 0
    )


@pytest.mark.parametrize("way", ["path", "absolute", "base64", "data", "dict", "list"])
def test_an_image_of_a_line_is_read_however_it_is_written(lines, tmp_path, way):
    (tmp_path / "a.png").write_bytes(png(1))
    value = {
        "path": "a.png",
        "absolute": str(tmp_path / "a.png"),
        "base64": encoded(png(1)),
        "data": f"data:image/png;base64,{encoded(png(1))}",
        "dict": {"bytes": None, "path": "a.png"},
        "list": ["a.png"],
    }[way]
    row = {"image": value, "question": "which?", "answer": "1", "level": 3}
    (item,) = items_of("jsonl", path=lines(row), images="image")
    assert item.images == (png(1),) and item.question == "which?"
    assert item.metadata == {"answer": "1", "level": 3}, "no scorer is sent an image"


def test_bytes_of_parquet_and_images_of_datasets_are_read(tmp_path):
    table = pa.table(
        {
            "question": ["which?"],
            "images": [[{"bytes": png(1), "path": None}, {"bytes": png(2), "path": None}]],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    (item,) = items_of("parquet", path=str(tmp_path / "rows.parquet"), images="images")
    assert item.images == (png(1), png(2))
    made = datasets.Dataset.from_dict(
        {"question": ["which?"], "image": [{"bytes": png(3), "path": None}]}
    ).cast_column("image", datasets.Image())
    (tmp_path / "set").mkdir()
    made.to_parquet(str(tmp_path / "set" / "train.parquet"))
    (item,) = items_of("huggingface", dataset=str(tmp_path / "set"), images="image")
    assert item.images == (png(3),), "the file itself, not one that is written anew"


def struct(seed):
    return {"bytes": png(seed), "path": f"{seed}.png"}


LAYOUTS = {
    # hiyouga/geometry3k
    "geometry3k": (
        {"images": [struct(1)], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"},
        {"question": "problem", "images": "images"},
        ("<image>Find x.", "2 \\sqrt { 221 }", 1),
    ),
    # Several pictures a problem, as multi-image sets write them
    "several": (
        {"images": [struct(1), struct(2)], "problem": "<image> or <image>?", "answer": "A"},
        {"question": "problem", "images": "images"},
        ("<image> or <image>?", "A", 2),
    ),
    # HuggingFaceM4/ChartQA: the answer is a list of one
    "chartqa": (
        {"image": struct(1), "query": "How many bars?", "label": ["14"], "human_or_machine": 0},
        {"question": "query", "answer": "label", "images": "image"},
        ("How many bars?", "14", 1),
    ),
    # AI4Math/MathVista: `image` is a path of its archive, the picture is `decoded_image`
    "mathvista": (
        {
            "pid": "1",
            "question": "Which is longest?",
            "image": "images/1.jpg",
            "decoded_image": struct(1),
            "choices": ["A", "B"],
            "unit": None,
            "precision": float("nan"),
            "answer": "B",
            "question_type": "multi_choice",
            "answer_type": "text",
            "metadata": {"category": "math-targeted-vqa", "grade": "high school", "skills": ["geometry"]},
            "query": "Hint: give the letter.\nQuestion: Which is longest?\nChoices:\n(A) A\n(B) B",
        },
        {"question": "query", "images": "decoded_image"},
        ("Hint: give the letter.\nQuestion: Which is longest?\nChoices:\n(A) A\n(B) B", "B", 1),
    ),
    # verl's geometry3k
    "verl": (
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [{"role": "user", "content": "<image>Find x."}],
            "images": [struct(1)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "3"},
            "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
        },
        {"form": "verl"},
        ("<image>Find x.", "3", 1),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_the_layouts_of_published_data_sets_are_read(tmp_path, layout, source):
    row, options, (question, answer, images) = LAYOUTS[layout]
    made = datasets.Dataset.from_list([row, row | {"answer": answer}])
    for name, value in row.items():  # columns of images, as the hub's files say them
        if value == struct(1):
            made = made.cast_column(name, datasets.Image(decode=False))
        elif isinstance(value, list) and value[0] == struct(1):
            made = made.cast_column(name, datasets.Sequence(datasets.Image(decode=False)))
    made.to_parquet(str(tmp_path / "train.parquet"))
    where = {"path": str(tmp_path / "train.parquet")} if source == "parquet" else {"dataset": str(tmp_path)}
    first, second = items_of(source, **where, **options)
    assert (first.question, first.answer) == (question, answer) == (second.question, second.answer)
    assert first.images == tuple(png(seed + 1) for seed in range(images))
    assert b"PNG" not in json.dumps(first.metadata).encode(), "no scorer is sent an image"


def test_images_of_any_column_are_refused_until_an_option_names_them(tmp_path):
    row, _, _ = LAYOUTS["mathvista"]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    found = refusal("parquet", path=str(tmp_path / "rows.parquet"), question="query")
    assert "set data.options.images: decoded_image" in found


def test_parts_of_messages_may_be_images(lines):
    url = {"url": f"data:image/png;base64,{encoded(png(1))}"}
    parts = [
        {"type": "text", "text": "is "},
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": " a 1?"},
    ]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes"}]}
    (item,) = items_of("jsonl", path=lines(row), form="openai")
    assert (item.question, item.answer, item.images) == ("is <image> a 1?", "yes", (png(1),))
    verl = {
        "prompt": [{"role": "user", "content": "<image>which?"}],
        "images": [{"bytes": None, "path": encoded(png(2))}],
        "reward_model": {"ground_truth": "2"},
    }
    (item,) = items_of("jsonl", path=lines(verl), form="verl")
    assert (item.question, item.answer, item.images) == ("<image>which?", "2", (png(2),))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("gone.png", "gone.png: No such file"),
        ("http://somewhere/a.png", "has a URL"),
        (encoded(png()[:-30]), "that is broken"),
        (encoded(b"no image at all"), "that is broken"),
        (encoded(png(mode="CMYK")), "of mode CMYK"),
        (encoded(transparent()), "of mode LA with transparent parts"),
        (encoded(gzip.compress(png())), "that is a gzip file; unpack it"),
        (encoded(png(size=(2010, 10))), "which no model reads"),
        ([encoded(png())] * 33, "33 images"),
        (7, "has 7 as image"),
        ("not/base64%", "no file here and no base64"),
    ],
)
def test_a_wrong_image_is_refused_with_its_line(lines, value, words):
    good = {"image": encoded(png(5)), "question": "which?"}
    found = refusal("jsonl", path=lines(good, {**good, "image": value}), images="image")
    assert words in found and "line 2 of" in found


def test_images_that_are_too_large_are_refused(lines, monkeypatch):
    from headrace_coordinator.data.builtin import pictures
    from headrace_servicekit import image_files

    row = {"image": [encoded(png(1, size=(40, 40))), encoded(png(2, size=(40, 40)))], "question": "?"}
    path, size = lines(row), len(png(1, size=(40, 40)))
    for module, name, value, words in (
        (image_files, "MOST_IMAGE_BYTES", size - 1, "travel"),
        (pictures, "MOST_PROMPT_IMAGE_BYTES", size + 1, "a prompt takes"),
        (image_files, "MOST_IMAGE_PIXELS", 1599, "40 x 40 pixels"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            assert words in refusal("jsonl", path=path, images="image"), name


def test_images_that_no_option_names_are_refused(tmp_path):
    pq.write_table(pa.table({"question": ["?"], "image": [png()]}), tmp_path / "rows.parquet")
    found = refusal("parquet", path=str(tmp_path / "rows.parquet"))
    assert "set data.options.images: image" in found and "row 1 of" in found


def test_items_that_differ_in_their_images_are_not_one_and_an_image_is_kept_once(lines):
    rows = [{"image": encoded(png(seed)), "question": "which?", "answer": str(seed)} for seed in (1, 2, 1)]
    dataset = opened(lines(*rows))
    assert dataset.train_size == 2 and dataset.repeated == 1 and dataset.images == ("image",)
    packed = PackedItems(open_source("jsonl", {"path": lines(*rows), "images": "image"}).items())
    assert len(packed._places) == 2 and packed[2].images == (png(1),)


def test_a_prompt_has_a_mark_for_each_image(lines):
    row = {"image": [encoded(png(1)), encoded(png(2))], "question": "same?"}
    content = opened(lines(row)).prompt(opened(lines(row)).train_item(0))
    assert content.chat == [{"role": "user", "content": "<image><image>same?"}] and len(content.images) == 2
    content = opened(lines(row), "{question} <image> or <image>").prompt(opened(lines(row)).train_item(0))
    assert content.chat == [{"role": "user", "content": "same? <image> or <image>"}]
    marked = {**row, "question": "<image> and <image>?"}
    content = opened(lines(marked)).prompt(opened(lines(marked)).train_item(0))
    assert content.chat == [{"role": "user", "content": "<image> and <image>?"}]


@pytest.mark.parametrize(
    ("template", "prompt", "key"),
    [("<image>{question}", {}, "data.prompt.template"), ("{question}", {"chat": False}, "data.prompt.chat")],
)
def test_marks_that_do_not_fit_are_refused(lines, template, prompt, key):
    row = {"image": [encoded(png(1)), encoded(png(2))], "question": "same?"}
    with pytest.raises(Impossible) as caught:
        opened(lines(row), template, **prompt)
    assert [each.key for each in caught.value.problems] == [key]


def test_a_text_with_another_number_of_marks_is_refused(lines):
    row = {"image": [encoded(png(1)), encoded(png(2))], "question": "<image>same?"}
    assert "has 1 marks <image>" in refusal("jsonl", path=lines(row), images="image")


def test_examples_of_a_warm_up_carry_their_images(lines):
    dataset = opened(lines({"image": encoded(png(1)), "question": "which?", "answer": "1"}))
    (example,) = dataset.warmup.examples
    assert example["images"] == [encoded(png(1))] and dataset.warmup.size > len(encoded(png(1)))


def test_groups_with_many_bytes_of_images_go_in_several_messages(monkeypatch):
    from headrace_coordinator.run.step import dispatch

    monkeypatch.setattr(dispatch, "IMAGE_BYTES", 250)
    message = rollout_pb2.AssignGroups()
    for ordinal in range(5):
        message.groups.add(prompt_ordinal=ordinal).prompt.images.add(data=b"0" * 100)
    parts = [[group.prompt_ordinal for group in part.groups] for part in by_size(message)]
    assert parts == [[0, 1], [2, 3], [4]]
    assert [*by_size(rollout_pb2.AssignGroups())] == [rollout_pb2.AssignGroups()]


def test_what_cannot_take_images_is_refused_by_its_key(lines, tmp_path):
    features = frozenset({"transformers:images", "vllm:resume_from_prefix"})
    rollout = {"engines": frozenset({"transformers", "vllm"}), "engine_features": features}
    trainer = {
        **FLEET.capabilities["trainer"],
        "backends": frozenset({"fsdp", "megatron"}),
        "backend_features": frozenset({"fsdp:images"}),
    }
    capabilities = {**FLEET.capabilities, "rollout": rollout, "trainer": trainer}
    fleet = replace(FLEET, capabilities=capabilities)
    data = {
        "source": "jsonl",
        "options": {"path": lines({"image": encoded(png(1)), "question": "?"}), "images": "image"},
    }
    (tmp_path / "model.safetensors").touch()

    def refused(kind="qwen2_5_vl", **changes):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        spec = spec_of(model={"path": str(tmp_path)}, data=data, **changes)
        return {each.key: each.fix for each in conflicts(submission_of(spec, fleet).resolved)}

    assert refused() == {}
    assert refused(rollout={"engine": "vllm"}) == {"rollout.engine": "set rollout.engine: transformers"}
    assert [*refused(trainer={"backend": "megatron"})] == ["trainer.backend"]
    (found,) = refused("qwen3").items()
    assert found[0] == "model.path" and found[1].startswith("name a model of qwen2_5_vl or qwen3_vl or ")


def test_a_row_names_no_image_of_the_fleets_own(tmp_path):
    """By whatever link: its spec may not name it either."""
    own = tmp_path / "fleet" / "runs" / "other"
    own.mkdir(parents=True)
    (own / "a.png").write_bytes(png())
    (tmp_path / "mine.png").symlink_to(own / "a.png")
    keep_closed([tmp_path / "fleet"])
    try:
        for path in (own / "a.png", tmp_path / "mine.png"):
            with pytest.raises(BadRow, match="the fleet's own"):
                image_of(str(path), "image", None)
    finally:
        keep_closed([])
    assert image_of(str(tmp_path / "mine.png"), "image", None) == png()
