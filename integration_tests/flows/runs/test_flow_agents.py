"""Conversations on a real fleet: the guessing games of examples/agents, with an environment and as an unmodified agent
behind the endpoint, and what falls over.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.fleet import RUN_S
from harness.ledger import audit
from headrace.client import HeadraceError

pytestmark = pytest.mark.usefixtures("one_simulator")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"
STEPS, GROUPS, SAMPLES = 3, 4, 4
# Scorers see all that was said, and what the environment gave for each turn.
JUDGE = """
def score(completion, messages, episode, finish_reason):
    assert messages[0] == {"role": "user", "content": "?"}, messages
    spoken = [turn["content"] for turn in messages if turn["role"] == "assistant"]
    assert spoken[-1] == completion and len(episode["rewards"]) == len(spoken) == episode["steps"]
    return {"score": len(spoken), "cut": float(finish_reason == "length")}
"""
BROKEN = """
class Broken:
    def reset(self, seed, item):
        return [{"role": "user", "content": "?"}]

    def step(self, message):
        raise RuntimeError("the game fell over")
"""
# A program of another kind: it streams, speaks plain HTTP, and posts its reward.
PROGRAM = """
import json, os, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return urllib.request.urlopen(request).read().decode()

given = json.loads(sys.stdin.readline())
events = post("/chat/completions", {"messages": [{"role": "user", "content": "?"}], "stream": True, "logprobs": True})
pieces = [json.loads(event[6:]) for event in events.split("\\n\\n") if event.startswith("data: {")]
said = "".join(choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"])
post("/sessions/" + os.environ["HEADRACE_SESSION"] + "/reward", {"reward": float(said[:1] == str(given["seed"] % 3))})
"""


def example(tiny_model: Path, **more: Any) -> dict[str, Any]:
    """The guessing game's spec with a few short steps."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / "guess.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["environment"] |= {"tasks": [f"{EXAMPLES / 'guess.py'}:Guess"], "count": 6}
    spec["reward"] = {"scorers": [{"name": f"{EXAMPLES / 'guess.py'}:reward"}]}
    spec["algorithm"] |= {"prompts_per_step": GROUPS, "group_size": SAMPLES}
    return spec | {
        "steps": STEPS,
        "evaluation": {"every": 0},
        "data": {"heldout": 4},
        "export": False,
        **more,
    }


def test_a_model_learns_from_conversations_with_an_environment(fleet, tiny_model, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text(JUDGE, encoding="utf-8")
    spec = example(tiny_model)
    spec["reward"]["scorers"] += [{"name": each, "weight": 0.0} for each in ("episode", f"{judge}:score")]
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and not found.dropped

    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == STEPS * GROUPS * SAMPLES
    for talk in talks:
        spoken = talk.parts["judge.py:score"]
        assert talk.completion.startswith("user: ?\nassistant: ") and spoken in (1, 2)
        assert talk.completion.count("assistant: ") == spoken
        assert talk.finish_reason in ("TERMINATED", "LENGTH")
        cut = 0.3 * (talk.finish_reason == "LENGTH")
        assert talk.reward == pytest.approx(talk.parts["episode"] - cut), "what the game gave, turn by turn"
        assert 1 <= talk.tokens <= 4 * spoken, "the policy's own tokens alone are counted"
    for certificate in found.live:
        of_step = [each for each in talks if each.step == certificate.step]
        assert certificate.tokens == sum(each.tokens for each in of_step)
        # What the environment said is in the context of the trainer's log-probs as it was in the engine's.
        assert certificate.log_prob_mismatch_mean < 1e-3
        # Groups whose rewards are all equal are not computed.
        assert 0 < certificate.log_prob_compared_tokens <= certificate.tokens
    assert {"simulate", "generate", "score", "learn"} <= fleet.client.metrics(run.id)[-1].stage_s.keys()
    assert [each.answers for each in run.evaluations] == [4, 4]


def test_what_falls_over_is_named(fleet, tiny_model, tmp_path):
    """By the submission, where the file is wrong; by the run's reason, where its step is."""
    file = tmp_path / "broken.py"
    file.write_text(BROKEN, encoding="utf-8")
    spec = example(tiny_model)
    spec["environment"]["tasks"] = [f"{file}:Brokn"]
    with pytest.raises(HeadraceError) as caught:
        fleet.submit(spec)
    (problem,) = caught.value.problems
    assert problem.key == "environment.tasks" and "there is no function 'Brokn'" in problem.problem
    spec["environment"]["tasks"] = [f"{file}:Broken"]
    run = fleet.submit(spec)
    ended = fleet.client.wait(run.id, RUN_S)
    assert ended.state == "FAILED"
    said = ended.reason.index("RuntimeError: the game fell over (broken.py:")
    assert (
        said < ended.reason.index("answers were not made") < ended.reason.index("(evaluation.max_unanswered)")
    )


def test_an_unmodified_agent_of_the_openai_package_is_trained_through_the_endpoint(fleet, tiny_model):
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / "endpoint.yaml").read_text(encoding="utf-8"))
    spec["model"]["path"] = str(tiny_model)
    spec["agent"]["python"] = f"{EXAMPLES / 'endpoint.py'}:play"
    spec["environment"]["count"] = 4
    spec["algorithm"] |= {"prompts_per_step": 3, "group_size": SAMPLES}
    spec |= {"steps": 2, "evaluation": {"every": 0}, "data": {"heldout": 2}, "export": False}
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == 2 * 3 * SAMPLES and not found.dropped
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == 2 * 3 * SAMPLES
    for talk in talks:
        spoken = talk.completion.count("assistant: ")
        assert talk.completion.startswith("user: ?\nassistant: ") and spoken in (1, 2)
        assert talk.finish_reason == "TERMINATED" and talk.tokens == spoken
        last = talk.completion.rpartition("assistant: ")[2]
        guessed = last in ("1", "2", "3")
        assert (talk.reward in (0.0, 1.0)) == guessed and (talk.reward == -0.5) != guessed, (
            "the reward is what the agent returned"
        )
    assert len({talk.reward for talk in talks}) > 1
    for certificate in found.live:
        # The trainer's log-probs of what the endpoint sampled, with the agent's messages as context.
        assert certificate.log_prob_mismatch_mean < 1e-3
        assert 0 < certificate.log_prob_compared_tokens <= certificate.tokens
    assert [each.answers for each in run.evaluations] == [2, 2]


@pytest.mark.nightly  # quick: test_simulator_agents.py, a command
def test_a_program_that_posts_its_reward_is_an_agent(fleet, tiny_model, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    spec = example(tiny_model, steps=1, data={"heldout": 0}, reward={"scorers": [{"name": "episode"}]})
    spec["agent"] = {"command": [sys.executable, str(program)]}
    spec["environment"] = {"count": 3}
    run = fleet.succeed(fleet.submit(spec))
    talks = fleet.client.trajectories(run.id, limit=100)
    assert len(talks) == GROUPS * SAMPLES and {talk.completion.count("assistant: ") for talk in talks} == {1}
    assert {talk.reward for talk in talks} <= {0.0, 1.0}
