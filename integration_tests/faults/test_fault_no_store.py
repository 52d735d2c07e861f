"""The store stands still for ten seconds: the run says what it waits for, loses nothing, and goes on."""

from __future__ import annotations

import signal
import time

from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

AWAY_S = 10.0


def test_ten_seconds_without_the_store(fleet, spec_of, gate):
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(steps=4, reward=gate.reward))
    gate.wait_until_held()
    fleet.reach(run, 2)
    began = time.monotonic()
    store = fleet.kill("store", signal.SIGSTOP)
    try:
        gate.open()

        def waiting():
            return [text for text in fleet.client.get(run.id).waiting_for if "Redis" in text]

        wait_for(waiting, "the run to say that it waits for the store", 60)
        while time.monotonic() - began < AWAY_S:
            assert fleet.client.get(run.id).step == 2, "a step was committed without its log"
            time.sleep(0.2)
    finally:
        fleet.kill("store", signal.SIGCONT)
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == 4 * BATCH and found.rewinds == 0
    assert not [text for text in fleet.client.get(run.id).waiting_for if "Redis" in text]
    assert fleet.pid_of("store") == store
    assert {item.state for item in fleet.client.instances()} == {"READY"}
