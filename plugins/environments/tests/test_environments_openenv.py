"""Environments of OpenEnv: real servers (nightly) and stubs of their wire play the same."""

from __future__ import annotations

import asyncio

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError
from serving import BOTH, real, serving, stub

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST


@pytest.fixture(params=BOTH)
def game(request):
    command = stub("openenv") if request.param == "stub" else real("openenv", "openenv_guess.py")
    with serving(*command) as found:
        yield found


@pytest.fixture(params=BOTH)
def town(request):
    tools = request.param == "stub"
    with serving(
        *(stub("openenv-tools") if tools else real("openenv", "openenv_guess.py", "tools"))
    ) as found:
        yield found[0]


def told(outcome) -> list[str]:
    return [message.content for message in outcome.messages]


async def test_each_place_of_a_pool_is_a_connection_and_a_lost_server_ends_its_episodes_by_name(
    simulator, game
):
    url, process = game
    options = {"reset": {"secret": "2"}, "system": "guess", "patience_s": 0.0}
    pool = await simulator.open(url, backend="openenv", options=options, count=2, processes=1)
    assert pool.opened.conversation and not pool.opened.agents
    for place in range(2):
        begun = await pool.reset(place, seed=3)
        assert begun.status == OK and told(begun) == ["guess", "?"], begun.detail
    wrong = await pool.say("1", 0)
    assert (told(wrong), wrong.reward, wrong.terminated) == (["+"], 0.0, False)
    right = await pool.say("2", 1)
    assert (told(right), right.reward, right.terminated) == ([], 1.0, True), (
        "its neighbour's turn is not its own"
    )
    over = await pool.say("3", 0)
    assert (told(over), over.reward, over.terminated) == ([], 0.0, True)
    assert (await pool.reset(0, seed=3)).status == OK
    failed = await pool.say("raise", 0)
    assert failed.status == LOST and "step failed with EXECUTION_ERROR: the game fell over" in failed.detail
    for place in range(2):
        assert (await pool.reset(place, seed=3)).status == OK
    gone = await pool.say("exit", 0)
    assert gone.status == LOST and f"server of OpenEnv at {url} is gone" in gone.detail, gone.detail
    process.wait(10)
    assert "is gone" in (await pool.say("1", 1)).detail
    again = await pool.reset(0, seed=3)
    assert again.status == LOST and "Connection refused" in again.detail


async def test_a_server_that_is_started_again_goes_on_with_the_next_episode(simulator):
    with serving(*stub("openenv")) as (url, process):
        pool = await simulator.open(url, backend="openenv", options={"patience_s": 60.0}, step_timeout_s=90.0)
        assert (await pool.reset(seed=3)).status == OK
        process.kill()
        process.wait()
        assert "is gone" in (await pool.say("1")).detail
        begins = asyncio.create_task(pool.reset(seed=3))
        with serving(*stub("openenv"), at=url):
            begun = await begins
            assert begun.status == OK and told(begun) == ["?"], begun.detail


def test_a_server_that_is_full_and_an_action_that_is_none(game):
    url, _ = game
    backend = create("openenv")
    held = [backend.converse(url, {"item": ["question"], "show": [key]}) for key in ("text", "other")]
    with pytest.raises(BackendError, match="raise max_concurrent_envs of the server") as caught:
        backend.converse(url, {})
    assert caught.value.field == "environment.count"
    with pytest.raises(Exception, match="the data item has no 'question'"):
        held[0].reset(0, {})
    with pytest.raises(
        Exception, match=r"environment\.options\.show: an observation has no 'other'; it has metadata, text"
    ):
        held[1].reset(0, {"question": "?"})
    # A seed is the episode's: the same one has the same secret.
    held[0].reset(5, {"question": "?"})
    scores = [held[0].step({"content": "1"})[1] for _ in range(2) if held[0].reset(5, {"question": "?"})]
    assert scores[0] == scores[1]


def test_an_environment_of_tools_is_called_and_a_turn_without_a_call_is_the_last(town):
    talk = create("openenv").converse(town, {"parser": "json"})
    messages, tools = talk.reset(0, {})
    assert [message["role"] for message in messages] == ["user"]
    assert [tool["function"]["name"] for tool in tools] == ["weather"]
    (answer,), reward, done = talk.step({"content": '{"name": "weather", "arguments": {"town": "Ulm"}}'})
    assert (answer["role"], answer["content"], reward, done) == ("tool", "rain in Ulm", 0.0, False)
    (answer,), _, done = talk.step({"content": '{"name": "weather", "arguments": {"twon": "Ulm"}}'})
    assert (
        answer["content"].startswith("error: ")
        and "issing required argument" in answer["content"]
        and not done
    )
    assert talk.step({"content": "wet"}) == ([], 0.0, True)


def test_an_address_of_something_else_is_refused_by_key():
    with serving(*stub("pages")) as (url, _):
        with pytest.raises(BackendError) as caught:
            create("openenv").converse(url, {})
    assert caught.value.field == "environment.name"
    assert (
        "GET /schema answers a page for people (200, HTML); give the server's own address"
        in caught.value.message
    )
    with pytest.raises(BackendError, match="does not answer at"):
        create("openenv").converse(url, {})
    with pytest.raises(BackendError, match="write http://HOST:PORT"):
        create("openenv").converse("guess", {})
    with pytest.raises(BackendError, match="did you mean 'reset'") as caught:
        create("openenv").converse(url, {"rest": {}})
    assert caught.value.field == "options_json.rest"
    with pytest.raises(BackendError, match=r"backend: container, tasks: \[openenv\]") as caught:
        create("openenv").converse("guess", {"image": "guess:latest"})
    assert caught.value.field == "options_json.image"
