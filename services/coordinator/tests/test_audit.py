"""Run life, the audit of a history, and what a long run keeps: pure rules."""

import msgspec
import pytest
from headrace_coordinator.api.reading.presenters import event_view
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.intervals import covered
from headrace_coordinator.domain.ledger.compact import (
    compact,
    compact_drops,
    count,
    count_drops,
    expand,
    expand_drops,
)
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import (
    ENDED_KEPT,
    KEY_LIFETIME_S,
    KEYS_KEPT,
    State,
    restore,
    snapshot,
)
from headrace_coordinator.domain.totals import EVALUATIONS_SHOWN, Shape, Totals
from headrace_coordinator.run.step.timer import StepTimer
from headrace_simulation.judging.audit import audit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_parts import certificate, committed, opened, restored, run_state


def test_terminal_states_are_final():
    for state in run_states.TERMINAL:
        with pytest.raises(run_states.IllegalTransition, match=f"run r is {state}"):
            runs.plan_move(run_state(state=state), run_states.PLANNING, "")


def test_every_state_can_fail_or_be_cancelled_until_it_is_terminal():
    for state in set(run_states.FOLLOWS) - run_states.TERMINAL:
        assert run_states.FAILED in run_states.FOLLOWS[state]


def history(*events):
    return list(enumerate(events))


def test_audit_finds_a_slot_trained_twice_and_one_that_is_missing():
    run = run_state()
    run.ledger.step, run.ledger.next_prompt = 2, 4
    twice = [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    found = audit(
        run, history(committed(2, 1, 1, 0, twice), committed(3, 2, 2, 1, [*twice[:1], (2, 0, 1), (3, 0, 1)]))
    )
    assert (found.duplicates, found.missing, found.trained) == (1, 2, 7)


def test_audit_forgets_what_a_rewind_abandoned():
    run = run_state()
    run.ledger.step, run.ledger.next_prompt = 1, 2
    slots = [(p, s, 1) for p in (0, 1) for s in (0, 1)]
    found = audit(
        run, history(committed(2, 1, 1, 0, slots), restored(5, frontier=0), committed(6, 5, 1, 0, slots))
    )
    assert (found.duplicates, found.missing, found.trained) == (0, 0, 4)


def test_engines_that_are_started_again_are_counted_over_the_steps():
    totals = Totals()
    for restarts in (0.0, 2.0, 1.0):
        view = {"step": 1, "figures": {"engine_restarts": restarts}}
        totals.apply(msgspec.structs.replace(committed(2, 1, 1, 0, []), view=view), Shape(0, 4, 2))
    totals.apply(restored(9, 3, ordinal=2, frontier=2), Shape(0, 4, 2))
    assert totals.engine_restarts == 3, "those of rewound steps too: they took their time"


def test_running_totals_count_as_an_audit_of_the_whole_history():
    run, slots = run_state(), [(p, s, 1) for p in (0, 1) for s in (0, 1)]
    later = [(p + 2, s, 1) for p, s, _ in slots]
    kept = ev.Kept(counts=(4, 0, 0, 0, 0), last_step={"step": 1})
    events = history(
        committed(2, 1, 1, 0, slots),
        committed(3, 2, 2, 1, [*later[:2], slots[0]]),
        msgspec.structs.replace(restored(5, frontier=1), kept=kept),
        ev.StepSkipped(at=0, run="r", step=1, dropped=compact_drops((p, s, "why") for p, s, _ in later)),
        committed(6, 5, 2, 2, [(4, 0, 1), (4, 0, 2)]),
    )
    for length, (_, event) in enumerate(events):
        run.apply(event)
        if length == 2:
            run.ledger.step, run.ledger.next_prompt = 1, 2
        assert run.totals.tally == audit(run, events[: length + 1]), length
    tally = run.totals.tally
    assert (tally.trained, tally.dropped, tally.duplicates, tally.missing) == (6, 4, 1, 3)


def test_a_rewind_leaves_the_figures_of_what_is_live():
    totals = Totals()
    for step in range(4):
        view = {"kind": "heldout", "step": step, "version": step + 2}
        totals.apply(ev.Evaluated(at=0, run="r", view=view), Shape(0, 4, 2))
    kept = ev.Kept(counts=(8, 0, 0, 0, 0), last_step={"step": 2})
    totals.apply(msgspec.structs.replace(restored(9, 3, ordinal=2, frontier=2), kept=kept), Shape(0, 4, 2))
    assert [view["step"] for view in totals.evaluations] == [0, 1, 2]
    assert (totals.tally.steps, totals.tally.trained, totals.last_step) == (2, 8, {"step": 2})


def test_a_run_shows_its_first_evaluation_and_the_newest_ones():
    totals = Totals()
    for step in range(100):
        totals.apply(ev.Evaluated(at=0, run="r", view={"kind": "heldout", "step": step}), Shape(0, 4, 2))
    shown = [view["step"] for view in totals.evaluations]
    assert shown == [0, *range(100 - EVALUATIONS_SHOWN + 1, 100)]


slot_lists = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 30)), max_size=40)


