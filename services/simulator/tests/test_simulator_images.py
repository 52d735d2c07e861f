"""Images in what environments say and tools answer: as files with their digests, within limits, or named."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_modelkit.presets.clips import sound_file, video_file
from headrace_servicekit.image_files import BadImage, image_file
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.tool_calls import Call
from headrace_simulator.backends.conversation.calls import Limits, Tool, answers
from headrace_simulator.child import conversations
from headrace_simulator.child.conversations import Conversations
from headrace_simulator.child.episodes import Raised
from PIL import Image


def image(mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new(mode, size)


def file(picture: Image.Image) -> bytes:
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


class Shows:
    images = True

    def __init__(self, content):
        self._content = content

    def reset(self, seed, item):
        return [{"role": "user", "content": self._content}]

    def step(self, message):
        return [], 0.0, True


def begun(environment) -> simulator_pb2.EnvironmentOutcome:
    operation = simulator_pb2.EnvironmentOperation(reset=simulator_pb2.ResetOperation())
    outcome = simulator_pb2.EnvironmentOutcome()
    Conversations(environment, 0).operate(operation, outcome)
    return outcome


def part(value):
    return {"type": "image", "image": value}


def test_images_become_files_with_marks_where_they_stand():
    given = file(image("L"))
    content = [{"type": "text", "text": "a"}, part(image()), {"type": "text", "text": "b"}, part(given)]
    (message,) = begun(Shows(content)).messages
    assert message.content == "a<image>b<image>"
    assert [each.data for each in message.images] == [file(image()), given]
    assert [each.digest for each in message.images] == [digest_bytes(each.data) for each in message.images]
    (plain,) = begun(Shows("<image> is text")).messages
    assert plain.content == "<image> is text" and not plain.images


VIDEO = video_file([np.full((16, 16, 3), shade, np.uint8) for shade in (0, 99)])
SOUND = sound_file(np.sin(np.arange(4000) / 5).astype(np.float32))


def test_videos_and_sounds_become_files_too():
    address = f"data:audio/wav;base64,{base64.b64encode(SOUND).decode()}"
    content = [
        {"type": "text", "text": "a <image>"},
        {"type": "video", "video": VIDEO},
        {"type": "audio_url", "audio_url": {"url": address}},
    ]
    (message,) = begun(Shows(content)).messages
    assert message.content == "a <image><video><audio>", "a mark without such files is text"
    assert [each.data for each in message.images] == [VIDEO, SOUND]


def test_what_one_call_returns_has_a_size(monkeypatch):
    monkeypatch.setattr(conversations, "MOST_IMAGE_BYTES", 3 * len(file(image())) - 1)
    assert len(begun(Shows([part(image())] * 2)).messages[0].images) == 2
    with pytest.raises(Raised, match=r"the images of one reset have .* make them smaller"):
        begun(Shows([part(image())] * 3))


class Silent(Shows):
    images = False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([part(b"nothing")], "part 0 of message 0 of what reset returned has an image that is broken"),
        ([part("http://x/y.png")], "an image that is no file here: a URL or a path is not opened"),
        ([part(image("CMYK").convert("RGBA").resize((1, 300)))], "1 x 300 pixels"),
        ([part([[0, 1]])], "an image that is int64 numbers of shape"),
        ([part(image())] * 33, "have 33 images; 32 are read"),
        ([{"type": "text", "text": "<image>"}, part(image())], "the text <image> beside such files"),
        ([{"type": "document"}], "a part is {'type': 'text'"),
        ([{"type": "video", "video": image()}], "has a video that is an image by its first bytes"),
        ([{"type": "video", "video": VIDEO[:99]}], "has a video that is broken"),
        (
            [{"type": "text", "text": "<audio>"}, {"type": "audio", "audio": SOUND}],
            "<audio> beside such files",
        ),
    ],
)
def test_what_is_no_image_that_is_read_is_named(content, words):
    with pytest.raises(Raised, match=words.replace("(", "[(]")):
        begun(Shows(content))


def test_an_environment_says_that_it_shows_images():
    with pytest.raises(Raised, match="set images = True in its class"):
        begun(Silent([part(image())]))
    with pytest.raises(BadImage, match="of mode RGBA"):
        image_file(Image.new("RGBA", (4, 4)))


def test_tools_answer_with_images_where_the_model_sees_them():
    def look(what: str) -> list:
        """Looks."""
        return [f"at {what}", image()]

    def blurred() -> Image.Image:
        """Looks badly."""
        return Image.new("RGBA", (4, 4))

    tools = {"look": Tool(look), "blurred": Tool(blurred)}
    calls = [Call("look", {"what": "it"}), Call("blurred", {})]
    seen, bad = (each.content for each in answers(calls, tools, Limits(5.0, 8, 100, images=True)))
    assert seen == [{"type": "text", "text": "at it"}, {"type": "image", "image": file(image())}]
    assert bad.startswith("error: blurred: BadImage: of mode RGBA")
    assert [each.content for each in answers(calls, tools, Limits(5.0, 8, 100))] == [
        "at it\n[image]",
        "[image]",
    ]
