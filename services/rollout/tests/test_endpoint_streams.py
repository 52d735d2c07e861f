"""Answers of the endpoint as they are made: pieces of text, calls that are kept back, clients that leave."""

from __future__ import annotations

import asyncio
import json

from endpoint_desk import CALL, TOOLS, Letters, user
from headrace_rollout.endpoint.requests import read_request
from headrace_rollout.endpoint.streaming import Pieces, pieces_of


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
    assert session.join().branches[0].spans == [(3, 4)]


async def test_a_stream_keeps_back_what_may_be_a_call_and_tells_it_whole(desk):
    session, _ = desk.open("I <add> " + CALL, most_tokens=400)
    session._says.stream.__dict__["max_new_tokens"] = 100
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
    assert speaker.stopped == 1 and not session.talk.turns
    speaker.waits.set()
    assert (await desk.said(session, [user("one")]))["message"]["content"] == "yes"
    assert session.join().branches[0].spans == [(3, 4)]


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
