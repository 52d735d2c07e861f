"""Single runs in a calm world: why they fail, what is settled when they come."""

import asyncio

import msgspec
from headrace.reward.v1 import reward_pb2 as reward
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.deaths import RESTART_S
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.trainer import Trainer
from scene import Scene, ends
from submission_parts import checked


def test_a_run_that_trained_nothing_has_failed_and_says_why(monkeypatch):
    async def broken(self, requests):
        async for request in requests:
            for item in request.items:
                yield reward.ScoreResponse(
                    results=[
                        reward.ScoreResult(
                            sample=item.sample,
                            attempt=item.attempt,
                            status=reward.SCORE_STATUS_OK
                            if item.evaluation
                            else reward.SCORE_STATUS_SCORER_BROKEN,
                            detail="" if item.evaluation else "ZeroDivisionError: division by zero",
                            evaluation=item.evaluation,
                        )
                    ]
                )

    async def watch(scene):
        await scene.until(
            lambda: scene.log(ev.RunStateChanged) and not scene.coordinator.event_log.state.runs
        )

    monkeypatch.setattr(Reward, "Score", broken)
    scene = Scene(watch, steps=3, limits={"max_drop_rate": 1.0})
    ends(scene)
    last = scene.log(ev.RunStateChanged)[-1]
    assert last.state == "FAILED"
    assert "nothing was trained: all" in last.reason and "slots of 3 steps were dropped" in last.reason
    assert last.reason.startswith(
        "a scorer is broken: ZeroDivisionError: division by zero (GROUP_INCOMPLETE)"
    )


def test_a_scorer_that_loads_for_long_holds_up_no_other_check(monkeypatch):
    began = asyncio.Event

    async def slow(self, request):
        if "slow.py" in request.config_json:
            self.slow.set()
            await asyncio.sleep(300)
        return await opens(self, request)

    async def check(scene):
        def spec(scorer):
            section = {"scorers": [{"name": scorer}], "load_timeout_s": 60.0}
            return type(scene.specs[0]).model_validate(
                scene.specs[0].model_dump(mode="json") | {"reward": section}
            )

        await scene.first()
        Reward.slow = began()
        coordinator, clock = scene.coordinator, asyncio.get_running_loop().time
        loading = asyncio.create_task(checked(coordinator, spec("slow.py:score")))
        await Reward.slow.wait()
        start = clock()
        assert await checked(coordinator, spec("quick.py:score")) == []
        assert clock() - start < 5 and not loading.done()
        (problem,) = await loading
        assert clock() - start < 120 and problem.key == "reward.load_timeout_s", problem

    opens = Reward.OpenRun
    monkeypatch.setattr(Reward, "OpenRun", slow)
    assert list(ends(Scene(check)).values()) == ["SUCCEEDED"]


def test_the_engine_that_auto_stands_for_is_settled_at_submission_and_noted():
    async def play(scene):
        spec = scene.specs[0].model_dump(mode="json") | {"rollout": {"engine": "auto"}}
        await scene.users.submit(type(scene.specs[0]).model_validate(spec), "auto", copies=2)

    scene = Scene(play)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    first, second = scene.log(ev.RunSubmitted)
    (run,) = (event for event in (first, second) if event.run == used_by(scene, "auto"))
    assert run.spec["rollout"]["engine"] == "transformers"
    notes = [event.text for event in scene.log(ev.Noted) if "rollout.engine: auto takes" in event.text]
    assert notes == [
        "rollout.engine: auto takes transformers: no rollout instance has vllm or sglang installed"
    ]


def used_by(scene, key):
    """The run that a key of anybody made: keys belong to their owners."""
    return next(used.resource for used in scene.log(ev.KeyUsed) if used.key.endswith(key))


def test_only_what_an_ended_instance_would_mend_waits_for_it_to_come_back():
    found = []

    async def play(scene):
        await scene.first()
        coordinator, clock = scene.coordinator, asyncio.get_running_loop().time
        spec = scene.specs[0]
        rollout, *_ = [each for each in coordinator.reads.instances() if each.kind == "rollout"]
        gone = coordinator.event_log.state.instances[rollout.incarnation]
        have = sum(each.kind == "rollout" for each in coordinator.reads.instances())
        for name, wanted, model in (
            ("gone-0", have + 1, spec.model),
            ("gone-0", have + 2, spec.model),
            ("gone-0", have + 1, spec.model.model_copy(update={"path": "/no/such/model"})),
            (rollout.name, have + 1, spec.model),  # It is back.
        ):
            asked = spec.model_copy(
                update={"model": model, "rollout": spec.rollout.model_copy(update={"instances": wanted})}
            )
            coordinator.fleet.deaths._ended = {
                name: (coordinator.event_log.monotonic(), msgspec.structs.replace(gone, instance=name))
            }
            began = clock()
            keys = {each.key for each in await checked(coordinator, asked)}
            assert "rollout.instances" in keys
            found.append((clock() - began, "model.path" in keys))  # a thread that checks costs moments

    ends(Scene(play, steps=30))
    (waited, _), *others = found
    assert waited >= RESTART_S
    assert [bad for _, bad in others] == [False, True, False]
    assert max(waited for waited, _ in others) < 1.0 < RESTART_S


def test_a_cancel_beside_an_open_run_that_is_not_answered_takes_seconds(monkeypatch):
    """The trainer stands still from before OpenRun on; what it opens later is closed by the reconciler."""
    opens, asks = Trainer.OpenRun, Trainer.GetStepState

    async def late(self, request):
        await asyncio.sleep(40.0)
        return await opens(self, request)

    async def never(self, request):
        await asyncio.sleep(40.0)
        return await asks(self, request)

    async def play(scene):
        await scene.until(lambda: scene.states() and scene.states()[0].state == "PLANNING")
        run, clock = scene.states()[0].id, asyncio.get_running_loop().time
        await asyncio.sleep(2.0)
        began = clock()
        await scene.users.intend(run, "CANCEL")
        await scene.until(lambda: scene.state(run) == "CANCELLED")
        scene.took = clock() - began

    monkeypatch.setattr(Trainer, "OpenRun", late)
    monkeypatch.setattr(Trainer, "GetStepState", never)
    scene = Scene(play)
    assert list(ends(scene).values()) == ["CANCELLED"]
    assert scene.took < 10.0
