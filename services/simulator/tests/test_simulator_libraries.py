"""What every library of conversation environments keeps, asked of real environments in real children."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_robots.simulator.isaaclab import IsaacLabBackend
from headrace_servicekit.rpc.errors import message_of
from headrace_simulator.backends import create
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.options import require

OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
# An environment of another package, which does as the model says.
PACKAGE = """
import time

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Obeys(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.config, self.extras = env_config, extras

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"{self.config['level']} {self.extras['hint']}"}], {}

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        assert action != "raise", "no such move"
        return BaseTextEnvStepOutput(observations="more", reward=0.5, done=False, metadata={})
"""


@dataclass(frozen=True)
class Case:
    """An environment; `right` answers its last message, and a game that is told `wrong` alone is lost in two turns.

    `reply` is how the environment's message behind the first of these begins.
    """

    task: str
    misspelt: str
    nearest: str
    right: Callable[[str], str]
    wrong: tuple[str, str]
    reply: str
    options: dict[str, Any] = field(default_factory=dict)
    item: dict[str, Any] = field(default_factory=dict)


def added(question: str) -> str:
    terms = re.findall(r"[+-]? ?[0-9]+", question)
    return f"so <answer>{sum(int(term.replace(' ', '')) for term in terms)}</answer>"


def guessed(told: str) -> str:
    return "3" if "higher" in told else "1" if "lower" in told else "2"


CASES = [
    Case(
        "reasoning_gym:chain_sum",
        "reasoning_gym:chain_sun",
        "chain_sum",
        right=added,
        wrong=("-1", "-1"),
        reply="That is not right. Try again.",
        options={"attempts": 2, "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    ),
    Case(
        "textarena:GuessTheNumber-v0",
        "textarena:GuessTheNumbr-v0",
        "GuessTheNumber-v0",
        right=guessed,
        wrong=("no", "no"),
        reply="You attempted an invalid move.",
        options={"min_number": 1, "max_number": 3, "max_turns": 2},
    ),
    Case(
        "skyrl_gym:gsm8k_multi_turn",
        "skyrl_gym:gsm8k_multi_tur",
        "gsm8k_multi_turn",
        right=lambda told: "#### 4",
        wrong=("#### 5", "5"),
        reply="Now provide only the final numeric answer",
        options={"extras": {"max_turns": 2}},
        item={"question": "2 + 2?", "answer": "4"},
    ),
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.task.partition(":")[0])


@pytest.fixture
def reset_timeout_s() -> float:
    return 20.0


async def opened(simulator, case, **fields):
    fields = {"options": case.options, "step_timeout_s": 20.0, **fields}
    return await simulator.open(case.task, backend="conversation", **fields)


def last(outcome) -> str:
    assert outcome.status == OK, outcome.detail
    return outcome.messages[-1].content if outcome.messages else ""


@every
async def test_a_library_s_environment_begins_by_its_seed_rewards_and_ends(simulator, case):
    """Two environments of one process, in turn: neither disturbs the other's game."""
    pool, played_out = await opened(simulator, case, count=2, processes=1), set()
    for seed in (3, 4, 5, 6):
        first, second = [await pool.reset(i, seed=seed, options=case.item) for i in range(2)]
        assert last(first) and first.messages == second.messages, "samples of one prompt begin the same"
        told, ends, right = last(first), [], []
        for turn in range(2):
            if not ends:
                right.append(case.right(told))
                played = await pool.say(right[-1], 0)
                told = last(played)
                ends = [played] if played.terminated else []
            lost = await pool.say(case.wrong[turn], 1)
            assert turn or last(lost).startswith(case.reply)
        assert ends and (ends[0].reward, ends[0].success or "skyrl" in case.task) == (1.0, True)
        played_out.add(tuple(right))
        assert lost.status == OK and lost.terminated and lost.reward < 0.5 and not lost.success
    assert len(played_out) > 1 or case.item, "another seed is another game"
    # What a begun conversation left is not in the next one.
    again = await pool.reset(1, seed=3, options=case.item)
    assert again.messages == (await pool.reset(0, seed=3, options=case.item)).messages


