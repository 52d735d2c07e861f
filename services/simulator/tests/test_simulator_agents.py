"""Agents in real children: what they return, how they fail, and that nothing of one outlives it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.contained.settings import ContainedSettings, Containment, NotContained
from headrace_servicekit.process.worker import contain_workers
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError
from headrace_simulator.pools.pool import PoolPlan, _openings

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
# Does what its item says. Its client is made as the file is imported, as that of many programs is.
AGENT = """
import asyncio
import os
import subprocess
import sys
import time

CLIENT = (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
RETURNS = {"number": 2, "nothing": {}, "both": {"reward": -1.5, "success": True}, "text": "much",
           "figures": {"reward": 1, "figures": {"turns": 2, "seconds": 0.5}},
           "false figures": {"reward": 1, "figures": {"turns": "two"}}, "one figure": {"reward": 1, "figures": 2},
           "not finite": float("inf"), "another key": {"reward": 1, "score": 2}}


def play(seed, item):
    does = item["does"]
    if does == "says":
        with open(item["file"], "w") as file:
            variables = sorted(name for name in os.environ if name.startswith(("OPENAI", "HEADRACE")))
            print(seed, *CLIENT, os.environ["HEADRACE_SESSION"], *variables, file=file)
        return 0.0
    if does == "imports":
        known = "colorsys" in sys.modules
        import colorsys
        return float(known)
    if does == "raises":
        raise RuntimeError("it fell over")
    if does == "exits":
        sys.exit("no more")
    if does == "dies":
        os._exit(7)
    if does == "hangs" or does == "leaves":
        # A daemon, which has left the agent's session and its parents.
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            with open(item["file"], "w") as file:
                print(os.getpid(), file=file, flush=True)
            os.closerange(0, 64)
            time.sleep(600)
        while not (os.path.exists(item["file"]) and os.path.getsize(item["file"])):
            time.sleep(0.001)
        if does == "hangs":
            time.sleep(600)
    if does == "prints":
        for _ in range(40):
            print("x" * (1 << 20))
            os.write(2, b"\\xff" * 100)
    if does == "writes on every descriptor":
        for number in range(3, 64):
            try:
                os.write(number, b"forged" * 100)
            except OSError:
                pass
    if does == "asks":
        import urllib.request
        return float(urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], timeout=30).read())
    if does == "awaits":
        return later()
    return RETURNS.get(does)


async def later():
    await asyncio.sleep(0)
    return 3.5
"""
WRONG = {
    "raises": "the agent raised RuntimeError: it fell over (agent.py:",
    "exits": "the agent raised SystemExit: no more",
    "dies": "the agent's process ended with exit code 7",
    "text": "returned 'much' (str); return a number as its reward",
    "not finite": "returned a reward of inf",
    "another key": "returned the keys score",
    "false figures": "the figure 'turns' (str) as 'two' (str); figures are finite numbers",
    "one figure": "returned figures that are no mapping",
}
UNKNOWN = [
    ("agent.py:gone", {}, "there is no function 'gone'"),
    ("nowhere.py:play", {}, "no such file"),
    ("play", {}, "give path/to/file.py:function"),
    ("x", {"command": ["no-such-program-7c1f"]}, "there is no program 'no-such-program-7c1f'"),
    ("agent.py:play", {"comand": []}, "command"),
]
GIVEN = {"base_url": "http://127.0.0.1:1/v1", "api_key": "sk-1", "session": "5e55"}


@pytest.fixture
async def agent(simulator, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    return await simulator.open("agent.py:play", backend="agent", processes=1)


def test_what_waits_for_others_has_a_process_of_its_own():
    """An agent's end is waited for; of environments that compute, the settings say how many share a process."""

    def held(backend):
        plan = PoolPlan(backend, "x", 3, {}, seed=0, max_episode_steps=0, step_timeout_s=1.0)
        return [each["environments"] for each in _openings(plan, 2)]

    assert held("agent") == [[0], [1], [2]] and held("conversation") == [[0, 2], [1]]


