"""A wrong run spec is refused with the key, the reason and the nearest valid value."""

from copy import deepcopy
from typing import Any

import pytest
from headrace_schema.problems import explain, nearest, sentence
from headrace_schema.rules.combinations import doubtful_values
from headrace_schema.sections.learning import LoraSection
from headrace_schema.spec import RunSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

BASE: dict[str, Any] = {
    "model": {"path": "org/model"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}]},
}
MEGATRON: dict[str, Any] = {
    "trainer.backend": "megatron",
    "trainer.ranks": 2,
    "trainer.backend_options.tensor_parallel": 2,
}
DIVIDED: dict[str, Any] = {"trainer.ranks": 2, "trainer.backend_options.context_parallel": 2}


def with_values(values: dict[str, Any]) -> dict[str, Any]:
    """The base spec with values at dotted paths."""
    spec = deepcopy(BASE)
    for key, value in values.items():
        *parents, last = key.split(".")
        place = spec
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return spec


def problems_of(values: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(with_values(values))
    return {item.key: sentence(item) for item in explain(caught.value, RunSpec)}


def test_a_minimal_spec_is_valid_and_its_json_is_a_fixed_point():
    spec = RunSpec.model_validate(BASE)
    assert RunSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert spec.slots_per_step == 32


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"stpes": 3}, "stpes", "unknown key; did you mean steps?"),
        ({"lr": 3}, "lr", "did you mean optimizer.lr?"),
        ({"optimizer.name": "adam"}, "optimizer.name", "adamw"),
        (
            {"optimizer.name": "muon", "trainer.lora": {}},
            "optimizer.name",
            "factors of an adapter are no matrix",
        ),
        (
            {"trainer.gradient_checkpointing": False, "trainer.backend_options.offload_activations": True},
            "trainer.backend_options.offload_activations",
            "from which layers are computed again",
        ),
        (
            {"sampling.stages": [{"until_step": 5, "max_new_tokens": 8}] * 2, "steps": 9},
            "sampling.stages[1].until_step",
            "5 is not above 5, the step that the stage begins with; use at least 6",
        ),
        (
            {"sampling.stages": [{"until_step": 9, "max_new_tokens": 8}], "steps": 9},
            "sampling.stages[0].until_step",
            "steps: 9 end the run before sampling.max_new_tokens: 64 holds; use less than 9",
        ),
        (
            {"sampling.stages": [{"until_step": 5, "max_new_tokens": 64}], "steps": 9},
            "sampling.stages[0].max_new_tokens",
            "64 is not below sampling.max_new_tokens: 64, of the last stage; lower it",
        ),
        (
            {"sampling.stages": [{"until_step": 1, "max_new_tokens": 0}]},
            "sampling.stages[0].max_new_tokens",
            "the nearest valid value is 1",
        ),
        ({"learning_rate": 3}, "learning_rate", "did you mean optimizer.lr?"),
        ({"optimizer.learning_rate": 3}, "optimizer.learning_rate", "did you mean optimizer.lr?"),
        ({"max_new_token": 3}, "max_new_token", "did you mean sampling.max_new_tokens?"),
        ({"trainer.groupsize": 3}, "trainer.groupsize", "did you mean algorithm.group_size?"),
        ({"optimizer.weight_decai": 3}, "optimizer.weight_decai", "did you mean weight_decay?"),
        ({"algorithm.group_sise": 8}, "algorithm.group_sise", "did you mean group_size?"),
        ({"reward.scorers": [{"nmae": "exact"}]}, "reward.scorers[0].nmae", "did you mean name?"),
        ({"reward.scorers": [{}]}, "reward.scorers[0].name", "required key is missing; add it: a built-in"),
        ({"placement.mode": "colocated"}, "placement.mode", "did you mean collocated?"),
        ({"steps": 0}, "steps", "must be at least 1, got 0; the nearest valid value is 1"),
        ({"trainer.lora": {"rank": 0}}, "trainer.lora.rank", "the nearest valid value is 1"),
        ({"trainer.lora": {"r": 8}}, "trainer.lora.r", "keys here: alpha, quantization, rank, targets"),
        ({"trainer.lora": {"alpha": 0}}, "trainer.lora.alpha", "must be above 0"),
        (
            {"trainer.lora": {"targets": "q_proj"}},
            "trainer.lora.targets",
            "put it in brackets, or write all-linear",
        ),
        ({"trainer.lora": {"targets": 3}}, "trainer.lora.targets", "use one of: all-linear"),
        ({"trainer.lora": {"targets": []}}, "trainer.lora.targets", "a list with at least one entry"),
        ({"trainer.lora": {"targets": [""]}}, "trainer.lora.targets[0]", "at least 1 character"),
        ({"weights.transports": ["shm"]}, "weights.transports", "add grpc"),
        ({"weights.transports": ["delta", "shm"]}, "weights.transports", "add grpc"),
        ({"weights.transports": ["grpc", "shm", "grpc"]}, "weights.transports", "name each way once"),
        ({"weights.transports": ["tcp"]}, "weights.transports[0]", "use one of: collective"),
        ({"steps": 2**31}, "steps", "the nearest valid value is 2147483647"),
        ({"steps": "10"}, "steps", "must be an integer, got '10' (text); write 10 without quotes"),
        ({"steps": 9.6}, "steps", "write 10"),
        ({"steps": True}, "steps", "got True (a truth value)"),
        ({"optimizer.lr": float("inf")}, "optimizer.lr", "must be a finite number"),
        ({"optimizer.lr": 0}, "optimizer.lr", "use a number above 0"),
        ({"optimizer.beta1": 1}, "optimizer.beta1", "use a number below 1"),
        ({"seed": -1}, "seed", "the nearest valid value is 0"),
        ({"scheduling.priority": 101}, "scheduling.priority", "the nearest valid value is 100"),
        ({"scheduling.priority": -101}, "scheduling.priority", "the nearest valid value is -100"),
        ({"scheduling.weight": 0}, "scheduling.weight", "use a number above 0"),
        ({"scheduling.quantum": 5}, "scheduling.quantum", "did you mean quantum_s?"),
        ({"priority": 5}, "priority", "did you mean scheduling.priority?"),
        ({"from_checkpoint": {"step": 3}}, "from_checkpoint.run", "add it: id of the run"),
        ({"from_checkpoint": {"run": "run-1", "stpe": 3}}, "from_checkpoint.stpe", "did you mean step?"),
        ({"from_checkpoint": "run-1"}, "from_checkpoint", "write a mapping"),
        ({"sampling.stop": "x"}, "sampling.stop", "write a list"),
        ({"model": "org/model"}, "model", "must be a mapping, got 'org/model' (text); write a mapping"),
        ({"algorithm.group_size": 1}, "algorithm.group_size", "use at least 2"),
        ({"algorithm.options": {"minibatches": 99}}, "algorithm.options.minibatches", "nearest valid value"),
        ({"trainer.ranks": 3}, "algorithm.prompts_per_step", "the nearest valid value is 3"),
        ({"trainer.min_ranks": 2}, "trainer.min_ranks", "use at most 1"),
        (
            {"trainer.ranks": 2, "trainer.max_ranks": 1, "algorithm.prompts_per_step": 4},
            "trainer.max_ranks",
            "use at least 2",
        ),
        (
            {**MEGATRON, "trainer.ranks": 3},
            "trainer.ranks",
            "3 ranks are no multiple of the 2 that compute one model (tensor_parallel 2); the nearest valid value is 4",
        ),
        (
            {**MEGATRON, "trainer.ranks": 4, "algorithm.prompts_per_step": 3},
            "algorithm.prompts_per_step",
            "trainer.ranks: 4, which are 2 replicas of the model; the nearest valid value is 4",
        ),
        (
            {"trainer.ranks": 3, "trainer.backend_options.expert_parallel": 2},
            "trainer.ranks",
            "no multiple of the 2 that divide the experts (expert_parallel); the nearest valid value is 4",
        ),
        (
            {**DIVIDED, "trainer.ranks": 3},
            "trainer.ranks",
            "3 ranks are no multiple of the 2 that compute one model (context_parallel 2)",
        ),
        (
            {**DIVIDED, "trainer.ranks": 4, "algorithm.prompts_per_step": 3},
            "algorithm.prompts_per_step",
            "trainer.ranks: 4, which are 2 replicas of the model; the nearest valid value is 4",
        ),
        (
            {"trainer.max_ranks": 2, "placement.rollout": ["0"], "placement.trainer": ["1"]},
            "placement.trainer",
            "name at least 2 devices, or set trainer.max_ranks: 1",
        ),
        ({"algorithm.clip_low": 0.2}, "algorithm.clip_low", "belong in algorithm.options"),
        ({"optimizer.schedule.warmup_steps": 11}, "optimizer.schedule.warmup_steps", "value is 10"),
        ({"sampling.top_p": 0.9}, "sampling.top_p", "set top_p: 1"),
        ({"sampling.min_p": 0.1}, "sampling.min_p", "set min_p: 0"),
        ({"model.max_context": 64}, "sampling.max_new_tokens", "use less than 64"),
        ({"sampling.stop": [""]}, "sampling.stop", "remove it"),
        (
            {"placement.rollout": ["cpu:0"]},
            "placement.trainer",
            "make placement.rollout and placement.trainer equal",
        ),
        (
            {"placement.rollout": ["a", "a"], "placement.trainer": ["a", "a"]},
            "placement.rollout",
            "named twice",
        ),
        (
            {"placement": {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:0"]}},
            "placement.trainer",
            "cpu:0 generates too",
        ),
        (
            {"placement": {"rollout": ["cpu:0"], "trainer": ["cpu:0"]}, "rollout.instances": 2},
            "placement.rollout",
            "name at least 2 devices, or set rollout.instances: 1",
        ),
        ({"trainer.helpers": 1}, "trainer.helpers", "set rollout.instances: 2, or"),
        (
            {"trainer.helpers": 1, "placement": {"mode": "disaggregated", "flow": "sequential"}},
            "trainer.helpers",
            "set rollout.instances: 2, or",
        ),
        (
            {"trainer.helpers": 2, "placement": {"mode": "disaggregated"}},
            "trainer.helpers",
            "set rollout.instances: 2, or",
        ),
        (
            {"rollout.helpers": 2, "placement.mode": "disaggregated"},
            "rollout.helpers",
            "use at most trainer.ranks: 1",
        ),
        (
            {"placement": {"rollout": "0-3", "trainer": "3-4"}},
            "placement.trainer",
            "make placement.rollout and placement.trainer equal",
        ),
        ({"reward.scorers": [{"name": "exact", "weight": 0}]}, "reward.scorers", "every weight is 0"),
        ({"reward.scorers": [{"name": "my/own.py"}]}, "reward.scorers[0].name", "write my/own.py:function"),
    ],
)
def test_a_mistake_is_named_with_its_fix(values, key, words):
    found = problems_of(values)
    assert words in found[key], found


