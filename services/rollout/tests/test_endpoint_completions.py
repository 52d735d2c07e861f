"""POST /v1/completions: texts that extend each other are one trajectory of exact ids, without a chat template."""

from __future__ import annotations

import httpx2
import pytest
from endpoint_desk import END, Letters
from headrace_rollout.endpoint.routes import make_app
from openai import AsyncOpenAI

TEXT = "/v1/completions"


async def test_texts_that_extend_each_other_are_one_trajectory_of_exact_ids(desk):
    """By the openai client, whole and streamed; the end that was sampled stays in the context."""
    session, speaker = desk.open("yes", " no")
    transport = httpx2.ASGITransport(make_app(desk.endpoint))
    web = httpx2.AsyncClient(transport=transport)
    async with AsyncOpenAI(base_url="http://endpoint/v1", api_key=session.api_key, http_client=web) as client:
        first = await client.completions.create(model="m", prompt="Is it? ", logprobs=1, max_tokens=30)
        (choice,) = first.choices
        assert (choice.text, choice.finish_reason, first.object) == ("yes", "stop", "text_completion")
        assert choice.logprobs.tokens == ["y", "e", "s", ""] and choice.logprobs.token_logprobs == [-0.5] * 4
        assert choice.logprobs.text_offset == [7, 8, 9, 10]
        streamed = await client.completions.create(
            model="m", prompt=["Is it? yes. And?"], stream=True, stream_options={"include_usage": True}
        )
        pieces = [piece async for piece in streamed]
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == " no"
    assert pieces[-1].usage.completion_tokens == 4
    one, two = speaker.asked
    assert Letters().decode(one.prompt_ids) == "^Is it? " and one.draw.max_new_tokens == 30
    assert list(two.prompt_ids) == [*one.prompt_ids, *map(ord, "yes"), END, *map(ord, ". And?")]
    talk = session.join()
    texts = [each.content for each in talk.messages]
    assert texts == ["Is it? ", "yes", ". And?", " no"]
    assert talk.branches[0].spans == [(3, 4), (0, 6), (3, 4)]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "Is it? yes!", "n": 0}, "n", "greater than or equal to 1"),
        ({"prompt": "Is it? yes!", "best_of": 2}, "best_of", "give n"),
        ({"prompt": "Is it? yes!", "echo": True}, "echo", "leave it out"),
        ({"prompt": "Is it? yes!", "suffix": "x"}, "suffix", "leave it out"),
        ({"prompt": "Is it? yes!", "logprobs": 5}, "logprobs", "give 1"),
        ({"prompt": ["a", "b"]}, "prompt", "give one text"),
        ({"prompt": [1, 2]}, "prompt", "give one text"),
        ({"prompt": ""}, "prompt", "give one text"),
        ({"messages": []}, "prompt", "give one text"),
    ],
)
async def test_what_a_session_cannot_answer_is_refused_by_name(desk, body, param, words):
    session, speaker = desk.open("yes", "no")
    assert (await desk.post(session, {"prompt": "Is it? "}, TEXT)).json()["choices"][0]["text"] == "yes"
    error = await desk.refused(session, body, path=TEXT)
    assert error["param"] == param and words in error["message"]
    assert len(speaker.asked) == 1


async def test_texts_and_messages_of_a_session_are_branches(desk):
    session, speaker = desk.open("yes", "no", "so")
    await desk.post(session, {"prompt": "Is it? "}, TEXT)
    messages = [{"role": "user", "content": "Is it? "}, {"role": "assistant", "content": "yes"}]
    await desk.said(session, [*messages, {"role": "user", "content": "."}])
    found = await desk.post(session, {"prompt": "Is it? yes"}, TEXT)
    assert found.json()["choices"][0]["text"] == "so", "it adds nothing, and so begins anew"
    assert Letters().decode(speaker.asked[2].prompt_ids) == "^Is it? yes"
    assert [[number for number, _ in branch.spans] for branch in session.join().branches] == [[3]] * 3
    assert (await desk.refused(session, b"[]", path=TEXT))["message"] == "the body: give a JSON object"
