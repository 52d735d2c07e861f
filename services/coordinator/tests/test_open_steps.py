"""Several open steps: which slots they have, who has credit to start them, and what aborts and rewinds leave."""

from types import SimpleNamespace

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import DispatchOrder, credit, plan_dispatch
from headrace_coordinator.domain.ledger.slot_index import ASSIGNED, FINISHED, PENDING, SETTLED, SlotIndex
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.run.step.state import Learns, SettledGroups
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World, run_world
from ledger_parts import assign, committed, open_ledger, opened, restored

SIZE, GROUPS = 2, 2


def ahead(ledger, *steps):
    for step in steps:
        ledger.apply(ev.SlotsOpened(at=0, run="r", step=step))


def settle(ledger, *prompts):
    for prompt in prompts:
        ledger.apply(ev.GroupsSettled(at=0, run="r", groups=[(prompt, [0.0] * SIZE)]))


def finish(ledger, *prompts):
    for prompt in prompts:
        slots = ledger.group(prompt)
        assign(ledger, slots)
        made = [(slot.prompt, slot.sample, slot.attempt, "d", 1) for slot in slots]
        ledger.apply(ev.SlotsFinished(at=0, run="r", slots=made))


def states(ledger):
    return {
        prompt: {slot.state for slot in ledger.group(prompt)} for prompt in range(10) if ledger.group(prompt)
    }


def consistent(ledger):
    kept, anew = vars(ledger.index), vars(SlotIndex(ledger.slots.values()))
    names = ("fresh", "returned", "waiting", "assigned", "open", "settled")
    return all(kept[name] == anew[name] for name in names)


@pytest.fixture
def ledger():
    """Steps 0 to 2 are open, with prompts 0 to 5."""
    made = open_ledger(GROUPS, SIZE)
    ahead(made, 1, 2)
    return made


def test_open_steps_have_the_prompts_that_follow_each_other(ledger):
    assert [ledger.prompts_of(step) for step in (0, 1, 2)] == [range(2), range(2, 4), range(4, 6)]
    assert [ledger.step_of(prompt) for prompt in range(6)] == [0, 0, 1, 1, 2, 2]
    assert len(ledger.slots) == 6 * SIZE and ledger.frontier == 0 and len(ledger.step_slots) == 2 * SIZE


def test_a_commit_ends_its_step_and_leaves_the_others_as_they_are(ledger):
    finish(ledger, 0, 1, 2, 4)
    settle(ledger, 0, 1, 4)
    assign(ledger, ledger.group(3), "y")
    assert ledger.complete and ledger.settled == [0, 1]
    ledger.apply(committed(2, 1, 1, 0))
    assert states(ledger) == {2: {FINISHED}, 3: {ASSIGNED}, 4: {SETTLED}, 5: {PENDING}}
    assert (ledger.step, list(ledger.steps), ledger.prompts, ledger.frontier) == (1, [1, 2], range(2, 4), 4)
    assert consistent(ledger) and not ledger.complete and ledger.terminal_total == 2 * SIZE
    ledger.apply(ev.StepOpened(at=0, run="r", step=1, attempt=1, base=2, number=3, goes_on=True))
    assert states(ledger) == {2: {FINISHED}, 3: {ASSIGNED}, 4: {SETTLED}, 5: {PENDING}} and ledger.open
    assert ledger.index.held["y"] == {(3, 0), (3, 1)} and consistent(ledger)


def test_an_attempt_that_does_not_go_on_has_nothing_assigned_or_settled_in_any_open_step(ledger):
    finish(ledger, 0, 2, 4)
    settle(ledger, 0, 4)
    assign(ledger, ledger.group(3))
    ledger.apply(ev.StepAborted(at=0, run="r", step=0, attempt=1, reason="x"))
    ledger.apply(opened(0, 2))
    assert states(ledger) == {
        0: {FINISHED},
        1: {PENDING},
        2: {FINISHED},
        3: {PENDING},
        4: {FINISHED},
        5: {PENDING},
    }
    assert consistent(ledger) and list(ledger.steps) == [0, 1, 2]


def test_a_rewind_closes_every_open_step_and_slots_begin_anew_in_order(ledger):
    finish(ledger, 0, 1, 3)
    settle(ledger, 0, 1)
    ledger.apply(committed(2, 1, 1, 0))
    ledger.apply(restored(5, 1, 0, frontier=0))
    assert (ledger.slots, ledger.steps, ledger.step, ledger.frontier) == ({}, {}, 0, 0)
    ledger.apply(opened(0, 1))
    ahead(ledger, 1)
    assert states(ledger) == {prompt: {PENDING} for prompt in range(4)} and consistent(ledger)


# --- credit


@pytest.fixture
def lineage():
    """Versions 1, 2 and 3 of ordinals 0, 1 and 2; version 3 is the head."""
    made = Lineage()
    for event in (restored(1), committed(2, 1, 1, 0), committed(3, 2, 2, 1)):
        made.apply(event)
    return made


