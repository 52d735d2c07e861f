"""A run is paused, resumed, cancelled and queued by its user; nothing of it is trained twice or lost."""

from __future__ import annotations

import httpx
import pytest
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace.client import HeadraceError


@pytest.fixture
def held(fleet, spec_of, gate):
    """A run of 4 steps that stands still in its third, and its gate."""
    gate.hold_after(2 * BATCH + 3)
    run = fleet.submit(spec_of(steps=4, reward=gate.reward))
    gate.wait_until_held()
    return fleet.reach(run, 2)


def test_pause_finishes_the_step_and_resume_goes_on(fleet, held, gate):
    assert fleet.headrace("run", "pause", held.id).returncode == 0
    assert fleet.client.get(held.id).state == "PAUSING"
    gate.open()
    paused = fleet.state(held, "PAUSED")
    assert paused.step == 3
    wait_for(lambda: not fleet.client.leases().leases, "a paused run to hold no device", 30)
    assert fleet.headrace("run", "resume", held.id).returncode == 0
    assert len(audit(fleet, fleet.succeed(held)).trained) == 4 * BATCH


def test_pause_now_aborts_the_step_and_makes_it_again(fleet, held, gate):
    assert fleet.headrace("run", "pause", held.id, "--now").returncode == 0
    paused = fleet.state(held, "PAUSED")
    assert paused.step == 2
    gate.open()
    fleet.client.resume(held.id)
    run = fleet.succeed(held)
    assert len(audit(fleet, run).trained) == 4 * BATCH
    assert [e.data["step"] for e in fleet.events(run) if e.type == "step_aborted"] == [3]


def test_cancel_ends_the_run_and_the_next_one_starts(fleet, held, gate, spec_of):
    waiting = fleet.submit(spec_of(steps=1))
    wait_for(
        lambda: any(held.id in text for text in fleet.client.get(waiting.id).waiting_for),
        "the queued run to say whom it waits for",
    )
    assert fleet.headrace("run", "cancel", held.id).returncode == 0
    cancelled = fleet.state(held, "CANCELLED")
    assert cancelled.step == 2 and len(audit(fleet, cancelled).trained) == 2 * BATCH
    assert fleet.client.checkpoints(held.id), "its last checkpoint stays"
    gate.open()
    assert fleet.succeed(waiting).step == 1
    with pytest.raises(HeadraceError) as refused:
        fleet.client.resume(held.id)
    assert refused.value.reason == "CONFLICT" and "CANCELLED" in refused.value.message


@pytest.mark.nightly  # quick: the seeds have up to four runs that compete
def test_two_runs_wait_for_each_other_in_order(fleet, spec_of):
    first, second = (fleet.submit(spec_of(name=name, steps=2)) for name in ("first", "second"))
    later = fleet.succeed(second)
    earlier = fleet.client.get(first.id)
    assert earlier.state == "SUCCEEDED" and earlier.finished_at <= later.started_at
    for run in (earlier, later):
        assert len(audit(fleet, run).trained) == 2 * BATCH


@pytest.mark.nightly  # quick: test_many_runs has a queued run show its place
def test_queued_runs_have_a_place_and_name_who_holds_the_instance(fleet, held, gate, spec_of):
    first = fleet.submit(spec_of(name="first"))
    second = fleet.submit(spec_of(name="second"))
    urgent = fleet.submit(spec_of(name="urgent", scheduling={"priority": 5}))

    def places() -> dict[str, int | None]:
        return {run.id: run.place for run in fleet.client.list() if run.place}

    wait_for(lambda: places() == {urgent.id: 1, first.id: 2, second.id: 3}, "three places in the queue")
    fleet.client.cancel(urgent.id)
    wait_for(lambda: places() == {first.id: 1, second.id: 2}, "two places in the queue")
    for width in ("60", "120"):
        shown = fleet.headrace("run", "list", COLUMNS=width).stdout
        assert max(map(len, shown.splitlines())) <= int(width)
        words = " ".join(shown.split())
        assert (
            f"held by {held.id}" in words and "cancelled while it was queued; it has no checkpoint" in words
        )
        for run, place in ((first, 1), (second, 2)):
            assert f"{run.id} QUEUED {place}" in words
    for run in (first, second):
        assert f"held by {held.id}" in fleet.headrace("run", "get", run.id).stdout
        assert fleet.client.cancel(run.id).state == "CANCELLED"
        assert fleet.client.get(run.id).started_at is None
    gate.open()
    fleet.succeed(held)