async def begun(pool, seed=3, **item):
    outcome = await pool.reset(seed=seed, options={**GIVEN, "item": item})
    assert outcome.status == OK, outcome.detail
    return pool


async def ended(pool, **item):
    return await (await begun(pool, **item)).wait_for_agent(4)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_an_agent_finds_its_endpoint_and_its_return_is_its_reward(agent, tmp_path):
    assert agent.opened.conversation and agent.opened.agents
    file = tmp_path / "said"
    outcome = await ended(agent, does="says", file=str(file))
    assert outcome.terminated and json.loads(outcome.info_json) == {"rewarded": True}
    seed, *found = file.read_text().split()
    assert seed == "3" and found[:3] == ["http://127.0.0.1:1/v1", "sk-1", "5e55"], (
        "a client of the file's own is made anew for each agent"
    )
    names = {*found[3:]}
    assert {"OPENAI_API_KEY", "OPENAI_BASE_URL", "HEADRACE_SESSION"} <= names
    assert not {"HEADRACE_TOKEN_FILE", "HEADRACE_INCARNATION", "HEADRACE_CHILD_HIDDEN"} & names
    outcome = await ended(agent, does="number")
    assert (outcome.reward, outcome.success_reported) == (2.0, False)
    outcome = await ended(agent, does="both")
    assert (outcome.reward, outcome.success, outcome.success_reported) == (-1.5, True, True)
    outcome = await ended(agent, does="figures")
    assert json.loads(outcome.info_json) == {"rewarded": True, "figures": {"turns": 2.0, "seconds": 0.5}}
    assert (await ended(agent, does="awaits")).reward == 3.5, "a coroutine is run"
    assert [(await ended(agent, does="imports")).reward for _ in range(2)] == [0.0, 1.0], (
        "what one agent imports as it runs is there for the next"
    )
    outcome = await ended(agent, does="nothing")
    assert outcome.terminated and json.loads(outcome.info_json) == {"rewarded": False}
    for does, words in WRONG.items():
        outcome = await ended(agent, does=does)
        assert outcome.status == LOST and words in outcome.detail, outcome.detail
    assert (await ended(agent, does="number")).reward == 2.0, "the next one starts"
    await begun(agent, does="number")
    assert "an agent takes none" in (await agent.say("hello")).detail


async def hanging(pool, file) -> int:
    """An agent that hangs, and the id of a daemon that it has started."""
    await begun(pool, does="hangs", file=str(file))
    while not (file.exists() and file.read_text().endswith("\n")):
        outcome = await pool.wait_for_agent(0.05)
        assert outcome.status == OK and not outcome.terminated, "it still runs"
    daemon = int(file.read_text())
    file.unlink()
    assert alive(daemon)
    return daemon


async def test_nothing_of_an_agent_outlives_it_or_reaches_the_frames(agent, simulator, tmp_path, capfd):
    file = tmp_path / "daemon"
    daemon = await hanging(agent, file)
    outcome = await agent.wait_for_agent(0, kill=True)
    assert outcome.status == OK and outcome.terminated and not alive(daemon)
    # One that ends by itself leaves nothing behind either, and a reset ends the agent before it.
    assert (await ended(agent, does="leaves", file=str(file))).terminated
    assert not alive(int(file.read_text()))
    file.unlink()
    daemon = await hanging(agent, file)
    assert (await ended(agent, does="number")).reward == 2.0 and not alive(daemon)
    assert (await ended(agent, does="prints")).terminated
    assert (await ended(agent, does="writes on every descriptor")).status in (OK, LOST)
    assert (await ended(agent, does="number")).reward == 2.0
    printed = capfd.readouterr()
    assert len(printed.out) + len(printed.err) < 3 << 20
    # A child that is closed takes its agent with it.
    daemon = await hanging(agent, file)
    request = simulator_pb2.ClosePoolRequest(header=simulator.header(), pool=agent.opened.pool)
    await simulator.stub.ClosePool(request)
    until = time.monotonic() + 5
    while alive(daemon) and time.monotonic() < until:
        time.sleep(0.01)  # noqa: ASYNC251  # nothing else runs meanwhile
    assert not alive(daemon)


