"""Admission over many runs as a pure function: grants, yields, places, and what it never does."""

import msgspec
import pytest
from admission_parts import CORES, admit_all, fleet, instance, spec, submit
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import Quarantine
from headrace_coordinator.domain.devices.scheduling import PATIENCE_QUANTA, plan_admission
from headrace_coordinator.domain.state import restore, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st


def leave(state, run, now, to="QUEUED"):
    state.apply(ev.RunReleased(at=now, run=run))
    state.apply(ev.RunStateChanged(at=now, run=run, state=to, reason=""))


def holders(state):
    return [run.id for run in state.runs.values() if run.grant is not None]


def test_two_runs_on_disjoint_instances_run_side_by_side_with_a_fair_part_of_the_devices():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "a"), submit(state, "b")
    admit_all(state, 0.0)
    grants = [state.runs[name].grant for name in "ab"]
    assert [len(grant.devices) for grant in grants] == [2, 2]
    assert not set(grants[0].devices) & set(grants[1].devices)


def test_a_run_alone_has_all_devices():
    state = fleet()
    submit(state, "a")
    admit_all(state, 0.0)
    assert len(state.runs["a"].grant.devices) == CORES


def test_the_queue_goes_by_priority_then_share_then_submission():
    state = fleet()
    for at, (name, priority) in enumerate([("a", 0), ("b", 0), ("c", 3), ("d", 0)]):
        submit(state, name, at=float(at), priority=priority)
    state.runs["b"].share_s = 50.0
    plan = plan_admission(state, 4.0)
    assert plan.grants[0].run == "c"
    assert list(plan.waiting) == ["a", "d", "b"]
    assert all("1 rollout instance" in reason for reason in plan.waiting.values())


def test_a_weight_divides_what_a_run_has_used():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "light", weight=1.0), submit(state, "heavy", weight=4.0)
    admit_all(state, 0.0)
    assert state.runs["light"].share(10.0) == pytest.approx(4 * state.runs["heavy"].share(10.0))
    leave(state, "light", 10.0), leave(state, "heavy", 10.0)
    state.instances.pop("rollout-1#1")
    assert plan_admission(state, 10.0).grants[0].run == "heavy"


def test_a_run_yields_only_after_its_quantum_and_only_to_one_that_comes_before_it():
    state = fleet()
    submit(state, "a", quantum_s=10.0), admit_all(state, 0.0)
    submit(state, "b", at=1.0)
    assert plan_admission(state, 9.0).yields == {}
    assert "b" in plan_admission(state, 11.0).yields["a"]
    state.runs["a"].spec["scheduling"]["priority"] = 5
    assert plan_admission(state, 11.0).yields == {}


def test_nobody_yields_where_that_does_not_let_the_waiting_run_start():
    state = fleet(rollouts=1, trainers=1)
    submit(state, "a", quantum_s=1.0), admit_all(state, 0.0)
    submit(state, "b", rollouts=2, priority=9)
    assert plan_admission(state, 100.0).yields == {}


def test_the_fewest_yield():
    state = fleet(rollouts=3, trainers=3, cores=6)
    for name in "abc":
        submit(state, name, quantum_s=1.0)
    admit_all(state, 0.0)
    submit(state, "d", at=1.0, priority=1)
    assert len(plan_admission(state, 100.0).yields) == 1


def test_a_low_priority_is_served_after_its_patience():
    """A stream of urgent runs: the low one waits its quanta, then comes first."""
    state, now = fleet(), 0.0
    submit(state, "low", quantum_s=10.0)
    submit(state, "urgent", quantum_s=10.0, priority=9)
    admit_all(state, now)
    while holders(state) == ["urgent"]:
        now += 11.0
        plan = admit_all(state, now)
        if "urgent" in plan.yields:
            leave(state, "urgent", now)
        admit_all(state, now)
        assert now <= (PATIENCE_QUANTA + 2) * 11.0
    assert holders(state) == ["low"] and now >= PATIENCE_QUANTA * 10.0


def test_nobody_overtakes_a_run_that_has_waited_too_long():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "a", quantum_s=1.0), admit_all(state, 0.0)
    submit(state, "wide", at=1.0, rollouts=2, quantum_s=1.0)
    late = 1.0 + PATIENCE_QUANTA
    submit(state, "small", at=late, priority=9)
    plan = plan_admission(state, late + 1)
    assert not plan.grants and list(plan.waiting) == ["wide", "small"] and "a" in plan.yields
    assert "an earlier run" in plan.waiting["small"]


@pytest.mark.parametrize("back", [3_600.0, 86_400.0])
def test_a_clock_that_is_set_back_ends_quanta_and_patience(back):
    state = fleet()
    submit(state, "a", at=back, quantum_s=10.0), admit_all(state, back)
    submit(state, "b", at=back + 1, quantum_s=10.0)
    assert "a" in plan_admission(state, 2.0).yields


