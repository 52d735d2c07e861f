"""What an embodied run leaves out is filled in, and keys of text runs are refused by name."""

from typing import Any

import pytest
from headrace_schema.openings import TrainerConfig
from headrace_schema.problems import explain
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "workflow": "embodied",
    "model": {"policy": {"kind": "mlp"}},
    "environment": {"tasks": ["Pendulum-v1", "Reach-v0"], "count": 8},
}


def problems_of(more: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({**BASE, **more})
    return {item.key: item.problem for item in explain(caught.value, RunSpec)}


def test_start_states_and_rewards_follow_from_the_environment():
    spec = RunSpec.model_validate({**BASE, "data": {"heldout": 16}})
    assert (spec.data.source, spec.data.heldout) == ("episodes", 16)
    assert spec.data.options == {"tasks": ["Pendulum-v1", "Reach-v0"]}
    assert [scorer.name for scorer in spec.reward.scorers] == ["episode"]
    assert spec.reward.evaluation[0].options == {"of": "outcome"}
    assert spec.model.dtype == "float32"
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_success_is_all_that_is_asked_of_held_out_episodes_unless_more_is_said():
    success = {"name": "episode", "options": {"of": "success"}}
    everything = {"scorers": [success], "evaluation": [success, {"name": "episode", "weight": 0}]}
    for reward, alone in (({}, True), ({"scorers": [success]}, True), (everything, False)):
        given = {"reward": reward} if reward else {}
        spec = RunSpec.model_validate({**BASE, **given})
        assert spec.reward.judges_success_alone is alone
    returns = RunSpec.model_validate({**BASE, "reward": {"scorers": [{"name": "episode"}]}})
    assert not returns.reward.judges_success_alone


def test_what_is_given_stays():
    given = {"scorers": [{"name": "episode", "options": {"scale": 0.1}}]}
    spec = RunSpec.model_validate(
        {**BASE, "reward": given, "model": {"path": "./policy", "dtype": "bfloat16"}}
    )
    assert spec.reward.scorers[0].options == {"scale": 0.1}
    assert not spec.reward.evaluation
    assert spec.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"data": {"source": "copy_digits"}}, "data.source"),
        ({"data": {"options": {"tasks": ["Other-v0"]}}}, "data.options.tasks"),
        ({"environment": {"tasks": ["a", "b"], "count": 1}}, "environment.count"),
        ({"environment": {"tasks": ["a", "a"]}}, "environment.tasks"),
    ],
)
def test_what_makes_no_sense_in_an_embodied_run_is_refused_by_its_key(more: dict[str, Any], key: str):
    assert key in problems_of(more)


def test_a_warm_up_on_demonstrations_is_handed_to_the_trainer():
    warmup = {"steps": 20, "demonstrations": "./push", "episodes": 8}
    spec = RunSpec.model_validate({**BASE, "trainer": {"warmup": warmup}})
    config = TrainerConfig.of(spec, instruction=spec.data.prompt.template)
    assert config.trainer.warmup.episodes == 8 and config.instruction == "{question}"


def test_minibatches_of_episodes_are_not_bounded_by_the_prompts():
    algorithm = {"name": "ppo", "group_size": 1, "prompts_per_step": 2, "options": {"minibatches": 8}}
    assert RunSpec.model_validate({**BASE, "algorithm": algorithm}).slots_per_step == 2


def parts(rollout: float = 0.6, simulator: float = 0.4) -> dict[str, float]:
    """`placement.joint`."""
    return {"rollout": rollout, "simulator": simulator}


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        ({"rollout,simulator": "gpu:0", "trainer": "gpu:1", "joint": parts()}, "disaggregated"),
        ({"rollout,simulator,trainer": "gpu:0", "joint": parts()}, "collocated"),
        ({"rollout": "0", "simulator": "1", "trainer": "2"}, "disaggregated"),
        ({"rollout": "0", "simulator": "1", "trainer": "1"}, "collocated"),
        ({"rollout": "0", "simulator": "1", "trainer": "0-1"}, "collocated"),
        ({"rollout,trainer": "0", "simulator": "1"}, "collocated"),
        ({"simulator,rollout": "0-1", "trainer": "2"}, "disaggregated"),
        ({"rollout,simulator,trainer": "all"}, "collocated"),
        ({"rollout": "0-1", "simulator": "2-3", "trainer": "all"}, "collocated"),
        ({"rollout": "a/all", "simulator": "a/all", "trainer": "b/all"}, "disaggregated"),
    ],
)
def test_devices_of_simulators_say_the_mode_too(placement: dict[str, Any], mode: str):
    spec = RunSpec.model_validate({**BASE, "placement": placement})
    assert spec.placement.mode == mode and spec.placement.simulator
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("placement", "key"),
    [
        ({"simulator": "1"}, "placement.rollout"),
        ({"simulator": "1", "rollout": "0"}, "placement.trainer"),
        ({"mode": "collocated", "rollout": "0", "simulator": "1", "trainer": "2"}, "placement.trainer"),
        ({"rollout,simulator": "0", "trainer": "1"}, "placement.simulator"),
        ({"rollout,trainer": "0", "simulator": ["1", "1"]}, "placement.simulator"),
        ({"rollout,simulator": "0", "trainer": "1", "joint": parts(0.7, 0.4)}, "placement.joint"),
        ({"rollout,simulator": "0", "trainer": "1", "joint": parts(1.0, 0.1)}, "placement.joint.rollout"),
        ({"rollout": "0", "simulator": "0-1", "trainer": "2", "joint": parts()}, "placement.joint"),
        ({"rollout,trainer": "0", "joint": parts()}, "placement.joint"),
    ],
)
def test_devices_of_simulators_that_cannot_be_are_refused(placement: dict[str, Any], key: str):
    assert key in problems_of({"placement": placement})


def test_a_rollout_and_its_simulator_do_not_share_a_device_and_the_sentence_says_why():
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({**BASE, "placement": {"rollout,simulator": "gpu:0", "trainer": "gpu:1"}})
    (found,) = explain(caught.value, RunSpec)
    assert "placement.joint" in found.fix
    assert "leased to one process at a time, and 1 is named for a rollout and a simulator" in found.problem
    assert "name at least 2 devices" in found.fix and "remove placement.simulator" in found.fix
