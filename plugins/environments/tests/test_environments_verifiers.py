"""Tasksets of verifiers in real children: they ask a stub of the endpoint, and their own code gives the reward.

Where verifiers is: `make simulators SIM=verifiers`, then .envs/verifiers/bin/python -m pytest.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import grpc
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
EXAMPLE = Path(__file__).resolve().parents[3] / "examples/environments/guess_v1"
with_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="make simulators SIM=verifiers")


class Endpoint(BaseHTTPRequestHandler):
    """Says `says` in turn, and refuses a second request of a conversation where `limit` is set."""

    says, limit, asked = ["2"], "", list[list[str]]()

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["content-length"])))
        texts = [message["content"] for message in given["messages"]]
        self.asked.append(texts)
        status = 400 if self.limit and len(texts) > 1 else 200
        message = {"role": "assistant", "content": self.says[(len(self.asked) - 1) % len(self.says)]}
        usage = {"prompt_tokens": len(texts), "completion_tokens": 1, "total_tokens": len(texts) + 1}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "usage": usage,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
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
def opened(simulator, endpoint, tmp_path):
    """Opens a pool of the example's taskset, and plays a task in it."""
    shutil.copytree(EXAMPLE, tmp_path / "guess_v1")

    async def open_pool(**options):
        fields = {"backend": "verifiers", "options": options, "processes": 1, "step_timeout_s": 30.0}
        pool = await simulator.open("./guess_v1", **fields)

        async def played(seed: int, *says: str, limit: str = ""):
            endpoint.says, endpoint.limit, endpoint.asked[:] = list(says) or ["2"], limit, []
            given = {"base_url": endpoint.url, "api_key": "sk-1", "session": "5e55", "item": {}}
            assert (await pool.reset(seed=seed, options=given)).status == OK
            return await pool.wait_for_agent(30)

        assert pool.opened.conversation and pool.opened.agents
        return played

    return open_pool


def told(outcome) -> dict[str, float]:
    return json.loads(outcome.info_json)["figures"]


@with_verifiers
async def test_a_packaged_taskset_is_played_by_its_own_harness_and_says_what_it_cost(opened, endpoint):
    played = await opened(taskset={"rows": 3})
    right = await played(4, "1", "2")  # row 1, whose secret is 2
    assert (right.status, right.terminated, right.reward) == (OK, True, 1.0), right.detail
    assert endpoint.asked == [["?"], ["?", "1", "+"]]
    cost = {"turns": 2.0, "input_tokens": 2.0, "output_tokens": 2.0, "errors": 0.0}
    assert told(right) == {**cost, "first": 0.0, "reward_right": 1.0}
    wrong = await played(2, "1", "1")
    assert (wrong.reward, endpoint.asked[-1]) == (0.0, ["?", "1", "+"])
    assert (await played(0, "no")).reward == -0.5
    cut = await played(1, "3", limit="turn_limit")
    assert (cut.status, cut.reward) == (OK, 0.0), "a limit of the run is no failure: what was said is judged"
    assert told(cut)["errors"] == 1.0
    lost = await played(1, "3", limit="another_refusal")
    assert lost.status == LOST and "ProviderError: upstream 400" in lost.detail, lost.detail
    assert (await played(0, "1")).reward == 1.0, "the next one plays"


@with_verifiers
async def test_an_environment_that_compares_attempts_is_one_sample(opened, endpoint):
    """What best-of-n says of its attempts together, which the task of one alone cannot."""
    played = await opened(id="best-of-n", n=3, agent={"harness": {"guesses": 1}})
    several = await played(0, "3", "1", "2")
    assert (several.status, several.reward) == (OK, 1.0), several.detail
    assert endpoint.asked == [["?"]] * 3
    found = told(several)
    assert (found["turns"], found["traces"], found["pass_at_n"]) == (3.0, 3.0, 1.0)
    assert found["best"] == found["reward_right"] == pytest.approx(1 / 3)


