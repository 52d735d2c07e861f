"""An environment of verifiers in a real child: it asks a stub of the endpoint, and its rubric gives the reward."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
# Rewards by the number of turns; the model says what the environment does.
ENVIRONMENT = """
import time

import verifiers as vf
from datasets import Dataset


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        said = messages[-1]["content"]
        if said == "raise":
            raise RuntimeError("the environment fell over")
        if said == "break":
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": f"on {state['answer']}"}]


def turns(completion, answer):
    return len([m for m in completion if m["role"] == "assistant"]) + 10 * int(answer)


def load_environment(rows=2, max_turns=2):
    asked = [{"prompt": [{"role": "user", "content": f"row {row}"}], "answer": str(row)} for row in range(rows)]
    return Talk(dataset=Dataset.from_list(asked), rubric=vf.Rubric(funcs=[turns]), max_turns=max_turns)
"""


class Endpoint(BaseHTTPRequestHandler):
    """Says `says`, and refuses a second request where `limit` is set, as the endpoint does."""

    says, limit, asked = "on", "", list[list[str]]()

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = [message["content"] for message in given["messages"]]
        self.asked.append(texts)
        status = 400 if self.limit and len(texts) > 1 else 200
        message = {"role": "assistant", "content": self.says}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [choice],
        }
        refusal = {"error": {"message": "it is over", "code": self.limit, "type": "invalid_request_error"}}
        body = json.dumps(answer if status == 200 else refusal).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silence."""


@pytest.fixture
def endpoint() -> Iterator[type[Endpoint]]:
    handler = type("Said", (Endpoint,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def reset_timeout_s() -> float:
    return 30.0


@pytest.mark.nightly  # quick: test_an_environment_of_verifiers_that_is_missing_is_named
async def test_its_own_code_speaks_and_its_rubric_rewards(simulator, endpoint, tmp_path):
    (tmp_path / "talk.py").write_text(ENVIRONMENT)
    options = {"arguments": {"rows": 3}}
    fields = {"backend": "agent", "options": options, "processes": 1, "step_timeout_s": 30.0}
    pool = await simulator.open("verifiers:talk.py:load_environment", **fields)

    async def played(seed: int, says: str = "on", limit: str = ""):
        endpoint.says, endpoint.limit = says, limit
        given = {"base_url": endpoint.url, "api_key": "sk-1", "session": "5e55", "item": {}}
        assert (await pool.reset(seed=seed, options=given)).status == OK
        return await pool.wait_for_agent(20)

    for seed, row in ((0, 0), (4, 1), (2, 2)):
        ended = await played(seed)
        assert (ended.status, ended.terminated, ended.reward) == (OK, True, 2 + 10 * row), ended.detail
        assert endpoint.asked[-2:] == [[f"row {row}"], [f"row {row}", "on", f"on {row}"]]
    cut = await played(1, limit="turn_limit")
    assert (cut.status, cut.reward) == (OK, 11), "a limit of the run is no failure: what was said is judged"
    mute = await played(1, says="")
    assert (mute.status, mute.reward) == (OK, 10), "neither is a policy that says nothing"
    for says, limit, words in [
        ("raise", "", "RuntimeError: the environment fell over"),
        ("break", "", "InfraError: the sandbox is gone"),
        ("on", "another_refusal", "ModelError"),
    ]:
        lost = await played(0, says, limit)
        assert lost.status == LOST and words in lost.detail, lost.detail
        assert (await played(0)).reward == 2, "the next one plays"


def test_an_environment_of_verifiers_that_is_missing_is_named(monkeypatch):
    from headrace_simulator.backends import agent

    monkeypatch.setattr(agent.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'headrace-simulator\[verifiers\]'") as caught:
        create("agent").agent("verifiers:wordle", {})
    assert caught.value.field == "environment.name"
