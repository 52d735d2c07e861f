"""Conversations in real children: what a user's class says and returns, and all that it may do wrong."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import message_of

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED
# It does what it is told, in its item as it begins and in the turns that follow.
TALKS = """
import os
import time

import numpy as np

USER = {"role": "user", "content": "on"}
STEPS = {
    "goes on": ([USER], 1.5, False),
    "ends": ([], np.float32(2), np.bool_(True), {"success": True}),
    "no tuple": [USER],
    "no list": ("on", 0, False),
    "no message": (["on"], 0, False),
    "another key": ([{**USER, "by": "x"}], 0, False),
    "another role": ([{"role": "assistant", "content": "on"}], 0, False),
    "bytes": ([{"role": "user", "content": b"\\xff"}], 0, False),
    "half a pair": ([{"role": "user", "content": "\\ud800"}], 0, False),
    "too long": ([{"role": "user", "content": "x" * 1_100_000}], 0, False),
    "no number": ([USER], "much", False),
    "not finite": ([USER], float("nan"), False),
    "no flag": ([USER], 0, "no"),
    "silent": ([], 0, False),
}


class Talk:
    def __init__(self, greeting="hello"):
        self.greeting = greeting

    def reset(self, seed, item):
        if item.get("hang"):
            time.sleep(60)
        messages = [{"role": "user", "content": f"{self.greeting} {seed} {item.get('question')}"}]
        first = {"nothing": [], "text": "hello", "bad tools": (messages, [{1, 2}])}
        if item.get("first") in first:
            return first[item["first"]]
        return (messages, item["tools"]) if "tools" in item else messages

    def step(self, message):
        told = message["content"]
        if told == "hang":
            time.sleep(60)
        if told == "print":
            for _ in range(64):
                print("x" * (1 << 20))
        if told == "die":
            os._exit(7)
        if told == "raise":
            raise SystemExit("enough")
        return STEPS.get(told, STEPS["goes on"])


class Mute:
    def reset(self, seed, item):
        return []


def broken(**options):
    raise ValueError("no talk today")
"""


READS = """
from pathlib import Path

from talks import Talk


class Reads(Talk):
    def __init__(self, files):
        self.greeting = Path(files[0]["path"]).read_text()

    def reset(self, seed, item):
        return [{"role": "user", "content": self.greeting}]