@pytest.mark.parametrize(
    ("staleness", "installed", "steps"),
    [(0, 3, 1), (0, 2, 0), (1, 3, 2), (1, 2, 1), (1, 1, 0), (2, 1, 1), (2, 3, 3), (4, 9, 0)],
)
def test_a_rollout_may_start_the_steps_whose_base_its_version_will_not_lag_too_far_behind(
    lineage, staleness, installed, steps
):
    ledger = SlotLedger(SIZE, GROUPS, step=2, next_prompt=4)
    first = ledger.next_prompt
    assert credit(ledger, lineage, installed, staleness) == (first + steps * GROUPS if steps else 0)


def test_an_abandoned_version_has_no_credit(lineage):
    lineage.apply(restored(7, 2, 1, frontier=1))
    ledger = SlotLedger(SIZE, GROUPS, step=1, next_prompt=2)
    assert credit(ledger, lineage, 3, 16) == 0 and credit(ledger, lineage, 2, 16) > 0


def test_work_is_handed_out_step_by_step_and_not_beyond_the_credit(ledger):
    order = DispatchOrder((), {0: 1, 1: 2, 2: 9, 3: 8, 4: 9, 5: 9}.__getitem__)
    for step in ledger.steps:
        order.reach(ledger.prompts_of(step))
    work = plan_dispatch(ledger.index, order, "x", 3, 1, below=3)
    assert [prompt for prompt, _ in work] == [1]
    assign(ledger, [ledger.slot(*key) for key in ((1, 0), (1, 1))])
    work = plan_dispatch(ledger.index, order, "x", 100, 1, below=3)
    assert [prompt for prompt, _ in work] == [0, 2]


# --- the queue of the step that is learned


def test_the_queue_has_the_groups_of_the_step_that_is_learned(ledger):
    context = SimpleNamespace(state=SimpleNamespace(ledger=ledger), spec=SimpleNamespace(deterministic=False))
    groups = SettledGroups(context, Trajectories(1), Learns.BESIDE)
    finish(ledger, 0, 1, 2, 3)
    settle(ledger, 0, 1, 2)
    groups.put([2, 1, 0])
    assert groups.take() == [1, 0] and groups.unanswered() == [0, 1]
    ledger.apply(committed(2, 1, 1, 0))
    groups.begin()
    assert groups.waiting == [2] and not groups.sent and not groups.closed.is_set()
    settle(ledger, 3)
    groups.put([3])
    assert groups.take() == [2, 3]
    groups.begin()
    assert groups.closed.is_set(), "all of the step's groups had settled before it began"


# --- the run loop


def played(staleness, placement, **rollout):
    """The events of a calm world of one run, and its groups of a step."""
    world = World(5, faults=False)
    spec = world.spec
    changes = {
        "algorithm": {"max_staleness": staleness, "options": {}},
        "placement": {"mode": "disaggregated", "flow": None, **placement},
        "rollout": {"instances": 1, **rollout},
        "trainer": {"helpers": 0, "ranks": 1},
        "data": {"curriculum": None, "heldout": 0},
        "evaluation": {"every": 0},
    }
    sections = {name: getattr(spec, name).model_copy(update=change) for name, change in changes.items()}
    world.spec = spec.model_copy(update={"steps": 10, "deterministic": False, **sections})
    outcome = run_virtual(world.live())
    assert outcome.state == "SUCCEEDED" and outcome.recoveries == 0
    return world.store.log, spec.algorithm.prompts_per_step


def ended(staleness, **rollout):
    """The steps that began before the step in front of them was committed, and all commits."""
    steps, early = [], set()
    log, groups = played(staleness, {}, **rollout)
    for event in log:
        if isinstance(event, ev.StepCommitted):
            steps.append(event)
        elif isinstance(event, ev.SlotsAssigned):
            begun = {prompt // groups for prompt, *_ in event.slots}
            early |= {step for step in begun if step > len(steps)}
    return early, steps


def test_answers_of_the_next_step_are_made_while_a_step_is_learned():
    assert ended(0)[0] == set()
    for install in ("in_flight", "drain", "abort_and_resume"):
        early, steps = ended(1, install=install)
        assert len(early) >= 5, install
        assert max(step.certificate.max_staleness for step in steps) == 1
        waited = [step.view["stage_s"].get("wait for tail", 0.0) for step in steps]
        assert max(waited) > 0, "the trainer is faster here"
        assert all(seconds < step.view["wall_s"] for seconds, step in zip(waited, steps, strict=True))


def test_a_trainer_takes_no_devices_from_rollouts_that_make_the_next_answers():
    """Hybrid, where learning begins once the step's answers are complete: those of the next one go on beside it."""
    log, _ = played(2, {"mode": "hybrid", "flow": "sequential"})
    stopped = [slot for event in log if isinstance(event, ev.SlotsReturned) for slot in event.slots]
    assert not stopped, "answers in hand were stopped for it"
    assert max(e.certificate.max_staleness for e in log if isinstance(e, ev.StepCommitted)) >= 1


def test_a_world_with_answers_of_older_versions_holds_its_guarantees():
    for seed in (7, 98):
        run_world(seed, stale=True)
