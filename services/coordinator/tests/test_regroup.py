"""A run's trainer group changes its size between steps, on an imaginary fleet; and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import re

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_simulation.fleet.network import SimulatedInstanceClient
from regroup_parts import COORDINATOR, JOINER, LEADER, STEPS, Scene, played


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid", "auto"])
def test_a_group_grows_and_shrinks_without_losing_a_step_or_reading_a_checkpoint(mode):
    scene = Scene(mode=mode)
    outcome = played(scene)
    assert outcome.recoveries == 0 and not scene.refusals
    changes = scene.log(ev.TrainersChanged)
    assert [change.ranks for change in changes] == [2, 1]
    assert changes[0].trainers[0] == changes[1].trainers[0], "the leader stays"
    assert [len(formed.trainers) for formed in scene.log(ev.TrainerGroupFormed)] == [1, 2, 1]
    assert len(scene.log(ev.VersionRestored)) == 1, "the initial model, and nothing since"
    steps = scene.log(ev.StepCommitted)
    assert len(steps) == STEPS and all(step.certificate.max_staleness == 0 for step in steps)
    assert sum("regroup" in step.view["stage_s"] for step in steps) == 2
    assert scene.ended.ranks == 1 and scene.ended.wanted_ranks == 0
    layouts = [event.layout for event in scene.log(ev.LayoutChosen)]
    assert layouts == ["shard_ranks: 2", "shard_ranks: 1"], "of each group that took up what was carried"
    assert scene.ended.layout == "shard_ranks: 1"


CALLS = ["LeaveTrainerGroup", "OpenRun", "JoinTrainerGroup", "Restore", "PublishPolicy", "CloseRun"]


@pytest.mark.parametrize("who", [LEADER, JOINER, COORDINATOR])
@pytest.mark.parametrize("method", CALLS)
def test_whoever_dies_at_any_point_of_a_change_the_run_has_one_of_both_sizes(method, who):
    """The world judges the ledger, the versions, and that the log's changes are what the rule gives."""
    scene = Scene(checkpoint={"enabled": True, "interval_steps": 1})
    struck = []

    async def strike():
        await asyncio.sleep(0.3 * (CALLS.index(method) % 2))  # as the call is sent, or within it
        if who == COORDINATOR:
            return await scene.kill_coordinator(0.5)
        grant = scene.states()[0].grant if scene.states() else None
        if grant is not None and grant.trainers:
            await scene.kill(grant.trainers[0 if who == LEADER else -1])

    def changing():
        return len(scene.log(ev.TrainersChanged)) > (method == "CloseRun")

    def hear(called, request):
        if not struck and called == method and (method == "LeaveTrainerGroup" or changing()):
            struck.append(called)
            scene.spawn(strike())

    scene.hear = hear
    played(scene)
    assert struck
    for run in scene.states():
        assert run.ranks in (1, 2)
    assert scene.ended.ledger.step == STEPS


def test_the_ranks_keep_their_order_when_another_instance_is_replaced():
    scene = Scene(sizes=[], ranks=2, checkpoint={"enabled": True, "interval_steps": 1})

    async def trouble():
        await scene.steps(1)
        await scene.kill(scene.states()[0].grant.trainers[0])  # the first by name, and so is who replaces it
        await scene.steps(1)
        await scene.kill(scene.states()[0].grant.rollouts[0])
        await scene.steps(1)
        await scene.kill_coordinator(0.5)  # which looks at who is in the group

    scene.trouble = trouble
    played(scene)
    assert len(scene.log(ev.TrainerGroupFormed)) == 2, "one for the start, one for the trainer that was lost"