"""


@pytest.fixture
def talks(tmp_path):
    (tmp_path / "talks.py").write_text(TALKS)
    return "talks.py:Talk"


async def talk(simulator, name, **fields):
    fields = {"step_timeout_s": 3.0, **fields}
    return await simulator.open(name, backend="conversation", **fields)


def texts(outcome):
    return [(message.role, message.content) for message in outcome.messages]


async def test_a_conversation_from_its_first_message_to_its_end(simulator, talks):
    pool = await talk(simulator, talks, options={"greeting": "hi"}, count=2, seed=5)
    assert pool.opened.conversation and not pool.opened.HasField("action_space")
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = await pool.reset(options={"question": "why", "tools": tools}, seed=9)
    assert first.status == OK and texts(first) == [("user", "hi 9 why")]
    assert first.tools_json == '[{"type": "function", "function": {"name": "f"}}]'
    on = await pool.say("goes on")
    assert (on.status, texts(on), on.reward, on.terminated) == (OK, [("user", "on")], 1.5, False)
    assert on == await pool.say("goes on", index=on.step_index), "a repetition takes no turn"
    end = await pool.say("ends")
    assert (end.reward, end.terminated, end.success, texts(end)) == (2, True, True, [])
    late = await pool.say("goes on")
    assert late.status == REFUSED and "its episode has ended" in late.detail
    other = await pool.reset(1, options={})
    assert texts(other) == [("user", "hi 6 None")], "without a seed, that of the environment"


async def test_paths_of_options_may_be_addresses_of_stores(simulator, talks, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("which number")
    (tmp_path / "reads.py").write_text(READS)
    options = {"files": [{"path": f"file://{tmp_path}/tasks.jsonl"}]}
    pool = await talk(simulator, "reads.py:Reads", options=options)
    assert texts(await pool.reset(options={})) == [("user", "which number")]
    options = {"files": [{"path": "s3://key:secret@bucket/tasks.jsonl"}]}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await talk(simulator, "reads.py:Reads", options=options)
    told = message_of(refused.value)
    assert "options_json.files[0].path: s3://…: the address has a user or password in it" in told
    assert "correct the address" in told and "secret" not in told


async def test_the_limit_of_turns_cuts(simulator, talks):
    pool = await talk(simulator, talks, max_episode_steps=2)
    await pool.reset(options={})
    cut = [(await pool.say("goes on")).truncated for _ in range(2)]
    assert cut == [False, True]
    await pool.reset(options={})
    await pool.say("goes on")
    end = await pool.say("ends")
    assert end.terminated and not end.truncated


WRONG_STEPS = [
    ("no tuple", "step returned an object of list; return (messages, reward, done)"),
    ("no list", "step returned 'on' (str), which is no list of messages"),
    ("no message", "message 0 of what step returned is 'on' (str); a message is {'role'"),
    ("another key", "beside these what chat templates read"),
    ("another role", "has the role 'assistant' (str); it may be system, user, tool"),
    ("bytes", "has the content an object of bytes; it has to be a str"),
    ("half a pair", "is no text that can be sent"),
    ("too long", "longer than 1048576 characters; shorten them"),
    ("no number", "the reward 'much' (str); return a number"),
    ("not finite", "a reward of nan, which is not finite"),
    ("no flag", "done as 'no' (str); return True or False"),
    ("silent", "no message and done is False"),
    ("die", "exit code 7"),
    ("raise", "SystemExit: enough (talks.py:"),
]


async def test_what_is_wrong_with_a_step_is_named_and_the_next_conversation_begins(simulator, talks):
    pool = await talk(simulator, talks)
    for told, why in WRONG_STEPS:
        await pool.reset(options={})
        lost = await pool.say(told)
        assert lost.status == LOST and why in lost.detail, (told, lost.detail)
        assert not lost.messages
        assert (await pool.reset(options={})).status == OK
        assert (await pool.say("goes on")).status == OK


WRONG_RESETS = [
    ("nothing", "reset returned no message"),
    ("text", "reset returned 'hello' (str), which is no list"),
    ("bad tools", "tool 0 of what reset returned is an object of set; give a JSON object"),
]


async def test_what_is_wrong_with_a_reset_is_named(simulator, talks):
    pool = await talk(simulator, talks)
    for first, why in WRONG_RESETS:
        lost = await pool.reset(options={"first": first})
        assert lost.status == LOST and why in lost.detail, (first, lost.detail)
        assert (await pool.reset(options={})).status == OK


async def test_a_step_and_a_reset_that_hang_are_killed_within_their_limits(simulator, talks):
    pool = await talk(simulator, talks, step_timeout_s=1.0, count=2, processes=2)
    await pool.send(*(pool.reset_operation(index, options={}) for index in range(2)))
    lost = await pool.say("hang")
    assert lost.status == LOST and "longer than 1 s" in lost.detail
    assert (await pool.say("goes on", 1)).status == OK
    hung = await pool.reset(options={"hang": True})
    assert hung.status == LOST and "longer than 1 s" in hung.detail
    assert (await pool.reset(options={})).status == OK


async def test_what_an_environment_prints_is_bounded(simulator, talks, capfd):
    pool = await talk(simulator, talks, step_timeout_s=20.0)
    await pool.reset(options={})
    assert (await pool.say("print")).status == OK
    assert (await pool.say("print")).status == OK, "what nobody takes is dropped, and nothing waits"
    printed = capfd.readouterr().err
    assert (1 << 19) < len(printed) < (1 << 20) + 20_000
    assert "is left out" in printed


CANNOT = [
    ("tool", {}, "did you mean 'tools'"),
    ("talks.py", {}, "name the function too, as talks.py:Conversation"),
    ("talks.py:Tolk", {}, "there is no function 'Tolk'"),
    ("none.py:Talk", {}, "no such file"),
    ("talks.py:Talk", {"volume": 1}, "unexpected keyword argument 'volume'"),
    ("talks.py:Mute", {}, "Mute has no method step"),
    ("talks.py:broken", {}, "no talk today"),
]


async def test_what_cannot_be_made_is_named(simulator, talks):
    for name, options, words in CANNOT:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talk(simulator, name, options=options)
        assert words in message_of(caught.value), name


async def test_actions_and_turns_are_told_apart(simulator, talks, environment_file):
    pool = await talk(simulator, talks)
    await pool.reset(options={})
    acted = await pool.act([0.0])
    assert acted.status == REFUSED and "a conversation takes turns" in acted.detail
    robots = await simulator.open(f"{environment_file}:make_env")
    await robots.reset()
    spoken = await robots.say("hello")
    assert spoken.status == REFUSED and "turns are of conversations alone" in spoken.detail
    for asked in ({}, {"video": True}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[0], **asked)
            await pool.stub.Render(request, timeout=60)
        assert "a conversation has no" in message_of(caught.value)


def test_the_example_is_played_as_it_says():
    """The guessing game of examples/agents: who guesses 2 and follows the hint is right, whatever the secret."""
    from headrace_simulator.backends.conversation.backend import Conversations

    file = Path(__file__).resolve().parents[3] / "examples" / "agents" / "guess.py"
    game = Conversations().converse(f"{os.path.relpath(file)}:Guess", {})
    secrets = set()
    for seed in range(20):
        assert game.reset(seed, {}) == [{"role": "user", "content": "?"}]
        messages, reward, done = game.step({"role": "assistant", "content": "2"})
        if not done:
            guess = {"+": "3", "-": "1"}[messages[0]["content"]]
            _, reward, done = game.step({"role": "assistant", "content": guess})
        secrets.add(game.secret)
        assert (reward, done) == (1.0, True)
    assert secrets == {1, 2, 3}
    game.reset(0, {})
    assert game.step({"role": "assistant", "content": "x2"})[1:] == (-0.5, True)


PARTIES = """
class Game:
    def __init__(self, roles=("speaker", "guesser")):
        self.roles = roles

    def reset(self, seed, item):
        self.heard = []
        return [{"role": "user", "content": str(seed), "to": "speaker", **item.get("other", {})}]

    def step(self, message):
        self.heard.append(message)
        if message["content"] == "stranger":
            return [], {"stranger": 1.0}, True
        if message["by"] == "speaker":
            return [{"role": "user", "content": message["content"], "to": "guesser"}], 0.5, False
        assert [each["by"] for each in self.heard] == ["speaker", "guesser"]
        return [], {"speaker": 1, "guesser": -1}, True
