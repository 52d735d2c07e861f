"""The endpoint as the openai client sees it: chat completions and responses, whole and streamed."""

from __future__ import annotations

import httpx2
import pytest
from endpoint_desk import CALL, TOOLS, Letters, user
from headrace_rollout.endpoint.routes import make_app
from openai import AsyncOpenAI, BadRequestError


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
    session._says.stream.__dict__["max_new_tokens"] = 100
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
    session._says.stream.__dict__["max_new_tokens"] = 100
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
    session._says.stream.__dict__["max_new_tokens"] = 100
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


@pytest.mark.parametrize("shown", ["", "wrong", "other"], ids=["no key", "a wrong key", "another's key"])
@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/sessions/{}/reward"),
        ("DELETE", "/sessions/{}"),
        ("POST", "/feedback"),
        ("POST", "/responses"),
        ("GET", "/models"),
        ("GET", "/sessions"),
    ],
)
async def test_who_may_not_see_a_session_does_not_learn_that_there_is_one(desk, method, route, shown):
    """Without the run's key or its own, what there is is refused word for word as what there never was."""
    there, _ = desk.open("yes")
    others, _ = desk.open("yes")
    keys = {"wrong": there.api_key[:-1] + "!", "other": others.api_key}
    headers = {"Authorization": f"Bearer {keys[shown]}"} if shown else {}
    said = []
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app(desk.endpoint))) as client:
        for id in (there.id, f"{there.id[:-4]}zzzz"):
            body = {
                "completion": f"{id}-1",
                "reward": 1,
                "previous_response_id": f"resp_{id}_1",
                "input": "x",
            }
            url = f"http://endpoint/v1{route.format(id)}"
            answer = await client.request(method, url, json=body, headers=headers)
            said.append((answer.status_code, answer.text.replace(id, "ID")))
    assert said[0] == said[1]
    assert there.id not in said[0][1] and there.api_key not in said[0][1]
    if not (shown == "other" and route == "/models"):
        assert said[0][0] in (400, 401, 404)
    if shown != "other":
        assert said[0][0] == 401