@every
def test_names_and_options_that_are_wrong_are_named_as_an_environment_is_made(simulator, case):
    backend = create("conversation")
    for task, options, field_name, words in [
        (case.misspelt, case.options, "environment.name", f"did you mean {case.nearest!r}?"),
        (case.task, {**case.options, "sistem": 1}, "options_json", "sistem"),
    ]:
        with pytest.raises(BackendError) as caught:
            backend.converse(task, options)
        told = f"{caught.value.field}: {caught.value.message}"
        assert told.startswith(field_name) and words in told, task


@every
def test_a_library_that_is_missing_is_told_with_the_line_that_installs_it(case, monkeypatch):
    library, find = case.task.partition(":")[0], importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == library else find(name, *more)
    )
    with pytest.raises(BackendError, match=r"pip install 'headrace-simulator\[") as caught:
        create("conversation").converse(case.task, case.options)
    assert caught.value.field == "environment.name" and library.replace("_", "-") in caught.value.message


async def test_a_game_of_several_players_and_one_without_its_data_are_refused(simulator):
    backend = create("conversation")
    with pytest.raises(BackendError, match="a game of more than two players"):
        backend.converse("textarena:SecretMafia-v0", {})
    with pytest.raises(BackendError, match=r"min_terms|max_terms"):
        backend.converse("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await simulator.open("textarenas:GuessTheNumber-v0", backend="conversation")
    assert "there is no conversation" in message_of(caught.value)


def test_a_game_of_two_players_has_a_role_for_each():
    match = create("conversation").converse("textarena:TicTacToe-v0", {})
    assert match.roles == ("player_0", "player_1")
    (first,) = match.reset(7, {})
    assert first["to"] == "player_0" and "You are Player 0" in first["content"]
    (second,), rewards, over = match.step({"role": "assistant", "content": "I take [4]", "by": "player_0"})
    assert (second["to"], rewards, over) == ("player_1", {}, False)
    assert "You are Player 1" in second["content"] and "Player 0: " in second["content"]
    for move, by in (("[0]", 1), ("[3]", 0), ("[1]", 1)):
        (heard,), rewards, over = match.step({"role": "assistant", "content": move, "by": f"player_{by}"})
        assert not over and "You are Player" not in heard["content"], "the rules are said once"
    assert match.step({"role": "assistant", "content": "[5]", "by": "player_0"}) == (
        [],
        {"player_0": 1.0, "player_1": -1.0},
        True,
    )
    assert [match.reset(7, {}), match.reset(7, {})] == [[first], [first]], "the seed decides"


async def test_an_environment_of_another_package_and_what_it_may_do_wrong(simulator, tmp_path, monkeypatch):
    (tmp_path / "obeying.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    options = {"config": {"level": "hard"}, "system": "Play.", "extras": {"hint": "left"}}
    fields = {"backend": "conversation", "options": options, "count": 2, "processes": 2}
    pool = await simulator.open("skyrl_gym:obeying:Obeys", step_timeout_s=0.5, **fields)
    for told, why in [("raise", "AssertionError: no such move"), ("hang", "longer than 0.5 s")]:
        begun = [await pool.reset(index, options={"question": "on?", "hint": "right"}) for index in range(2)]
        assert [message.content for message in begun[0].messages] == ["Play.", "on?", "hard left"]
        lost = await pool.say(told, 0)
        assert lost.status == LOST and why in lost.detail, lost.detail
        other = await pool.say("on", 1)
        assert (last(other), other.reward, other.terminated) == ("more", 0.5, False), "only its own is lost"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await simulator.open("skyrl_gym:obeying:Obay", **fields)
    assert "there is no class 'Obay' in obeying" in message_of(caught.value)


@pytest.mark.parametrize(
    ("extra", "made"),
    [("metaworld", True), ("maniskill", True), ("libero", True), ("mcp", False)],
)
def test_a_missing_package_is_told_by_a_way_that_there_is(extra, made):
    with pytest.raises(BackendError) as refused:
        require(extra, "no_such_module")
    assert f"pip install 'headrace-simulator[{extra}]'" in refused.value.message
    assert ("make simulators" in refused.value.message) is made


def test_isaac_lab_is_installed_by_its_own_instructions():
    if importlib.util.find_spec("isaaclab") is not None:
        pytest.skip("it is installed here")
    with pytest.raises(BackendError) as refused:
        IsaacLabBackend()
    assert "by its own instructions" in refused.value.message and "SIM=" not in refused.value.message
