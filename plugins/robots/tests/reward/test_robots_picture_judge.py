"""A vision-language model as a judge of episodes, a tiny one: its score is what transformers' own forward says."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace.reward.v1 import reward_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.presets.tiny_vision import plain_inputs, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_reward import scorers
from headrace_reward.scorers.base import Answer, AnswerFailed, ScorerError
from headrace_reward.scorers.contract import check_scorer
from headrace_robots.reward.judge import PictureJudgeOptions
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.tensors import write_tensor
from PIL import Image

SIDE = 16
QUESTION = "is it done: {instruction}?"
WORDS = {"question": QUESTION, "yes": ["y"], "no": ["n"]}
GOOD = reward_pb2.SCORE_STATUS_OK


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a tiny model of a family, once, and returns its directory."""
    written = {}

    def made(family="qwen2_5_vl"):
        if family not in written:
            written[family] = str(tmp_path_factory.mktemp(family))
            write_tiny_vision(written[family], family=family)
        return written[family]

    return made


def episode(seed, instruction, cameras=("front",), count=2):
    """An episode of coloured noise."""
    random = np.random.default_rng(seed)
    pictures = {camera: random.integers(0, 255, (count, SIDE, SIDE, 3), np.uint8) for camera in cameras}
    return Answer("", "{}", metadata={"task": "push", "instruction": instruction}, pictures=pictures)


def judge(path, **options):
    return scorers.choose("picture_judge", {"path": path, "of": "probability", **WORDS, **options}).build()


def png(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def own(path, text, pictures):
    """Probabilities of y and n after a prompt, by transformers' forward of it alone."""
    section = ModelSection(path=path, dtype="float32")
    codec, model = load_tokenizer(section), load_model(section)
    files = [png(picture) for picture in pictures]
    ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=files)
    tokens_BL = torch.tensor([ids])
    given = plain_inputs(codec.images, tokens_BL, [codec.images.read(each) for each in files])
    with torch.inference_mode():
        found_V = model(input_ids=tokens_BL, **given).logits[0, -1].softmax(-1)
    return found_V[codec.tokenizer.convert_tokens_to_ids(["y", "n"])].tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "internvl"])
def test_episodes_in_a_batch_are_worth_what_transformers_says_of_each_alone(write, family):
    path = write(family)
    episodes = [
        episode(1, "push"),
        episode(2, "put it into the box, and then close it"),
        episode(3, "lift", count=1),
    ]
    scorer = judge(path)
    found = scorer.score_batch(episodes)
    for each, said in zip(episodes, found, strict=True):
        seen = each.pictures["front"]
        text = "<image>" * len(seen) + f"\nis it done: {each.metadata['instruction']}?"
        yes, no = own(path, text, seen)
        expected = {"score": yes / (yes + no), "probability": yes / (yes + no), "answered": yes + no}
        assert said == pytest.approx(expected, abs=1e-5)
    assert len({round(each["score"], 5) for each in found}) == 3
    alone = [judge(path, batch_tokens=1).score_batch([each])[0] for each in episodes]
    assert [each["score"] for each in alone] == pytest.approx([each["score"] for each in found], abs=1e-5)


def test_cameras_are_named_and_in_the_order_of_the_option(write):
    path, both = write(), episode(4, "push", ("front", "wrist"), count=1)
    seen = [both.pictures[camera][0] for camera in ("wrist", "front")]
    yes, no = own(path, "wrist: <image>\nfront: <image>\nis it done: push?", seen)
    found = judge(path, cameras=["wrist", "front"]).score(both)["score"]
    assert found == pytest.approx(yes / (yes + no), abs=1e-5)


