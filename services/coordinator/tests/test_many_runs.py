"""Scenes of many runs on a calm imaginary fleet: what users do to one run must not reach another, or the next."""

import asyncio
import contextlib

import pytest
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission import submissions
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices.scheduling import PATIENCE_QUANTA
from headrace_coordinator.run.step import receiving
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.judging.judge import Violation
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import Quiet
from scene import Scene, ends, trained_once


def test_a_paused_run_is_in_nobodys_way():
    async def play(scene):
        a = await scene.first()
        await scene.users.intend(a, run_states.PAUSE)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        b = await scene.another()
        await scene.until(lambda: scene.state(b) in run_states.TERMINAL)
        assert (scene.state(a), scene.state(b)) == ("PAUSED", "SUCCEEDED")
        await scene.users.intend(a, run_states.RUN)

    scene = Scene(play)
    assert set(ends(scene).values()) == {"SUCCEEDED"} and len(scene.log(ev.RunSubmitted)) == 2
    assert trained_once(scene, scene.log(ev.RunSubmitted)[0].run)
    assert not scene.log(ev.RunRecovering)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_keeps_what_is_recorded_whatever_the_checkpoint_section_says(enabled):
    async def play(scene):
        a = await scene.first()
        await scene.users.intend(a, run_states.PAUSE_NOW)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        await scene.users.intend(a, run_states.RUN)

    scene = Scene(play, checkpoint={"enabled": enabled})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert trained_once(scene, scene.ended.id)


def test_a_run_whose_state_cannot_be_saved_does_not_yield_it():
    """On a full disk each turn would end with a rewind, and no turn would get further than the one before."""

    async def play(scene):
        scene.disk.full = True
        await scene.first()
        await scene.until(lambda: [note for note in scene.log(ev.Noted) if "another quantum" in note.text])
        await asyncio.sleep(60.0)
        scene.disk.full = False

    scene = Scene(play, count=2, steps=30, scheduling={"quantum_s": 0.5})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    for submitted in scene.log(ev.RunSubmitted):
        assert trained_once(scene, submitted.run)


def test_a_run_that_yielded_has_not_recovered_and_one_whose_trainer_was_killed_has():
    async def play(scene):
        await scene.until(lambda: any(each.checkpoint for each in scene.log(ev.VersionRestored)))
        yielded.extend(scene.log(ev.VersionRestored))
        assert not scene.log(ev.RunRecovering)
        made = len(scene.log(ev.StepCommitted))
        await scene.until(lambda: len(scene.log(ev.StepCommitted)) > made)
        victim = next(each for each in scene.instances.values() if isinstance(each, Trainer) and each.alive)
        await scene.kill(victim.incarnation)

    yielded = []
    scene = Scene(play, count=2, steps=30, scheduling={"quantum_s": 0.5})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert not any(each.recovery for each in yielded)
    assert any(each.recovery for each in scene.log(ev.VersionRestored)) and scene.log(ev.RunRecovering)


def test_a_run_that_is_paused_and_cancelled_is_in_nobodys_way():
    async def play(scene):
        a = await scene.first()
        await scene.users.intend(a, run_states.PAUSE)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        await scene.users.intend(a, run_states.CANCEL)
        assert scene.state(a) == "CANCELLED"
        b = await scene.another()
        await scene.until(lambda: scene.state(b) == "SUCCEEDED")

    assert sorted(ends(Scene(play)).values()) == ["CANCELLED", "SUCCEEDED"]


def test_a_run_that_is_resumed_beside_another_takes_turns_with_it():
    async def play(scene):
        a = await scene.first()
        await scene.users.intend(a, run_states.PAUSE)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        b = await scene.another()
        await scene.until(lambda: scene.state(b) == "RUNNING")
        await scene.users.intend(a, run_states.RUN)
        assert scene.state(a) == "QUEUED"

    scene = Scene(play, steps=40)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert not scene.log(ev.RunRecovering)
    assert all(trained_once(scene, event.run) for event in scene.log(ev.RunSubmitted))
    yielded = [event for event in scene.log(ev.RunStateChanged) if event.reason.startswith("yields to")]
    assert {event.run for event in yielded} == {event.run for event in scene.log(ev.RunSubmitted)}


@pytest.mark.parametrize("intent", [run_states.PAUSE_NOW, run_states.CANCEL])
def test_a_commit_that_was_sent_is_kept(intent):
    """Whoever stops the run while the trainer commits: the step is recorded."""

    class Interrupted(Scene):
        asked = False

        def heard(self, method, request):
            if method == "CommitStep" and request.step == 2 and not self.asked:
                self.asked = True
                self.spawn(self.users.intend(request.header.run.removeprefix("runs/"), intent))

    async def play(scene):
        a = await scene.first()
        await scene.until(lambda: scene.state(a) in ("PAUSED", "CANCELLED"))
        assert [event.certificate.step for event in scene.log(ev.StepCommitted)] == [0, 1, 2]
        if intent == run_states.PAUSE_NOW:
            await scene.users.intend(a, run_states.RUN)

    scene = Interrupted(play)
    assert set(ends(scene).values()) == {"SUCCEEDED" if intent == run_states.PAUSE_NOW else "CANCELLED"}
    assert trained_once(scene, scene.ended.id)


