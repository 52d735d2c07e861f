"""Resources servers of NeMo Gym: real ones (nightly) and stubs of their wire verify the same."""

from __future__ import annotations

import json

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError
from serving import BOTH, real, serving, stub

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string"}},
    "required": ["town"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": PARAMETERS,
    "strict": True,
}
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Ulm?"}]
ROWS = [
    {"responses_create_params": {"input": ASKED, "tools": [TOOL]}, "weather": "rain"},
    {"responses_create_params": {"input": "Bonn?", "tools": [TOOL]}, "weather": "sun"},
]


@pytest.fixture(params=BOTH)
def town(request):
    with serving(*(stub("nemo") if request.param == "stub" else real("nemo-gym", "nemo_town.py"))) as found:
        yield found


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return str(tmp_path / "rows.jsonl")


def call(town: str) -> str:
    return json.dumps({"name": "weather", "arguments": {"town": town}})


def told(outcome) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in outcome.messages]


async def test_two_sessions_are_apart_and_what_was_said_is_verified(simulator, town, rows):
    url, process = town
    options = {"path": rows, "parser": "json", "turns": 4, "patience_s": 0.0}
    pool = await simulator.open(url, backend="nemo_gym", options=options, count=2, processes=1)
    begun = [await pool.reset(place, seed=place) for place in range(2)]
    assert told(begun[0]) == [("system", "Be short."), ("user", "Ulm?")], begun[0].detail
    assert told(begun[1]) == [("user", "Bonn?")]
    assert json.loads(begun[0].tools_json)[0]["function"]["parameters"] == PARAMETERS
    assert told(await pool.say(call("Ulm"), 0)) == [("tool", '"rain in Ulm (1)"')]
    assert told(await pool.say(call("Bonn"), 1)) == [("tool", '"sun in Bonn (1)"')], (
        "each has its own session"
    )
    assert told(await pool.say(call("Bonn"), 1)) == [("tool", '"sun in Bonn (2)"')]
    wrong = await pool.say(json.dumps({"name": "weather", "arguments": {"twon": "Ulm"}}), 0)
    assert told(wrong)[0][1].startswith("error: 422")
    ended = await pool.say("rain", 0)
    assert (ended.terminated, ended.reward, ended.success) == (True, 1.5, True), (
        "it said so, and called twice"
    )
    cut = [await pool.say(call("Bonn"), 1) for _ in range(2)][-1]
    assert (cut.terminated, cut.reward) == (True, 1.0), (
        "the last turn is verified too: four calls, and no answer"
    )
    assert (await pool.reset(0, seed=1)).status == OK
    masked = await pool.say("mask", 0)
    assert masked.status == LOST and "measured nothing (mask_sample): the judge is away" in masked.detail
    assert (await pool.reset(0, seed=1)).status == OK
    gone = await pool.say(call("exit"), 0)
    assert gone.status == LOST and f"resources server of NeMo Gym at {url} is gone" in gone.detail
    process.wait(10)
    assert f"does not answer at {url}" in (await pool.reset(0, seed=1)).detail


def test_a_wrong_address_and_wrong_rows_are_refused_by_key(tmp_path, rows):
    backend = create("nemo_gym")
    with serving(*stub("pages")) as (url, _):
        with pytest.raises(BackendError, match="answers a page for people") as caught:
            backend.converse(url, {"path": rows})
    assert caught.value.field == "environment.name"
    with pytest.raises(BackendError) as caught:
        backend.converse(url, {})
    assert caught.value.field == "options_json.path"
    (tmp_path / "wrong.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    with serving(*stub("nemo")) as (url, _):
        for name, words in [
            ("gone.jsonl", "there is no file"),
            ("wrong.jsonl", "wrong.jsonl:1 is no row with responses_create_params.input"),
            ("empty.jsonl", "is empty"),
        ]:
            with pytest.raises(BackendError, match=words) as caught:
                backend.converse(url, {"path": str(tmp_path / name)})
            assert caught.value.field == "options_json.path"
    with serving(*stub("openenv")) as (url, _):
        with pytest.raises(BackendError, match="it has no /verify"):
            backend.converse(url, {"path": rows})
