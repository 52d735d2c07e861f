"""Versions, slots, the dispatcher, run life and the audit: pure rules."""

import msgspec
import pytest
from headrace_coordinator.api.audit import audit
from headrace_coordinator.api.presenters import event_view
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import runs
from headrace_coordinator.domain.compact import (
    compact,
    compact_drops,
    count,
    count_drops,
    expand,
    expand_drops,
)
from headrace_coordinator.domain.dispatch import (
    DispatchOrder,
    accepts,
    plan_assign,
    plan_dispatch,
    plan_return,
)
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.slot_index import ACCUMULATED, DROPPED, FINISHED, PENDING, SlotIndex
from headrace_coordinator.domain.slots import SlotLedger
from headrace_coordinator.domain.state import (
    ENDED_KEPT,
    KEY_LIFETIME_S,
    KEYS_KEPT,
    State,
    restore,
    snapshot,
)
from headrace_coordinator.domain.totals import EVALUATIONS_SHOWN, Shape, Totals, step_dropped, step_trained
from headrace_coordinator.domain.versions import Lineage, plan_lost_rewind
from headrace_coordinator.run.stages.step_timer import StepTimer, covered
from hypothesis import given, settings
from hypothesis import strategies as st


def restored(number, parent=0, ordinal=0, frontier=0):
    return ev.VersionRestored(
        at=0,
        run="r",
        number=number,
        parent=parent,
        ordinal=ordinal,
        digest=f"d{number}",
        checkpoint="",
        frontier_step=frontier,
    )


def certificate(number, parent, ordinal, step, trained=(), dropped=()):
    return ev.Certificate(
        number=number, parent=parent, ordinal=ordinal, digest=f"d{number}", step=step, attempt=1,
        trained=list(trained), dropped=dropped or [], set_digest="", tokens=0, tokens_by_version={}, max_staleness=0,
        log_prob_mismatch_mean=0.0, drop_rate_by_length={}, drop_rate_by_pass_rate={},
    )  # fmt: skip


def committed(*args, **kwargs):
    return ev.StepCommitted(at=0, run="r", certificate=certificate(*args, **kwargs), view={})


def opened(step, attempt, number=9):
    return ev.StepOpened(at=0, run="r", step=step, attempt=attempt, base=1, number=number)


def open_ledger(groups=2, size=2):
    ledger = SlotLedger(size, groups)
    ledger.apply(opened(0, 1))
    return ledger


def assign(ledger, slots, holder="x"):
    ledger.apply(plan_assign(ledger, "r", slots, holder, 0.0))


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
    assert accepts(ledger.slot(9, 0), 1, "a") == "not a slot of the open step"


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


# --- dispatch


def take(ledger, order, holder, capacity=100, holders=1):
    """Gives a holder what is planned for it; the groups."""
    work = plan_dispatch(ledger.index, order, holder, capacity, holders)
    assign(ledger, [ledger.slot(prompt, sample) for prompt, samples in work for sample in samples], holder)
    return work


def finish(ledger, *keys):
    slots = [(*key, ledger.slot(*key).attempt, "d", 1) for key in keys]
    ledger.apply(ev.SlotsFinished(at=0, run="r", slots=slots))


def give_back(ledger, slots, **fields):
    for event in plan_return("r", slots, 0.0, **fields):
        ledger.apply(event)


def held(ledger, holder):
    return [ledger.slot(*key) for key in sorted(ledger.index.held.get(holder, ()))]


def test_longest_expected_starts_first_and_work_is_shared_evenly():
    ledger = open_ledger(groups=4)
    order = DispatchOrder(ledger.prompts, expected=lambda prompt: float(prompt))
    assert take(ledger, order, "a", holders=2) == [(3, [0, 1]), (2, [0, 1])]
    assert take(ledger, order, "b", holders=2) == [(1, [0, 1]), (0, [0, 1])]
    assert take(ledger, order, "a") == [] and not ledger.index.waiting


def test_without_expectation_order_is_by_ordinal():
    ledger = open_ledger(groups=2, size=1)
    assert take(ledger, DispatchOrder([1, 0]), "a") == [(0, [0]), (1, [0])]


def test_a_lost_holders_work_goes_to_the_front():
    ledger = open_ledger(groups=3)
    order = DispatchOrder(ledger.prompts)
    assert take(ledger, order, "a", capacity=2) == [(0, [0, 1])]
    finish(ledger, (0, 1))
    give_back(ledger, held(ledger, "a"))
    assert (ledger.slot(0, 0).state, ledger.slot(0, 0).holder) == (PENDING, "")
    assert take(ledger, order, "b") == [(0, [0]), (1, [0, 1]), (2, [0, 1])]


def test_a_dropped_group_is_nobodys_work():
    ledger = open_ledger(groups=2, size=1)
    order = DispatchOrder(ledger.prompts)
    ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=1, reason="X", detail=""))
    assert take(ledger, order, "a") == [(0, [0])]
    ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=0, reason="X", detail=""))
    assert held(ledger, "a") == [] and not ledger.index.waiting and not ledger.index.open


