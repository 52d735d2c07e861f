"""Processes that die at a named place in their code, again and again: every incarnation does some of the work."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

FAST = ["trainer.commit.before_reply=kill@2"]
REST = [
    "trainer.checkpoint.before_rename=kill@2",
    "rollout.round=kill@14",  # for every change test_fault_kills kills the rollout, in a held step and in decoding
    "trainer.commit.before_optimizer=kill@2",
    "trainer.learn=kill@6",
    "trainer.commit.after_optimizer=kill@2",
    "trainer.checkpoint.write=kill@3",
    "rollout.round=kill@14;trainer.commit.after_optimizer=kill@2",
]


def run_with(script, own_fleet, spec_of, mode, steps=3):
    with own_fleet(HEADRACE_FAILPOINTS=script) as fleet:
        run = fleet.succeed(fleet.submit(spec_of(steps=steps, placement__mode=mode)), 400)
        found = audit(fleet, run)
        assert len(found.trained) == steps * BATCH and not found.dropped
        assert run.recoveries or any(event.type == "noted" for event in fleet.events(run)), "nothing died"
        return found


@pytest.mark.nightly  # quick: test_trainer_service has a commit fail at each of its places
@pytest.mark.parametrize("script", FAST)
def test_a_death_at_a_named_place(own_fleet, spec_of, script):
    run_with(script, own_fleet, spec_of, "disaggregated", steps=2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
@pytest.mark.parametrize("script", [*FAST, *REST])
def test_a_death_at_any_named_place(own_fleet, spec_of, script, mode):
    run_with(script, own_fleet, spec_of, mode)


@pytest.mark.nightly  # test_trainer_service has a commit fail at each of its places
def test_an_error_in_a_commit_is_no_version(own_fleet, spec_of):
    found = run_with("trainer.commit.before_optimizer=error@2", own_fleet, spec_of, "collocated")
    assert [item.version.ordinal for item in found.live] == [1, 2, 3]
