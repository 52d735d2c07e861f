"""Faults of a run whose next steps are answered while a step is learned: algorithm.max_staleness above 0."""

from __future__ import annotations

import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 6
FRESH_FLEET = True
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


@pytest.mark.parametrize(
    "instance", ["trainer-0", "rollout-0", pytest.param("coordinator", marks=pytest.mark.nightly)]
)
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
    assert found.rewinds == (1 if instance == "trainer-0" else 0)
    tokens, worst = stale_tokens(found)
    assert tokens and 1 <= worst <= 2, "nothing was made ahead of its step"
    opened = {event.data["step"] for event in fleet.events(run) if event.type == "step_opened"}
    assert opened == set(range(1, STEPS + 1))