def test_a_pause_in_the_middle_of_a_change_loses_nothing():
    scene = Scene(sizes=[2])
    paused = []

    def hear(called, request):
        if called == "JoinTrainerGroup" and scene.log(ev.TrainersChanged) and not paused:
            paused.append(called)
            scene.spawn(scene.users.intend(next(iter(scene.users.specs)), run_states.PAUSE_NOW))

    async def care():
        while not any(e.state == run_states.PAUSED for e in scene.log(ev.RunStateChanged)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await scene.users.intend(next(iter(scene.users.specs)), run_states.RUN)

    async def trouble():
        await Scene.trouble(scene)
        await care()

    scene.hear, scene.trouble = hear, trouble
    played(scene)
    assert paused and not [e for e in scene.log(ev.RunStateChanged) if "could not be saved" in e.reason]
    numbers = [step.certificate.number for step in scene.log(ev.StepCommitted)]
    assert len(numbers) == STEPS


def test_a_trainer_that_refuses_the_state_leaves_the_run_with_the_size_that_it_had(monkeypatch):
    scene = Scene(sizes=[2])
    call = SimulatedInstanceClient.call

    async def unfit(port, method, request, timeout):
        if method == "Restore" and request.carried and scene.states()[0].ranks == 2:
            raise port._instance._refuse("INVALID", "trainer.backend: it runs on one rank")
        return await call(port, method, request, timeout)

    monkeypatch.setattr(SimulatedInstanceClient, "call", unfit)
    outcome = played(scene)
    changes = scene.log(ev.TrainersChanged)
    assert [change.ranks for change in changes] == [2, 1] and "one rank" in changes[1].reason
    assert outcome.recoveries == 0 and len(scene.log(ev.StepCommitted)) == STEPS


@pytest.mark.parametrize(
    ("scene", "reason", "words"),
    [
        ({"sizes": [4]}, "INVALID", "use one of: 1, 2, 3, 6"),
        ({"sizes": [2], "trainers": 1}, "CONFLICT", "2 trainer instances .*headrace scale trainer=2"),
        ({"sizes": [2], "placement": {"trainer": ["cpu:1"], "rollout": ["cpu:0"]}}, "INVALID", "placement"),
    ],
    ids=["batch", "no trainer", "named devices"],
)
def test_a_size_that_does_not_fit_is_refused_with_what_would(scene, reason, words):
    scene = Scene(**scene)
    played(scene)
    (refused,) = scene.refusals
    text = refused.message + "; ".join(f"{p.key} {p.problem} {p.fix}" for p in refused.problems)
    assert refused.reason == reason
    assert re.search(words, text), text
    assert not scene.log(ev.TrainersChanged) and not scene.log(ev.RanksWanted)


def test_a_run_that_may_grow_takes_a_trainer_that_comes_and_goes_on_without_it_when_it_goes():
    scene = Scene(sizes=[], trainers=1, trainer={"ranks": 1, "helpers": 0, "min_ranks": 1, "max_ranks": 2})

    async def trouble():
        await scene.steps(1)
        await scene.bear("trainer", "trainer-new", scene.hosts[0])
        scene.tell_tables(scene._fleet())
        await scene.steps(3)
        leaver = next(each for each in scene.living("trainer") if "new" in each.incarnation)
        scene.spawn(scene.terminate(leaver, 30.0))

    scene.trouble = trouble
    played(scene)
    grown, *shrunk = scene.log(ev.TrainersChanged)
    assert grown.ranks == 2 and "free" in grown.reason
    assert shrunk[0].ranks == 1 and "1 of 2 trainers is lost" in shrunk[0].reason
    assert scene.log(ev.RanksWanted) == [] and len(scene.log(ev.StepCommitted)) == STEPS
    assert "lacks" not in "".join(event.reason for event in scene.log(ev.RunStateChanged))


def test_a_run_that_may_shrink_does_not_wait_for_a_trainer_that_was_killed():
    scene = Scene(
        sizes=[],
        ranks=2,
        checkpoint={"enabled": True, "interval_steps": 1},
        trainer={"ranks": 2, "helpers": 0, "min_ranks": 1},
    )

    async def trouble():
        await scene.steps(2)
        await scene.kill(scene.states()[0].grant.trainers[1])

    scene.trouble = trouble
    played(scene)
    changes = scene.log(ev.TrainersChanged)
    assert [change.ranks for change in changes] == [1, 2], "and takes the replacement when it is there"
    assert changes[0].trainers == changes[1].trainers[:1]


def test_a_run_that_changes_by_itself_is_not_set():
    scene = Scene(trainers=2, sizes=[2], trainer={"ranks": 1, "helpers": 0, "max_ranks": 2})
    played(scene)
    (refused,) = scene.refusals
    assert refused.reason == "INVALID" and "by itself" in refused.problems[0].problem


def test_a_run_does_not_grow_while_another_one_waits_for_the_trainer():
    scene = Scene(sizes=[], trainers=1, trainer={"ranks": 1, "helpers": 0, "max_ranks": 2})
    other = scene.spec.model_dump(mode="json") | {"name": "other"}
    other["trainer"] |= {"max_ranks": None}
    scene.specs.append(type(scene.spec).model_validate(other))

    async def trouble():
        await scene.steps(1)
        await scene.bear("trainer", "trainer-new", scene.hosts[0])
        scene.tell_tables(scene._fleet())

    scene.trouble = trouble
    played(scene)
    for change in scene.log(ev.TrainersChanged):
        before = scene.store.log[: scene.store.log.index(change)]
        ended = {
            e.run for e in before if isinstance(e, ev.RunStateChanged) and e.state in run_states.TERMINAL
        }
        assert len(ended) == 1, "the other run has had its turn"
