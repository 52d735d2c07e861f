"""Which samples a holder gets, and what becomes of them when it dies: pure rules."""

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import (
    DispatchOrder,
    plan_dispatch,
    plan_return,
)
from headrace_coordinator.domain.ledger.slot_index import DROPPED, FINISHED, PENDING, SlotIndex
from headrace_coordinator.domain.state import (
    State,
    restore,
    snapshot,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_parts import assign, open_ledger, opened, run_state

# --- dispatch


def take(ledger, order, holder, capacity=100, holders=1):
    """Gives a holder what is planned for it; the groups."""
    work = plan_dispatch(ledger.index, order, holder, capacity, holders, ledger.prompts.stop)
    assign(ledger, [ledger.slot(prompt, sample) for prompt, samples in work for sample in samples], holder)
    return work


def finish(ledger, *keys):
    slots = [(*key, ledger.slot(*key).attempt, "d", 1) for key in keys]
    ledger.apply(ev.SlotsFinished(at=0, run="r", slots=slots))


def give_back(ledger, slots, **fields):
    for event in plan_return("r", slots, **fields):
        ledger.apply(event)


def held(ledger, holder):
    return [ledger.slot(*key) for key in sorted(ledger.index.held.get(holder, ()))]


def test_longest_expected_starts_first_and_work_is_shared_evenly():
    ledger = open_ledger(groups=4)
    order = DispatchOrder(ledger.prompts, expected=lambda prompt: float(prompt))
    assert take(ledger, order, "a", holders=2) == [(3, [0, 1]), (1, [0, 1])]
    assert take(ledger, order, "b", holders=2) == [(2, [0, 1]), (0, [0, 1])]
    assert take(ledger, order, "a") == [] and not ledger.index.waiting


def test_no_holder_gets_the_whole_tail_and_where_not_all_can_start_the_longest_go_first():
    ledger = open_ledger(groups=12)
    order = DispatchOrder(ledger.prompts, expected=lambda prompt: float(prompt))
    prompts = [[prompt for prompt, _ in take(ledger, order, name, holders=3)] for name in "abc"]
    assert prompts == [[11, 8, 5, 2], [10, 7, 4, 1], [9, 6, 3, 0]]
    ledger = open_ledger(groups=12)
    order = DispatchOrder(ledger.prompts, expected=lambda prompt: float(prompt))
    assert [prompt for prompt, _ in take(ledger, order, "a", capacity=4, holders=3)] == [11, 10]


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
