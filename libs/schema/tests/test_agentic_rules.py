"""What an agentic run leaves out is filled in, and keys that it does not have are refused by name."""

from typing import Any

import pytest
from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.problems import explain
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "workflow": "agentic",
    "model": {"path": "models/tiny"},
    "environment": {"tasks": ["games.py:Guess"]},
}
JSONL = {"source": "jsonl", "options": {"path": "sums.jsonl"}}


def problems_of(more: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({**BASE, **more})
    return {item.key: f"{item.problem}; {item.fix}" for item in explain(caught.value, RunSpec)}


def test_what_is_left_out_follows_from_the_environment():
    spec = RunSpec.model_validate({**BASE, "data": {"heldout": 16}})
    assert spec.environment is not None and spec.environment.backend == "conversation"
    assert (spec.data.source, spec.data.heldout) == ("episodes", 16)
    assert spec.data.options == {"tasks": ["games.py:Guess"]}
    assert [scorer.name for scorer in spec.reward.scorers] == ["episode"]
    assert spec.install == "drain", "a conversation is made with one version"
    assert spec.main_stage == "score"
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_what_is_given_stays():
    environment = {"tasks": ["tools"], "backend": "other"}
    reward = {"scorers": [{"name": "exact"}]}
    spec = RunSpec.model_validate({**BASE, "environment": environment, "data": JSONL, "reward": reward})
    assert spec.environment is not None and spec.environment.backend == "other"
    assert (spec.data.source, spec.reward.scorers[0].name) == ("jsonl", "exact")


def test_a_rollout_is_told_how_messages_become_prompts():
    prompt = {"chat": True, "template_arguments": {"enable_thinking": False}}
    spec = RunSpec.model_validate({**BASE, "data": {"prompt": prompt}})
    config = RolloutConfig.of(spec, prompt=spec.data.prompt)
    assert config.workflow == "agentic" and config.environment == spec.environment
    assert config.prompt.template_arguments == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"environment": {"tasks": ["a.py"]}}, "environment.tasks[0]", "write a.py:Class"),
        ({"environment": {"tasks": ["a.py:A", "a.py:A"]}}, "environment.tasks", "named twice"),
        (
            {"environment": {"tasks": ["a.py:A", "b.py:B"]}, "data": JSONL},
            "environment.tasks",
            "with which of 2 environments",
        ),
        (
            {"environment": {"tasks": ["a.py:A"], "count": 1}, "rollout": {"instances": 2}},
            "environment.count",
            "is 2",
        ),
        ({"data": {"options": {"tasks": ["b.py:B"]}}}, "data.options.tasks", "not among environment.tasks"),
        (
            {"environment": {"tasks": ["textarena:GuessTheNumber-v0"]}, "data": JSONL},
            "data.source",
            "leave it out (episodes)",
        ),
        ({"environment": {"tasks": ["skyrl_gym:gsm8k"]}}, "data.source", "has seeds alone"),
    ],
)
def test_keys_that_make_no_sense_are_named_with_the_fix(more, key, words):
    found = problems_of(more)
    assert words in found[key], found


AGENT: dict[str, Any] = {
    "workflow": "agentic",
    "model": {"path": "models/tiny"},
    "agent": {"python": "agent.py:play"},
}


