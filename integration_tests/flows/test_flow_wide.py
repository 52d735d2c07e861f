"""Devices that move inside a step, on a real fleet: a helper takes groups while the tail decodes."""

from __future__ import annotations

from typing import Any

import pytest
from harness.fleet import Fleet
from harness.ledger import audit

STEPS, GROUPS, SAMPLES = 4, 12, 4
"""Two steps are measured before anything moves."""
FLAGS = ("--simulator", "0", "--rollout", "2", "--trainer", "2")
SLOW = "rollout.round=delay:0.02;trainer.micro=delay:0.15"
"""Times that do not depend on how busy the machine is: a decode round, and a micro-batch of about one group."""


def run_elastic(fleet: Fleet, spec_of: Any) -> tuple[list[dict[str, list[int]]], list[str]]:
    """A run whose answers end anywhere, a few of them late; what helpers gave to each step, and the run's notes.

    Two rollouts, an owner and a helper on two cores.
    """
    fleet.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    spec = spec_of(
        steps=STEPS,
        sampling__max_new_tokens=200,
        algorithm={"prompts_per_step": GROUPS, "group_size": SAMPLES},
        rollout__instances=2,
        trainer={"helpers": 1, "micro_batch_tokens": 96, "warmup": {"steps": 0}},
        reward={"scorers": [{"name": "length", "options": {"target": 1, "limit": 200}}]},
        checkpoint={"enabled": False},
    )
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and run.recoveries == 0
    notes = [event.data["text"] for event in fleet.events(run) if event.type == "noted"]
    return [item.helped for item in found.live], notes


def test_a_helper_contributes_the_gradient_of_whole_groups(tmp_path, spec_of):
    with Fleet(tmp_path / "data", *FLAGS, HEADRACE_FAILPOINTS=SLOW) as fleet:
        helped, notes = run_elastic(fleet, spec_of)
    assert helped[:2] == [{}, {}] and any(helped[2:]), notes
    for step, groups in enumerate(helped):
        own = range(step * GROUPS, (step + 1) * GROUPS)
        prompts = [prompt for each in groups.values() for prompt in each]
        assert set(prompts) <= set(own) and len(set(prompts)) == len(prompts)


@pytest.mark.nightly  # test_core_helpers kills helpers at every call, in virtual time
def test_the_owners_learn_what_a_killed_helper_had(tmp_path, spec_of):
    """Each helper dies as it tells of its gradient, which is the last that it does."""
    script = f"{SLOW};trainer.contribution.before_reply=kill"
    with Fleet(tmp_path / "data", *FLAGS, HEADRACE_FAILPOINTS=script) as fleet:
        helped, notes = run_elastic(fleet, spec_of)
    assert helped == [{}] * STEPS
    assert any("gives nothing to step" in note for note in notes), notes