async def test_a_command_is_an_agent_and_its_exit_code_says_whether_it_went_well(simulator, tmp_path):
    said = tmp_path / "said"
    program = (
        "import json, os, sys; given = json.loads(sys.stdin.readline()); "
        f"open({str(said)!r}, 'w').write(os.environ['OPENAI_BASE_URL'] + ' ' + str(given['seed'])); "
        "sys.exit(given['item']['code'])"
    )
    command = [sys.executable, "-c", program]
    pool = await simulator.open("a command", backend="agent", options={"command": command}, processes=1)
    outcome = await ended(pool, code=0)
    assert outcome.status == OK and outcome.terminated, outcome.detail
    assert said.read_text() == "http://127.0.0.1:1/v1 3"
    assert json.loads(outcome.info_json) == {"rewarded": False}
    outcome = await ended(pool, code=3)
    assert outcome.status == LOST and "ended with exit code 3" in outcome.detail


async def test_what_a_command_said_last_stands_before_its_exit_code(simulator):
    """Its log goes on as before: what it writes is passed on."""
    program = "import sys; print('one', file=sys.stderr); raise RuntimeError('gripper 7 lost its CAN bus')"
    command = [sys.executable, "-c", program]
    pool = await simulator.open("a command", backend="agent", options={"command": command}, processes=1)
    outcome = await ended(pool)
    words = "RuntimeError: gripper 7 lost its CAN bus; the agent's process ended with exit code 1"
    assert outcome.status == LOST and outcome.detail == f"the environment raised an error: {words}"
    assert (await ended(pool)).detail == outcome.detail, "each agent's own"


def test_an_agent_that_cannot_be_started_is_refused_as_its_pool_opens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    for variable in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "of this process")
    for name, options, words in UNKNOWN:
        with pytest.raises(BackendError) as caught:
            create("agent").agent(name, options)
        assert words in caught.value.message, caught.value.message
        assert caught.value.field.startswith(("environment.name", "options_json"))


TALK = """
import socket


class Talk:
    def reset(self, seed, item):
        said = []
        for port in (3128, 3129, item["port"]):
            with socket.socket() as each:
                each.settimeout(10)
                try:
                    each.connect(("127.0.0.1", port))
                    each.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
                    said.append(each.recv(100).decode())
                except OSError as error:
                    said.append(str(error))
        return [{"role": "user", "content": " ".join(said)}]

    def step(self, message):
        return [], 0.0, True
"""


async def test_a_contained_agent_has_its_endpoint_and_an_item_that_names_one_opens_nothing(
    simulator, tmp_path
):
    """A conversation's item is its users', whatever it looks like."""
    try:
        containment = Containment(ContainedSettings())
    except NotContained:
        pytest.skip("this machine gives no networks")

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\n42.0")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    outside = GIVEN | {"base_url": f"http://127.0.0.1:{port}/v1"}
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "talk.py").write_text(TALK)
    contain_workers(containment)
    try:
        agents = await simulator.open("agent.py:play", backend="agent", processes=1)
        await agents.reset(seed=1, options={**outside, "item": {"does": "asks"}})
        assert (await agents.wait_for_agent(30)).reward == 42.0
        talk = await simulator.open("talk.py:Talk", backend="conversation", processes=1)
        outcome = await talk.reset(seed=1, options={**outside, "item": {}, "port": port})
        assert outcome.status == OK and "42.0" not in outcome.messages[0].content, outcome
    finally:
        contain_workers(None)
        server.close()
        if containment.groups:
            containment.groups.close()
