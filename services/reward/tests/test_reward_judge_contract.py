"""What OpenAI's contract allows a judge's server: names of keys, shapes of replies, errors with status 200."""

from __future__ import annotations

import json

import pytest
from headrace_reward import scorers
from headrace_reward.scorers.base import Answer, AnswerFailed, ScorerError, Unavailable
from judge_stub import judge

SUM = Answer(prompt="1 + 1?", completion="It is 2.", reference="2")


def made(name, options):
    return scorers.choose(name, options).build()


def said(score) -> str:
    return json.dumps({"reason": "", "score": score})


@pytest.mark.parametrize(
    ("keys", "options", "sent"),
    [
        ({"max_tokens": "max_completion_tokens"}, {}, {"max_completion_tokens": 512, "temperature": 0}),
        ({"temperature": None, "max_tokens": None}, {}, {}),
        ({}, {"temperature": None, "max_tokens": None}, {}),
        ({"model": None}, {}, {"max_tokens": 512, "temperature": 0}),
        (
            {"model": "deployment"},
            {"max_tokens": 7},
            {"max_tokens": 7, "temperature": 0, "deployment": "grader-7b"},
        ),
    ],
)
async def test_every_key_that_is_sent_can_be_renamed_or_left_out(keys, options, sent):
    with judge(lambda body: said(8), keys=keys, verdict="json", **options) as (stub, given):
        assert (await made("judge", given).score(SUM))["verdict"] == 8
    (asked,) = stub.asked
    assert len(asked.pop("messages")) == 2
    assert asked == sent | ({} if "model" in keys else {"model": "grader-7b"})


def test_keys_that_are_not_sent_are_named():
    for keys, words in (({"top_p": "p"}, "top_p is never sent"), ({"messages": None}, "cannot be left out")):
        with pytest.raises(ScorerError, match=words):
            made("judge", {"base_url": "http://127.0.0.1:1/v1", "model": "m", "keys": keys})


def choice(finish="stop", **message):
    return 200, {
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}]
    }


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (choice(content=None, refusal="I will not."), "the judge refuses: I will not."),
        (choice(content=[{"type": "refusal", "refusal": "No."}]), "the judge refuses: No."),
        (choice(content=said(8), refusal="No."), "the judge refuses"),
        (choice("length", content='{"reason": "'), "longer than max_tokens"),
        (choice("content_filter", content=None), "content_filter"),
        (
            choice("tool_calls", content=None, tool_calls=[{"id": "a", "function": {"name": "f"}}]),
            "calls of tools",
        ),
        (choice("function_call", content=None, function_call={"name": "f"}), "calls of tools"),
        (choice(content="", reasoning_content="Well, 8."), "reasoning alone"),
        (choice(content=None, reasoning="Well, 8."), "reasoning alone"),
        (choice(content=None), "no content"),
        ((200, {"choices": []}), "no choices"),
    ],
)
async def test_replies_without_a_verdict_are_named(reply, words):
    with judge(lambda body: reply) as (_, options):
        with pytest.raises(AnswerFailed, match=words):
            await made("judge", options).score(SUM)


@pytest.mark.parametrize(
    "reply",
    [
        choice(content=[{"type": "text", "text": said(8)[:5]}, {"type": "text", "text": said(8)[5:]}]),
        choice(content=said(8), refusal=None, tool_calls=None, reasoning_content="9? No, 8.", annotations=[]),
        choice("eos", content=said(8), tool_calls=[]),
        (200, {"choices": [choice(content=said(8))[1]["choices"][0]] * 2, "error": None}),
    ],
)
async def test_every_shape_of_a_verdict_is_read(reply):
    with judge(lambda body: reply) as (_, options):
        assert (await made("judge", options).score(SUM))["verdict"] == 8


@pytest.mark.parametrize(
    ("error", "fault", "words"),
    [
        ({"message": "no such model", "code": 404}, Unavailable, "options.model"),
        ({"message": "no such model", "code": "model_not_found"}, Unavailable, "options.model"),
        ({"message": "bad key", "type": "authentication_error"}, Unavailable, "options.api_key"),
        ({"message": "max_tokens", "type": "invalid_request_error"}, ScorerError, "max_completion_tokens"),
        ({"message": "x", "code": "context_length_exceeded"}, AnswerFailed, "too long"),
        ("overloaded", Unavailable, "overloaded"),
        ({"message": "overloaded", "code": "503"}, Unavailable, "overloaded"),
    ],
)
async def test_errors_that_come_with_status_200_are_errors(error, fault, words):
    for body in ({"error": error}, {"choices": [{"error": error, "message": {"content": ""}}]}):
        with judge(lambda _, body=body: (200, body), deadline_s=0.6) as (_, options):
            with pytest.raises(fault) as raised:
                await made("judge", options).score(SUM)
        assert words in f"{getattr(raised.value, 'field', '')} {raised.value}" and type(raised.value) is fault
    replies = iter([(200, {"error": {"message": "slow down", "type": "rate_limit_error"}}), said(8)])
    with judge(lambda body: next(replies)) as (_, options):
        assert (await made("judge", options).score(SUM))["verdict"] == 8
