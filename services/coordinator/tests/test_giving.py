"""A run whose trainer group is larger than it must be makes room for one that waits, before anybody yields whole."""

import asyncio

import pytest
from admission_parts import admit_all, fleet, submit
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices.scheduling import least_room, plan_admission, plan_regroup
from headrace_coordinator.domain.runs import Grant
from headrace_simulation.fleet.network import SimulatedInstanceClient
from regroup_parts import COORDINATOR, LEADER, Scene, played

QUANTUM = 60.0


def grown(trainers=3, ranks=1, to=3, least=None, rollouts=2, cores=6, **fields):
    """A run that has grown to all trainers of its fleet at second 1."""
    state = fleet(rollouts=rollouts, trainers=trainers, cores=cores)
    run = submit(state, "a", trainers=ranks, **fields)
    run.spec["trainer"] |= {"min_ranks": least, "max_ranks": to}
    run.spec["algorithm"]["prompts_per_step"] = 6
    admit_all(state, 0.0)
    change = plan_regroup(state, "a", to, "a trainer is free", 1.0)
    state.apply(change)
    return state


def give(state, now):
    """What the run loop does at a step's boundary."""
    for name, gift in plan_admission(state, now).gifts.items():
        change = plan_regroup(state, name, gift.ranks, gift.reason, now, gift.given_to)
        assert not isinstance(change, str), change
        state.apply(change)
    return admit_all(state, now)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_trainers_beyond_the_specs_are_for_whoever_waits_and_nobody_yields(mode):
    state = grown(mode=mode, priority=5)
    submit(state, "b", at=2.0, mode=mode)
    plan = plan_admission(state, 1.0 + QUANTUM)
    assert plan.yields == {} and plan.gifts["a"].ranks == 2, "the most that lets the other one start"
    assert "gives 1 trainer to b" in plan.gifts["a"].reason
    assert "a gives 1 trainer when its step ends" in plan.waiting["b"]
    give(state, 1.0 + QUANTUM)
    a, b = (state.runs[name].grant for name in "ab")
    assert (len(a.trainers), len(b.trainers)) == (2, 1)
    assert not set(a.devices) & set(b.devices) and a.devices


def test_a_run_keeps_what_it_took_for_its_quantum_and_takes_nothing_back_as_soon():
    state = grown()
    submit(state, "b", at=2.0)
    assert plan_admission(state, QUANTUM + 0.9).gifts == {}, "it grew at second 1"
    give(state, 1.0 + QUANTUM)
    submit(state, "c", at=70.0)
    assert plan_admission(state, 2 * QUANTUM).gifts == {}
    assert state.runs["a"].gave_at == 1.0 + QUANTUM


@pytest.mark.parametrize(("priority", "least", "given"), [(-1, 1, None), (1, 1, 1), (1, None, None)])
def test_what_its_spec_names_is_given_to_a_run_that_comes_before_it_and_never_below_the_least(
    priority, least, given
):
    state = grown(trainers=2, ranks=2, to=2, least=least)
    submit(state, "b", at=2.0, priority=priority)
    plan = plan_admission(state, 1.0 + QUANTUM)
    assert [gift.ranks for gift in plan.gifts.values()] == ([given] if given else [])
    assert bool(plan.yields) == (priority > 0 and given is None)


def test_a_run_yields_whole_where_its_trainers_alone_help_nobody():
    state = grown(rollouts=1)
    submit(state, "b", at=2.0, priority=1)
    plan = plan_admission(state, 1.0 + QUANTUM)
    assert list(plan.yields) == ["a"] and plan.gifts == {}


def test_nobody_gives_anything_to_a_run_behind_one_that_has_waited_too_long():
    state = grown(rollouts=2)
    submit(state, "long", rollouts=5, quantum_s=1.0), submit(state, "b", at=2.0)
    plan = plan_admission(state, 1.0 + QUANTUM)
    assert plan.gifts == {} and "earlier run" in plan.waiting["b"]


def test_a_run_that_grew_queues_for_what_its_spec_names():
    state = grown()
    state.apply(ev.RunReleased(at=9.0, run="a"))
    assert state.runs["a"].ranks == 1


