"""A fleet on another Redis server goes down and comes up again: it keeps its runs and goes on with the one in hand.

On the fleet's own store the launcher's fault tests stop fleets and start them again.
"""

from __future__ import annotations

import pytest
from harness.ledger import audit
from harness.specs import BATCH
from harness.valkey import Valkey


@pytest.mark.nightly  # test_fault_launcher stops a fleet in a step; test_compose_faults has the other server
def test_down_and_up_keep_runs_on_another_redis_and_resume_the_one_in_hand(
    own_fleet, spec_of, gate, tmp_path
):
    with Valkey(tmp_path / "store") as store, own_fleet(HEADRACE_REDIS_URL=store.url) as fleet:
        assert not fleet.runs("store"), "no embedded store beside another server"
        ended = fleet.succeed(fleet.submit(spec_of(name="ended", steps=1)))
        assert any(b"headrace" in key for key in store.names())
        gate.hold_after(2 * BATCH + 3)
        cut = fleet.submit(spec_of(name="cut", steps=4, reward=gate.reward))
        queued = fleet.submit(spec_of(name="queued", steps=1))
        gate.wait_until_held()
        fleet.reach(cut, 2)
        fleet.down()
        gate.open()
        fleet.up()
        assert {run.id for run in fleet.client.list()} == {ended.id, cut.id, queued.id}
        assert fleet.client.get(ended.id).raw == ended.raw
        found = audit(fleet, fleet.succeed(cut))
        assert len(found.trained) == 4 * BATCH and found.rewinds >= 1
        assert len(audit(fleet, fleet.succeed(queued)).trained) == BATCH