# How fast examples are drawn is the machine's affair.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(slot_lists)
def test_compacted_slots_expand_to_themselves(slots):
    assert list(expand(compact(slots))) == slots and count(compact(slots)) == len(slots)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), unique=True), st.sampled_from("ab"))
def test_compacted_drops_expand_to_themselves(slots, reason):
    drops = sorted((prompt, sample, reason if sample else "c") for prompt, sample in slots)
    assert expand_drops(compact_drops(drops)) == drops and count_drops(compact_drops(drops)) == len(drops)


def test_a_hundred_thousand_slots_of_a_step_are_one_run():
    slots = [(prompt, sample, 1 + prompt * 8 + sample) for prompt in range(12_500) for sample in range(8)]
    assert compact(slots) == [(0, 0, 1, 8, 12_500)]
    made = certificate(2, 1, 1, 0, compact(slots), compact_drops((p, s, "X") for p, s, _ in slots))
    assert len(ev.encode(ev.StepCommitted(at=0, run="r", certificate=made, view={}))) < 1000


# --- what stays in memory


def test_a_lineage_keeps_what_rules_ask_for_however_long_the_run():
    run = RunState(
        "r",
        {"algorithm": {"max_staleness": 2}, "checkpoint": {"keep": 2}},
        "",
        SlotLedger(2, 2),
        Lineage(),
        0.0,
    )
    run.apply(restored(1))
    for step in range(500):
        slots = [(2 * step + p, s, 1) for p in (0, 1) for s in (0, 1)]
        run.apply(committed(step + 2, step + 1, step + 1, step, slots))
        if step % 100 == 99:
            run.apply(ev.CheckpointSaved(at=0, run="r", name=f"c{step}", number=step + 2))
    lineage = run.lineage
    assert len(lineage.versions) < 30
    assert [number for _, number in run.checkpoints] == [401, 501] and 401 in lineage.versions
    assert [lineage.staleness(number, 501) for number in (501, 499)] == [0, 2]
    run.apply(restored(900, parent=401, ordinal=400, frontier=400))
    assert [lineage.abandoned(number) for number in (2, 401, 402, 501, 900)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    run.apply(restored(950, parent=300, ordinal=299, frontier=299))
    assert [lineage.abandoned(number) for number in (300, 301, 900, 950)] == [False, True, True, False]
    assert lineage.rewinds == [(300, 950)] and len(snapshot_of(run)) < 6000


def snapshot_of(run):
    state = State()
    state.runs[run.id] = run
    return snapshot(state)


def test_idempotency_keys_expire_by_time_and_by_count():
    state = State()
    state.apply(ev.KeyUsed(at=0.0, key="old", body="b", resource="r"))
    assert state.key("old", KEY_LIFETIME_S - 1) and state.key("old", KEY_LIFETIME_S) is None
    for number in range(KEYS_KEPT + 5):
        state.apply(ev.KeyUsed(at=KEY_LIFETIME_S, key=f"k{number}", body="b", resource="r"))
    assert len(state.keys) == KEYS_KEPT and "old" not in state.keys and "k4" not in state.keys


def test_ended_runs_leave_a_few_bytes_and_only_the_newest_are_listed():
    state = State()
    for number in range(ENDED_KEPT + 3):
        name = f"a-run-of-some-length-{number:06d}"
        state.apply(ev.RunArchived(at=1.0, run=name, state="SUCCEEDED", created_at=1234567.89))
    assert len(state.ended) == ENDED_KEPT and "a-run-of-some-length-000002" not in state.ended
    assert len(snapshot(state)) < 100 * ENDED_KEPT
    assert restore(snapshot(state)) == state


def test_state_survives_its_snapshot():
    state = State()
    spec = {"algorithm": {"group_size": 2, "prompts_per_step": 2}, "steps": 3}
    for event in (
        ev.RunSubmitted(at=1, run="r", spec=spec, directory="d"),
        restored(1),
        opened(0, 1),
        ev.LeaseGranted(at=1, epoch=1, incarnation="a", run="r", stage="learn", devices=["d"]),
        ev.KeyUsed(at=1, key="k", body="b", resource="r"),
    ):
        state.apply(event)
    assert restore(snapshot(state)) == state


def test_overlapping_intervals_count_once():
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4


def test_protocol_time_is_what_no_stage_covers():
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    timer.add("generate", (0.0, 2.0), ["cpu:0"])
    timer.add("learn", (1.0, 3.0), ["cpu:1"])
    now[0] = 4.0
    assert timer.stages() == {"generate": 2.0, "learn": 2.0, "protocol": 1.0}
    assert timer.devices() == {"cpu:0": {"generate": 2.0}, "cpu:1": {"learn": 2.0}}


def test_what_people_see_counts_steps_from_1():
    common = {"at": 1.0, "run": "r"}
    shown = [
        event_view((1, event)).data["step"]
        for event in (
            ev.StepOpened(**common, step=0, attempt=1, base=0, number=1),
            ev.GroupDropped(**common, step=0, prompt=0, reason="X", detail=""),
            ev.StepAborted(**common, step=0, attempt=1, reason=""),
            ev.StepSkipped(**common, step=0, dropped={}),
            ev.CheckpointSaved(**common, name="step-1-1", number=1, step=1),
        )
    ]
    assert shown == [1] * 5