def test_adapters_are_off_unless_given_and_take_defaults():
    assert RunSpec.model_validate(BASE).trainer.lora is None
    spec = RunSpec.model_validate(with_values({"trainer.lora": {}}))
    assert spec.trainer.lora == LoraSection(rank=16, alpha=32.0, targets="all-linear")
    named = with_values({"trainer.lora": {"targets": ["q_proj"]}, "algorithm.name": "ppo"})
    assert RunSpec.model_validate(named).trainer.lora.targets == ["q_proj"]


@pytest.mark.parametrize(("rate", "doubted"), [(1e-6, True), (1e-5, False)])
def test_a_rate_of_whole_weights_is_doubted_for_adapters(rate, doubted):
    values = {"optimizer.lr": rate, "trainer.lora": {}}
    found = {item.key for item in doubtful_values(RunSpec.model_validate(with_values(values)))}
    assert ("optimizer.lr" in found) is doubted
    assert not [*doubtful_values(RunSpec.model_validate(with_values({"optimizer.lr": rate})))]


def test_a_session_may_have_several_ranks():
    spec = {"workflow": "session", "model": {"path": "org/model"}, "trainer": {"ranks": 2}}
    assert RunSpec.model_validate(spec).trainer.ranks == 2


def test_prompts_are_shared_by_replicas_and_not_by_ranks():
    spec = RunSpec.model_validate(with_values({**MEGATRON, "algorithm.prompts_per_step": 3}))
    assert spec.trainer.ranks == 2


