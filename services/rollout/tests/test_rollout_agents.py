"""Agents over real gRPC and HTTP: real simulators' children start them, and they speak with a real engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import HEADER, check_log_probs
from simulator_rig import SimulatorProcess, open_pool

# It sends the requests that the openai client sends, and does as its item says.
AGENT = """
import os
import time

import httpx

CLIENT = httpx.Client(
    base_url=os.environ["OPENAI_BASE_URL"] + "/",
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    timeout=60,
)


def complete(messages, **more):
    answer = CLIENT.post("chat/completions", json={"model": "any", "messages": messages, **more})
    if answer.status_code != 200:
        raise RuntimeError(answer.json()["error"]["message"])
    return answer.json()


def play(seed, item):
    wrong, turns = item.get("wrong"), item.get("turns", 3)
    if wrong == "mute":
        return 1.0
    messages = [{"role": "system", "content": "copy"}, {"role": "user", "content": f"{seed % 10}="}]
    for turn in range(turns):
        drawn = item["drawn"][turn] if "drawn" in item else {"temperature": 0.2}
        found = complete(messages, max_tokens=item.get("max_tokens", 24), **drawn)
        message = found["choices"][0]["message"]
        messages += [message, {"role": "user", "content": " +" * (40 if wrong == "grows" else 1)}]
        if wrong == "raises" and turn == 1:
            raise RuntimeError("the agent fell over")
        if wrong == "dies" and turn == 1:
            os._exit(7)
        if wrong == "edits" and turn == 0:
            messages[1]["content"] = "0="
        if wrong == "hangs" and turn == 1:
            time.sleep(600)
        if item.get("posts"):
            CLIENT.post(f"sessions/{os.environ['HEADRACE_SESSION']}/reward", json={"reward": 0.5 * (turn + 1)})
    if item.get("posts") or wrong == "unrewarded":
        return None
    return {"reward": 4.0, "success": True, "figures": {"turns": turns}}