def test_the_room_that_is_made_is_the_least():
    held = {name: Grant(trainers=[f"{name}{i}" for i in range(4)]) for name in "abc"}

    def offers(*sizes, leaves=False):
        return {
            name: [*(Grant(trainers=held[name].trainers[:size]) for size in sizes), *([None] * leaves)]
            for name in "abc"
        }

    def kept(wanted, offered):
        found = least_room(
            held, offered, lambda grants: sum(len(g.trainers) for g in grants.values()) <= 12 - wanted
        )
        return {name: None if grant is None else len(grant.trainers) for name, grant in found.items()}

    assert kept(1, offers(3, 1)) == {"a": 3}
    assert kept(5, offers(3, 1)) == {"a": 1, "b": 1}
    assert kept(3, offers(2, leaves=True)) == {"a": 2, "b": 2}, "two smaller groups before a whole run"
    assert kept(7, offers(2, leaves=True)) == {"a": None, "b": 2, "c": 2}
    assert kept(13, offers(2, leaves=True)) == {}


# --- on the imaginary fleet


def pair(**other):
    """A run that may have two trainers, and one that comes when it has them."""
    trainer = {"ranks": 1, "helpers": 0, "min_ranks": 1, "max_ranks": 2}
    scheduling = {"quantum_s": 1.0, "priority": 1}
    scene = Scene(sizes=[], trainers=2, trainer=trainer, scheduling=scheduling, steps_total=10, **other)
    scene.counts["rollout"] = 2
    second = scene.spec.model_dump(mode="json") | {"name": "second"}
    second["trainer"] |= {"max_ranks": None, "min_ranks": None}
    second["scheduling"] |= {"priority": 0}
    scene.second = type(scene.spec).model_validate(second)
    return scene


async def second_comes(scene):
    await scene.steps(2)
    while not any(run.ranks == 2 for run in scene.states()):  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.05)
    await scene.users.submit(scene.second, "second")


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "auto"])
def test_a_run_that_grew_gives_a_trainer_to_one_that_comes_and_both_run_to_their_ends(mode):
    scene = pair(mode=mode)
    scene.trouble = lambda: second_comes(scene)
    outcome = played(scene)
    changes = [change for change in scene.log(ev.TrainersChanged) if change.given_to]
    assert changes and all(change.ranks == 1 for change in changes)
    assert "gives 1 trainer to" in changes[0].reason and outcome.recoveries == 0
    reasons = [event.reason for event in scene.log(ev.RunStateChanged)]
    assert not [reason for reason in reasons if "yields" in reason]
    assert not any(event.checkpoint for event in scene.log(ev.VersionRestored)), "nothing is read from a disk"


@pytest.mark.parametrize("who", [LEADER, "taker", COORDINATOR])
@pytest.mark.parametrize("method", ["LeaveTrainerGroup", "JoinTrainerGroup", "Restore"])
def test_whoever_dies_while_a_trainer_is_given_both_runs_end(method, who):
    """The world judges the ledgers, the leases, and that the log's changes are what the rule gives."""
    scene = pair(checkpoint={"enabled": True, "interval_steps": 1})
    scene.trouble = lambda: second_comes(scene)
    struck = []

    async def strike():
        if who == COORDINATOR:
            return await scene.kill_coordinator(0.5)
        states = [run for run in scene.states() if run.id.startswith("second") == (who == "taker")]
        grant = states[0].grant if states else None
        if grant is not None and grant.trainers:
            await scene.kill(grant.trainers[0])

    def hear(called, request):
        given = [change for change in scene.log(ev.TrainersChanged) if change.given_to]
        if (
            not struck
            and called == method
            and (given or (method == "LeaveTrainerGroup" and len(scene.states()) > 1))
        ):
            struck.append(called)
            scene.spawn(strike())

    scene.hear = hear
    played(scene)
    assert struck


def test_trainers_that_refuse_the_smaller_group_leave_the_run_to_queue_for_the_one_that_it_had(monkeypatch):
    scene = pair(checkpoint={"enabled": True, "interval_steps": 1})
    scene.trouble = lambda: second_comes(scene)
    call = SimulatedInstanceClient.call
    refused = []

    async def unfit(port, method, request, timeout):
        given = [change for change in scene.log(ev.TrainersChanged) if change.given_to]
        if method == "Restore" and request.carried and given and not refused:
            taker = given[0].given_to
            while not [run for run in scene.states() if run.id == taker and run.grant]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            refused.append(method)
            raise port._instance._refuse("MEMORY_SHORT", "12 GB are needed")
        return await call(port, method, request, timeout)

    monkeypatch.setattr(SimulatedInstanceClient, "call", unfit)
    played(scene)
    assert refused
    queued = [e.reason for e in scene.log(ev.RunStateChanged) if e.state == run_states.QUEUED]
    assert any("12 GB are needed" in reason for reason in queued)
