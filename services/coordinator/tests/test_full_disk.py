"""A disk that takes no more: the run is paused by the system, says what and where, and goes on when it is resumed."""

import asyncio

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.world import Quiet
from scene import Scene, ends, trained_once

FULL = "/runs/r/export cannot be written: No space left on device; the model has up to 1,000 bytes, and 7 are free"


def reasons(scene, state):
    return [event.reason for event in scene.log(ev.RunStateChanged) if event.state == state]


def test_an_export_without_room_pauses_the_run_and_is_made_on_resume(monkeypatch):
    exports, full = Trainer.ExportModel, [True]

    async def export(self, request):
        if full:
            raise self._refuse("EXPORT_FAILED", FULL)
        return await exports(self, request)

    async def play(scene):
        await scene.until(lambda: reasons(scene, "PAUSED"))
        run = scene.states()[0]
        assert (run.intent, run.ledger.step, run.recoveries) == (run_states.PAUSE, 6, 0)
        full.clear()
        await scene.users.intend(run.id, run_states.RUN)

    monkeypatch.setattr(Trainer, "ExportModel", export)
    scene = Scene(play)
    scene.specs = [spec.model_copy(update={"export": True}) for spec in scene.specs]
    (run,) = ends(scene)
    assert scene.state(run) == "SUCCEEDED" and trained_once(scene, run)
    assert reasons(scene, "PAUSED") == [f"export: {FULL}; make room and resume"]
    assert len(scene.log(ev.StepCommitted)) == 6 and len(scene.log(ev.ModelExported)) == 1


def test_files_that_cannot_be_written_pause_a_run_once_its_head_is_saved(monkeypatch):
    async def play(scene):
        run = await scene.first()
        scene.disk.full = True  # The head cannot be saved either: a pause would lose it.
        monkeypatch.setattr(Quiet, "trouble", "[Errno 28] No space left on device: 'metrics.jsonl'")
        await asyncio.sleep(10.0)
        assert not reasons(scene, "PAUSED")
        scene.disk.full = False
        await scene.until(lambda: reasons(scene, "PAUSED"))
        monkeypatch.setattr(Quiet, "trouble", "")
        await scene.users.intend(run, run_states.RUN)

    scene = Scene(play, steps=60)
    (run,) = ends(scene)
    assert scene.state(run) == "SUCCEEDED" and trained_once(scene, run)
    (why,) = reasons(scene, "PAUSED")
    assert (
        why.startswith("its files below ") and "metrics.jsonl" in why and why.endswith("make room and resume")
    )
