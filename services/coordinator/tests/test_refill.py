"""Refill: a step takes the next groups in place of dropped ones, by what became of them and never by when."""

import msgspec
import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import compact, compact_drops
from headrace_coordinator.domain.ledger.dispatch import DispatchOrder, plan_dispatch, plan_refill
from headrace_coordinator.domain.ledger.slot_index import FILTERED, PENDING, SETTLED
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage, plan_lost_rewind
from headrace_coordinator.domain.runs import RunState
from headrace_simulation.judging.audit import audit
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World
from hypothesis import given, settings
from hypothesis import strategies as st

GROUPS, SIZE = 3, 2


def opened_ledger():
    ledger = SlotLedger(SIZE, GROUPS)
    ledger.apply(ev.StepOpened(at=0, run="r", step=0, attempt=1, base=1, number=2))
    return ledger


def drop(ledger, prompt, reason=FILTERED):
    ledger.apply(ev.GroupDropped(at=0, run="r", step=ledger.step, prompt=prompt, reason=reason, detail="d"))


def settle(ledger, prompt):
    ledger.apply(ev.GroupsSettled(at=0, run="r", groups=[(prompt, [0.0, 1.0])]))


def refill(ledger, limit=100, whole=False):
    for event in plan_refill(ledger, "r", limit, whole=whole):
        ledger.apply(event)


def committed(ledger, number, parent, attempt=1):
    slots = list(ledger.slots.values())
    trained = compact((s.prompt, s.sample, attempt) for s in slots if s.state == SETTLED)
    dropped = compact_drops((s.prompt, s.sample, s.reason) for s in slots if s.state != SETTLED)
    certificate = ev.Certificate(
        number=number, parent=parent, ordinal=number - 1, digest="d", step=ledger.step, attempt=1, trained=trained,
        dropped=dropped, set_digest="", tokens=0, tokens_by_version={}, max_staleness=0, log_prob_mismatch_mean=None,
        drop_rate_by_length={}, drop_rate_by_pass_rate={}, refilled=ledger.refilled,
    )  # fmt: skip
    return ev.StepCommitted(at=0, run="r", certificate=certificate, view={})


@settings(deadline=None)
@given(st.sets(st.integers(0, 11), max_size=8), st.randoms(use_true_random=False), st.booleans())
def test_the_members_are_the_first_groups_that_are_kept_in_whatever_order_they_end(unkept, order, whole):
    ledger = opened_ledger()
    while ledger.index.open:
        prompt = order.choice(sorted(ledger.index.open))
        (drop if prompt in unkept else settle)(ledger, prompt)
        refill(ledger, whole=whole)
    kept = [prompt for prompt in range(20) if prompt not in unkept][:GROUPS]
    assert sorted(ledger.index.settled) == kept
    assert ledger.prompts == range(kept[-1] + 1)


def test_the_search_ends_at_its_limit():
    ledger = opened_ledger()
    for prompt in range(5):
        drop(ledger, prompt)
        refill(ledger, limit=2)
    assert ledger.prompts == range(5) and ledger.lacking(0) == 3 and not ledger.index.open


def test_what_the_trainer_drops_is_not_replaced():
    """It may come when no stream is open any more: what is replaced would depend on the time."""
    ledger = opened_ledger()
    settle(ledger, 0)
    drop(ledger, 0, "NONFINITE")
    refill(ledger)
    assert ledger.refilled == 0


def test_a_whole_wave_ends_before_the_next_groups_of_a_deterministic_run_start():
    ledger = opened_ledger()
    drop(ledger, 1)
    refill(ledger, whole=True)
    assert ledger.refilled == 0
    settle(ledger, 0)
    drop(ledger, 2)
    refill(ledger, whole=True)
    assert ledger.prompts == range(5)


def test_groups_that_came_later_are_handed_out_after_the_first():
    ledger = opened_ledger()
    order = DispatchOrder(ledger.index.fresh, {0: 1, 1: 2, 2: 3, 3: 9}.__getitem__)
    assert [prompt for prompt, _ in plan_dispatch(ledger.index, order, "x", 100, 1, 99)] == [2, 1, 0]
    drop(ledger, 1)
    refill(ledger)
    order.reach(ledger.prompts)
    assert [prompt for prompt, _ in plan_dispatch(ledger.index, order, "x", 100, 1, 99)] == [2, 0, 3]


def test_a_filtered_group_is_no_failure_and_the_frontier_moves_behind_all_groups():
    ledger = opened_ledger()
    drop(ledger, 0)
    drop(ledger, 1, "GROUP_INCOMPLETE")
    refill(ledger)
    for prompt in sorted(ledger.index.open):
        settle(ledger, prompt)
    ledger.apply(committed(ledger, 2, 1))
    assert (ledger.dropped_total, ledger.terminal_total) == (SIZE, 5 * SIZE)
    assert ledger.prompts == range(5, 8) and ledger.frontier == 5 * SIZE
    assert ledger.last_drop == "d (GROUP_INCOMPLETE)"


def test_an_aborted_attempt_keeps_the_groups_that_it_took():
    ledger = opened_ledger()
    drop(ledger, 0)
    refill(ledger)
    ledger.apply(ev.StepAborted(at=0, run="r", step=0, attempt=1, reason="x"))
    ledger.apply(ev.StepOpened(at=0, run="r", step=0, attempt=2, base=1, number=3))
    assert ledger.prompts == range(4) and [s.prompt for s in ledger.members(PENDING)[::SIZE]] == [1, 2, 3]


