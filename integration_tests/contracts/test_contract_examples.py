"""Every example of an algorithm is a spec that a fleet takes: by its keys, by the options' schemas, by the plug-in."""

from __future__ import annotations

import pytest
from harness.examples import PAGE, algorithm_examples
from headrace.client.specs import load_spec
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_coordinator.data.given import GivenForm
from headrace_schema.rules.asked import GROUP_RELATIVE
from headrace_schema.spec import RunSpec
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm
from pydantic import ValidationError

EXAMPLES = algorithm_examples()
VARIANTS = {"grpo_kl": "grpo"}
"""Examples that show an algorithm once more, with options of another kind."""
FLEET = FleetView(
    capabilities={
        "trainer": {
            "backends": frozenset({"fsdp"}),
            "algorithms": frozenset(ALGORITHMS.names()),
            "algorithm_options": frozenset(ALGORITHMS.capabilities(pytest.fail)),
        },
        "rollout": {"engines": frozenset({"transformers"})},
        "reward": {"scorers": frozenset({"exact"})},
    },
    instances={"trainer": 1, "rollout": 1, "reward": 1},
    devices=["host/cpu:0"],
)


def check(spec, fleet):
    return problems_of(Submission(spec, fleet, Dataset.open(spec.data, spec.seed, given=GivenForm.of(spec))))


def spec_of(name, tiny_model, **overrides):
    file, changes = EXAMPLES[name]
    changes = [*changes, f"model.path={tiny_model}"]
    if name == "distill":  # Its teacher is made by its own command.
        changes += [f"trainer.reference.path={tiny_model}"]
    return load_spec(
        file, [*changes, *(f"{key.replace('__', '.')}={value}" for key, value in overrides.items())]
    )


def test_every_algorithm_has_an_example_and_every_file_is_named():
    assert EXAMPLES.keys() == {*ALGORITHMS.names(), *VARIANTS}
    assert {file for file, _ in EXAMPLES.values()} == {*PAGE.parent.glob("*.yaml")}


@pytest.mark.parametrize("name", [*ALGORITHMS.names(), *VARIANTS])
def test_a_fleet_takes_the_example(name, tiny_model):
    spec = RunSpec.model_validate(spec_of(name, tiny_model))
    assert check(spec, FLEET) == []
    assert spec.algorithm.name == VARIANTS.get(name, name)
    assert build_algorithm(spec.algorithm).passes.several or not spec.has_scorers


def test_a_wrong_option_of_an_example_is_named(tiny_model):
    spec = RunSpec.model_validate(spec_of("gspo", tiny_model, algorithm__options__gamma=0.9))
    assert [found.key for found in check(spec, FLEET)] == ["algorithm.options.gamma"]


@pytest.mark.parametrize("name", sorted(GROUP_RELATIVE))
def test_a_group_of_one_is_refused_where_groups_are_compared(name, tiny_model):
    with pytest.raises(ValidationError, match=r"compares the samples of a group"):
        RunSpec.model_validate(spec_of(name, tiny_model, algorithm__group_size=1))


def test_a_group_of_one_is_taken_where_they_are_not(tiny_model):
    spec = RunSpec.model_validate(spec_of("reinforce_pp", tiny_model, algorithm__group_size=1))
    assert check(spec, FLEET) == [] and build_algorithm(spec.algorithm)
