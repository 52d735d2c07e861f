"""G5: a deterministic run that lost its trainer ends with the very weights of one that lost nothing."""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 4


@pytest.mark.parametrize("mode", [pytest.param("collocated", marks=pytest.mark.nightly), "disaggregated"])
def test_a_killed_trainer_does_not_change_the_final_weights(fleet, spec_of, gate, mode):
    settings = {"steps": STEPS, "deterministic": True, "placement__mode": mode, "reward": gate.reward}
    calm = fleet.succeed(fleet.submit(spec_of(**settings)))
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(**settings))
    gate.wait_until_held()
    fleet.kill("trainer-0")
    gate.open()
    killed = fleet.succeed(fleet.reach(run, 2))
    assert audit(fleet, killed).rewinds == 1
    moved = {item.version.digest for item in fleet.client.certificates(calm.id)}
    assert len(moved) > 1, "the weights never moved: equality would prove nothing"
    assert killed.policy.digest == calm.policy.digest
