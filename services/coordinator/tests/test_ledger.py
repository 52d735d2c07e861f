"""Versions and slots: pure rules."""

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import (
    accepts,
)
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED, DROPPED, FINISHED, PENDING
from headrace_coordinator.domain.ledger.versions import Lineage, plan_lost_rewind
from ledger_parts import assign, committed, open_ledger, opened, restored

# --- versions


def test_a_rewind_abandons_everything_after_the_checkpoint():
    lineage = Lineage()
    for event in (
        restored(1),
        committed(2, 1, 1, 0),
        committed(3, 2, 2, 1),
        restored(7, parent=2, ordinal=1, frontier=1),
    ):
        lineage.apply(event)
    assert {n: v.live for n, v in lineage.versions.items()} == {1: True, 2: True, 3: False, 7: True}
    assert lineage.chain(lineage.head) == [7, 2, 1]


def test_staleness_counts_ordinals_and_refuses_abandoned_versions():
    lineage = Lineage()
    for event in (
        restored(1),
        committed(2, 1, 1, 0),
        committed(3, 2, 2, 1),
        restored(7, parent=2, ordinal=1),
    ):
        lineage.apply(event)
    assert lineage.staleness(7, 7) == 0
    assert lineage.staleness(1, 7) == 1
    assert lineage.staleness(3, 7) is None
    assert lineage.staleness(99, 7) is None


def test_a_rewind_that_an_older_log_lacks_is_made_up_from_the_step_that_follows_it():
    """A checkpoint's ledger repeats the step on version 9; that 9 was version 2 restored is in no log."""
    lineage = Lineage()
    for event in (restored(1), committed(2, 1, 1, 0), committed(3, 2, 2, 1)):
        lineage.apply(event)
    for step in (committed(10, 9, 2, 1), committed(11, 10, 3, 2)):
        for event in (*plan_lost_rewind(lineage, step), step):
            lineage.apply(event)
    assert lineage.chain(lineage.head) == [11, 10, 9, 2, 1]
    assert {number for number, version in lineage.versions.items() if not version.live} == {3}
    assert lineage.versions[9].digest == lineage.versions[2].digest


def test_a_burnt_number_is_never_given_again():
    lineage = Lineage()
    for event in (restored(1), ev.NumberBurnt(at=0, run="r", number=5), opened(0, 1, number=6)):
        lineage.apply(event)
    assert lineage.last_number == 6


# --- slots


def test_slots_of_a_step_are_decided_before_dispatch():
    ledger = open_ledger(groups=2, size=3)
    assert sorted(ledger.slots) == list(range(6))
    assert [slot.state for slot in ledger.slots.values()] == [PENDING] * 6


def test_only_the_assigned_attempt_fills_a_slot_and_only_with_one_digest():
    ledger = open_ledger()
    assign(ledger, ledger.group(0))
    slot = ledger.slot(0, 0)
    assert accepts(slot, 7, "a") == "attempt 7 is not the assigned attempt 1"
    assert accepts(slot, 1, "a") == ""
    ledger.apply(ev.SlotsFinished(at=0, run="r", slots=[(0, 0, 1, "a", 1)]))
    assert accepts(slot, 1, "a") == ""
    assert "already offered with digest a" in accepts(slot, 1, "b")
    assert accepts(ledger.slot(9, 0), 1, "a") == "not a slot of an open step"


def test_attempts_rise_over_reissue_and_restart():
    ledger = open_ledger()
    assign(ledger, ledger.group(0))
    assign(ledger, ledger.group(0))
    assert [slot.attempt for slot in ledger.group(0)] == [3, 4]
    ledger.apply(ev.CoordinatorStarted(at=0, epoch=2, store_id="s", leap=100))
    assign(ledger, ledger.group(1))
    assert [slot.attempt for slot in ledger.group(1)] == [105, 106]


def test_an_aborted_attempt_keeps_what_is_finished_and_drops_stay_dropped():
    ledger = open_ledger(groups=3)
    assign(ledger, [slot for prompt in range(3) for slot in ledger.group(prompt)])
    ledger.apply(ev.SlotsFinished(at=0, run="r", slots=[(0, s, s + 1, "d", 1) for s in (0, 1)]))
    ledger.apply(ev.GroupsSettled(at=0, run="r", groups=[(0, [1.0, 0.0])]))
    ledger.apply(ev.GroupsAccumulated(at=0, run="r", step=0, attempt=1, prompts=[0]))
    ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=2, reason="NONFINITE", detail=""))
    ledger.apply(ev.StepAborted(at=0, run="r", step=0, attempt=1, reason="test"))
    ledger.apply(opened(0, 2))
    states = [[slot.state for slot in ledger.group(prompt)] for prompt in range(3)]
    assert states == [[FINISHED] * 2, [PENDING] * 2, [DROPPED] * 2]


def test_commit_moves_the_frontier_and_counts_drops():
    ledger = open_ledger()
    ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=1, reason="X", detail=""))
    ledger.apply(committed(2, 1, 1, 0))
    assert (ledger.frontier, ledger.dropped_total, ledger.terminal_total) == (4, 2, 4)


def test_a_rewind_returns_slots_to_the_front():
    ledger = open_ledger()
    ledger.apply(committed(2, 1, 1, 0))
    ledger.apply(opened(1, 1))
    ledger.apply(restored(5, frontier=0))
    assert (ledger.frontier, ledger.slots) == (0, {})


def test_unsettled_names_groups_that_are_neither_accumulated_nor_dropped():
    ledger = open_ledger()
    for slot in ledger.group(0):
        slot.state = ACCUMULATED
    assert ledger.unsettled() == [1]
