"""A damaged or vanished checkpoint, and then the trainer is killed: the run goes on from what is intact, or pauses."""

from __future__ import annotations

import time

import pytest
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

STEPS = 5


@pytest.fixture
def held(fleet, spec_of, gate):
    """A run that stands still in its fourth step, with the checkpoints of the steps before, and their directory."""
    fleet.ready("rollout-0", "trainer-0", "reward-0")
    gate.hold_after(3 * BATCH + 3)
    run = fleet.submit(spec_of(steps=STEPS, reward=gate.reward, checkpoint__interval_steps=1))
    gate.wait_until_held()
    run = fleet.reach(run, 3)
    checkpoints = fleet.data_dir / "runs" / run.id / "checkpoints"
    # A save begins before the next step does, and is left out while the one before is being written.
    wait_for(lambda: two_and_no_more(checkpoints), "two checkpoints, and none that is being written")
    return run, checkpoints


def two_and_no_more(checkpoints):
    """Whether at least two are there, and the same ones a second later."""
    found = saved_in(checkpoints)
    time.sleep(1.0)
    return len(found) >= 2 and saved_in(checkpoints) == found


def saved_in(checkpoints):
    """Names of the first lineage's checkpoints, newest first; none while one is being written."""
    lineage = checkpoints / "lineage-1"
    return (
        []
        if list(lineage.glob(".*"))
        else sorted((path.name for path in lineage.glob("step-*")), reverse=True)
    )


@pytest.mark.nightly  # quick: test_trainer_damage does each harm to each file of a checkpoint, without a fleet
@pytest.mark.parametrize("file", ["weights.safetensors", "ledger.json", "state.json"])
def test_one_flipped_byte_in_the_newest_falls_back_to_the_one_before(fleet, held, gate, file):
    run, checkpoints = held
    newest, before, *_ = saved_in(checkpoints)
    path = checkpoints / "lineage-1" / newest / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    fleet.kill("trainer-0")
    gate.open()
    run = fleet.succeed(run)
    assert len(audit(fleet, run).trained) == STEPS * BATCH
    events = fleet.events(run)
    [told] = [event.data for event in events if event.type == "checkpoint_set_aside"]
    assert told["name"] == f"lineage-1/{newest}" and file in told["reason"]
    assert (checkpoints / "lineage-1" / f"{newest}.damaged-1" / file).read_bytes() == data
    restored = [event.data["checkpoint"] for event in events if event.type == "version_restored"]
    assert restored == ["", f"lineage-1/{before}"]


@pytest.mark.nightly  # quick: test_trainer_damage.py
def test_a_directory_moved_away_pauses_the_run_until_it_is_back(fleet, held, gate):
    run, checkpoints = held
    moved = checkpoints.rename(checkpoints.with_name("elsewhere"))
    fleet.kill("trainer-0")
    gate.open()
    paused = fleet.state(run, "PAUSED")
    assert "put the directory back and resume" in paused.reason
    if checkpoints.exists():
        checkpoints.rename(checkpoints.with_name("empty"))
    moved.rename(checkpoints)
    fleet.headrace("run", "resume", run.id)
    assert len(audit(fleet, fleet.succeed(run)).trained) == STEPS * BATCH