"""
TASK = "agent.py:play"


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("agents")
    (directory / "agent.py").write_text(AGENT)
    simulator = SimulatorProcess(directory)
    yield simulator.address
    simulator.kill()


@pytest.fixture
def serving(new_rollout, tiny_directory, publish, reference):
    """Opens a run of agents and installs version 3."""

    async def start(**environment):
        rollout = await new_rollout()
        rollout.model_path = tiny_directory
        config = {
            "workflow": "agentic",
            "model": {"path": str(tiny_directory), "dtype": "float32", "max_context": 64},
            "environment": {"backend": "agent", "tasks": [TASK], **environment},
            "agent": {"python": TASK},
            "agent_rewards": True,
            "rollout": {"max_concurrency": 16},
            "seed": 7,
        }
        await rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config)))
        await rollout.install(publish(reference, 3))
        return rollout

    return start


async def pool_of(address, *, count=3, **fields):
    return await open_pool(
        address,
        TASK,
        backend="agent",
        **{"max_episode_steps": 0, "count": count, "processes": count, **fields},
    )


def rewards(trajectory):
    return [turn.reward for turn in trajectory.conversation.turns]


def begins(prompts, samples=1, *, attempt=1, **item):
    """Groups whose prompt number is the seed of their agents."""
    start = {"task": TASK, "options_json": json.dumps(item)}
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(episode=rollout_pb2.EpisodeStart(seed=ordinal, **start)),
            samples=[rollout_pb2.SampleAssignment(sample_index=i, attempt=attempt) for i in range(samples)],
        )
        for ordinal in prompts
    ]


async def said(rollout, pool, groups, **options):
    call = rollout.generate(groups, pools=[pool], **{"policy_number": 3, "max_new_tokens": 12, **options})
    return await (await call.start()).read_all()


STOP = [*"12345"]


async def test_what_an_agent_says_is_one_trajectory_of_the_policys_own_ids(serving, agents, codec, reference):
    rollout = await serving()
    pool = await pool_of(agents)
    found = await said(rollout, pool, begins([4, 7], 3, posts=True), stop=STOP)
    again = await said(rollout, pool, begins([4, 7], 3), stop=STOP)
    assert len(found) == len(again) == 6
    for key, trajectory in found.items():
        assert trajectory.body_digest == trajectory_digest(trajectory)
        prompt, *turns = [
            (each.policy_number, list(each.tokens.token_ids)) for each in trajectory.branches[0].segments
        ]
        assert codec.decode(prompt[1]) == f"copy{key[0]}="
        same = [list(each.tokens.token_ids) for each in again[key].branches[0].segments]
        assert [prompt[1], *(ids for _, ids in turns)] == same, "how an agent is rewarded changes no token"
        talk = trajectory.conversation
        assert [each.role for each in talk.messages] == [
            "system",
            "user",
            *["assistant", "user"] * 2,
            "assistant",
        ]
        assert all(codec.decode(ids) == " +" for number, ids in turns if not number)
        assert rewards(trajectory) == [0.5, 1.0, 1.5] and not talk.success
        assert rewards(again[key]) == [0.0, 0.0, 4.0] and again[key].conversation.success
        assert again[key].conversation.figures == {"turns": 3.0} and not talk.figures
        assert trajectory.finish_reason in (
            common_pb2.FINISH_REASON_TERMINATED,
            common_pb2.FINISH_REASON_LENGTH,
        )
        # The log-probs are the model's at the temperature that the agent asked for, and the segments say so.
        drawn = {
            each.tokens.distribution.temperature
            for each in trajectory.branches[0].segments
            if each.policy_number
        }
        assert [round(each, 3) for each in drawn] == [0.2]
        check_log_probs(trajectory, reference)


async def test_each_turn_is_told_with_what_it_was_drawn_from(serving, agents, reference):
    rollout = await serving()
    pool = await pool_of(agents, count=1)
    drawn = [{"temperature": 0.5}, {"temperature": 0}, {"temperature": 2.0, "seed": 3}]
    found = await said(rollout, pool, begins([4], 2, drawn=drawn), stop=STOP)
    for trajectory in found.values():
        sampled = [each.tokens for each in trajectory.branches[0].segments if each.policy_number]
        assert [round(each.distribution.temperature, 3) for each in sampled] == [0.5, 2.0]
        assert [turn.tokens == 0 for turn in trajectory.conversation.turns] == [False, True, False]
        check_log_probs(trajectory, reference)
    found = await said(rollout, pool, begins([5], drawn=[{"top_p": 0.9}] * 3), stop=STOP)
    (cut,) = found.values()
    assert cut.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert "agent.sampling: run" in cut.conversation.failure


@pytest.mark.nightly  # quick: test_endpoint.py, test_limits_end_a_session
async def test_each_limit_is_a_finish_reason(serving, agents):
    rollout = await serving(max_episode_steps=2)
    pool = await pool_of(agents)
    found = await said(rollout, pool, begins([1, 2], turns=3), stop=STOP)
    assert {each.finish_reason for each in found.values()} == {common_pb2.FINISH_REASON_TRUNCATED}
    assert {len(each.conversation.turns) for each in found.values()} == {2}
    found = await said(rollout, pool, begins([1], turns=2, max_tokens=2))
    assert [each.finish_reason for each in found.values()] == [common_pb2.FINISH_REASON_TERMINATED], (
        "an agent that stops at the limit has ended by itself"
    )
    found = await said(rollout, pool, begins([1], turns=1), max_new_tokens=1)
    assert [each.finish_reason for each in found.values()] == [common_pb2.FINISH_REASON_LENGTH]
    found = await said(rollout, pool, begins([1], wrong="grows", turns=2), stop=STOP)
    (grown,) = found.values()
    assert grown.finish_reason == common_pb2.FINISH_REASON_LENGTH and len(grown.conversation.turns) == 1
    assert sum(len(each.tokens.token_ids) for each in grown.branches[0].segments) <= 64


async def test_an_agent_that_never_ends_is_killed_and_its_turns_count(serving, agents):
    rollout = await serving(max_episode_s=1.0)
    found = await said(rollout, await pool_of(agents, count=1), begins([1], wrong="hangs"), stop=STOP)
    (late,) = found.values()
    assert late.finish_reason == common_pb2.FINISH_REASON_TIMED_OUT
    assert len(late.conversation.turns) == 2 and not late.conversation.failure


WRONG = {
    "mute": "spoke to nobody",
    "raises": "the agent raised RuntimeError: the agent fell over (agent.py:",
    "dies": "exit code 7",
    "unrewarded": "ended without a reward",
}


async def test_an_agent_that_fails_costs_its_own_sample_alone(serving, agents):
    rollout = await serving()
    pool = await pool_of(agents, count=2)
    wrong = [group for ordinal, each in enumerate(WRONG, 10) for group in begins([ordinal], wrong=each)]
    found = await said(rollout, pool, [*begins([1, 2]), *wrong, *begins([4])], stop=STOP)
    for ordinal, words in enumerate(WRONG.values(), 10):
        failed = found.pop((ordinal, 0))
        assert failed.finish_reason == common_pb2.FINISH_REASON_ERROR
        assert words in failed.conversation.failure, failed.conversation.failure
    assert len(found) == 3
    assert not [each.conversation.failure for each in found.values() if each.conversation.failure]


async def test_a_pause_stops_agents_which_begin_anew_with_the_next_version(serving, agents, publish):
    rollout = await serving()
    pool = await pool_of(agents, count=2)
    call = rollout.generate(
        begins(range(4), turns=1000), half_close=False, policy_number=3, max_new_tokens=1, pools=[pool]
    )
    call = await call.start()
    while not rollout.engine.figures.sampled_tokens:  # noqa: ASYNC110  # counted in a thread
        await asyncio.sleep(0.01)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) + len(call.finished()) == 4)
    assert call.partials and all(not partial.state.token_ids for partial in call.partials)
    await rollout.install(publish(tiny_model(9), 4))
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    call.call.cancel()
    after = await said(rollout, pool, begins([1, 2, 3]), policy_number=4)
    assert len(after) == 3
    for each in after.values():
        assert {segment.policy_number for segment in each.branches[0].segments} <= {0, 4}
        assert not each.conversation.failure
    # The endpoint ends with its run.
    url = await rollout.servicer._endpoint.url()
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    with pytest.raises(OSError):
        await asyncio.open_connection(host, int(port))


async def test_agents_of_a_prompt_may_begin_otherwise(serving, agents, tmp_path):
    """One says the time, another leads two conversations at once: what is compared is what they came to."""
    rollout = await serving()
    (tmp_path / "unlike.py").write_text(AGENT.replace('"copy"', 'f"copy{time.monotonic_ns()}"'))
    pool = await open_pool(
        agents,
        f"{tmp_path}/unlike.py:play",
        backend="agent",
        task=TASK,
        count=2,
        processes=2,
        max_episode_steps=0,
    )
    found = await said(rollout, pool, begins([1], 2))
    prompts = {bytes(str(each.branches[0].segments[0].tokens.token_ids), "ascii") for each in found.values()}
    assert len(found) == len(prompts) == 2
    assert not any(each.conversation.failure for each in found.values())