def test_named_devices_are_waited_for_and_nothing_else_is_taken():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "a", named=(["cpu:1"], ["cpu:1"]))
    submit(state, "b", named=(["cpu:1"], ["cpu:2"]))
    admit_all(state, 0.0)
    assert state.runs["a"].grant.devices == ["a/cpu:1"]
    assert plan_admission(state, 1.0).waiting == {"b": "a/cpu:1 to be free; held by a"}


def test_a_lost_member_is_replaced_and_the_devices_stay():
    state = fleet(rollouts=2)
    submit(state, "a"), admit_all(state, 0.0)
    before = state.runs["a"].grant
    state.apply(ev.InstanceLost(at=1.0, incarnation=before.rollouts[0], reason="", proven=True))
    admit_all(state, 1.0)
    after = state.runs["a"].grant
    assert after.rollouts == ["rollout-1#1"] and after.devices == before.devices


def test_a_lost_member_is_replaced_also_while_another_run_waits():
    state = fleet()
    submit(state, "a"), admit_all(state, 0.0)
    submit(state, "b", at=1.0)
    state.apply(ev.InstanceLost(at=2.0, incarnation="rollout-0#1", reason="", proven=True))
    admit_all(state, 2.0)
    assert state.runs["a"].grant.rollouts == []
    newborn = msgspec.structs.replace(
        state.instances["trainer-0#1"], instance="rollout-0", incarnation="rollout-0#2", kind="rollout"
    )
    state.instances["rollout-0#2"] = newborn
    admit_all(state, 3.0)
    assert state.runs["a"].grant.rollouts == ["rollout-0#2"]


def test_a_run_grows_only_while_nobody_waits():
    state = fleet(rollouts=2, trainers=2)
    run = submit(state, "a", rollouts=2)
    admit_all(state, 0.0)
    run.lineage.head = 1
    state.apply(ev.InstanceLost(at=1.0, incarnation="rollout-1#1", reason="", proven=True))
    admit_all(state, 1.0)
    submit(state, "b", at=2.0, trainers=2)
    state.instances["rollout-1#2"] = instance("rollout", 1)
    state.instances["rollout-1#2"].incarnation = "rollout-1#2"
    admit_all(state, 3.0)
    assert state.runs["a"].grant.rollouts == ["rollout-0#1"]
    leave(state, "b", 4.0, to="CANCELLED")
    admit_all(state, 5.0)
    assert state.runs["a"].grant.rollouts == ["rollout-0#1", "rollout-1#2"]


def test_a_run_gets_helpers_only_while_nobody_waits_and_an_idle_one_goes_to_who_does():
    state = fleet(rollouts=3, trainers=3)
    submit(state, "a", helpers=2)
    admit_all(state, 0.0)
    first = state.runs["a"].grant
    assert len(first.trainers) == 1 and len(first.helpers) == 2
    assert set(first.instances) >= {*first.helpers, *first.trainers}
    busy, idle = first.helpers
    state.apply(
        ev.LeaseGranted(at=1.0, epoch=7, incarnation=busy, run="a", stage="help", devices=["h/cpu:0"])
    )
    submit(state, "b", at=2.0)
    admit_all(state, 2.0)
    assert state.runs["a"].grant.helpers == [busy], "it is at work until the step's end"
    submit(state, "c", at=3.0)
    admit_all(state, 3.0)
    state.apply(ev.LeaseEnded(at=4.0, epoch=7, cause="released", proven=True))
    admit_all(state, 4.0)
    assert state.runs["a"].grant.helpers == [] and state.runs["a"].grant.trainers == first.trainers
    assert state.runs["b"].grant.trainers == [idle] and state.runs["c"].grant.trainers == [busy]


def test_a_lost_owner_is_replaced_by_a_helper():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "a", rollouts=2, helpers=1)
    admit_all(state, 0.0)
    before = state.runs["a"].grant
    del state.instances[before.trainers[0]]
    admit_all(state, 1.0)
    after = state.runs["a"].grant
    assert after.trainers == before.helpers and after.helpers == []


def test_draining_and_quarantined_things_are_not_granted():
    state = fleet(rollouts=2)
    state.instances["rollout-0#1"].draining = True
    state.table.quarantined["a/cpu:0"] = Quarantine("x#1", "")
    submit(state, "a"), admit_all(state, 0.0)
    assert state.runs["a"].grant.rollouts == ["rollout-1#1"]
    assert state.runs["a"].grant.devices == [f"a/cpu:{i}" for i in range(1, CORES)]


def test_a_host_whose_devices_are_all_in_doubt_is_waited_for():
    state = fleet()
    for core in range(CORES):
        state.table.quarantined[f"a/cpu:{core}"] = Quarantine("x#1", "")
    submit(state, "a")
    plan = plan_admission(state, 0.0)
    assert not plan.grants and plan.waiting == {"a": "1 device on a (0 free of 0)"}