def test_an_agent_says_what_its_environment_is():
    spec = RunSpec.model_validate({**AGENT, "environment": {"count": 4}})
    assert spec.environment is not None
    assert (spec.environment.backend, spec.environment.tasks) == ("agent", ["agent.py:play"])
    assert (spec.environment.count, spec.environment.max_episode_s) == (4, 600.0)
    assert spec.data.options == {"tasks": ["agent.py:play"]}
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    command = RunSpec.model_validate({**AGENT, "agent": {"command": ["python", "my agent.py"]}})
    assert command.environment is not None and command.environment.tasks == ["command: python 'my agent.py'"]
    assert command.environment.options == {"command": ["python", "my agent.py"]}
    assert RolloutConfig.of(spec).agent == spec.agent
    long = RunSpec.model_validate({**AGENT, "agent": {"command": ["agent", "x" * 1000]}})
    assert long.environment is not None and len(long.environment.tasks[0]) == 200, (
        "simulators take 256 characters"
    )
    assert long.environment.options == {"command": ["agent", "x" * 1000]}
    elsewhere = RunSpec.model_validate(
        {
            **AGENT,
            "agent": {"command": ["agent"]},
            "environment": {"backend": "plugged", "options": {"path": "tasks"}},
        }
    )
    assert elsewhere.environment is not None and elsewhere.environment.backend == "plugged"
    assert elsewhere.environment.options == {"path": "tasks", "command": ["agent"]}, "a plug-in starts it"
    plugged = {"backend": "verifiers", "task": "wordle", "options": {"runtime": {"type": "docker"}}}
    verifiers = RunSpec.model_validate({**AGENT, "agent": plugged})
    assert verifiers.environment is not None and verifiers.environment.backend == "verifiers"
    assert verifiers.environment.tasks == ["wordle"] and verifiers.environment.options == plugged["options"]


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"agent": {}}, "agent", "give one"),
        ({"agent": {"python": "a.py:f", "command": ["a"]}}, "agent", "python and command are given"),
        ({"agent": {"python": "a.py:f", "backend": "verifiers"}}, "agent", "python and backend are given"),
        ({"agent": {"backend": "verifiers"}}, "agent.task", "name it"),
        ({"agent": {"python": "a.py:f", "task": "wordle"}}, "agent.task", "remove it"),
        ({"agent": {"python": "a.py:f", "options": {"rows": 3}}}, "agent.options", "remove it"),
        ({"agent": {"python": "agent.py"}}, "agent.python", "path/to/file.py:function"),
        ({"agent": {"pyhton": "agent.py:f"}}, "agent.pyhton", "python"),
        ({"environment": {"tasks": ["tools"]}}, "environment.tasks", "follows from agent"),
        ({"environment": {"backend": "conversation"}}, "environment.backend", "follows from agent"),
        ({"environment": {"backend": "plugged"}}, "environment.backend", "plugged starts commands"),
        ({"environment": {"processes": 2}}, "environment.processes", "a process of its own"),
        ({"environment": {"max_episode_s": -1}}, "environment.max_episode_s", ""),
    ],
)
def test_what_does_not_fit_an_agent_is_refused(more, key, words):
    found = problems_of({"environment": None, **AGENT, **more})
    assert words in found.get(key, str(found)), found
    assert key in found


ONLINE: dict[str, Any] = {**BASE, "environment": None, "agent": {"online": {"reward_within_s": 60}}}


def test_an_online_run_needs_no_data_no_agent_and_no_group():
    spec = RunSpec.model_validate(ONLINE)
    assert (spec.algorithm.name, spec.algorithm.group_size, spec.environment) == ("reinforce_pp", 1, None)
    assert spec.data.source == "episodes" and [each.name for each in spec.reward.scorers] == ["episode"]
    assert spec.limits.step_timeout_s > 86400 and spec.install == "in_flight"
    config = RolloutConfig.of(spec, endpoint_key="key", group_size=spec.algorithm.group_size)
    assert config.agent is not None and config.agent.online is not None and config.sampling == spec.sampling
    own = {"limits": {"step_timeout_s": 60}, "algorithm": {"name": "grpo", "group_size": 4}}
    assert RunSpec.model_validate({**ONLINE, **own}).limits.step_timeout_s == 60


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        ({"algorithm": {"name": "grpo"}}, "algorithm.group_size", "X-Headrace-Group"),
        ({"agent": {"online": {"reward_within_s": 0}}}, "agent.online.reward_within_s", ""),
    ],
)
def test_what_an_online_run_cannot_have_is_refused(more, key, words):
    found = problems_of({**ONLINE, **more})
    assert words in found.get(key, str(found)), found
    assert key in found


def test_policies_play_roles_and_what_they_leave_out_is_the_runs():
    policies = {"guesser": {"optimizer": {"lr": 1e-3}, "algorithm": {"name": "rloo"}}}
    roles = {"guesser": {"policy": "guesser"}}
    more = {"policies": policies, "environment": {**BASE["environment"], "roles": roles}}
    spec = RunSpec.model_validate({**BASE, "algorithm": {"group_size": 4}, **more})
    config = TrainerConfig.of(spec)
    assert config.played == {"guesser": "guesser"}
    own, other = config.of_policy(""), config.of_policy("guesser")
    assert (own.optimizer.lr, own.algorithm.name) == (1e-6, "grpo") and not own.policies
    assert (other.optimizer.lr, other.algorithm.name, other.algorithm.group_size) == (1e-3, "rloo", 4)
    assert other.model == spec.model and not other.policies
    assert RolloutConfig.of(spec, prompt=spec.data.prompt).policies == spec.policies


ONE_BASE = {
    "trainer": {"lora": {"rank": 4}},
    "rollout": {"enable_lora": True},
    "environment": {**BASE["environment"], "roles": {"guesser": {"policy": "guesser"}}},
}


def playing(**algorithm: Any) -> dict[str, Any]:
    """A run in which the policy `tutor`, of this algorithm, plays the teller."""
    return {
        "environment": {"tasks": ["a.py:A"], "roles": {"teller": {"policy": "tutor"}}},
        "policies": {"tutor": {"algorithm": {"name": "grpo", **algorithm}}},
    }