@pytest.mark.parametrize(
    ("given", "mode", "rollout"),
    [
        ({}, "auto", []),
        ({"rollout": "0-2", "trainer": "3"}, "disaggregated", ["0", "1", "2"]),
        ({"rollout": "cpu:0-1", "trainer": ["cpu:0", "cpu:1"]}, "collocated", ["cpu:0", "cpu:1"]),
        ({"trainer,rollout": "all"}, "collocated", ["all"]),
        ({"rollout": "a/all", "trainer": "b/0-1"}, "disaggregated", ["a/all"]),
        ({"mode": "hybrid", "rollout": 0, "trainer": 1}, "hybrid", ["0"]),
    ],
)
def test_named_devices_say_the_mode(given, mode, rollout):
    placement = RunSpec.model_validate(with_values({"placement": given})).placement
    assert (placement.mode, placement.rollout) == (mode, rollout)


@pytest.mark.parametrize(
    ("given", "steps", "measured"),
    [
        ({}, 159, 0),
        ({}, 160, 3),
        ({"measure_steps": 2}, 5, 2),
        ({"measure_steps": 0}, 1000, 0),
        ({"mode": "disaggregated"}, 1000, 0),
    ],
)
def test_a_run_is_measured_where_that_is_a_small_part_of_it(given, steps, measured):
    spec = RunSpec.model_validate(with_values({"placement": given, "steps": steps}))
    assert spec.placement.measured_steps(spec.steps) == measured


