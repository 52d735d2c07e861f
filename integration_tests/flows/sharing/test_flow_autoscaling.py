"""A queue makes rollout grow within its bounds, and shrink when nobody has wanted as many for the cool-down."""

from __future__ import annotations

import time

import pytest
from harness.fleet import Fleet
from harness.specs import small_spec
from harness.waiting import wait_for

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
]  # The policy looks every 5 s; its rules have unit tests.
COOLDOWN_S = 12.0


def test_rollout_grows_with_the_queue_and_shrinks_after_it(tmp_path, tiny_model):
    variables = {"HEADRACE_AUTOSCALE": "rollout=1:2", "HEADRACE_AUTOSCALE_COOLDOWN_S": str(COOLDOWN_S)}
    counts = ("--rollout", "1", "--trainer", "1", "--reward", "1", "--simulator", "0")
    with Fleet(tmp_path / "fleet", *counts, **variables) as fleet:
        seen: list[set[str]] = []

        def rollouts() -> set[str]:
            listed = fleet.client.instances()
            seen.append({item.name for item in listed if item.kind == "rollout" and item.state == "READY"})
            return seen[-1]

        assert rollouts() == {"rollout-0"}
        spec = small_spec(tiny_model, steps=500, evaluation={"every": 0})
        runs = [fleet.submit(spec) for _ in range(3)]
        wait_for(lambda: rollouts() == {"rollout-0", "rollout-1"}, "a second rollout", 90)
        fleet.reach(runs[0], 1)
        for run in reversed(runs):
            fleet.client.cancel(run.id)
        ended = time.monotonic()
        wait_for(lambda: rollouts() == {"rollout-0"}, "one rollout", 90)
        assert time.monotonic() - ended > COOLDOWN_S - 1
        assert all(len(names) <= 2 for names in seen)  # Three runs wanted three.