def test_only_the_attempt_that_ended_is_returned_and_its_failures_count_until_the_next_attempt_at_the_step():
    ledger = open_ledger(groups=1)
    assign(ledger, ledger.group(0))
    late = ledger.slot(0, 0)
    give_back(ledger, [late], failed=True)
    assign(ledger, [late], "b")
    ledger.apply(ev.SlotsReturned(at=0, run="r", slots=[(0, 0, 1)], failed=True))
    assert (late.attempt, late.holder, late.failures) == (3, "b", 1)
    ledger.apply(ev.StepAborted(at=0, run="r", step=0, attempt=1, reason="test"))
    ledger.apply(opened(0, 2))
    assert (late.state, late.failures) == (PENDING, 0)


def test_what_is_said_late_of_a_dropped_slot_changes_nothing():
    ledger = open_ledger(groups=1)
    assign(ledger, ledger.group(0))
    ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=0, reason="X", detail=""))
    finish(ledger, (0, 0))
    give_back(ledger, ledger.group(0))
    assert [slot.state for slot in ledger.group(0)] == [DROPPED] * 2


def place_of(index):
    held = {holder: keys for holder, keys in index.held.items() if keys}
    return (index.fresh, index.returned, held, index.waiting, index.assigned, index.open, index.settled)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.integers(1, 4), st.data())
def test_every_sample_is_handed_out_until_it_is_finished_even_when_holders_die(
    groups, size, capacity, holders, data
):
    ledger = open_ledger(groups, size)
    order, names = DispatchOrder(ledger.prompts), [f"h{i}" for i in range(holders)]
    for _ in range(60):
        name = data.draw(st.sampled_from(names))
        take(ledger, order, name, capacity, holders)
        match data.draw(st.sampled_from(["die", "finish", "settle", "drop"])):
            case "die":
                give_back(ledger, held(ledger, name))
            case "finish":
                finish(ledger, *((slot.prompt, slot.sample) for slot in held(ledger, name)))
            case "settle":
                whole = [p for p in ledger.prompts if all(s.state == FINISHED for s in ledger.group(p))]
                ledger.apply(ev.GroupsSettled(at=0, run="r", groups=[(p, [0.0] * size) for p in whole]))
            case "drop" if data.draw(st.integers(0, 9)) == 0:
                prompt = data.draw(st.sampled_from(list(ledger.prompts)))
                ledger.apply(ev.GroupDropped(at=0, run="r", step=0, prompt=prompt, reason="X", detail=""))
        assert place_of(ledger.index) == place_of(SlotIndex(ledger.slots.values()))
        assert len(held(ledger, name)) <= max(capacity, size)
    for name in names:
        give_back(ledger, held(ledger, name))
    while work := take(ledger, order, "last", 10**6):
        finish(ledger, *((p, s) for p, samples in work for s in samples))
    assert {slot.state for slot in ledger.slots.values()} <= {FINISHED, "SETTLED", DROPPED}


def test_a_restored_ledger_answers_as_the_one_that_was_saved():
    state = State(runs={"r": run_state()})
    ledger = state.runs["r"].ledger
    ledger.apply(opened(0, 1))
    assign(ledger, ledger.group(0))
    finish(ledger, (0, 0))
    again = restore(snapshot(state)).runs["r"].ledger
    assert again == ledger and place_of(again.index) == place_of(ledger.index)


# --- run life, audit, snapshot, timer


def run_state(**fields):
    return RunState("r", {}, "", SlotLedger(2, 2), Lineage(), 0.0, **fields)


def test_terminal_states_are_final():
    for state in runs.TERMINAL:
        with pytest.raises(runs.IllegalTransition, match=f"run r is {state}"):
            runs.plan_move(run_state(state=state), runs.PLANNING, "", 0.0)


def test_every_state_can_fail_or_be_cancelled_until_it_is_terminal():
    for state in set(runs.FOLLOWS) - runs.TERMINAL:
        assert runs.FAILED in runs.FOLLOWS[state]


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


def test_running_totals_count_as_an_audit_of_the_whole_history():
    run, slots = run_state(), [(p, s, 1) for p in (0, 1) for s in (0, 1)]
    later = [(p + 2, s, 1) for p, s, _ in slots]
    kept = ev.Kept(counts=(4, 0, 0, 0, 0), last_step={"step": 1})
    events = history(
        committed(2, 1, 1, 0, slots),
        committed(3, 2, 2, 1, [*later[:2], slots[0]]),
        msgspec.structs.replace(restored(5, frontier=1), kept=kept),
        ev.StepSkipped(at=0, run="r", step=1, dropped=[(p, s, "why") for p, s, _ in later]),
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


def test_slots_that_an_older_release_wrote_one_by_one_are_read():
    line = (
        b'{"type":"StepCommitted","at":1.0,"run":"r","certificate":{"number":2,"parent":1,"ordinal":1,"digest":"d",'
        b'"step":0,"attempt":1,"trained":[[0,0,1],[0,1,2]],"dropped":[[1,0,"X"],[1,1,"X"]],"set_digest":"",'
        b'"tokens":0,"tokens_by_version":{},"max_staleness":0,"log_prob_mismatch_mean":0.0,'
        b'"drop_rate_by_length":{},"drop_rate_by_pass_rate":{}},"view":{}}'
    )
    event = ev.decode(line)
    assert step_trained(event) == [(0, 0, 1), (0, 1, 2)]
    assert step_dropped(event) == [(1, 0, "X"), (1, 1, "X")]


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
            ev.StepSkipped(**common, step=0, dropped=[]),
            ev.CheckpointSaved(**common, name="step-1-1", number=1, step=1),
        )
    ]
    assert shown == [1] * 5
