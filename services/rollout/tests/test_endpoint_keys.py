"""Keys of requests and of messages: what is read, ignored or refused; ids of calls; bytes of log-probs."""

from __future__ import annotations

import json

import pytest
from endpoint_desk import CALL, CHAT, END, TOOLS, Letters, user
from headrace_rollout.endpoint.streaming import Spelling

ASK = {"messages": [user("one")]}
IGNORED = [
    {"metadata": {"a": "b"}, "user": "me", "store": True, "service_tier": "flex", "safety_identifier": "x"},
    {"prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}, "parallel_tool_calls": True},
    {"modalities": ["text"], "verbosity": "medium", "function_call": "none", "web_search_options": None},
    {"parallel_tool_calls": False, "logit_bias": {}, "n": 1, "stop": None, "tool_choice": "auto"},
]


@pytest.mark.parametrize("more", IGNORED)
async def test_keys_that_change_no_answer_are_ignored(desk, more):
    session, _ = desk.open("yes")
    await desk.said(session, [user("one")], **more)


REFUSED = {
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": TOOLS},
    "reasoning_effort": {"reasoning_effort": "high"},
    "verbosity": {"verbosity": "low"},
    "modalities": {"modalities": ["text", "audio"]},
    "audio": {"audio": {"voice": "x", "format": "wav"}},
    "web_search_options": {"web_search_options": {}},
    "function_call": {"function_call": {"name": "add"}},
    "functions": {"functions": [{"name": "add"}]},
    "documents": {"documents": [{"text": "x"}]},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "min_tokens": {"min_tokens": 5},
    "top_a": {"top_a": 0.1},
    "messages.0.audio": {"messages": [{"role": "assistant", "audio": {"id": "x"}}, user("one")]},
    "messages.0.function_call": {
        "messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, user("one")]
    },
}


@pytest.mark.parametrize("key", REFUSED)
async def test_keys_that_would_change_answers_are_refused_by_name(desk, key):
    session, speaker = desk.open("yes")
    error = await desk.refused(session, {**ASK, **REFUSED[key]})
    assert error["param"] == key and error["message"].startswith(f"{key}: ") and not speaker.asked


FORMS = {
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required", "tools": TOOLS},
    "parallel_tool_calls": {"parallel_tool_calls": False, "tools": TOOLS},
}


@pytest.mark.parametrize("key", FORMS)
@pytest.mark.parametrize("stream", [False, True])
async def test_forms_that_are_hints_force_nothing_and_are_told(desk, key, stream):
    session, speaker = desk.open("yes", hints=True)
    found = await desk.post(session, {**ASK, **FORMS[key], "stream": stream})
    assert found.status_code == 200 and found.headers["x-headrace-not-forced"] == key
    assert len(speaker.asked) == 1
    assert "x-headrace-not-forced" not in (await desk.post(desk.open("yes", hints=True)[0], ASK)).headers
    session, speaker = desk.open("yes")
    error = await desk.refused(session, {**ASK, **FORMS[key]})
    assert "agent.forms: hint" in error["message"] and not speaker.asked


@pytest.mark.parametrize(
    ("path", "key", "more"),
    [
        ("/v1/completions", "tools", {"tools": TOOLS}),
        ("/v1/completions", "reasoning_effort", {"reasoning_effort": "low"}),
        ("/v1/completions", "min_tokens", {"min_tokens": 3}),
        ("/v1/responses", "truncation", {"truncation": "auto"}),
        ("/v1/responses", "reasoning", {"reasoning": {"effort": "low"}}),
        ("/v1/responses", "max_tool_calls", {"max_tool_calls": 1}),
        ("/v1/responses", "n", {"n": 2}),
        ("/v1/responses", "stop", {"stop": "x"}),
        ("/v1/responses", "verbosity", {"text": {"verbosity": "high"}}),
        ("/v1/responses", "top_a", {"top_a": 1}),
    ],
)
async def test_keys_of_the_other_forms_are_refused_by_name(desk, path, key, more):
    session, speaker = desk.open("yes")
    error = await desk.refused(session, {"prompt" if "comp" in path else "input": "one", **more}, 400, path)
    assert error["param"] == key and not speaker.asked


async def test_responses_ignore_what_changes_nothing_and_tell_log_probs_that_are_included(desk):
    session, _ = desk.open("yes")
    more = {
        "truncation": "disabled",
        "store": False,
        "reasoning": {"summary": "auto"},
        "metadata": {},
        "text": {},
    }
    include = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    found = (await desk.post(session, {"input": "one", **more, **include}, "/v1/responses")).json()
    told = found["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for each in told for byte in each["bytes"]).decode() == "yes"


class Seen(Letters):
    """Keeps the messages that its template was given."""

    def __init__(self):
        self.chats = []

    def render(self, chat, arguments=None):
        self.chats.append(chat)
        return super().render(chat, arguments)


async def test_templates_see_the_keys_of_messages_and_calls_have_ids_of_nine_letters(desk):
    codec = Seen()
    session, _ = desk.open(CALL, "three", codec=codec, most_tokens=400)
    session._says.stream.__dict__["max_new_tokens"] = 100
    choice = await desk.said(session, [user("1+2")], tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    await desk.said(session, [user("1+2"), choice["message"], result], tools=TOOLS)
    (answer,) = [each for chat in codec.chats for each in chat if each["content"] == "3"][:1]
    assert (answer["tool_call_id"], answer["name"]) == (call["id"], "add")
    assert ("tool", "3") in [each[:2] for each in session.join().messages]
    thought = {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "hm",
        "refusal": None,
        "tool_calls": [call],
    }
    await desk.said(*[desk.open("yes", codec=codec)[0], [user("1"), thought, {**result, "name": "own"}]])
    before, told = codec.chats[-1][1:]
    assert before["reasoning_content"] == "hm" and "refusal" not in before
    assert before["tool_calls"] == [
        {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    ]
    assert told["name"] == "own"
    bare = {**thought, "tool_calls": [{**call, "id": None}]}  # as servers that give none write them
    await desk.said(desk.open("yes", codec=codec)[0], [user("1"), bare, {"role": "tool", "content": "3"}])


class Bytes(Letters):
    """Each byte is an id."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(id for id in ids if id != END).decode(errors="replace")

    def lengths(self, ids, text):
        found = [int(id != END) for id in ids]
        return found if sum(found) == len(text.encode()) else []


TEXT = "né🙂, 日本 \u200d!"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
async def test_bytes_of_log_probs_join_to_the_text(desk, path, stream):
    letters = "".join(map(chr, TEXT.encode()))
    session, _ = desk.open(letters, codec=Bytes())
    include = (
        {"include": ["message.output_text.logprobs"]} if path.endswith("responses") else {"logprobs": True}
    )
    body = {CHAT: ASK, "/v1/completions": {"prompt": "one"}}.get(path, {"input": "one"})
    found = await desk.post(session, {**body, **include, "stream": stream}, path)
    text = found.text
    if path == "/v1/completions":
        lines = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]] if stream else [json.loads(text)]
        tokens = [
            each for line in lines for each in (line["choices"][0]["logprobs"] or {"tokens": ()})["tokens"]
        ]
        assert tokens[0] == "n" and tokens[1:3] == ["\\xc3", "\\xa9"]
        return
    if stream and path == "/v1/responses":
        text = next(
            line for line in text.splitlines() if line.startswith('data: {"type": "response.completed"')
        )
    found = [each for line in text.split("data: ") if line[:1] == "{" for each in _bytes_in(json.loads(line))]
    assert bytes(found).decode() == TEXT


def _bytes_in(value):
    if isinstance(value, dict):
        yield from value.get("bytes") or ()
        for each in value.values():
            yield from _bytes_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _bytes_in(each)


def test_a_turn_that_ends_within_a_character_joins_to_what_is_shown_of_it():
    spelling = Spelling(Bytes())
    found = [*spelling.new(list("né🙂".encode()[:-1])), *spelling.rest()]
    assert b"".join(found).decode() == "né\ufffd" and len(found) == 6