ERRAND = '''
"""A taskset with a server of tools, and an agent that calls one and asks the model what it heard."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import mcp_client

__all__ = ["Errand", "Caller"]


class Data(vf.TaskData):
    answer: str = "rain"


class Weather(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def weather(self, town: str) -> str:
        """Tells the weather."""
        return f"rain in {town}"


class Task(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Weather(vf.ToolsetConfig())]


class Errand(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield Task(Data(prompt="Ulm?"), self.config.task)


class Caller(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER, EXECUTES_CODE, SUPPORTS_MCP = False, False, True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        (url,) = mcp_urls.values()
        async with mcp_client({"url": url}) as tools:
            heard = (await tools.call_tool("weather", {"town": "Ulm"})).content[0].text
        messages = [{"role": "user", "content": f"{data.prompt} {heard}"}]
        key = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=key, timeout=60) as client:
            (await client.post("/chat/completions", json={"model": ctx.model, "messages": messages})).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    Weather.run()
'''


@with_verifiers
@pytest.mark.nightly  # quick: test_a_packaged_taskset_is_played_by_its_own_harness_and_says_what_it_cost
async def test_servers_of_tools_and_judges_are_those_of_the_taskset(simulator, endpoint, tmp_path):
    (tmp_path / "errand.py").write_text(ERRAND)
    judge = {"id": "reference", "base_url": f"{endpoint.url}/judge", "api_key_var": "JUDGE", "weight": 0.5}
    options = {"taskset": {"task": {"judges": [judge]}}, "tasks": 4}
    fields = {"backend": "verifiers", "options": options, "processes": 1, "step_timeout_s": 60.0}
    pool = await simulator.open("./errand.py", **fields)
    endpoint.says, endpoint.asked[:] = ["wet", "yes"], []
    given = {"base_url": endpoint.url, "api_key": "sk-1", "session": "5e55", "item": {}}
    assert (await pool.reset(seed=5, options=given)).status == OK
    played = await pool.wait_for_agent(60)
    assert (played.status, played.reward) == (OK, 0.5), played.detail
    asked, judged = endpoint.asked
    assert asked == ["Ulm? rain in Ulm"] and "rain" in judged[-1] and "wet" in judged[-1]
    assert told(played)["judge_tokens"] > 0 and told(played)["turns"] == 1.0


WRONG = {
    "nowhere": ({}, "environment.name", "taskset 'nowhere' not found"),
    "./gone.py": ({}, "environment.name", "no such file"),
    "./older.py": ({}, "environment.name", "is of another verifiers"),
    "./oldest.py": ({}, "environment.name", "for verifiers 0.4"),
    "./other.py": ({}, "environment.name", "exports its Taskset, and its Harness, by __all__"),
    "./empty.py": ({}, "environment.name", "has no task"),
    "./guess_v1": ({"taskset": {"rosw": 3}}, "options_json.taskset.rosw", "verifiers refuses it"),
}
FILES = {
    "older.py": "import verifiers as vf\n\n\ndef load_environment():\n    return vf.SingleTurnEnv()\n",
    "oldest.py": "import verifiers as vf\n\n\nclass Talk(vf.MultiTurnEnv):\n    pass\n",
    "other.py": "__all__ = ['A']\n\n\nclass A:\n    pass\n",
    "empty.py": "import verifiers.v1 as vf\n\n__all__ = ['Empty']\n\n\nclass Empty(vf.Taskset[vf.Task, "
    "vf.TasksetConfig]):\n    def load(self):\n        return []\n",
}


@with_verifiers
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_taskset_of_this_verifiers_is_refused_by_key(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLE, tmp_path / "guess_v1")
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    options, key, words = WRONG[name]
    with pytest.raises(BackendError) as caught:
        create("verifiers").agent(name, options)
    assert caught.value.field == key and words in caught.value.message, caught.value.message


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="of a Python without verifiers")
async def test_a_python_without_verifiers_says_what_makes_one(simulator):
    with pytest.raises(grpc.aio.AioRpcError, match="make simulators SIM=verifiers"):
        await simulator.open("guess-v1", backend="verifiers")