"""


async def test_with_several_roles_each_message_says_to_whom_it_is_and_rewards_are_by_role(
    simulator, tmp_path
):
    (tmp_path / "party.py").write_text(PARTIES)
    pool = await talk(simulator, "party.py:Game")
    assert list(pool.opened.roles) == ["speaker", "guesser"]
    first = await pool.reset(seed=4)
    assert [(each.content, each.party) for each in first.messages] == [("4", "speaker")]
    second = await pool.say("up")
    assert [(each.content, each.party) for each in second.messages] == [("up", "guesser")]
    assert second.role_rewards == {"speaker": 0.5} and second.reward == 0.5
    last = await pool.say("7")
    assert last.terminated and last.role_rewards == {"speaker": 1.0, "guesser": -1.0} and last.reward == 0.0

    for other, told in [
        ({"to": "nobody"}, "to 'nobody' (str); it may be to speaker, guesser"),
        ({"by": "x"}, "beside these what chat templates read"),
    ]:
        lost = await pool.reset(options={"other": other})
        assert lost.status == LOST and told in lost.detail
    await pool.reset()
    lost = await pool.say("stranger")
    assert "a reward of 'stranger' (str); roles: speaker, guesser" in lost.detail


@pytest.mark.parametrize("roles", [["alone"], ["twice", "twice"], "text", ["one", ""]])
async def test_roles_are_two_names_or_more(simulator, tmp_path, roles):
    (tmp_path / "party.py").write_text(PARTIES)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await talk(simulator, "party.py:Game", options={"roles": roles})
    assert "roles are two names or more" in message_of(caught.value)
