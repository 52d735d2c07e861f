"""Runs whose rollouts take new weights by their changes, and by another way where one fails."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 6
CHANGES = {
    "steps": STEPS,
    "placement__mode": "disaggregated",
    "model__dtype": "bfloat16",
    "optimizer__lr": 1e-6,
    "weights": {"transports": ["delta", "grpc"], "delta": "always", "whole_every": 4},
}


def came_whole(moved):
    """Whether versions 1 and 5 did; of the latter a norm that no step has moved is held."""
    assert 0.9 * moved[0] < moved[4] <= moved[0] == max(moved), moved


def test_rollouts_take_what_has_changed_and_every_so_often_the_whole(fleet, spec_of):
    run = fleet.succeed(fleet.submit(spec_of(**CHANGES)))
    assert len(audit(fleet, run).trained) == STEPS * BATCH and run.recoveries == 0
    steps = [step.figures for step in fleet.client.metrics(run.id)]
    moved = [step["weights_bytes"] for step in steps]
    came_whole(moved)
    assert all(0 < moved[index] < 0.25 * moved[0] for index in (1, 2, 3, 5)), moved
    assert not any(step["weights_fallbacks"] for step in steps)
    assert all(step["weights_pause_seconds"] > 0 < step["weights_seconds"] for step in steps)


BROADCAST = {"transports": ["collective", "delta", "grpc"], "delta": "always", "whole_every": 4}


def broadcast_changes(steps):
    """Whether version 1 and 5 came whole and the others by their changes."""
    moved = [step["weights_bytes"] for step in steps]
    came_whole(moved)
    assert all(0 < moved[index] < 0.25 * moved[0] for index in (1, 2, 3, 5)), moved


@pytest.mark.nightly
def test_each_rank_of_a_trainer_sends_its_part(own_fleet, spec_of):
    with own_fleet("--trainer", "2", "--devices", "cpu:0,cpu:1,cpu:2") as fleet:
        fleet.ready("trainer-0", "trainer-1")
        weights = BROADCAST | {"publish": "ranks"}
        run = fleet.succeed(fleet.submit(spec_of(**CHANGES | {"weights": weights, "trainer__ranks": 2})))
        assert len(audit(fleet, run).trained) == STEPS * BATCH and run.recoveries == 0
        steps = [step.figures for step in fleet.client.metrics(run.id)]
        broadcast_changes(steps)
        assert not any(step["weights_fallbacks"] for step in steps)


def test_rollouts_take_part_in_a_broadcast(fleet, spec_of):
    weights = BROADCAST | {"transports": ["cuda_ipc", *BROADCAST["transports"]]}
    run = fleet.succeed(fleet.submit(spec_of(**CHANGES | {"weights": weights})))
    assert len(audit(fleet, run).trained) == STEPS * BATCH and run.recoveries == 0
    broadcast_changes([step.figures for step in fleet.client.metrics(run.id)])
    texts = [str(event.data.get("text")) for event in fleet.events(run)]
    told = [text.partition("in another way: ")[2] for text in texts if "in another way" in text]
    # The only way that failed, and once for each rollout: this machine has no GPU.
    assert set(told) == {"cuda_ipc from trainer-0: the source computes on no GPU now"}, told


@pytest.mark.nightly  # quick: test_rollouts_take_part_in_a_broadcast, where a way fails and the next is taken
def test_a_run_goes_on_by_the_whole_where_changes_fail(own_fleet, spec_of):
    with own_fleet(HEADRACE_FAILPOINTS="weights.delta=error@2+") as fleet:
        run = fleet.succeed(fleet.submit(spec_of(**CHANGES)))
        assert len(audit(fleet, run).trained) == STEPS * BATCH and run.recoveries == 0
        steps = [step.figures for step in fleet.client.metrics(run.id)]
        # The one of the second is changes; the third and fourth version, and the last, asked for them in vain.
        assert [step["weights_fallbacks"] for step in steps][:4] == [0, 0, 1, 1]
        moved = [step["weights_bytes"] for step in steps]
        assert moved[1] < 0.25 * moved[0] and min(moved[2:4]) > 0.9 * moved[0] == 0.9 * max(moved)
        texts = [str(event.data.get("text")) for event in fleet.events(run)]
        told = [text for text in texts if "in another way" in text]
        assert len(told) == 1 and "delta from trainer-0" in told[0] and "failpoint" in told[0], told
        assert "delta from" in fleet.log("rollout-0")
