"""Faults of a run whose next steps are answered while a step is learned: algorithm.max_staleness above 0."""

from __future__ import annotations

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 6
WORKERS = ("rollout-0", "trainer-0", "reward-0")


@pytest.fixture
def stale(spec_of, gate):
    """A run with answers of versions up to two steps old, whose answers are scored as `gate` lets them."""

    def make(**more):
        return spec_of(
            steps=STEPS,
            reward=gate.reward,
            algorithm__max_staleness=2,
            placement__mode="disaggregated",
            **more,
        )

    return make


def stale_tokens(found):
    """Tokens that an older version than the base sampled, and the worst staleness."""
    fresh = sum(item.tokens_by_version.get(item.version.parent, 0) for item in found.live)
    return sum(item.tokens for item in found.live) - fresh, max(item.max_staleness for item in found.live)


@pytest.mark.nightly  # quick: the seeds with --stale, test_open_steps.py
def test_processes_killed_in_turn_cost_no_slot_of_the_open_steps(fleet: Fleet, stale, gate):
    """Each dies while its step waits for scores and answers of the next ones are there, or are being made."""
    steps, more = 10, 2 * BATCH + 3
    fleet.ready(*WORKERS)
    gate.hold_after(more)
    run = fleet.submit(stale() | {"steps": steps})
    for instance in ("rollout-0", "trainer-0", "coordinator"):
        gate.wait_until_held()
        killed = fleet.kill(instance)
        gate.hold_after(more)
        fleet.replaced(instance, killed)
    gate.wait_until_held()
    gate.open()
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == steps * BATCH and not found.dropped
    assert found.rewinds == 1, "the trainer was killed once"
    tokens, worst = stale_tokens(found)
    assert tokens and 1 <= worst <= 2, "nothing was made ahead of its step"


PLACES = [
    "rollout.install.in_flight=kill@2",
    "rollout.round=kill@30",
    "trainer.learn=kill@5",
    "trainer.commit.before_optimizer=kill@3",
    "trainer.commit.after_optimizer=kill@3",
    "trainer.commit.before_reply=kill@3",
    "trainer.checkpoint.before_rename=kill@2",
]


@pytest.mark.nightly
@pytest.mark.parametrize("place", PLACES)
def test_a_death_at_a_named_place_of_the_pipeline(own_fleet, stale, place):
    """Again and again: every incarnation does some of the work."""
    with own_fleet(HEADRACE_FAILPOINTS=place) as fleet:
        run = fleet.succeed(fleet.submit(stale()), 400)
        found = audit(fleet, run)
        assert len(found.trained) == STEPS * BATCH and not found.dropped
        assert run.recoveries or any(event.type == "noted" for event in fleet.events(run)), "nothing died"
        assert max(item.max_staleness for item in found.live) <= 2


@pytest.mark.nightly  # quick: the seeds with --stale, test_engine_leases.py
def test_an_install_that_fails_half_way_is_made_between_answers(own_fleet, stale):
    """The answers in hand have begun to go on with a version whose weights then do not come."""
    with own_fleet(HEADRACE_FAILPOINTS="rollout.install.in_flight=error@2") as fleet:
        run = fleet.succeed(fleet.submit(stale()))
        found = audit(fleet, run)
        notes = [event.data["text"] for event in fleet.events(run) if event.type == "noted"]
    assert any("was not installed in flight: " in note and "FAILPOINT" in note for note in notes), notes
    assert len(found.trained) == STEPS * BATCH and not found.dropped and run.recoveries == 0
    tokens, worst = stale_tokens(found)
    assert tokens and 1 <= worst <= 2


@pytest.mark.nightly  # above, each is killed in one run
@pytest.mark.parametrize("instance", ["trainer-0", "rollout-0", "coordinator"])
def test_a_killed_process_loses_nothing_of_the_open_steps(fleet: Fleet, stale, gate, instance):
    """Held while the third step is learned and answers of the two behind it wait for their scores."""
    fleet.ready(*WORKERS)
    gate.hold_after(3 * BATCH + 3)
    run = fleet.submit(stale())
    gate.wait_until_held()
    fleet.reach(run, 2)
    killed = fleet.kill(instance)
    gate.open()
    fleet.replaced(instance, killed)
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == STEPS * BATCH and not found.dropped
    # A run whose only rollout is away for long gives its devices back, and restores when it has them again.
    left = sum(
        each.type == "run_state_changed" and each.data["state"] == "QUEUED" for each in fleet.events(run)
    )
    assert found.rewinds == left + (instance == "trainer-0")
    tokens, worst = stale_tokens(found)
    assert tokens and 1 <= worst <= 2, "nothing was made ahead of its step"
    opened = {event.data["step"] for event in fleet.events(run) if event.type == "step_opened"}
    assert opened == set(range(1, STEPS + 1))
