"""The built-in engine with images in prompts, against a forward of transformers that computes positions itself."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from collector import Collector
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_modelkit.presets.tiny_vision import plain_inputs, write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines.base import EngineConfig, Policy
from headrace_rollout.engines.samples import Group, ImageAt, Prefix, Sample, SlotKey
from headrace_rollout.engines.transformers.engine import TransformersEngine
from headrace_rollout.wire import groups_of
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from model_weights import weights_of_model
from PIL import Image


def png(seed: int, width: int = 16) -> bytes:
    file = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 255, (16, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def video(seed: int, count: int = 4) -> bytes:
    drawn = np.random.default_rng(seed)
    return video_file([drawn.integers(0, 255, (16, 16, 3), dtype=np.uint8) for _ in range(count)])


def sound(hertz: int, seconds: float = 1.05) -> bytes:
    times = np.arange(int(16_000 * seconds)) / 16_000
    return sound_file((0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32))


QUICK = ("qwen2_5_vl", "qwen3_5", "gemma4", "internvl", "qwen3_omni_moe_thinker")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, marks=() if each in QUICK else pytest.mark.nightly) for each in VISION_FAMILIES
    ],
)
def section(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    write_tiny_vision(directory, family=request.param, frames=2, initializer_range=0.2)
    return ModelSection(path=str(directory), dtype="float32")


@pytest.fixture(scope="module")
def reference(section):
    return load_model(section)


@pytest.fixture(scope="module")
def codec(section):
    return load_tokenizer(section)


@pytest.fixture
async def engine(section, codec, reference):
    engine = TransformersEngine(EngineConfig(section, codec, 6))
    await engine.install(Policy(1, "a"), weights_of_model(reference))
    yield engine
    await engine.close()


def group_of(codec, ordinal: int, text: str, *images: bytes, samples: int = 3, prefix=None) -> Group:
    ids = codec.encode_prompt(chat=[{"role": "user", "content": text}], images=images)
    return Group(
        ordinal, ids, [Sample(index, 1, prefix) for index in range(samples)], placed(codec, ids, images)
    )


def placed(codec, ids, images, before: int = 0) -> tuple[ImageAt, ...]:
    starts = codec.images.starts(ids, [codec.images.read(data) for data in images])
    return tuple(ImageAt(before + start, data) for start, data in zip(starts, images, strict=True))


def expected(reference, codec, group: Group, answer: list[int]) -> list[float]:
    """Log-probs of an answer by transformers alone: its own positions, its own placing of features."""
    ids = torch.tensor([[*group.prompt_ids, *answer]])
    images = [codec.images.read(image.data) for image in group.images]
    kinds = torch.zeros_like(ids)
    for at, image in zip(group.images, images, strict=True):
        kinds[:, at.start + image.slots] = {"image": 1, "video": 2, "audio": 3}[image.kind]
    inputs = plain_inputs(codec.images, ids, images, kinds)
    with torch.no_grad():
        found = reference(input_ids=ids, **inputs).logits[0].log_softmax(-1)
    start = len(group.prompt_ids)
    return [float(found[start + at - 1, token]) for at, token in enumerate(answer)]


def marked(codec) -> set[int]:
    """Ids of the tokens for and around files."""
    return set(codec.tokenizer.get_added_vocab().values()) - codec.eos_ids


def plain(codec, answer: list[int]) -> list[int]:
    """An answer up to such a token: transformers' own forward places features by ids, and cannot take one more."""
    return answer[: next((at for at, token in enumerate(answer) if token in marked(codec)), len(answer))]


def close(codec, values: list[float]):
    """A state that goes on token by token differs in the last bits from one that is computed at once."""
    return pytest.approx(values, rel=5e-5 if "qwen3_5" in codec.images.family else 1e-5, abs=1e-5)


async def test_log_probs_are_those_of_transformers_for_prompts_with_and_without_images(
    engine, codec, reference
):
    groups = [
        group_of(codec, 0, "<image>which?", png(1)),
        group_of(codec, 1, "<image>which?", png(2)),  # the same ids, another image
        group_of(codec, 2, "a<image>b<image>c", png(3, 32), png(1)),
        group_of(codec, 3, "no image"),
    ]
    collector = Collector()
    await engine.submit(collector.stream(max_new_tokens=12), groups)
    ended = await collector.wait_ended(12)
    told = 0
    for key, output in ended.items():
        group = groups[key.prompt_ordinal]
        assert output.images == group.images
        answer = list(output.whole.token_ids)
        answer = plain(codec, answer)
        own = expected(reference, codec, group, answer)
        assert output.whole.log_probs[: len(answer)] == close(codec, own), key
        told += len(answer)
    assert told > 2 * len(ended)
    first, second = (
        [ended[SlotKey(ordinal, at)].whole.log_probs[0] for at in range(3)] for ordinal in (0, 1)
    )
    assert first != second