def test_it_tells_bright_pictures_from_dark_ones_once_it_has_learned_to(write, tmp_path):
    """A frozen judge is as good as its model: a tiny one is taught by a few supervised steps."""
    section = ModelSection(path=write(), dtype="float32")
    codec, model = load_tokenizer(section), load_model(section)
    random = np.random.default_rng(0)

    def shown(bright):
        low = 150 if bright else 0
        return random.integers(low, low + 100, (1, SIDE, SIDE, 3), np.uint8)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(30):
        labels = [True, False] * 4
        files = [png(shown(bright)[0]) for bright in labels]
        chat = [{"role": "user", "content": "<image>\nis it done: push?"}]
        ids_BL = torch.tensor([codec.encode_prompt(chat=chat, images=[each]) for each in files])
        given = plain_inputs(codec.images, ids_BL, [codec.images.read(each) for each in files])
        words = codec.tokenizer.convert_tokens_to_ids(["n", "y"])
        logits_B2 = model(input_ids=ids_BL, **given).logits[:, -1][:, words]
        loss = torch.nn.functional.cross_entropy(logits_B2, torch.tensor(labels).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "taught")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "preprocessor_config.json",
    ):
        shutil.copy(Path(section.path) / name, tmp_path / "taught")
    scorer = judge(str(tmp_path / "taught"), of="success")
    labels = [place % 2 == 0 for place in range(16)]
    episodes = [
        Answer("", "{}", metadata={"instruction": "push"}, pictures={"front": shown(each)}) for each in labels
    ]
    found = [each["score"] for each in scorer.score_batch(episodes)]
    assert sum(score == float(label) for score, label in zip(found, labels, strict=True)) >= 15


async def test_the_service_judges_the_pictures_that_it_is_asked_for(reward, write):
    path, seen = write(), episode(5, "push", count=7).pictures["front"]
    options = {"path": path, "of": "probability", **WORDS}
    await reward.open({"name": "picture_judge", "options": options}, pictures=2, timeout_s=60)
    item = reward.item("{}", metadata={"task": "push", "instruction": "lift"})
    write_tensor(item.pictures["front"], seen[:-1])
    write_tensor(item.last_picture["front"], seen[-1])
    (found,) = await reward.score(item)
    yes, no = own(path, "<image><image>\nis it done: lift?", [seen[0], seen[-1]])
    assert (found.status, found.reward) == (GOOD, pytest.approx(yes / (yes + no), abs=1e-5)), found.detail
    assert found.parts["picture_judge/answered"] == pytest.approx(yes + no, abs=1e-5)
    item = reward.item("{}", metadata={"task": "push", "instruction": ""})
    write_tensor(item.pictures["front"], seen)
    (found,) = await reward.score(item)
    assert found.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN
    assert "options.question" in found.detail and "environment.instructions: {push: …}" in found.detail


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"yes": ["yes"]}, "options.yes[0]", "'yes' is not one token of this model ('y' 'e' 's')"),
        ({"no": ["n", "N"]}, "options.no[1]", "'N' is not one token"),
        ({"yes": ["n"]}, "options.no", "says yes and no"),
        ({"path": "./nowhere"}, "options.path", "there is no such directory"),
    ],
)
def test_what_cannot_judge_is_refused_by_key(write, options, field, words):
    with pytest.raises(ScorerError) as refused:
        judge(**{"path": write(), **options})
    assert refused.value.field == field and words in refused.value.message


def test_a_model_that_reads_no_pictures_is_refused(tmp_path):
    write_tiny(tmp_path / "text")
    with pytest.raises(
        ScorerError, match="is a qwen3, which reads no pictures; give a vision-language model"
    ) as refused:
        judge(str(tmp_path / "text"))
    assert refused.value.field == "options.path"


def test_an_unknown_place_of_the_question_is_named():
    with pytest.raises(ValueError, match=r"\{task\} stands for nothing; write \{instruction\}"):
        PictureJudgeOptions(path="x", question="is {task} done?")


def test_an_episode_that_cannot_be_shown_fails_alone(write):
    right = episode(6, "push")
    options = {"path": write(), "of": "probability", **WORDS}
    scorer = check_scorer("picture_judge", options, right)
    assert scorer.needs_pictures and scorer.one_process, "so that a run without reward.pictures is refused"
    for pictures, words in (
        ({}, "reads a camera, and the episode has pictures of none"),
        ({"front": right.pictures["front"][..., :2]}, "have 2 channels, and 1 or 3 are read"),
        ({"front": np.zeros((140, SIDE, SIDE, 3), np.uint8)}, "room for the 512 of the model's context"),
    ):
        with pytest.raises(AnswerFailed, match=words):
            scorer.score(Answer("", "{}", metadata=right.metadata, pictures=pictures))
