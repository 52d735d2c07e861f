"""A fleet that goes down and comes up again keeps its runs, on its own store or on another server."""

from __future__ import annotations

from harness.ledger import audit
from harness.specs import BATCH
from harness.valkey import Valkey


def test_down_and_up_keep_runs_and_resume_the_one_in_hand(own_fleet, spec_of, gate):
    with own_fleet() as fleet:
        ended = fleet.succeed(fleet.submit(spec_of(name="ended", steps=1)))
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


def test_another_redis_holds_the_log(own_fleet, spec_of, tmp_path):
    with Valkey(tmp_path / "store") as store:
        with own_fleet(HEADRACE_REDIS_URL=store.url) as fleet:
            assert not fleet.runs("store"), "no embedded store beside another server"
            run = fleet.succeed(fleet.submit(spec_of(steps=1)))
            assert any(b"headrace" in key for key in store.names())
            fleet.down()
            fleet.up()
            assert fleet.client.get(run.id).raw == run.raw
            assert len(audit(fleet, fleet.succeed(fleet.submit(spec_of(steps=2)))).trained) == 2 * BATCH