def test_a_rewind_goes_back_to_the_prompt_of_its_checkpoint_and_the_counts_agree_with_an_audit():
    spec = {"algorithm": {"group_size": SIZE, "prompts_per_step": GROUPS}}
    run, events = RunState("r", spec, "", SlotLedger(SIZE, GROUPS), Lineage(), 0.0), []

    def apply(event):
        events.append((len(events), event))
        run.apply(event)

    def step(number, parent, unkept):
        apply(ev.StepOpened(at=0, run="r", step=run.ledger.step, attempt=1, base=parent, number=number))
        while run.ledger.index.open:
            prompt = min(run.ledger.index.open)
            (drop if prompt in unkept else settle)(run.ledger, prompt)
            refill(run.ledger)
        apply(committed(run.ledger, number, parent))

    step(2, 1, {0})
    kept = ev.Kept(counts=run.totals.tally.counts)
    step(3, 2, {4, 6})
    assert run.ledger.next_prompt == 9 and run.totals.tally == audit(run, events)
    assert (run.totals.tally.filtered, run.totals.tally.trained) == (3 * SIZE, 6 * SIZE)
    apply(
        ev.VersionRestored(at=0, run="r", number=9, parent=2, ordinal=1, digest="d", checkpoint="c",
                           frontier_step=1, frontier_prompt=4, kept=kept)
    )  # fmt: skip
    assert run.ledger.prompts == range(4, 7) and run.totals.tally == audit(run, events)
    step(10, 9, {5})
    assert run.ledger.next_prompt == 8 and run.totals.tally == audit(run, events)
    assert (run.totals.tally.duplicates, run.totals.tally.missing) == (0, 0)
    (made_up,) = plan_lost_rewind(run.lineage, committed_at(run, 5))
    assert made_up.frontier_prompt == 5


def committed_at(run, prompt):
    """A step of a later version whose base the log lacks, with slots from `prompt` on."""
    ledger = SlotLedger(SIZE, GROUPS, step=1, next_prompt=prompt)
    ledger.apply(ev.StepOpened(at=0, run="r", step=1, attempt=1, base=20, number=21))
    event = committed(ledger, 21, 20)
    made = msgspec.structs.replace(event.certificate, ordinal=run.lineage.base.ordinal + 1)
    return msgspec.structs.replace(event, certificate=made)


def test_a_fork_counts_from_the_prompt_of_its_origin():
    ledger = SlotLedger(SIZE, GROUPS)
    ledger.apply(
        ev.VersionRestored(at=0, run="r", number=1, parent=0, ordinal=2, digest="d", checkpoint="c",
                           frontier_step=2, frontier_prompt=8, source_run="origin")
    )  # fmt: skip
    assert ledger.shape == (8 * SIZE, GROUPS * SIZE, SIZE) and ledger.prompts == range(8, 11)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("placement", ["collocated", "disaggregated"])
def test_a_calm_run_trains_whole_steps_of_groups_that_differ(placement, deterministic):
    world = World(3, faults=False)
    spec = world.specs[0].model_dump(mode="json")
    spec["algorithm"]["options"] = {"drop_equal": True, "max_refill": 5}
    spec["placement"]["mode"], spec["deterministic"] = placement, deterministic
    world.specs[0] = type(world.specs[0]).model_validate(spec)
    run_virtual(world.live())  # whose judge knows which rewards are equal
    steps = [event for _, event in world.history if isinstance(event, ev.StepCommitted)]
    assert steps and sum(step.certificate.refilled for step in steps)
    size = world.specs[0].slots_per_step
    assert [step.view["trained"] for step in steps] == [size] * len(steps)
    assert all(step.view["filtered"] == step.view["dropped"] for step in steps)


# --- several open steps


def keep_opening(ledger, upto):
    for step in range(len(ledger.steps), upto):
        ledger.apply(ev.SlotsOpened(at=0, run="r", step=step))


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 20), max_size=14),
    st.randoms(use_true_random=False),
    st.integers(0, 6),
)
def test_the_members_of_steps_that_are_open_at_once_are_those_of_steps_one_after_the_other(
    unkept, order, limit
):
    ledger = opened_ledger()
    keep_opening(ledger, 4)
    before = {}
    while ledger.index.open:
        prompt = order.choice(sorted(ledger.index.open))
        (drop if prompt in unkept else settle)(ledger, prompt)
        while events := plan_refill(ledger, "r", limit, whole=False):
            for event in events:
                ledger.apply(event)
        now = {prompt: ledger.step_of(prompt) for prompt in range(ledger.prompts_of(3).stop)}
        assert all(now[prompt] <= step for prompt, step in before.items()), "a group moved to a later step"
        before = now
    first = 0
    for step in range(4):
        taken = 0
        while taken < limit and taken < len(unkept & {*range(first, first + GROUPS + taken)}):
            taken += 1
        assert ledger.prompts_of(step) == range(first, first + GROUPS + taken)
        first += GROUPS + taken
    assert len(ledger.slots) == first * SIZE
