"""What a request of an agent may say: how answers are drawn, calls of tools, and what is refused by name."""

from __future__ import annotations

import json

import pytest
from endpoint_desk import CALL, TOOLS, Letters, user
from headrace_rollout.endpoint.routes import MOST_BYTES
from headrace_rollout.engines.samples import Distribution, Given

DRAWN = [
    ({}, None, True),
    ({"temperature": 1}, None, True),
    ({"temperature": 0.5, "top_p": 1}, Distribution(0.5), True),
    ({"temperature": 0}, Distribution(0.0), False),
    ({"top_p": 0.9}, Distribution(top_p=0.9), False),
]


@pytest.mark.parametrize(("said", "drawn", "learned"), DRAWN)
async def test_an_answer_is_drawn_as_the_request_says(desk, said, drawn, learned):
    """And kept with what it was drawn from; what a trainer cannot score carries no loss."""
    session, speaker = desk.open("yes")
    await desk.said(session, [user("one")], presence_penalty=0, **said)
    assert speaker.asked[0].draw.distribution == drawn
    talk = session.join()
    (branch,), (turn,) = talk.branches, talk.turns
    assert branch.drawn == [drawn if learned else None] and session.learned == learned
    assert (branch.spans, turn.tokens) == (([(3, 4)], 4) if learned else ([(0, 4)], 0))
    assert len(branch.tokens) == len(branch.log_probs) == 4


async def test_a_seed_draws_alike_within_a_session_and_each_choice_by_itself(desk):
    session, speaker = desk.open(*["yes"] * 5)
    for _ in range(2):
        await desk.said(session, [user("one")], seed=7, n=2)
    await desk.said(session, [user("one")])
    assert [asked.draw.seed for asked in speaker.asked] == ["7/0", "7/1", "7/0", "7/1", ""]


async def test_the_runs_own_sampling_holds_where_the_spec_says_so(desk):
    session, speaker = desk.open("yes", asked=False)
    await desk.said(session, [user("one")], temperature=0, top_p=0.1, seed=3, presence_penalty=2)
    assert (speaker.asked[0].draw.distribution, speaker.asked[0].draw.seed) == (None, "")
    session.join()
    assert session.learned


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
        ({"messages": [user("one")], "tools": [{"nope": 1}]}, "tools"),
        (
            {"messages": [user("one")], "tools": [{"type": "function", "function": {"description": "x"}}]},
            "tools",
        ),
        ({"messages": [user("one")], "temperature": -1}, "temperature"),
        ({"messages": [user("one")], "temperature": 0.001}, "temperature"),
        ({"messages": [user("one")], "top_p": 0}, "top_p"),
        ({"messages": [user("one")], "presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": [user("one")], "top_k": 5}, "top_k"),
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


async def test_calls_of_tools_are_told_as_calls_and_taken_back(desk):
    session, speaker = desk.open("I add. " + CALL, "three", most_tokens=400)
    session._says.stream.__dict__["max_new_tokens"] = 100
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
    said = [each[:2] for each in session.join().messages]
    assert ("assistant", f"I add. {CALL}") in said and ("tool", "3") in said


@pytest.mark.parametrize("text", ['<tool_call>{"name": </tool_call>', "<tool_call>{"])
async def test_a_broken_call_is_text(desk, text):
    session, _ = desk.open(text)
    choice = await desk.said(session, [user("1+2")], tools=TOOLS)
    assert choice["message"] == {"role": "assistant", "content": text} and choice["finish_reason"] == "stop"


async def test_what_is_not_served_says_what_is(desk):
    session, _ = desk.open("yes")
    found = await desk.client.get("/v1/models", headers={"Authorization": f"Bearer {session.api_key}"})
    assert [each["id"] for each in found.json()["data"]] == ["run"]
    error = await desk.refused(session, {}, 404, "/v1/embeddings")
    assert "POST /v1/chat/completions" in error["message"]


async def test_messages_of_which_the_template_shows_nothing_are_refused(desk, monkeypatch):
    session, speaker = desk.open("yes")
    monkeypatch.setattr(session.player.template, "opened", lambda chat, tools: Given([]))
    error = await desk.refused(session, {"messages": [{"role": "user", "content": None}]})
    assert error["message"].startswith("messages: nothing is said") and not speaker.asked
