"""Values of users' tools and environments that are not there yet, or are none: awaited, or refused by name."""

from __future__ import annotations

import json
import time

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends.conversation.backend import Conversations

OK = simulator_pb2.OUTCOME_STATUS_OK
KIT = """
import asyncio
import concurrent.futures
import datetime
import decimal
import enum
import functools
import pathlib
import time
import uuid
from collections import deque
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

POOL = concurrent.futures.ThreadPoolExecutor(1)
QUEUE = []


async def later() -> str:
    await asyncio.sleep(0)
    return "late"

async def nested():
    return later()

def future():
    return POOL.submit(lambda: later())

async def tasks():
    return asyncio.ensure_future(later())

def several():
    return [later(), later()]

def inside():
    return {"a": later(), "b": [later()]}

async def same_loop() -> bool:
    QUEUE.append(asyncio.get_running_loop())
    return QUEUE[0] is QUEUE[-1]

async def hangs():
    await asyncio.sleep(60)

def blocks():
    async def sleeps():
        time.sleep(60)
    return sleeps()

async def fails():
    raise KeyError("town")

async def picture():
    import PIL.Image
    return PIL.Image.new("RGB", (2, 2))


@dataclass
class Town:
    name: str
    at: tuple

class Model(BaseModel):
    a: int = 1
    when: datetime.date = datetime.date(2026, 1, 2)

class Colour(enum.Enum):
    RED = "red"

class Plain:
    pass

class Said:
    def __str__(self):
        return "said"

def values():
    return [Town("Ulm", (1, 2)), Model(), Colour.RED, np.float32(0.5), np.arange(2), b"x", {1}, deque([2]),
            datetime.date(2026, 1, 2), decimal.Decimal("1.5"), pathlib.PurePosixPath("/a"), uuid.UUID(int=1), Said()]

def generator():
    yield 1

async def agenerator():
    yield 1

def mapped():
    return map(str, [1])

def function():
    return later

def partial():
    return functools.partial(later)

def plain():
    return Plain()

def inner():
    return {"a": [Plain()]}

def lock():
    return asyncio.Lock()

def kind():
    return Plain

def file():
    return open(__file__)
"""


@pytest.fixture
def talk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit.py").write_text(KIT)

    def answer(name, **options):
        environment = Conversations().converse("tools", {"tools": [f"kit.py:{name}"], **options})
        call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        (message,) = environment.step({"role": "assistant", "content": call})[0]
        return message["content"]

    return answer


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("later", "late"),
        ("nested", "late"),
        ("future", "late"),
        ("tasks", "late"),
        ("several", '["late", "late"]'),
        ("inside", '{"a": "late", "b": ["late"]}'),
        ("fails", "error: fails: KeyError: 'town'"),
        ("picture", "[image]"),
    ],
)
def test_what_is_not_there_yet_is_awaited(talk, name, text):
    assert talk(name) == text


def test_what_is_awaited_keeps_one_loop(talk):
    assert [talk("same_loop"), talk("same_loop")] == ["true", "true"]


@pytest.mark.parametrize("name", ["hangs", "blocks"])
def test_what_does_not_come_is_stopped_and_the_next_one_is_answered(talk, name):
    begun = time.monotonic()
    assert "was stopped" in talk(name, deadline_s=0.3) and time.monotonic() - begun < 10
    assert talk("later") == "late"


def test_values_of_common_kinds_are_json(talk):
    assert json.loads(talk("values")) == [
        {"name": "Ulm", "at": [1, 2]},
        {"a": 1, "when": "2026-01-02"},
        "red",
        0.5,
        [0, 1],
        "x",
        [1],
        [2],
        "2026-01-02",
        "1.5",
        "/a",
        "00000000-0000-0000-0000-000000000001",
        "said",
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("generator", "generator"),
        ("agenerator", "async_generator"),
        ("mapped", "map"),
        ("function", "function later"),
        ("partial", "partial"),
        ("plain", "Plain"),
        ("inner", "Plain"),
        ("lock", "Lock"),
        ("kind", "type Plain"),
        ("file", "TextIOWrapper"),
    ],
)
def test_what_is_no_value_is_refused_by_name(talk, name, kind):
    found = talk(name)
    assert found.startswith(f"error: {name}: TypeError: it returned") and kind in found
    assert "0x" not in found and "<" not in found


ENVIRONMENT = """
import asyncio


class Waits:
    async def reset(self, seed, item):
        await asyncio.sleep(0)
        return [{"role": "user", "content": "go"}]

    def step(self, message):
        return self.answer(message["content"])

    async def answer(self, said):
        if said == "content":
            return [{"role": "user", "content": self.answer("on")}], 0.0, False
        if said == "messages":
            return (each for each in ()), 0.0, False
        return [{"role": "user", "content": said}], 1.0, False


class Yields(Waits):
    def step(self, message):
        yield [{"role": "user", "content": "x"}]
"""


async def test_environments_may_be_async_and_what_they_return_is_never_shown_as_an_object(
    simulator, tmp_path
):
    (tmp_path / "waits.py").write_text(ENVIRONMENT)
    pool = await simulator.open("waits.py:Waits", backend="conversation", step_timeout_s=20.0)
    assert (await pool.reset()).messages[0].content == "go"
    said = await pool.say("on")
    assert (said.messages[0].content, said.reward) == ("on", 1.0)
    for wrong, told in (
        ("content", "has the content an object of coroutine"),
        ("messages", "an object of generator"),
    ):
        await pool.reset()
        assert told in (await pool.say(wrong)).detail
    pool = await simulator.open("waits.py:Yields", backend="conversation", step_timeout_s=20.0)
    await pool.reset()
    assert "step returned an object of generator" in (await pool.say("on")).detail
