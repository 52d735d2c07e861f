"""When a checkpoint is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from headrace.trainer.v1 import trainer_pb2
from headrace_coordinator.run import checkpointing
from headrace_coordinator.run.checkpointing import Checkpointer


@pytest.fixture
def run(monkeypatch):
    """A run that has committed nothing, whose leader never says that one is written. `base.ordinal` is its step."""

    async def nothing(*_):
        return []

    async def save(*_):
        return trainer_pb2.SaveCheckpointResponse()

    for name in ("ledger_of", "wanted_by_others"):
        monkeypatch.setattr(checkpointing, name, nothing)
    monkeypatch.setattr(Checkpointer, "announce", nothing)
    lineage = SimpleNamespace(base=SimpleNamespace(ordinal=0), head=1)
    section = SimpleNamespace(enabled=True, interval_steps=10)
    return SimpleNamespace(
        spec=SimpleNamespace(checkpoint=section, is_session=False),
        run_id="run",
        state=SimpleNamespace(lineage=lineage, last_checkpoint=0, ledger=SimpleNamespace(step=0)),
        event_log=SimpleNamespace(monotonic=lambda: 0.0),
        workers=SimpleNamespace(leader=SimpleNamespace(save=save)),
        recording=SimpleNamespace(bases=list),
        uploads=SimpleNamespace(names=[]),
    )


async def saved_at(run, checkpointer, steps, written=None):
    """Ordinals at which one was begun; each is written by the next step, or by those of `written`."""
    found = []
    for ordinal in steps:
        run.state.lineage.base.ordinal, run.state.lineage.head = ordinal, ordinal + 1
        if written is None or ordinal in written:
            checkpointer._in_flight = 0
        if checkpointer.due():
            found.append(ordinal)
            await checkpointer.save(wait=False)
    return found


async def test_one_is_due_every_so_many_steps(run):
    assert await saved_at(run, Checkpointer(run), range(1, 41)) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("written", "found"),
    [((23, 25), [10, 23, 30]), (range(23, 41), [10, 23, 30, 40])],
    ids=["twice", "from then on"],
)
async def test_one_left_out_while_another_was_written_is_made_up_for(run, written, found):
    assert await saved_at(run, Checkpointer(run), range(1, 41), written) == found


async def test_by_time_quick_checkpoints_are_five_seconds_apart_and_slow_ones_further(run):
    """Saving takes at most a twentieth of the time, and counts as a quarter of a second at least."""
    clock, costs = 0.0, iter((0.1, 2.0, 0.1))

    async def save(*_):
        nonlocal clock
        clock += next(costs)
        return trainer_pb2.SaveCheckpointResponse()

    run.spec.checkpoint = SimpleNamespace(
        enabled=True, interval_steps=0, max_interval_s=600, time_budget=0.05
    )
    run.event_log.monotonic, run.workers.leader.save = lambda: clock, save
    checkpointer, begun = Checkpointer(run), list[float]()
    for _ in range(3):
        while not checkpointer.due():
            clock += 1.0
            run.state.lineage.head += 1
            checkpointer._in_flight = 0
        begun.append(clock)
        await checkpointer.save(wait=False)
    assert begun == pytest.approx([5.0, 10.1, 52.1], abs=1.0)


async def test_a_run_that_goes_back_saves_at_the_same_steps_again(run):
    checkpointer = Checkpointer(run)
    assert await saved_at(run, checkpointer, range(1, 31)) == [10, 20, 30]
    assert await saved_at(run, checkpointer, range(21, 41)) == [30, 40]


async def test_the_checkpoint_that_a_recording_begins_with_is_not_deleted(run):
    kept = []

    async def save(number, ledger, wait, retained):
        kept.extend(retained)
        return trainer_pb2.SaveCheckpointResponse()

    run.workers.leader.save = save
    run.recording.bases = lambda: ["lineage-1/step-3"]
    await Checkpointer(run).save(wait=False)
    assert kept == ["lineage-1/step-3"]
