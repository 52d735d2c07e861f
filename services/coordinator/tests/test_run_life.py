"""Run life as a table: every state with every intent, what may follow, and recoveries that count in a row."""

import itertools

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage

PAIRS = list(itertools.product(run_states.STATES, run_states.INTENTS))
MOVES = {
    ("QUEUED", "PAUSE"): "PAUSED",
    ("QUEUED", "PAUSE_NOW"): "PAUSED",
    ("QUEUED", "CANCEL"): "CANCELLED",
    ("PAUSING", "RUN"): "RUNNING",
    ("PAUSING", "CANCEL"): "CANCELLING",
    ("PAUSED", "RUN"): "QUEUED",
    ("PAUSED", "CANCEL"): "CANCELLED",
    **{(state, "PAUSE"): "PAUSING" for state in ("PLANNING", "RUNNING", "RECOVERING")},
    **{(state, "PAUSE_NOW"): "PAUSING" for state in ("PLANNING", "RUNNING", "RECOVERING")},
    **{(state, "CANCEL"): "CANCELLING" for state in ("PLANNING", "RUNNING", "RECOVERING")},
}
OTHERS = {
    ("PAUSING", "PAUSE"): run_states.STOP_AT_BOUNDARY,
    ("PAUSING", "PAUSE_NOW"): run_states.STOP_NOW,
    **{("CANCELLING", intent): run_states.STOP_NOW for intent in run_states.INTENTS},
    **{(state, "RUN"): run_states.WORK for state in ("PLANNING", "RUNNING", "RECOVERING")},
}


def run_state(state="QUEUED", intent="RUN", **fields):
    spec = {"scheduling": {}, "checkpoint": {"keep": 2}, "algorithm": {"max_staleness": 0}}
    return runs.RunState(
        id="r",
        spec=spec,
        directory="/r",
        ledger=SlotLedger(2, 2),
        lineage=Lineage(),
        created_at=0.0,
        state=state,
        intent=intent,
        **fields,
    )


@pytest.mark.parametrize(("state", "intent"), PAIRS)
def test_every_pair_has_one_defined_action(state, intent):
    action = runs.next_action(run_state(state, intent))
    if (state, intent) in MOVES:
        assert (action.kind, action.state) == (run_states.MOVE, MOVES[state, intent])
        assert action.state in run_states.FOLLOWS[state] and action.reason
    else:
        assert action.kind == OTHERS.get((state, intent), run_states.WAIT)


@pytest.mark.parametrize(("state", "intent"), PAIRS)
def test_moves_end_in_a_pair_that_waits_or_works(state, intent):
    run, visited = run_state(state, intent), []
    while (action := runs.next_action(run)).kind == run_states.MOVE:
        assert run.state not in visited, "a run that moves for ever"
        visited.append(run.state)
        for event in runs.plan_move(run, action.state, action.reason):
            run.apply(event)
    assert len(visited) <= 2


@pytest.mark.parametrize(("state", "intent"), PAIRS)
@pytest.mark.parametrize("wanted", run_states.INTENTS)
def test_an_intent_is_recorded_or_refused_with_words(state, intent, wanted):
    run = run_state(state, intent)
    over = state in run_states.TERMINAL or (intent == "CANCEL" and wanted != "CANCEL")
    if over:
        with pytest.raises(run_states.IllegalIntent, match="run r"):
            runs.plan_intent(run, wanted, "user", "")
        return
    for event in runs.plan_intent(run, wanted, "user", ""):
        run.apply(event)
    assert run.intent == wanted or (intent, wanted) == ("PAUSE_NOW", "PAUSE")


def test_what_ended_and_what_is_not_allowed_does_not_move():
    for state, target in itertools.product(run_states.STATES, run_states.STATES):
        run = run_state(state)
        if target == state:
            assert runs.plan_move(run, target, "") == []
        elif target in run_states.FOLLOWS[state]:
            assert runs.plan_move(run, target, "")[0].state == target
        else:
            with pytest.raises(run_states.IllegalTransition):
                runs.plan_move(run, target, "")
    assert all(not run_states.FOLLOWS[state] for state in run_states.TERMINAL)


# --- recoveries in a row


def restored(number, frontier):
    return ev.VersionRestored(
        at=0,
        run="r",
        number=number,
        parent=0,
        ordinal=frontier,
        digest="",
        checkpoint="",
        frontier_step=frontier,
    )


def skipped(step):
    return ev.StepSkipped(at=0, run="r", step=step, dropped={})


RECOVERING = ev.RunRecovering(at=0, run="r", reason="")


def test_a_run_that_loses_what_it_made_at_every_recovery_counts_them_in_a_row():
    """A trainer that dies in each third step before the first checkpoint: progress never passes what is lost."""
    run = run_state("RUNNING")
    run.apply(restored(1, 0))
    for recovery in range(1, 8):
        run.apply(skipped(0))
        run.apply(skipped(1))
        run.apply(RECOVERING)
        run.apply(restored(recovery + 1, 0))
        assert run.recoveries_in_a_row == recovery


def test_progress_beyond_what_was_lost_ends_the_row():
    run = run_state("RUNNING")
    run.apply(restored(1, 0))
    for step in range(3):
        run.apply(skipped(step))
    run.apply(RECOVERING)
    run.apply(restored(2, 2))  # one step is lost
    run.apply(skipped(2))
    assert run.recoveries_in_a_row == 1
    run.apply(skipped(3))
    assert run.recoveries_in_a_row == 1, "only the lost step was made good"
    run.apply(skipped(4))
    assert run.recoveries_in_a_row == 0


def test_a_loss_without_a_rewind_is_made_good_by_the_next_step():
    run = run_state("RUNNING")
    run.apply(restored(1, 0))
    run.apply(RECOVERING)
    run.apply(skipped(0))
    assert (run.recoveries_in_a_row, run.recoveries) == (0, 1)
