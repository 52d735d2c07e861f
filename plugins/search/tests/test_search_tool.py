"""The tool `search` in a conversation: in memory, over a shared server of an index, and over an address."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import uvicorn
from headrace_search import server, tool
from headrace_search.index import Found, Index, SearchProblem, build
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.backend import Conversations
from starlette.testclient import TestClient


def talk(**options):
    return Conversations().converse(
        "tools", {"tools": [{"name": "search", "options": options}], "deadline_s": 60.0}
    )


def call(query):
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"


def answers(environment, content):
    messages, _, _ = environment.step({"role": "assistant", "content": content})
    return [message["content"] for message in messages]


def test_a_corpus_is_searched_in_memory(corpus):
    environment = talk(path=str(corpus), results=2, longest=9)
    _, tools = environment.reset(0, {"question": "?"})
    assert tools[0]["function"]["parameters"]["properties"] == {"query": {"type": "string"}}
    (found,) = answers(environment, call("which river does Ulm lie at, the Danube?"))
    assert found == "[0] The Danub\n\n[2] Ulm has a"
    assert answers(environment, call("zebra") + call("")) == ["nothing was found"] * 2


@pytest.fixture
def own_tmp(tmp_path, monkeypatch):
    """Where the servers' sockets lie, so that this test's are its own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(server, "UNUSED_S", 0.1)
    tool._shared.cache_clear()
    yield tmp_path
    tool._shared.cache_clear()


def servers(index):
    """Processes that serve an index, by id."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if b"headrace_search.server" in line and str(index).encode() in line:
            found.append(int(place.name))
    return found


def until(condition, seconds=60.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.05)


ASKS = """
import sys, json
from headrace_search.tool import build, SearchOptions
tool = build(SearchOptions(path=sys.argv[1], by="meaning", results=1))
print(tool.begin({"query": "dogs at night"}, 60.0)(60.0), flush=True)
sys.stdin.read()
"""


def test_processes_share_one_server_which_ends_with_the_last(index, own_tmp):
    """Also where it was killed in between: it is started anew, and nothing is lost but the call."""
    several = [
        subprocess.Popen(
            [sys.executable, "-c", ASKS, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert [each.stdout.readline() for each in several] == ["[4] Dogs bark at night.\n"] * 2
        (first,) = servers(index)
        environment = talk(path=str(index), by="meaning", results=1)
        os.kill(first, signal.SIGKILL)
        until(lambda: not servers(index))
        assert answers(environment, call("dogs at night")) == ["[4] Dogs bark at night."]
        assert len(servers(index)) == 1
    finally:
        for each in several:
            each.kill()
            each.communicate()
    del environment
    tool._shared.cache_clear()
    gc.collect()  # the failure's frames, which a process takes with it
    until(lambda: not servers(index))


@pytest.fixture
def client(index):
    with TestClient(server.app(Index(index), token="")) as made:
        yield made


def test_the_server_speaks_the_form_of_search_r1(client):
    asked = {"queries": ["the Danube", "dogs bark"], "topk": 2, "return_scores": True}
    first, second = client.post("/retrieve", json=asked).json()["result"]
    assert first[0]["document"] == {"id": "0", "contents": "The Danube flows through Ulm."}
    assert first[0]["score"] > first[1]["score"] and second[0]["document"]["id"] == "4"
    plain = client.post("/retrieve", json={"queries": ["the Danube"], "topk": 1}).json()["result"]
    assert plain == [[{"id": "0", "contents": "The Danube flows through Ulm."}]]


async def test_queries_that_wait_together_are_one_batch_and_each_gets_its_own():
    asked = []

    class Counted:
        def search(self, queries, count, by):
            asked.append(len(queries))
            if "bad" in queries:
                raise SearchProblem("no", "none")
            return [[Found(int(query), count, by)] for query in queries]

    batches = server.Batches(Counted())
    answering = asyncio.create_task(batches.answer())
    wanted = [server.Asked(queries=[str(n), str(n + 100)], topk=1 + n % 2, by="words") for n in range(10)]
    bad = batches.search(server.Asked(queries=["bad"], topk=9))
    *found, refused = await asyncio.gather(*map(batches.search, wanted), bad, return_exceptions=True)
    answering.cancel()
    assert [[each[0].row for each in several] for several in found] == [[n, n + 100] for n in range(10)]
    assert [several[0][0].score for several in found] == [1, 2] * 5
    assert sorted(asked) == [1, 10, 10] and isinstance(refused, SearchProblem)


@pytest.fixture
def address(index):
    """Of a server of its own, as `headrace search serve` starts it."""
    config = uvicorn.Config(server.app(Index(index)), host="127.0.0.1", port=0, log_level="warning")
    serving = uvicorn.Server(config)
    thread = threading.Thread(target=serving.run)
    thread.start()
    until(lambda: serving.started)
    yield f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"
    serving.should_exit = True
    thread.join()


def test_the_search_of_skyrl_gym_asks_our_server_unchanged(address):
    """Search-R1's task as SkyRL wrote it: a search, what was found, and an answer that its own score judges."""
    config = {"search_url": f"{address}/retrieve", "topk": 2, "timeout": 30, "log_requests": False}
    options = {"config": config, "extras": {"max_turns": 3}}
    environment = Conversations().converse("skyrl_gym:search", options)
    asked = {"question": "which river?", "reward_spec": {"ground_truth": {"target": ["Danube"]}}}
    environment.reset(0, asked)
    said, reward, done = environment.step(
        {"role": "assistant", "content": "<search>the Danube flows</search>"}
    )
    assert (reward, done) == (0.0, False) and "Doc 1: The Danube flows through Ulm." in said[0]["content"]
    _, reward, done = environment.step({"role": "assistant", "content": "<answer>Danube</answer>"})
    assert done and reward == 1.0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("no json", 400, "JSON"),
        ('{"queries": []}', 400, "queries"),
        ('{"queries": ["x"], "top": 3}', 400, "top"),
        (json.dumps({"queries": ["x"] * 257}), 400, "queries"),
        ('{"queries": ["x"], "topk": 101}', 400, "topk"),
        (" " * (1 << 20) + "1", 413, "1,048,576 bytes"),
    ],
)
def test_wrong_requests_are_refused(client, body, status, words):
    answer = client.post("/retrieve", content=body)
    assert answer.status_code == status and words in answer.json()["error"]