@pytest.mark.nightly  # quick: test_scaling.py; the seeds add and lose instances in a step
def test_scaling_a_service_serves_the_next_run(fleet, held, gate, spec_of):
    wanted = spec_of(steps=2, rollout__instances=2, reward=gate.reward)
    with pytest.raises(HeadraceError) as refused:
        fleet.submit(wanted)
    assert [problem.key for problem in refused.value.problems] == ["rollout.instances"]
    assert fleet.json("scale", "rollout=2") == {"kind": "rollout", "count": 2}
    fleet.ready("rollout-0", "rollout-1")
    gate.open()
    assert len(audit(fleet, fleet.succeed(held)).trained) == 4 * BATCH
    gate.hold_after(BATCH + 1)
    run = fleet.submit(wanted)
    gate.wait_until_held()
    busy = {item.name for item in fleet.client.instances() if item.kind == "rollout" and item.run}
    assert busy == {"rollout-0", "rollout-1"}
    # Scaled down in its middle and hurt, it recovers with what is left, and waits for no rollout that will not come.
    fleet.json("scale", "rollout=1")
    killed = fleet.kill("trainer-0")
    fleet.replaced("trainer-0", killed)
    gate.open()
    assert len(audit(fleet, fleet.succeed(run)).trained) == 2 * BATCH


def test_data_that_has_changed_stops_a_resume_until_it_is_put_back(fleet, spec_of, tmp_path, gate):
    """A slot is a position in the data: with other items, the ledger would speak of prompts that nobody saw."""
    lines = [f'{{"question": "{number}=", "answer": "{number}"}}\n' for number in range(100, 140)]
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(lines))
    gate.hold_after(BATCH + 3)
    spec = spec_of(steps=3, reward=gate.reward, data__source="jsonl", data__options={"path": str(data)})
    run = fleet.submit(spec)
    gate.wait_until_held()
    fleet.client.pause(run.id, now=True)
    fleet.state(run, "PAUSED")
    gate.open()
    data.write_text("".join(reversed(lines[1:])))
    fleet.client.resume(run.id)
    stopped = fleet.state(run, "PAUSED", timeout_s=60)
    assert "data.source" in stopped.reason and stopped.step == 1
    data.write_text("".join(lines))
    fleet.client.resume(run.id)
    assert len(audit(fleet, fleet.succeed(run)).trained) == 3 * BATCH


@pytest.mark.nightly  # quick: test_scaling.py has keys of writes, test_flow_http a repeated submission
def test_a_repeated_request_steers_once(fleet, held, gate):
    """A client that never saw the answer asks again, with the same key, when the run has long gone on."""
    assert steer(fleet, held, "pause?now=true", "p1")["state"] in ("PAUSING", "PAUSED")
    fleet.state(held, "PAUSED")
    gate.open()
    steer(fleet, held, "resume", "r1")
    assert steer(fleet, held, "pause?now=true", "p1")["state"] not in ("PAUSING", "PAUSED")
    assert len(audit(fleet, fleet.succeed(held)).trained) == 4 * BATCH
    assert steer(fleet, held, "resume", "r1")["state"] == "SUCCEEDED"
    other = httpx.post(
        f"{fleet.url}/v1/runs/{held.id}:cancel", headers={"Idempotency-Key": "p1"} | fleet.headers
    )
    assert other.status_code == 409


def steer(fleet, run, action, key):
    answer = httpx.post(
        f"{fleet.url}/v1/runs/{run.id}:{action}", headers={"Idempotency-Key": key} | fleet.headers
    )
    assert answer.status_code == 200, answer.text
    return answer.json()