def test_pause_now_and_cancel_eight_milliseconds_later():
    async def play(scene):
        a = await scene.first()
        pause = scene.spawn(scene.users.intend(a, run_states.PAUSE_NOW))
        await asyncio.sleep(0.008)
        await scene.users.intend(a, run_states.CANCEL)
        await pause
        b = await scene.another()
        await scene.until(lambda: scene.state(b) == "SUCCEEDED")

    scene = Scene(play)
    assert sorted(ends(scene).values()) == ["CANCELLED", "SUCCEEDED"]
    reasons = [event.reason for event in scene.log(ev.RunStateChanged) if event.state == "CANCELLED"]
    assert len(reasons) == 1 and reasons[0].startswith("cancelled")


def test_twenty_parallel_submissions_with_one_key_are_one_run():
    async def play(scene):
        for kind in ("reward", "rollout"):  # while instances restart, the check waits
            victim = next(i for i in scene.living(kind))
            scene.spawn(scene.kill(victim.incarnation))
        await asyncio.sleep(0.1)
        await scene.users.submit(scene.specs[0], "twenty", copies=20)

    scene = Scene(play)
    ends(scene)
    assert [used.key for used in scene.log(ev.KeyUsed)].count("admin/twenty") == 1
    assert len(scene.log(ev.RunSubmitted)) == 2


def test_a_submission_right_after_a_restart_waits_for_the_instances_to_register():
    answers = []

    async def play(scene):
        await scene.first()
        await scene.kill_coordinator(0.5)
        coordinator, _ = await scene.serving()
        ready = {kind: len(coordinator.fleet.ready(kind)) for kind in ("rollout", "trainer", "reward")}
        assert 0 in ready.values(), f"nothing to wait for: {ready}"
        answers.append(await coordinator.submissions.submit(scene.specs[0], "at once"))
        scene.users.one_of("at once", set(answers))

    scene = Scene(play)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert len(answers) == 1


def test_a_trainer_that_is_stopped_in_order_takes_no_step_with_it():
    async def play(scene):
        a = await scene.first()
        leaver = next(i for i in scene.living("trainer") if f"runs/{a}" in i.open_runs)
        await scene.bear("trainer", "trainer-9", "host0")
        scene.tell_tables(scene.coordinator.fleet)
        await scene.terminate(leaver, 60.0)

    scene = Scene(play, steps=10)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert trained_once(scene, scene.ended.id) and len(scene.log(ev.VersionRestored)) == 2
    assert not scene.log(ev.RunRecovering)


def test_a_queued_run_shows_its_place_and_a_cancelled_one_the_truth():
    async def play(scene):
        await scene.first()
        b, c = await scene.another("b"), await scene.another("c")
        await asyncio.sleep(0.1)
        views = [scene.coordinator.reads.run(run) for run in (b, c)]
        assert [view.place for view in views] == [1, 2]
        assert "1 rollout instance" in views[0].waiting_for[0]
        await scene.users.intend(b, run_states.CANCEL)
        view = scene.coordinator.reads.run(b)
        assert view.state == "CANCELLED" and view.reason.startswith("cancelled while it was queued")
        assert "checkpoint stays" not in view.reason
        await asyncio.sleep(0.1)
        assert scene.coordinator.reads.run(c).place == 1

    assert sorted(ends(Scene(play, steps=30, scheduling={"quantum_s": 1000.0})).values())[0] == "CANCELLED"


def test_a_trainer_that_dies_in_each_third_step_before_the_first_checkpoint_ends_the_run():
    async def play(scene):
        while True:
            before = len(scene.log(ev.StepCommitted))
            await scene.until(lambda before=before: len(scene.log(ev.StepCommitted)) >= before + 2)
            await scene.kill(scene.living("trainer")[0].incarnation)

    scene = Scene(play, steps=20, limits={"recoveries": 4})
    with contextlib.suppress(Violation, AssertionError):
        run_virtual(scene.live())
    last = scene.log(ev.RunStateChanged)[-1]
    assert last.state == "FAILED"
    assert last.reason.endswith("; 4 recoveries without progress (limits.recoveries)")


def test_a_fork_goes_on_from_its_origins_checkpoint():
    async def play(scene):
        a = await scene.first()
        await scene.users.intend(a, run_states.PAUSE)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        spec = scene.specs[0].model_dump(mode="json") | {"from_checkpoint": {"run": a}}
        scene.users.origins[await scene.users.submit(type(scene.specs[0]).model_validate(spec), "fork")] = a
        await scene.users.intend(a, run_states.RUN)

    scene = Scene(play)
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    forks = [event for event in scene.log(ev.VersionRestored) if event.source_run]
    assert len(forks) == 1 and forks[0].frontier_step > 0
    fork = scene.replay.runs[forks[0].run]
    assert fork.ledger.first_step == forks[0].frontier_step and fork.checkpoints