def test_a_token_is_wanted_where_one_is_set(index, monkeypatch):
    asked = {"queries": ["the Danube"]}
    with TestClient(server.app(Index(index), token="t0")) as client:
        assert client.post("/retrieve", json=asked).status_code == 401
        assert client.post("/retrieve", json=asked, headers={"Authorization": "Bearer t"}).status_code == 401
        assert client.post("/retrieve", json=asked, headers={"Authorization": "Bearer t0"}).status_code == 200
    monkeypatch.delenv(server.TOKEN, raising=False)
    with pytest.raises(ValueError, match=f"set {server.TOKEN}"):
        server.serve(index, "0.0.0.0", 0)


def test_a_conversation_asks_an_address_and_is_made_again_where_it_is_gone(client, monkeypatch):
    """What the address refuses is told to the model; what is no server of an index, or none, loses the conversation."""
    monkeypatch.setattr(tool.httpx, "Client", lambda **options: client)
    environment = talk(url="http://retriever:8000", results=1)
    assert answers(environment, call("the Danube")) == ["[0] The Danube flows through Ulm."]
    (long,) = answers(environment, call("x" * 9000))
    assert "error" in long and "8192 characters" in long
    monkeypatch.undo()
    with pytest.raises(tool.ServiceLost, match="does not answer"):
        answers(talk(url="http://127.0.0.1:1"), call("the Danube"))
    html = httpx.MockTransport(lambda request: httpx.Response(200, text="<html>"))
    with closing(httpx.Client(transport=html, base_url="http://x")) as wrong:
        monkeypatch.setattr(tool.httpx, "Client", lambda **options: wrong)
        with pytest.raises(tool.ServiceLost, match="in another form"):
            answers(talk(url="http://x"), call("the Danube"))


def test_an_index_that_has_no_vectors_is_not_asked_by_meaning(corpus, tmp_path):
    build(corpus, tmp_path / "words")
    with pytest.raises(BackendError) as caught:
        talk(path=str(tmp_path / "words"), by="meaning")
    assert caught.value.field == "options_json.tools.search" and "by words alone" in caught.value.message


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({}, "options_json.tools.search", "give path"),
        ({"path": "a.jsonl", "url": "http://x"}, "options_json.tools.search", "give path"),
        ({"path": "no.jsonl"}, "options_json.tools.search", "no.jsonl cannot be read"),
        ({"path": "no.jsonl", "by": "both"}, "options_json.tools.search", "headrace search build"),
        ({"path": "."}, "options_json.tools.search", "is no index: headrace search build"),
        ({"corpus": "a.jsonl"}, "options_json.tools.search.corpus", "unknown key"),
    ],
)
def test_options_that_are_wrong_are_named(options, key, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackendError) as caught:
        talk(**options)
    assert caught.value.field == key and words in caught.value.message
