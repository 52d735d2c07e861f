"""When a checkpoint is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from headrace_coordinator.run.checkpointing import Checkpointer


@pytest.fixture
def run():
    """A run that has committed nothing; `base.ordinal` and `head` are its steps."""
    lineage = SimpleNamespace(base=SimpleNamespace(ordinal=0), head=1)
    section = SimpleNamespace(enabled=True, interval_steps=10)
    return SimpleNamespace(
        spec=SimpleNamespace(checkpoint=section),
        state=SimpleNamespace(lineage=lineage, last_checkpoint=0, ledger=SimpleNamespace(step=0)),
        event_log=SimpleNamespace(monotonic=lambda: 0.0),
    )


def due_at(run, checkpointer, steps, written=()):
    """Ordinals at which one is due; each is in flight until a step of `written`, or until the next look."""
    found = []
    for ordinal in steps:
        run.state.lineage.base.ordinal, run.state.lineage.head = ordinal, ordinal + 1
        if ordinal in written or not written:
            checkpointer._in_flight = 0
        if checkpointer.due():
            found.append(ordinal)
            checkpointer._began_at, checkpointer._in_flight = ordinal, ordinal + 1
    return found


def test_one_is_due_every_so_many_steps(run):
    assert due_at(run, Checkpointer(run), range(1, 41)) == [10, 20, 30, 40]


def test_one_left_out_while_another_was_written_is_made_up_for(run):
    assert due_at(run, Checkpointer(run), range(1, 41), written=(23,)) == [10, 23]


def test_a_run_that_goes_back_saves_at_the_same_steps_again(run):
    checkpointer = Checkpointer(run)
    assert due_at(run, checkpointer, range(1, 31)) == [10, 20, 30]
    assert due_at(run, checkpointer, range(21, 41)) == [30, 40]
