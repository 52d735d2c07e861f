"""Images in requests of agents: where they stand in what the policy reads, turn by turn, and what is refused."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from endpoint_desk import user
from headrace.common.v1 import common_pb2
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines.samples import Distribution, Finish, Stream
from headrace_rollout.sessions import session as sessions
from headrace_rollout.streams.trajectories import fill_trajectory
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import digest_bytes, trajectory_digest
from PIL import Image


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_vision(directory)
    return load_tokenizer(ModelSection(path=str(directory), dtype="float32"))


def png(value: int, width: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 16), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def seen(text: str, *files: bytes, role: str = "user"):
    """A message with images behind its text."""
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": role, "content": [{"type": "text", "text": text}, *images]}


async def test_images_keep_their_places_turn_by_turn_and_travel_once(desk, codec):
    session, speaker = desk.open("ab", "cd", "ef", codec=codec)
    first, then = seen("which?", png(1)), seen("and?", png(2, 32), png(1), role="tool")
    said = (await desk.said(session, [first]))["message"]
    await desk.said(session, [first, said, then])
    await desk.said(session, [seen("other", png(3))])  # begins a branch
    one, two, three = speaker.asked
    assert two.prompt_ids[: len(one.prompt_ids) + 3] == [*one.prompt_ids, *map(ord, "ab"), 0]
    assert [image.data for image in two.images] == [png(1), png(2, 32), png(1)]
    for asked in (one, two, three):
        for image, tokens in zip(asked.images, (4, 8, 4), strict=False):
            span = codec.images.span(asked.prompt_ids, image.start, image.data)
            assert span.image.tokens == tokens and asked.prompt_ids[image.start - 1] != codec.images.token
    assert two.images[0] == one.images[0] and len(three.images) == 1

    stream = Stream(3, Distribution(), 40, 7, lambda _: None, lambda _: None)
    update = session.ended(Finish.TERMINATED, 3)
    trajectory = common_pb2.Trajectory()
    fill_trajectory(trajectory, update, stream, codec, "producer")
    files = [png(1), png(2, 32), png(1), png(3)]
    placed = [(branch, image) for branch in trajectory.branches for image in branch.images]
    assert [image.digest for _, image in placed] == list(map(digest_bytes, files))
    for (branch, image), file in zip(placed, files, strict=True):
        codec.images.span([id for part in branch.segments for id in part.tokens.token_ids], image.start, file)
    assert [image.data for image in trajectory.images] == [png(1), png(2, 32), png(3)], "each once"
    assert trajectory_digest(trajectory) == trajectory.body_digest
    told = [
        (each.content, [image.digest for image in each.images]) for each in trajectory.conversation.messages
    ]
    assert told[0] == ("which?<image>", [digest_bytes(png(1))])
    assert not any(image.data for each in trajectory.conversation.messages for image in each.images)


async def test_items_of_a_response_may_be_images(desk, codec):
    session, speaker = desk.open("ab", "cd", codec=codec)
    url = seen("", png(1))["content"][1]["image_url"]["url"]
    content = [{"type": "input_text", "text": "which?"}, {"type": "input_image", "image_url": url}]
    first = await desk.post(session, {"input": [{"role": "user", "content": content}]}, "/v1/responses")
    more = {"input": "and?", "previous_response_id": first.json()["id"]}
    assert (await desk.post(session, more, "/v1/responses")).status_code == 200
    assert speaker.asked[1].images == speaker.asked[0].images and len(speaker.asked[0].images) == 1


async def test_a_request_that_shows_another_image_goes_on_nowhere(desk, codec):
    session, speaker = desk.open("ab", "cd", codec=codec)
    said = (await desk.said(session, [seen("which?", png(1))]))["message"]
    await desk.said(session, [seen("which?", png(2)), said, user("and?")])
    assert speaker.asked[1].images[0].data == png(2) and len(session.talk.branches) == 2


FRAMES = [np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8) for seed in range(4)]
VIDEO = video_file(FRAMES)
SOUND = sound_file(np.sin(np.arange(4000) / 5).astype(np.float32))


def sent(kind: str, data: bytes) -> dict:
    text = base64.b64encode(data).decode()
    given = {"data": text, "format": "wav"} if kind == "input_audio" else {"url": f"data:;base64,{text}"}
    return {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": kind, kind: given}]}


async def test_a_request_may_show_a_video(desk, codec):
    session, speaker = desk.open("ab", codec=codec)
    await desk.said(session, [sent("video_url", VIDEO)])
    (asked,) = speaker.asked
    (image,) = asked.images
    own = codec.images.read(VIDEO)
    assert image.data == VIDEO and own.kind == "video"
    assert tuple(asked.prompt_ids[image.start : image.start + own.tokens]) == own.ids


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (seen("which?", png(1)[:50]), "messages: an image that is broken"),
        (seen("which?", png(1, 16 * 300)), "messages: an image of 4800 x 16 pixels"),
        (seen("which?", *[png(1)] * 33), "messages: its messages have 33 images"),
        (seen("which <image>?", png(1)), "messages.0.content: the text <image>"),
        (seen("which?", png(1), role="assistant"), "messages.0.content: the policy says no images"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]},
            "messages.0.content: an image that is no file here",
        ),
        (
            {"role": "user", "content": [{"type": "input_file"}]},
            "messages.0.content: a part of type input_file",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "messages.0.content: a sound that is no file here",
        ),
        (sent("video_url", png(1)), "messages.0.content: a video that is an image by its first bytes"),
        (sent("video_url", VIDEO[:40]), "messages: a video that is broken"),
        (sent("input_audio", SOUND), "messages: a sound is not read by qwen2_5_vl"),
        (seen("<|image_pad|>", png(1)), "messages: the prompt has 2 image tokens for 1 images"),
    ],
)
async def test_images_that_are_not_read_are_refused_by_name(desk, codec, message, words):
    session, speaker = desk.open("ab", codec=codec)
    error = await desk.refused(session, {"messages": [message]})
    assert error["message"].startswith(words) and not speaker.asked


async def test_images_of_a_conversation_have_a_size_together(desk, codec, monkeypatch):
    monkeypatch.setattr(sessions, "MOST_PROMPT_IMAGE_BYTES", len(png(1)) + len(png(2)))
    session, speaker = desk.open("ab", "cd", codec=codec)
    opened = [seen("which?", png(1), png(2))]
    said = (await desk.said(session, opened))["message"]
    await desk.said(session, [*opened, said, seen("and?", png(1))])  # a file counts once
    error = await desk.refused(session, {"messages": [*opened, said, seen("and?", png(3))]})
    assert "and those of a conversation" in error["message"] and len(speaker.asked) == 2


async def test_a_model_that_reads_no_images_is_named(desk):
    session, speaker = desk.open("ab")
    error = await desk.refused(session, {"messages": [seen("which?", png(1))]})
    assert error["message"].startswith("messages: model.path") and not speaker.asked
