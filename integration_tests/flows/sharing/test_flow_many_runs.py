"""Several runs on one fleet of one instance of each kind: in turns, and by priority."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

STEPS = 6


def weights_hash(run) -> str:
    """Digest of the exported weights."""
    return hashlib.sha256((Path(run.export_path) / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.nightly  # quick: test_fault_deterministic.py; `ci.recorded` has the weights of three examples
def test_a_deterministic_run_that_takes_turns_ends_with_the_weights_that_it_has_alone(fleet, spec_of):
    def spec(name, **more):
        return spec_of(name=name, steps=STEPS, deterministic=True, export=True, **more)

    alone = fleet.succeed(fleet.submit(spec("alone")))
    runs = [
        fleet.submit(spec("alternating", scheduling__quantum_s=0.3)),
        fleet.submit(spec_of(name="other", steps=STEPS, seed=11, scheduling__quantum_s=0.3)),
    ]
    both = [fleet.succeed(run) for run in runs]
    admitted = sorted(
        (event.time, event.run) for run in both for event in fleet.events(run) if event.type == "run_admitted"
    )
    turns = sum(a != b for (_, a), (_, b) in pairwise(admitted))
    assert turns >= 2, f"they alternate: {admitted}"
    for run in both:
        found = audit(fleet, run)
        assert len(found.trained) == STEPS * BATCH and not found.dropped
        assert run.recoveries == 0, "being admitted again is no recovery"
    assert weights_hash(both[0]) == weights_hash(alone)


@pytest.mark.nightly  # quick: test_many_runs serves a low priority beside urgent runs
def test_a_higher_priority_comes_first(fleet, spec_of, gate):
    gate.hold_after(3)
    holder = fleet.submit(spec_of(name="holder", steps=1, reward=gate.reward))
    gate.wait_until_held()
    low = fleet.submit(spec_of(name="low", steps=1))
    high = fleet.submit(spec_of(name="high", steps=1, scheduling__priority=5))
    assert wait_for(
        lambda: fleet.client.get(high.id).place == 1 and fleet.client.get(low.id).place == 2,
        "the queue's order",
        10,
    )
    gate.open()
    ended = {name: fleet.succeed(run) for name, run in (("holder", holder), ("low", low), ("high", high))}
    assert ended["high"].started_at < ended["low"].started_at