def test_all_mistakes_are_named_at_once():
    assert set(problems_of({"steps": 0, "sede": 1, "optimizer.lr": "fast"})) == {
        "steps",
        "sede",
        "optimizer.lr",
    }
    assert set(problems_of({"sampling.top_p": 0.5, "sampling.top_k": 4})) == {
        "sampling.top_p",
        "sampling.top_k",
    }


STALE: dict[str, Any] = {"algorithm.max_staleness": 1}
ROBOT: dict[str, Any] = {
    "workflow": "embodied",
    "model": {"policy": {"kind": "mlp"}},
    "environment.tasks": ["reach-v3"],
    "algorithm.name": "ppo",
    "data.source": "episodes",
}


@pytest.mark.parametrize("wrong", [-1, 17, 1.5, True, "1"])
def test_staleness_is_a_whole_number_from_0_to_16(wrong: object):
    assert list(problems_of({"algorithm.max_staleness": wrong})) == ["algorithm.max_staleness"]


@pytest.mark.parametrize(
    ("values", "mode", "install"),
    [
        (STALE, "auto", "in_flight"),
        ({**STALE, "placement.mode": "hybrid"}, "hybrid", "in_flight"),
        ({**STALE, "placement.rollout": "0", "placement.trainer": "1"}, "disaggregated", "in_flight"),
        ({**STALE, "rollout.install": "abort_and_resume"}, "auto", "abort_and_resume"),
        ({**STALE, **ROBOT}, "auto", "drain"),
        ({**STALE, "algorithm.options.clip_high": 0.3}, "auto", "in_flight"),
        ({"algorithm.options": {"old_log_probs": "engine", "clip_high": 0.3}}, "auto", "in_flight"),
    ],
)
def test_what_older_answers_take_stays_as_it_is_given(values, mode, install):
    spec = RunSpec.model_validate(with_values(values))
    assert (spec.placement.mode, spec.install) == (mode, install)


KEYS = st.sampled_from([*RunSpec.model_fields, "lr", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # The first draw of text builds a table.
@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_any_json_is_either_valid_or_explained(values):
    try:
        RunSpec.model_validate({**BASE, **values})
    except ValidationError as error:
        found = explain(error, RunSpec)
        assert found
        assert all(item.problem and item.fix for item in found)


def test_nearest_ignores_case_and_refuses_far_values():
    assert nearest("GRPO", ["grpo", "ppo"]) == "grpo"
    assert nearest("zzzz", ["grpo", "ppo"]) is None