@pytest.mark.parametrize(
    ("more", "key", "words"),
    [
        (
            playing(options={"routing_replay": True}),
            "policies.tutor.algorithm.options.routing_replay",
            "without routes",
        ),
        (
            {**playing(name="rloo"), "algorithm": {"name": "reinforce", "group_size": 1}},
            "algorithm.group_size",
            "rloo compares",
        ),
        (
            playing(options={"minibatches": 9}),
            "policies.tutor.algorithm.options.minibatches",
            "nearest valid value is 4",
        ),
        (
            playing(options={"clip_low": 0.1}),
            "policies.tutor.algorithm.options.clip_low",
            "policies.tutor.algorithm.options.epochs",
        ),
    ],
)
def test_rules_of_an_algorithm_hold_for_that_of_every_policy(more, key, words):
    found = problems_of(more)
    assert words in found[key], found


def test_adapters_of_one_base_are_in_one_engine():
    own = {"guesser": {"trainer": {"lora": {"rank": 8, "alpha": 4.0}}}}
    spec = RunSpec.model_validate(BASE | ONE_BASE | {"policies": own})
    assert RolloutConfig.of(spec).adapters == {"": 4, "guesser": 8}
    config = TrainerConfig.of(spec)
    assert config.adapter_scales() == {"": 8.0, "guesser": 0.5} and config.weights.lora == "adapter"
    merged = RunSpec.model_validate(BASE | ONE_BASE | {"policies": own, "rollout": {}})
    assert not RolloutConfig.of(merged).adapters and TrainerConfig.of(merged).weights.lora == "auto"


@pytest.mark.parametrize(
    ("policies", "roles", "key", "words"),
    [
        (
            {"guesser": {}},
            {"guesser": {"policy": "guessr"}},
            "environment.roles.guesser.policy",
            "did you mean",
        ),
        ({}, {"guesser": {"policy": "other"}}, "environment.roles.guesser.policy", "add policies.other"),
        ({"guesser": {}}, {}, "policies.guesser", "plays no role"),
        ({"policy": {}}, {"guesser": {"policy": "policy"}}, "policies.policy", "another name"),
        (
            {"a": {}},
            {"guesser": {"policy": "a", "path": "models/b"}},
            "environment.roles.guesser.policy",
            "remove one of the two",
        ),
        (
            {"a": {}},
            {"guesser": {"policy": "a", "learns": False}},
            "environment.roles.guesser.policy",
            "learns: false",
        ),
        (
            {"a": {}},
            {"guesser": {"policy": "a", "temperature": 0.5}},
            "environment.roles.guesser.temperature",
            "as sampling says",
        ),
    ],
)
def test_policies_that_nobody_plays_with_are_refused(policies, roles, key, words):
    found = problems_of({"policies": policies, "environment": {**BASE["environment"], "roles": roles}})
    assert words in found[key], found


def test_models_with_devices_of_their_own_are_counted_once_each():
    frozen = {"path": "models/b", "own_devices": True}
    roles = {"a": frozen, "b": frozen, "c": {"path": "models/c"}, "d": {"policy": "d"}}
    given = {"environment": {**BASE["environment"], "roles": roles}, "policies": {"d": {"own_devices": True}}}
    spec = RunSpec.model_validate({**BASE, **given})
    assert spec.engines == 3, "the policy, models/b and d; models/c shares the policy's"
    apart = {"rollout": "0-2", "trainer": "3"}
    assert RunSpec.model_validate({**BASE, **given, "placement": apart}).placement.mode == "disaggregated"
    found = problems_of({**given, "placement": {**apart, "rollout": "0-1"}})["placement.rollout"]
    assert "2 devices are too few for 1 rollout instances, each of 3 models" in found, found
    assert "name at least 3 devices, or leave own_devices out" in found
    simulating = {"rollout,simulator": "0-2", "trainer": "3"}
    assert "name at least 4 devices" in problems_of({**given, "placement": simulating})["placement.simulator"]


@pytest.mark.parametrize(
    ("role", "key", "fix"),
    [
        ({"own_devices": True}, "own_devices", "or give path"),
        ({"policy": "a", "own_devices": True}, "own_devices", "set policies.a.own_devices"),
        ({"path": "models/b", "stop": [""]}, "stop", "remove it"),
        ({"stop": ["."]}, "stop", "set learns: false"),
    ],
)
def test_what_a_role_cannot_have_is_named(role, key, fix):
    found = problems_of({"policies": {"a": {}}, "environment": {**BASE["environment"], "roles": {"b": role}}})
    assert fix in found[f"environment.roles.b.{key}"], found


def test_a_task_that_gives_no_reward_needs_scorers():
    for task in ("exchange", "tools"):
        given = {"environment": {"tasks": [task]}}
        assert f"{task} gives none" in problems_of(given)["reward.scorers"]
        RunSpec.model_validate({**BASE, **given, "reward": {"scorers": [{"name": "exact"}]}})
