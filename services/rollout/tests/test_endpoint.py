"""The endpoint for agents, without a network and without a model: what is answered, kept as ids, and refused."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from endpoint_desk import CHAT, END, Letters
from headrace_rollout.endpoint.requests import read_request
from headrace_rollout.endpoint.server import MOST_BYTES, make_app
from headrace_rollout.endpoint.streaming import Pieces, pieces_of
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import Finish, SlotKey
from openai import AsyncOpenAI, BadRequestError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'


def user(text):
    return {"role": "user", "content": text}


async def test_requests_that_extend_each_other_are_one_trajectory_of_exact_ids(desk):
    session, speaker = desk.open("yes", "no")
    first = await desk.said(
        session, [{"role": "developer", "content": "be"}, user("one")], temperature=0, logprobs=True
    )
    assert first["message"] == {"role": "assistant", "content": "yes"} and first["finish_reason"] == "stop"
    assert [each["token"] for each in first["logprobs"]["content"]] == ["y", "e", "s", ""]
    assert {each["logprob"] for each in first["logprobs"]["content"]} == {-0.5}
    # Clients send answers back with keys of their own, and lose blanks around them.
    echoed = {
        **first["message"],
        "content": " yes\n",
        "refusal": None,
        "annotations": [],
        "function_call": None,
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]}
    await desk.said(session, [{"role": "system", "content": "be"}, user("one"), echoed, parts])
    one, two = speaker.asked
    assert Letters().decode(one.prompt_ids) == "s:beu:onea:"
    assert list(two.prompt_ids) == [
        *one.prompt_ids,
        *map(ord, "yes"),
        END,
        *map(ord, "u:two"),
        END,
        *map(ord, "a:"),
    ]
    assert (one.turn, two.turn, two.key, two.limits.max_new_tokens, two.limits.stop) == (
        0,
        1,
        SlotKey(1, 2),
        40,
        ("#",),
    )
    talk = session.talk
    assert talk.said == [
        ("system", "be"),
        ("user", "one"),
        ("assistant", "yes"),
        ("user", "two"),
        ("assistant", "no"),
    ]
    assert [*talk.prompt_ids, *talk.tokens] == [*two.prompt_ids, *map(ord, "no"), END]
    assert talk.spans == [(3, 4), (0, 8), (3, 3)] and len(talk.log_probs) == len(talk.tokens)


EDITED = {
    "the same again": ([user("one")], {}),
    "another answer": ([user("one"), {"role": "assistant", "content": "no"}, user("two")], {}),
    "another question": ([user("won"), {"role": "assistant", "content": "yes"}, user("two")], {}),
    "a summary": ([user("summary of all so far"), user("two")], {}),
    "words in its mouth": (
        [user("one"), {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "and no"}],
        {},
    ),
    "other tools": ([user("one"), {"role": "assistant", "content": "yes"}, user("two")], {"tools": TOOLS}),
}


@pytest.mark.parametrize("edited", EDITED)
async def test_messages_that_do_not_extend_what_was_said_begin_a_sibling(desk, edited):
    """Of the same session: a line of its own, which reads its own prompt, and shares the reward."""
    messages, more = EDITED[edited]
    session, speaker = desk.open("yes", "no", "so")
    await desk.said(session, [user("one")])
    choice = await desk.said(session, messages, **more)
    assert choice["message"]["content"] == "no"
    await desk.said(session, [user("one"), {"role": "assistant", "content": "yes"}, user("two")])
    first, other, last = (asked.prompt_ids for asked in speaker.asked)
    letters = Letters()
    tools = more.get("tools")
    assert list(other) == letters.encode_prompt(chat=messages, arguments={"tools": tools} if tools else None)
    assert list(last[: len(first) + 4]) == [*first, *map(ord, "yes"), END], "the first line goes on"
    session.reward(1.0)
    talk = session.join()
    given = [*map(ord, "u:two"), END, *map(ord, "a:")]
    assert talk.spans == [(3, 4), (0, len(given)), (3, 3), (-1, len(other)), (3, 3)]
    assert talk.tokens == [*map(ord, "yes"), END, *given, *map(ord, "so"), END, *other, *map(ord, "no"), END]
    assert (talk.turn_tokens, talk.rewards) == ([4, 3, 3], [0.0, 1.0, 0.0]) and len(talk.log_probs) == len(
        talk.tokens
    )
    assert [talk.said[place] for place in talk.turn_messages] == [
        ("assistant", "yes"),
        ("assistant", "so"),
        ("assistant", "no"),
    ]


async def test_a_line_that_branches_off_reads_the_ids_that_were_sampled(desk):
    """Whether from its end, twice at once, or from an earlier turn."""
    session, speaker = desk.open("yes", "no", "so", "oh")
    said = [user("one"), {"role": "assistant", "content": "yes"}]
    await desk.said(session, [user("one")])
    await asyncio.gather(*(desk.said(session, [*said, user(text)]) for text in ("two", "too")))
    await desk.said(session, [*said, user("to")])
    own = [*speaker.asked[0].prompt_ids, *map(ord, "yes"), END]
    for asked, text in zip(speaker.asked[1:], ("two", "too", "to"), strict=True):
        assert list(asked.prompt_ids) == [*own, *map(ord, f"u:{text}"), END, *map(ord, "a:")]
    assert len({asked.turn for asked in speaker.asked}) == 4, "each turn draws by a seed of its own"
    assert [number for number, _ in session.join().spans] == [3, 0, 3, -1, 3, -1, 3]


async def test_each_of_several_choices_is_kept_and_the_one_that_is_extended_goes_on(desk):
    session, speaker = desk.open("yes", "no", "so")
    found = (await desk.post(session, {"messages": [user("one")], "n": 2})).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == ["yes", "no"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": 7, "total_tokens": 15}
    await desk.said(session, [user("one"), {"role": "assistant", "content": "no"}, user("two")])
    assert list(speaker.asked[2].prompt_ids[:11]) == [*speaker.asked[0].prompt_ids, *map(ord, "no"), END]
    assert [number for number, _ in session.join().spans] == [3, -1, 3, 0, 3]


async def test_forged_keys_are_refused_and_no_session_is_told_of_another(desk):
    session, other = desk.open("yes")[0], desk.open("no")[0]
    for header in ({}, {"Authorization": "Bearer sk-headrace-forged"}, {"Authorization": session.api_key}):
        found = await desk.client.post(CHAT, json={"messages": [user("one")]}, headers=header)
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
    found = await desk.client.get("/v1/models")
    assert found.status_code == 401
    assert session.api_key != other.api_key and session.id not in session.api_key
    await desk.refused(session, {"reward": 1.0}, 404, f"/v1/sessions/{other.id}/reward")
    with desk.endpoint.serving(session):
        pass
    await desk.refused(session, {"messages": [user("one")]}, 401)


async def test_requests_of_a_session_are_answered_side_by_side(desk):
    session, speaker = desk.open("yes", "no")
    speaker.waits.clear()
    both = [asyncio.create_task(desk.said(session, [user(text)])) for text in ("one", "mine")]
    while len(speaker.asked) < 2:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    speaker.waits.set()
    assert [(await each)["message"]["content"] for each in both] == ["yes", "no"]


async def test_a_client_that_lost_an_answer_gets_it_again(desk):
    session, speaker = desk.open("yes", "no")
    body = {"messages": [user("one")]}
    first = await desk.post(session, body)
    again = await desk.post(session, body, **{"x-stainless-retry-count": "1"})
    assert again.json()["choices"] == first.json()["choices"] and len(speaker.asked) == 1
    await desk.post(session, body, **{"x-stainless-retry-count": "0"})
    assert len(speaker.asked) == 2, "a client that means it asks anew"


async def test_a_client_that_repeats_a_request_under_way_gets_its_answer(desk):
    session, speaker = desk.open("yes")
    speaker.waits.clear()
    body = {"messages": [user("one")]}
    first = asyncio.create_task(desk.post(session, body))
    while not speaker.asked:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    again = asyncio.create_task(desk.post(session, body, **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.02)
    speaker.waits.set()
    assert (await again).json()["choices"] == (await first).json()["choices"] and len(speaker.asked) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff", "the body"),
        ({"messages": []}, "messages"),
        ({"messages": [user(7)]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "wizard", "content": "one"}]}, "messages.0.role"),
        ({"messages": [user("one")], "n": 0}, "n"),
        ({"messages": [user("one")], "n": 1000}, "n"),
        ({"messages": [user("one")], "logit_bias": {"5": 100}}, "logit_bias"),
        ({"messages": [user("one")], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [user("one")], "tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        ({"messages": [user("one")], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [user("one")], "max_tokens": 0}, "max_tokens"),
        ({"messages": [user("one")], "stop": [""]}, "stop"),
    ],
)
async def test_what_the_policy_cannot_do_is_refused_by_name(desk, body, words):
    session, speaker = desk.open("yes")
    error = await desk.refused(session, body)
    assert error["message"].startswith(words) and error["type"] == "invalid_request_error"
    assert not speaker.asked and not session.talk.turns


async def test_a_body_without_end_is_refused(desk):
    session, _ = desk.open("yes")
    await desk.refused(session, b" " * (MOST_BYTES + 1), 413)


async def test_an_answer_is_as_long_as_agent_and_run_allow(desk):
    session, speaker = desk.open("yes" * 20, "yes" * 20)
    choice = await desk.said(session, [user("one")], max_completion_tokens=4, stop="!")
    assert choice["message"]["content"] == "yesy" and choice["finish_reason"] == "length"
    assert speaker.asked[0].limits.stop == ("#", "!") and not session.cut, (
        "its own wish cut it, and it goes on"
    )
    said = [user("one"), {"role": "assistant", "content": "yesy"}, user("two")]
    choice = await desk.said(session, said, max_tokens=10_000)
    assert len(choice["message"]["content"]) == 40 and session.cut
    # The end of the turn that was cut stands before what follows.
    assert list(speaker.asked[1].prompt_ids)[-9:-3] == [END, *map(ord, "u:two")]


async def test_limits_end_a_session(desk):
    session, _ = desk.open("yes", most_turns=1)
    await desk.said(session, [user("one")])
    assert session.limit is None, "an agent that stops by itself has met no limit"
    error = await desk.refused(
        session, {"messages": [user("one"), {"role": "assistant", "content": "yes"}, user("two")]}
    )
    assert error["code"] == "turn_limit" and session.limit is Finish.TRUNCATED
    session, _ = desk.open("yes", most_tokens=20)
    await desk.said(session, [user("one")])
    said = [user("one"), {"role": "assistant", "content": "yes"}, user("two" * 9)]
    error = await desk.refused(session, {"messages": said})
    assert error["code"] == "context_length_exceeded" and session.limit is Finish.LENGTH
    assert session.talk.spans == [(3, 4)], "what does not fit is not kept"
    session, _ = desk.open("yes", most_tokens=20)
    await desk.refused(session, {"messages": [user("one" * 9)]})
    assert session.limit is Finish.PROMPT_TOO_LONG


@pytest.mark.parametrize("end", [None, Refused("PAUSED", "the engine is paused")])
async def test_requests_of_a_sample_that_is_stopped_wait_and_do_not_fail(desk, end):
    session, _ = desk.open(end)
    waits = asyncio.create_task(desk.post(session, {"messages": [user("one")]}))
    await asyncio.wait({session.halted})
    await asyncio.sleep(0.05)
    assert not waits.done() and not session.talk.tokens
    assert (session.halted.exception() is None) == (end is None)
    session.over.set()
    assert (await waits).status_code == 503


def events_of(text):
    """The objects of a stream of server-sent events, and its last line."""
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [json.loads(event) for event in events], done


async def test_a_streamed_answer_comes_token_by_token_and_is_the_same_answer(desk):
    session, _ = desk.open("yes")
    body = {
        "messages": [user("one")],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
    }
    found = await desk.post(session, body)
    assert found.headers["content-type"].startswith("text/event-stream")
    pieces, done = events_of(found.text)
    assert done == "[DONE]" and {piece["object"] for piece in pieces} == {"chat.completion.chunk"}
    assert {piece["id"] for piece in pieces} == {f"chatcmpl-{session.id}-1"}
    choices = [piece["choices"][0] for piece in pieces[:-1]]
    assert [choice["delta"].get("content", "") for choice in choices] == ["y", "e", "s", "", ""]
    assert choices[0]["delta"]["role"] == "assistant"
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert [(token["token"], token["logprob"]) for token in tokens] == [
        (text, -0.5) for text in ("y", "e", "s", "")
    ]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert pieces[-1]["usage"] == {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    assert session.talk.spans == [(3, 4)]


async def test_a_stream_keeps_back_what_may_be_a_call_and_tells_it_whole(desk):
    session, _ = desk.open("I <add> " + CALL, most_tokens=400)
    session._terms.stream.__dict__["max_new_tokens"] = 100
    body = {"messages": [user("1+2")], "tools": TOOLS, "stream": True}
    pieces, _ = events_of((await desk.post(session, body)).text)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "I <add>"
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "add" and calls[0]["index"] == 0
    assert pieces[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_that_its_client_leaves_is_stopped_and_forgotten(desk):
    session, speaker = desk.open("yes", "no")
    speaker.waits.clear()
    parts = pieces_of(
        lambda told: session.answer(
            read_request(b'{"messages": [{"role": "user", "content": "one"}]}'), told=told
        ),
        [Pieces(Letters(), (), log_probs=False)],
    )
    first = asyncio.ensure_future(anext(parts))
    while not speaker.asked:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0)
    assert speaker.stopped == 1 and not session.turns
    speaker.waits.set()
    assert (await desk.said(session, [user("one")]))["message"]["content"] == "yes"
    assert session.join().spans == [(3, 4)]


async def test_a_character_of_several_tokens_is_told_when_it_is_whole():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    pieces, told = Pieces(Bytes(), (), log_probs=True), []
    for byte in "né🙂".encode():
        told.append(pieces.new([byte], [-1.0]))
    assert [text for text, _ in told] == ["n", "", "é", "", "", "", "🙂"]
    assert [len(tokens) for _, tokens in told] == [1, 0, 2, 0, 0, 0, 4]


async def test_what_is_refused_before_a_stream_begins_is_a_plain_refusal(desk):
    session, _ = desk.open("yes", most_tokens=20)
    await desk.refused(session, {"messages": [user("one" * 9)], "stream": True})


async def test_calls_of_tools_are_told_as_calls_and_taken_back(desk):
    session, speaker = desk.open("I add. " + CALL, "three", most_tokens=400)
    session._terms.stream.__dict__["max_new_tokens"] = 100
    choice = await desk.said(session, [user("1+2")], tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    assert call["type"] == "function" and call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    call["function"]["arguments"] = '{"b":2,"a":1}'  # as a framework writes it anew
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    choice = await desk.said(session, [user("1+2"), choice["message"], result], tools=TOOLS)
    assert choice["message"]["content"] == "three"
    context = Letters().decode(speaker.asked[1].prompt_ids)
    assert context == f"[1 tools]u:1+2a:I add. {CALL}t:3a:", "its own turn is as it was sampled"
    assert ("assistant", f"I add. {CALL}") in session.talk.said and ("tool", "3") in session.talk.said


@pytest.mark.parametrize("text", ['<tool_call>{"name": </tool_call>', "<tool_call>{"])
async def test_a_broken_call_is_text(desk, text):
    session, _ = desk.open(text)
    choice = await desk.said(session, [user("1+2")], tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


async def test_rewards_are_of_the_turn_that_they_follow(desk):
    session, _ = desk.open("yes", "no")
    path = f"/v1/sessions/{session.id}/reward"
    assert (await desk.refused(session, {"reward": 1}, 409, path))["code"] == "no_turn"
    await desk.said(session, [user("one")])
    for wrong in (
        {"reward": "1"},
        {"reward": True},
        {},
        [1],
        b"NaN",
        b'{"reward": NaN}',
        {"reward": 1, "success": 1},
    ):
        await desk.refused(session, wrong, 400, path)
    assert not session.rewarded
    assert (await desk.post(session, {"reward": 0.5}, path)).json() == {"rewards": [0.5]}
    await desk.said(session, [user("one"), {"role": "assistant", "content": "yes"}, user("two")])
    await desk.post(session, {"reward": -1, "success": True}, path)
    await desk.post(session, {"reward": 0.25}, path)
    assert session.talk.rewards == [0.5, -0.75] and session.talk.success and session.rewarded


async def test_what_is_not_served_says_what_is(desk):
    session, _ = desk.open("yes")
    found = await desk.client.get("/v1/models", headers={"Authorization": f"Bearer {session.api_key}"})
    assert [each["id"] for each in found.json()["data"]] == ["run"]
    error = await desk.refused(session, {}, 404, "/v1/embeddings")
    assert "POST /v1/chat/completions" in error["message"]


@pytest.fixture
async def openai_client(desk):
    """Makes real clients of a session."""
    clients = []

    def made(session):
        transport = httpx2.ASGITransport(make_app(desk.endpoint))
        clients.append(httpx2.AsyncClient(transport=transport))
        return AsyncOpenAI(
            base_url="http://endpoint/v1", api_key=session.api_key, http_client=clients[-1], max_retries=0
        )

    yield made
    for client in clients:
        await client.aclose()


async def test_the_openai_client_reads_what_it_is_answered(desk, openai_client):
    session, _ = desk.open("yes", CALL, "three", most_tokens=400)
    session._terms.stream.__dict__["max_new_tokens"] = 100
    client = openai_client(session)
    messages = [user("one")]
    found = await client.chat.completions.create(
        model="x", messages=messages, tools=TOOLS, logprobs=True, seed=3
    )
    assert found.choices[0].message.content == "yes" and found.usage.completion_tokens == 4
    assert found.choices[0].logprobs.content[0].token == "y"
    messages += [found.choices[0].message, user("1+2")]
    calls = []
    stream = await client.chat.completions.create(model="x", messages=messages, tools=TOOLS, stream=True)
    async for piece in stream:
        calls += piece.choices[0].delta.tool_calls or []
    assert calls[0].function.name == "add"
    call = {"id": calls[0].id, "type": "function", "function": calls[0].function.model_dump()}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    found = await client.chat.completions.create(model="x", messages=messages, tools=TOOLS)
    assert found.choices[0].message.content == "three"
    with pytest.raises(BadRequestError, match="logit_bias"):
        await client.chat.completions.create(model="x", messages=messages, logit_bias={"5": 100})
    assert [each.id async for each in client.models.list()] == ["run"]


async def test_responses_are_the_same_session_in_another_form(desk, openai_client):
    session, speaker = desk.open("Sum: " + CALL, "three", "yes" * 40, most_tokens=500)
    session._terms.stream.__dict__["max_new_tokens"] = 100
    client = openai_client(session)
    tools = [{"type": "function", "name": "add", "parameters": {}, "strict": True}]
    items = [user("1+2")]
    more = {"model": "x", "instructions": "be", "tools": tools}
    found = await client.responses.create(input=items, **more)
    assert found.output_text == "Sum:" and found.output[1].name == "add" and found.status == "completed"
    items += [each.model_dump() for each in found.output]
    items += [{"type": "function_call_output", "call_id": found.output[1].call_id, "output": "3"}]
    found = await client.responses.create(input=items, **more)
    assert found.output_text == "three" and found.usage.output_tokens == 6
    context = Letters().decode(speaker.asked[1].prompt_ids)
    assert context == f"[1 tools]s:beu:1+2a:Sum: {CALL}t:3a:"
    found = await client.responses.create(
        input="go on", previous_response_id=found.id, max_output_tokens=5, **more
    )
    assert found.status == "incomplete" and found.output_text == "yesye"
    assert Letters().decode(speaker.asked[2].prompt_ids) == f"{context}threeu:go ona:"
    error = await desk.refused(
        session, {"input": "x", "previous_response_id": "resp_other"}, 404, "/v1/responses"
    )
    assert "no response of this session" in error["message"]
    for wrong, words in (
        ({"input": 7}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "messages.0.content"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0"),
        (b"{", "the body"),
        (b"[]", "the body"),
    ):
        error = await desk.refused(session, wrong, path="/v1/responses")
        assert error["message"].startswith(words), error


async def test_a_streamed_response_is_read_by_the_client(desk, openai_client):
    session, _ = desk.open("Sum: " + CALL, most_tokens=500)
    session._terms.stream.__dict__["max_new_tokens"] = 100
    tools = [{"type": "function", "name": "add", "parameters": {}, "strict": True}]
    kinds, text = [], ""
    async with openai_client(session).responses.stream(model="x", input="1+2", tools=tools) as stream:
        async for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        found = await stream.get_final_response()
    assert text.strip() == "Sum:" and kinds.count("response.output_text.delta") > 1
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert found.output_text == "Sum:" and found.output[1].name == "add"