async def test_videos_and_sounds_are_read_as_transformers_reads_them(engine, codec, reference):
    reader = codec.images
    if reader.kinds == ("image",):
        pytest.skip("a family that reads images alone")
    groups = [
        group_of(codec, 0, "<video>which?", video(1)),
        group_of(codec, 1, "<video>which?", video(2)),  # the same ids, another video
    ]
    if not reader.family.startswith("glm"):  # whose own forward takes no image beside a video
        groups.append(group_of(codec, 2, "a<image>b<video>c", png(3, 32), video(1, 6)))
    if "audio" in reader.kinds:
        groups.append(group_of(codec, 3, "a<audio>b<audio>c", sound(400), sound(700, 0.3)))
        groups.append(group_of(codec, 4, "a<audio>b<video>c<image>", sound(400), video(1), png(1)))
    collector = Collector()
    await engine.submit(collector.stream(max_new_tokens=8), groups)
    ended = await collector.wait_ended(3 * len(groups))
    told = 0
    for key, output in ended.items():
        answer, group = list(output.whole.token_ids), groups[key.prompt_ordinal]
        answer = plain(codec, answer)
        expected_K = expected(reference, codec, group, answer)
        assert output.whole.log_probs[: len(answer)] == close(codec, expected_K), key
        told += len(answer)
    assert told > len(ended)
    first, second = (
        [ended[SlotKey(ordinal, at)].whole.log_probs[0] for at in range(3)] for ordinal in (0, 1)
    )
    assert first != second, "the video is seen"


async def test_an_answer_goes_on_behind_tokens_of_another_engine_that_hold_the_image_token(
    engine, codec, reference
):
    given = [codec.images.token, 5, 6]
    group = group_of(codec, 0, "<image>which?", png(1), samples=1)
    if reference.config.model_type == "qwen2_5_vl":  # transformers places features by id: give it none more
        given = [4, 5, 6]
    prefix = Prefix(given, [-1.0] * 3, [(1, 3)])
    collector = Collector()
    await engine.submit(
        collector.stream(max_new_tokens=8), [Group(0, group.prompt_ids, [Sample(0, 1, prefix)], group.images)]
    )
    (output,) = (await collector.wait_ended(1)).values()
    answer = list(output.whole.token_ids)
    assert answer[:3] == given and len(answer) > 3
    if codec.images.token not in given:
        own = expected(reference, codec, group, answer)
        assert output.whole.log_probs[3:] == close(codec, own[3:])


async def test_a_turn_of_a_conversation_is_computed_behind_the_one_before_with_its_new_image(
    engine, codec, reference
):
    first = group_of(codec, 0, "<image>which?", png(1), samples=2)
    collector = Collector()
    await engine.submit(collector.stream(max_new_tokens=6, goes_on=True), [first])
    said = await collector.wait_ended(2)
    text = codec.encode_prompt(chat=[{"role": "user", "content": "so<image>and?"}], images=[png(3, 32)])
    turns, new = [], 0
    for key, output in said.items():
        before = [*first.prompt_ids, *output.whole.token_ids]
        # transformers' forward places features by id: what was sampled holds none of them there.
        before = [
            4 if token in marked(codec) and at >= len(first.prompt_ids) else token
            for at, token in enumerate(before)
        ]
        changed = before[:-1] != [*first.prompt_ids, *output.whole.token_ids[:-1]]
        images = (*first.images, *placed(codec, text, [png(3, 32)], len(before)))
        turns.append(Group(key.sample_index, [*before, *text], [Sample(key.sample_index, 1)], images))
        # Its last token was sampled, and not computed yet; images that look ahead are computed with all behind them.
        new += len(text) + (len(before) if changed or codec.images.looks_ahead else 1)
    turns = [Group(0, each.prompt_ids, each.samples, each.images) for each in turns]
    computed, collector = engine.figures.prefill_tokens, Collector()
    await engine.submit(collector.stream(max_new_tokens=8, goes_on=True, seed=8), turns)
    ended = await collector.wait_ended(2)
    assert engine.figures.prefill_tokens - computed == new
    for turn, (_, output) in zip(
        turns, sorted(ended.items(), key=lambda each: each[0].sample_index), strict=True
    ):
        answer = plain(codec, list(output.whole.token_ids))
        own = expected(reference, codec, turn, answer)
        assert output.whole.log_probs[: len(answer)] == close(codec, own)
    other = Group(
        0,
        turns[0].prompt_ids,
        [Sample(0, 2)],
        (ImageAt(turns[0].images[0].start, png(2)), turns[0].images[1]),
    )
    computed, collector = engine.figures.prefill_tokens, Collector()
    await engine.submit(collector.stream(max_new_tokens=2, goes_on=True, seed=9), [other])
    await collector.wait_ended(1)
    assert engine.figures.prefill_tokens - computed == len(other.prompt_ids), (
        "the same ids, another first image"
    )


def assignment(*images: common_pb2.Image, text: str = "<image>which?") -> rollout_pb2.GroupAssignment:
    chat = rollout_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=text)])
    prompt = rollout_pb2.Prompt(chat=chat, images=images)
    return rollout_pb2.GroupAssignment(prompt=prompt, samples=[rollout_pb2.SampleAssignment(attempt=1)])


async def test_images_come_once_for_a_group_and_are_checked(codec):
    data = png(1)
    (group,) = await groups_of(
        [assignment(common_pb2.Image(digest=digest_bytes(data), data=data))], codec, None
    )
    assert [image.data for image in group.images] == [data]
    assert list(group.prompt_ids).count(codec.images.token) == len(codec.images.read(data).slots)
    with pytest.raises(ServiceError, match="has not its digest"):
        await groups_of([assignment(common_pb2.Image(digest="0", data=data))], codec, None)
    cut = data[:50]
    with pytest.raises(ServiceError, match="cannot be read"):
        await groups_of([assignment(common_pb2.Image(digest=digest_bytes(cut), data=cut))], codec, None)