def test_paused_and_cancelled_runs_do_not_wait():
    state = fleet()
    submit(state, "a")
    state.apply(ev.RunIntentChanged(at=1.0, run="a", intent="PAUSE", author="user", reason=""))
    assert plan_admission(state, 2.0).grants == [] and plan_admission(state, 2.0).waiting == {}


# --- whatever comes

DEMANDS = st.tuples(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["collocated", "disaggregated"]),
    st.integers(-2, 2),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.floats(1.0, 20.0),
)
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), DEMANDS),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("yield"), st.integers(0, 9)),
        st.tuples(st.just("lose"), st.integers(0, 9)),
        st.tuples(st.just("come"), st.sampled_from(["rollout", "trainer", "reward"])),
        st.tuples(st.just("wait"), st.floats(0.1, 30.0)),
    ),
    max_size=25,
)


def happens(state, what, with_, now, index):
    match what:
        case "submit":
            rollouts, trainers, mode, priority, weight, quantum_s = with_
            submit(
                state, f"r{index:02}", now, rollouts=rollouts, trainers=trainers, mode=mode,
                priority=priority, weight=weight, quantum_s=quantum_s,
            )  # fmt: skip
        case "leave":
            if held := holders(state):
                leave(state, held[with_ % len(held)], now, to="CANCELLING")
        case "yield":
            if yields := plan_admission(state, now).yields:
                leave(state, sorted(yields)[with_ % len(yields)], now)
        case "lose":
            if known := sorted(state.instances):
                lost = known[with_ % len(known)]
                state.apply(ev.InstanceLost(at=now, incarnation=lost, reason="", proven=True))
        case "come":
            newborn = instance(with_, index, host="ab"[index % 2])
            state.instances[newborn.incarnation] = newborn


@settings(max_examples=150, deadline=None)
@given(HAPPENINGS)
def test_whatever_happens_nothing_is_granted_twice_and_order_of_dicts_means_nothing(happenings):
    state, now = fleet(rollouts=3, trainers=3), 0.0
    for index, (what, with_) in enumerate(happenings):
        now += with_ if what == "wait" else 0.5
        happens(state, what, with_, now, index)
        shuffled = restore(snapshot(state))
        shuffled.runs = dict(reversed(shuffled.runs.items()))
        shuffled.instances = dict(reversed(shuffled.instances.items()))
        assert plan_admission(shuffled, now) == plan_admission(state, now)
        plan = admit_all(state, now)
        grants = [run.grant for run in state.active_runs() if run.grant is not None]
        for names in ([n for g in grants for n in g.instances], [d for g in grants for d in g.devices]):
            assert len(names) == len(set(names))
        for run in state.active_runs():
            if run.grant is None:
                assert (run.state == "QUEUED") == (run.id in plan.waiting)
                continue
            usable = [who for who in run.grant.instances if who in state.instances]
            assert run.grant.devices or not usable
            assert not (set(plan.yields) & {run.id}) or now - run.admitted_at >= run.quantum_s


def evaluate(state, run, at=0.0, **fields):
    asked = {"spec": {"samples": 2, "suite": {"name": "items"}}, "model": "m", "items": 3}
    state.apply(ev.RunSubmitted(at=at, run=run, spec=spec(**fields), directory=f"/{run}", evaluation=asked))
    return state.runs[run]


def test_an_evaluation_needs_no_trainer_and_starts_with_one_rollout():
    state = fleet(rollouts=1, trainers=0)
    evaluate(state, "e", rollouts=2)
    admit_all(state, 0.0)
    grant = state.runs["e"].grant
    assert (grant.rollouts, grant.trainers, len(grant.devices)) == (["rollout-0#1"], [], CORES)


def test_an_evaluation_runs_beside_a_run_that_has_the_trainer():
    state = fleet(rollouts=2, trainers=2)
    submit(state, "a", trainers=1), evaluate(state, "e", at=1.0)
    admit_all(state, 1.0)
    assert holders(state) == ["a", "e"]
    assert not set(state.runs["a"].grant.devices) & set(state.runs["e"].grant.devices)


def test_an_evaluation_counts_answers_over_a_restart_and_forgets_recoveries_when_it_goes_on():
    state = fleet()
    run = evaluate(state, "e")
    state.apply(ev.RunRecovering(at=1.0, run="e", reason="a rollout is lost"))
    assert run.recoveries_in_a_row == 1 and run.evaluation.total == 6
    state.apply(ev.EvaluationProgressed(at=2.0, run="e", answers=0, digest="d"))
    assert run.recoveries_in_a_row == 1, "the weights alone are no progress"
    state.apply(ev.EvaluationProgressed(at=3.0, run="e", answers=4, digest="d"))
    again = restore(snapshot(state)).runs["e"]
    assert (again.recoveries_in_a_row, again.evaluation.answers, again.evaluation.digest) == (0, 4, "d")
    state.apply(ev.RunArchived(at=4.0, run="e", state="SUCCEEDED", created_at=0.0, evaluation=True))
    assert restore(snapshot(state)).ended["e"].evaluation