def test_of_a_large_step_only_what_is_shown_is_kept(monkeypatch):
    """Texts and log-probs of 10⁵ answers would be hundreds of megabytes until their step is committed."""
    shown, made, lines = [], [], []

    def spied(context, slot):
        found = of_answer(context, slot)
        made.append(slot)
        shown.extend([slot] if found else [])
        return found

    async def play(scene):
        await asyncio.sleep(0.0)

    of_answer = receiving.is_shown
    monkeypatch.setattr(receiving, "is_shown", spied)
    monkeypatch.setattr(Quiet, "trajectories", lambda self, views, images=None: lines.append(len(views)))
    scene = Scene(play, steps=2, algorithm={"group_size": 8, "prompts_per_step": 20})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert len(made) >= 2 * 160 and len(shown) <= len(made) // 2
    assert len(lines) == 2 and all(0 < count <= 64 for count in lines) and max(lines) > 40


def fork_of(spec, run, step=None, **changes):
    fields = spec.model_dump(mode="json") | {"from_checkpoint": {"run": run, "step": step}} | changes
    return type(spec).model_validate(fields)


def test_the_checkpoint_that_a_queued_fork_names_outlives_retention():
    """Its origin goes on meanwhile, on the only trainer, and keeps one checkpoint."""
    seen = []

    async def play(scene):
        a = await scene.first()
        await scene.until(lambda: scene.log(ev.CheckpointSaved))
        saved = scene.log(ev.CheckpointSaved)[0]
        fork = await scene.users.submit(fork_of(scene.specs[0], a, saved.step), "fork")
        scene.users.origins[fork] = a
        directory = scene.coordinator.event_log.state.runs[a].directory
        await scene.until(lambda: scene.state(fork) == "RUNNING")
        seen.append([c.name for c in scene.disk.listed(directory)])
        await scene.until(lambda: scene.state(fork) == "SUCCEEDED")
        seen.append([c.name for c in scene.disk.listed(directory)])
        seen.append(saved.name)

    scene = Scene(play, steps=12, checkpoint={"interval_steps": 1, "keep": 1}, scheduling={"quantum_s": 8.0})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    during, after, name = seen
    assert during[-1] == name and len(during) == 2
    assert name not in after


def test_a_fork_whose_checkpoint_is_deleted_while_its_scorers_are_tried_is_refused(monkeypatch):
    refused = []

    async def play(scene):
        a = await scene.first()
        await scene.until(lambda: scene.log(ev.CheckpointSaved))
        first = scene.log(ev.CheckpointSaved)[0]

        async def trial(*_):
            await scene.until(lambda: scene.log(ev.CheckpointSaved)[-1] != first)
            await asyncio.sleep(1.0)
            return []

        monkeypatch.setattr(submissions, "check_scorers", trial)
        try:
            await scene.coordinator.submissions.submit(fork_of(scene.specs[0], a, first.step), "fork")
        except Refused as error:
            refused.extend(problem.key for problem in error.problems)

    scene = Scene(play, steps=8, checkpoint={"interval_steps": 1, "keep": 1})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    assert refused == ["from_checkpoint.step"]


def test_a_fork_begins_with_another_checkpoint_when_the_newest_is_pruned_under_it(monkeypatch):
    """Its origin saves the next one between the fork's listing and its Restore."""
    pruned = []

    async def late(self, request):
        if request.source_run_directory and not pruned:
            pruned.append(request.checkpoint)
            self.disk.find(request.source_run_directory, request.checkpoint).pruned = True
        return await restore(self, request)

    async def play(scene):
        a = await scene.first()
        await scene.until(lambda: len(scene.log(ev.CheckpointSaved)) > 1)
        await scene.users.intend(a, run_states.PAUSE)
        await scene.until(lambda: scene.state(a) == "PAUSED")
        scene.users.origins[await scene.users.submit(fork_of(scene.specs[0], a), "fork")] = a
        await scene.until(lambda: pruned)
        await scene.users.intend(a, run_states.RUN)

    restore = Trainer.Restore
    monkeypatch.setattr(Trainer, "Restore", late)
    scene = Scene(play, steps=8, checkpoint={"interval_steps": 1, "keep": 3})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    begun = [event.checkpoint for event in scene.log(ev.VersionRestored) if event.source_run]
    assert len(begun) == 1 and begun != pruned


@pytest.mark.parametrize("seed", range(2))
def test_a_low_priority_is_served_beside_urgent_runs(seed):
    async def play(scene):
        await asyncio.sleep(0.0)

    scene = Scene(play, count=3, seed=seed, steps=40)
    for index, spec in enumerate(scene.specs):
        scheduling = spec.scheduling.model_copy(update={"priority": index, "quantum_s": 3.0})
        scene.specs[index] = spec.model_copy(update={"scheduling": scheduling})
    assert set(ends(scene).values()) == {"SUCCEEDED"}
    quantum = scene.replay.longest_quantum  # of a run that took long to start, longer than its spec's
    for run, waited in scene.replay.longest_wait.items():
        assert waited < (PATIENCE_QUANTA + 3) * quantum + 60.0, run
