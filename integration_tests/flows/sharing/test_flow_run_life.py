"""What stands around one run: pause, cancel and resume beside other runs; repeated requests; forks of a step."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from harness.gate import Gate
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for


@pytest.fixture
def held(fleet, spec_of, gate):
    """A run of 4 steps that stands still in its third, and its gate."""
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(steps=4, reward=gate.reward))
    gate.wait_until_held()
    return fleet.reach(run, 2)


def nothing_held(fleet, run):
    """No lease, no grant and no open run is left of a run that is paused or has ended."""
    wait_for(
        lambda: (
            not any(lease.run == run.id for lease in fleet.client.leases().leases)
            and not any(item.run == run.id for item in fleet.client.instances())
        ),
        f"{run.id} to hold nothing",
        30,
    )


@pytest.mark.nightly  # a twin in virtual time: test_many_runs, "in nobody's way"
def test_another_run_uses_the_instances_of_a_paused_one(fleet, held, gate, spec_of):
    fleet.client.pause(held.id, now=True)
    fleet.state(held, "PAUSED")
    nothing_held(fleet, held)
    gate.open()
    other = fleet.succeed(fleet.submit(spec_of(name="other", steps=2)))
    assert len(audit(fleet, other).trained) == 2 * BATCH
    fleet.client.resume(held.id)
    found = audit(fleet, fleet.succeed(held))
    assert len(found.trained) == 4 * BATCH and len(found.live) == 4


@pytest.mark.parametrize(
    "instance",
    [
        pytest.param("rollout-0", marks=pytest.mark.nightly),
        "trainer-0",
        pytest.param("reward-0", marks=pytest.mark.nightly),
    ],
)
def test_a_drained_instance_is_replaced_and_the_run_loses_nothing(fleet, held, gate, instance):
    before = fleet.pid_of(instance)
    shown = httpx.get(
        f"{fleet.url}/v1/runs/{held.id}/flow", headers={"Authorization": f"Bearer {fleet.token}"}
    ).json()
    assert shown["slots"] == BATCH and shown["scoring"] > 0 and shown["step"] == 3
    first = fleet.client.drain(instance)
    gate.open()
    fleet.replaced(instance, before)
    found = audit(fleet, ended := fleet.succeed(held))
    assert len(found.trained) == 4 * BATCH and len(found.live) == 4
    assert ended.counts.dropped == 0
    fleet.ready(instance)
    assert first not in {item.raw["incarnation"] for item in fleet.client.instances()}


@pytest.mark.nightly  # a twin in virtual time: test_many_runs, "paused and cancelled"
def test_a_paused_run_that_is_cancelled_leaves_the_fleet_usable(fleet, held, gate, spec_of):
    fleet.client.pause(held.id, now=True)
    fleet.state(held, "PAUSED")
    cancelled = fleet.client.cancel(held.id)
    assert cancelled.state == "CANCELLED" and "paused" in cancelled.reason
    gate.open()
    for name in ("second", "third"):
        assert fleet.succeed(fleet.submit(spec_of(name=name, steps=1))).step == 1


@pytest.mark.nightly  # a twin in virtual time: test_many_runs, "resumed beside another"
def test_a_resumed_run_waits_while_another_one_works(fleet, held, gate, spec_of, tmp_path):
    fleet.client.pause(held.id, now=True)
    fleet.state(held, "PAUSED")
    gate.open()
    other_gate = Gate(tmp_path / "other")
    other_gate.hold_after(3)
    other = fleet.submit(spec_of(name="other", steps=1, reward=other_gate.reward))
    other_gate.wait_until_held()
    resumed = fleet.client.resume(held.id)
    assert resumed.state == "QUEUED"
    queued = wait_for(lambda: (now := fleet.client.get(held.id)).place and now, "a place in the queue", 10)
    assert queued.place == 1 and any(other.id in text for text in queued.waiting_for)
    other_gate.open()
    fleet.succeed(other)
    assert len(audit(fleet, fleet.succeed(held)).trained) == 4 * BATCH


@pytest.mark.nightly  # test_many_runs has the two arrive eight milliseconds apart, in virtual time
def test_pause_now_and_cancel_in_one_breath(fleet, held, gate, spec_of):
    with ThreadPoolExecutor(2) as pool:
        paused = pool.submit(fleet.client.pause, held.id, now=True)
        cancelled = pool.submit(fleet.client.cancel, held.id)
        paused.exception()
        cancelled.result()
    ended = fleet.state(held, "CANCELLED")
    assert "bug" not in ended.reason
    nothing_held(fleet, held)
    gate.open()
    assert fleet.succeed(fleet.submit(spec_of(name="next", steps=1))).step == 1


@pytest.mark.nightly  # test_many_runs keeps a commit that was sent, for either intent
def test_a_commit_in_hand_is_recorded_before_the_run_pauses(own_fleet, spec_of):
    point = "trainer.commit.after_optimizer=stop@1"
    with own_fleet(HEADRACE_FAILPOINTS=point) as fleet:
        run = fleet.submit(spec_of(steps=3))
        trainer = fleet.process("trainer-0")
        wait_for(lambda: trainer.status() == psutil.STATUS_STOPPED, "the trainer to stand still in a commit")
        fleet.client.pause(run.id, now=True)
        trainer.send_signal(signal.SIGCONT)
        paused = fleet.state(run, "PAUSED")
        assert paused.step == 1
        fleet.client.resume(run.id)
        found = audit(fleet, fleet.succeed(run))
        assert len(found.trained) == 3 * BATCH
        # A committed step is never thrown away: each step was committed once.
        commits = [event for event in fleet.events(run) if event.type == "step_committed"]
        assert len(commits) == 3 and fleet.client.get(run.id).warmup_steps == 2


def test_one_key_is_one_run_however_often_and_fast_it_is_sent(fleet, spec_of, gate):
    spec = spec_of(steps=1, reward=gate.reward)  # A user's scorer: each submission tries it out first.

    def submit(_: int) -> str:
        answer = httpx.post(
            f"{fleet.url}/v1/runs",
            json=spec,
            headers={"Idempotency-Key": "twenty"} | fleet.headers,
            timeout=120,
        )
        assert answer.status_code in (200, 201), answer.text
        return answer.json()["id"]

    with ThreadPoolExecutor(20) as pool:
        ids = set(pool.map(submit, range(20)))
    assert len(ids) == 1
    fleet.succeed(ids.pop())


@pytest.mark.nightly  # test_many_runs has a trainer die in each third step, in virtual time
def test_recoveries_without_progress_end_the_run(own_fleet, spec_of):
    """A trainer that dies in each third step, before the first checkpoint, would recover for ever."""
    point = "trainer.commit.after_optimizer=kill@3"
    with own_fleet(HEADRACE_FAILPOINTS=point) as fleet:
        spec = spec_of(steps=6, checkpoint__interval_steps=100, limits__recoveries=1)
        run = fleet.submit(spec)
        ended = fleet.client.wait(run.id, 400)
        assert ended.state == "FAILED" and "limits.recoveries" in ended.reason
