"""An online run over real gRPC and HTTP, with a real engine: clients speak, streams of work come and go."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from headrace_rollout.engines.transformers.decoder import Decoder
from openai import AsyncOpenAI
from rollout_calls import HEADER, check_log_probs
from rollout_rig import WAIT_S

KEY = "sk-headrace-run"


def slots(prompts, *, attempt=1, oldest=3):
    start = rollout_pb2.Prompt(episode=rollout_pb2.EpisodeStart(task="online"))
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=start,
            samples=[rollout_pb2.SampleAssignment(sample_index=0, attempt=attempt)],
            oldest_version=oldest,
        )
        for ordinal in prompts
    ]


@pytest.fixture
async def served(new_rollout, tiny_directory, publish, reference):
    """An online run with version 3, and a client of it."""
    rollout = await new_rollout()
    rollout.model_path = tiny_directory
    config = {
        "workflow": "agentic",
        "model": {"path": str(tiny_directory), "dtype": "float32", "max_context": 256},
        "agent": {"online": {}},
        "endpoint_key": KEY,
        "sampling": {"max_new_tokens": 200},
        "rollout": {"max_concurrency": 16},
        "seed": 7,
    }
    opened = await rollout.stub.OpenRun(
        rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    )
    await rollout.install(publish(reference, 3))
    async with AsyncOpenAI(base_url=opened.endpoint_url, api_key=KEY, max_retries=0) as client:
        yield rollout, client


async def opened(rollout, groups, number=3):
    return await rollout.generate(groups, half_close=False, policy_number=number, max_new_tokens=200).start()


async def rewarded(client, completion, reward=1.0):
    body = {"completion": completion, "reward": reward}
    return (await client.post("/feedback", cast_to=object, body=body))["state"]


async def test_a_session_that_is_rewarded_is_a_trajectory_with_the_engines_log_probs(
    served, reference, codec
):
    rollout, client = served
    asking = asyncio.create_task(
        client.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "1+1="}], max_tokens=6, n=2, logprobs=True
        )
    )
    await asyncio.sleep(0.05)
    assert not asking.done(), "it waits for a stream"
    call = await opened(rollout, slots([5, 6]))
    answer = await asking
    assert await rewarded(client, answer.id, 0.5) == "taken"
    await call.read_until(lambda call: len(call.finished()) == 1)
    (trajectory,) = call.finished().values()
    assert trajectory.sample.prompt_ordinal == 5
    (first, one), (prompt, two) = (branch.segments for branch in trajectory.branches)
    assert first.tokens.token_ids == prompt.tokens.token_ids
    for choice, segment in zip(answer.choices, (one, two), strict=True):
        told = [token.logprob for token in choice.logprobs.content]
        assert told == pytest.approx(list(segment.tokens.log_probs)) and len(told) <= 6
        assert codec.decode(segment.tokens.token_ids) == choice.message.content
    assert [turn.reward for turn in trajectory.conversation.turns] == [0.5, 0.0]
    check_log_probs(trajectory, reference)  # of each branch what the model says after its own prompt


async def test_a_stream_goes_on_with_the_next_version_behind_what_was_told(served, publish, monkeypatch):
    """As a step ends, and weights are installed: the client sees one answer, and its tokens say who made them."""
    rollout, client = served
    decode = Decoder._decode

    def slowly(decoder):
        time.sleep(0.02)  # or the whole answer may come in one piece
        decode(decoder)

    monkeypatch.setattr(Decoder, "_decode", slowly)
    call = await opened(rollout, slots([5]))
    # Tokens are drawn by the seed and the session's key: with these two the first version's answer has many, and does
    # not end by itself before it is cut.
    monkeypatch.setattr("headrace_rollout.sessions.drivers.online.secrets.randbelow", lambda _: 12)
    more = {"stream": True, "logprobs": True, "max_tokens": 200, "seed": 1}
    stream = await client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "1+1="}], **more
    )
    pieces = [await anext(stream) for _ in range(3)]
    call.call.cancel()
    while rollout.servicer._run.streams:  # noqa: ASYNC110  # the stream ends by itself
        await asyncio.sleep(0.01)
    await rollout.install(publish(tiny_model(9), 4))
    call = await opened(rollout, slots([5], attempt=2), 4)
    pieces += [piece async for piece in stream]
    tokens = [token for p in pieces if p.choices[0].logprobs for token in p.choices[0].logprobs.content]
    assert await rewarded(client, pieces[0].id) in ("taken", "waiting"), (
        "its slot may come behind the answer's end"
    )
    await call.read_until(lambda call: len(call.finished()) == 1)
    (trajectory,) = call.finished().values()
    _, old, new = trajectory.branches[0].segments
    assert (old.policy_number, new.policy_number, trajectory.attempt) == (3, 4, 2)
    sampled = [*old.tokens.log_probs, *new.tokens.log_probs]
    assert [token.logprob for token in tokens] == pytest.approx(sampled), "each token is told once"
    text = "".join(p.choices[0].delta.content or "" for p in pieces)
    assert text == trajectory.conversation.messages[1].content


async def wanted(client, slots):
    """Until the desk has so many slots to fill."""
    async with asyncio.timeout(WAIT_S):
        while (await client.get("/sessions", cast_to=object))["wanted"] != slots:  # noqa: ASYNC110  # asked over HTTP
            await asyncio.sleep(0.01)


async def test_slots_that_come_behind_a_pause_come_back_at_once(served):
    rollout, client = served
    call = await opened(rollout, slots([5]))
    await wanted(client, 1)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) == 1)
    await call.assign(slots([6]))
    await call.read_until(lambda call: len(call.partials) == 2)


async def test_a_pause_gives_slots_back_and_requests_wait(served):
    rollout, client = served
    call = await opened(rollout, slots([5, 6]))
    await wanted(client, 2)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) == 2)
    messages = [{"role": "user", "content": "1+1="}]
    asking = asyncio.create_task(client.chat.completions.create(model="x", messages=messages, max_tokens=2))
    await asyncio.sleep(0.1)
    assert not asking.done()
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    call.call.cancel()
    call = await opened(rollout, slots([5], attempt=3))
    assert await rewarded(client, (await asking).id) == "taken"
    # What was taken and is asked for again is the same session: nothing of it is lost with a stream.
    await call.read_until(lambda call: len(call.finished()) == 1)
    before = call.finished()[5, 0]
    call.call.cancel()
    call = await opened(rollout, slots([5], attempt=4))
    await call.read_until(lambda call: len(call.finished()) == 1)
    again = call.finished()[5, 0]
    assert again.attempt == 4 and again.branches == before.branches
