"""Evaluation draws from a stream of its own, whatever the run's seed."""

import pytest
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_coordinator.run.evaluation.evaluate import evaluation_seed
from headrace_schema.spec import RunSpec
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World
from pydantic import ValidationError

LARGEST = 2**63 - 1


def test_a_small_seed_keeps_its_stream():
    assert evaluation_seed(7, 0) == 7 + 1_000_003


@pytest.mark.parametrize("ordinal", [0, 1, 2**31])
def test_every_seed_of_a_spec_fits_the_message_and_is_not_the_runs(ordinal):
    for seed in (0, 1, LARGEST - 1_000_003, LARGEST - 1, LARGEST):
        found = evaluation_seed(seed, ordinal)
        assert rollout.GenerateOpen(seed=found).seed == found != seed


def test_a_run_with_the_largest_seed_evaluates():
    """The world's spec has held-out items, so it is evaluated at its start."""
    world = World(1, faults=False)
    world.spec = world.spec.model_copy(update={"seed": LARGEST})
    outcome = run_virtual(world.live())
    assert outcome.state == "SUCCEEDED"


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_other_seeds_are_refused_by_name(seed):
    spec = World(1, faults=False).spec.model_dump(mode="json")
    with pytest.raises(ValidationError, match="seed"):
        RunSpec.model_validate({**spec, "seed": seed})
