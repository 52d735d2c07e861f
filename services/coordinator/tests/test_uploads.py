"""A run's copies in a store, here a folder: what is told, what waits, what is skipped, what is fetched back."""

import asyncio
import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.runs import Uploads as Known
from headrace_coordinator.run import uploads as module
from headrace_coordinator.run.uploads import Uploads, fetch_origin
from headrace_coordinator.waits import Waits
from headrace_schema.sections.running import StoreSection
from headrace_servicekit.stores.problems import StoreProblem


class Run:
    """What an upload sees of a run, with the events that it posts folded."""

    def __init__(self, folder, **section):
        self.run_id, self.told, self.notes = "run-1", [], []
        self.directory = folder / "run-1"
        self.store = folder / "store"
        self.spec = SimpleNamespace(
            store=StoreSection.model_validate({"url": f"file://{self.store}", **section}),
            checkpoint=SimpleNamespace(keep=2),
        )
        lineage = SimpleNamespace(abandoned=lambda _number: False)
        self.state = SimpleNamespace(
            checkpoints=[], uploads=Known(), directory=str(self.directory), spec={"a": 1}, lineage=lineage
        )
        self.recording = SimpleNamespace(bases=list)
        self.fleet = SimpleNamespace(waits=Waits(time.monotonic))
        loop = asyncio.get_running_loop()
        self.event_log = SimpleNamespace(now=loop.time, monotonic=loop.time, post=self.post)

    def post(self, event):
        self.told.append(event)
        self.state.uploads.fold(event)

    def note(self, text):
        self.notes.append(text)

    def kinds(self):
        return [type(event) for event in self.told]

    def checkpoint(self, step):
        """A checkpoint on disk, durable as of now."""
        root = self.directory / "checkpoints"
        folder = root / f"lineage-1/step-{step}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        (root / "lineage-1.json").write_text(json.dumps({"base_checkpoint": "", "base_run": ""}))
        return f"lineage-1/step-{step}", step + 1, step


@pytest.fixture
async def run(tmp_path):
    return Run(tmp_path)


async def until(predicate):
    async with asyncio.timeout(60):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_checkpoints_are_uploaded_pruned_and_told(run):
    (run.directory / "export").mkdir(parents=True)
    (run.directory / "export" / "config.json").write_text("{}")
    async with Uploads(run) as uploads:
        for step in (1, 2, 3):
            uploads.saved(*run.checkpoint(step))
            await uploads.finish()
    assert run.kinds() == [ev.CheckpointUploaded] * 3 and run.state.uploads.step == 3
    last = run.told[-1]
    assert last.url == f"file://{run.store}/run-1/checkpoints/lineage-1/step-3" and last.size > 0
    kept = sorted(path.parent.name for path in run.store.rglob("upload.json"))
    assert kept == ["step-2", "step-3"]
    assert json.loads((run.store / "run-1" / "run.json").read_text()) == {"run": "run-1", "spec": {"a": 1}}
    assert (run.store / "run-1/export/config.json").read_text() == "{}"
    assert run.notes == []


async def test_more_than_may_wait_are_skipped_and_told(run):
    uploads = Uploads(run)
    for step in range(1, 6):
        uploads.saved(*run.checkpoint(step))
    # No task uploads yet: two wait, and stay on disk; the others are left out, the oldest first.
    assert uploads.names == ["lineage-1/step-4", "lineage-1/step-5"]
    assert [event.step for event in run.told] == [1, 2, 3] and run.state.uploads.skipped == 3
    assert "store.waiting" in run.told[0].reason and "slower than" in run.told[0].reason
    async with uploads:
        await uploads.finish()
    assert [e.step for e in run.told if isinstance(e, ev.CheckpointUploaded)] == [4, 5]


async def test_a_store_that_refuses_is_told_once_and_tried_again(run, monkeypatch):
    monkeypatch.setattr(module, "FIRST_AGAIN_S", 0.05)
    run.store.write_text("a file where the folder should be")
    async with Uploads(run) as uploads:
        uploads.saved(*run.checkpoint(1))
        await until(lambda: run.told)
        assert run.told[0].reason.startswith("store.url: ") and run.state.uploads.problem
        run.store.unlink()
        await uploads.finish()
    assert run.kinds() == [ev.UploadFailed, ev.CheckpointUploaded] and not run.state.uploads.problem


async def test_a_run_does_not_wait_for_ever_for_its_store(run, monkeypatch):
    run.spec.store = run.spec.store.model_copy(update={"at_end_s": 1.5})
    monkeypatch.setattr(module, "FIRST_AGAIN_S", 60.0)
    run.store.write_text("a file where the folder should be")
    async with Uploads(run) as uploads:
        uploads.saved(*run.checkpoint(1))
        await uploads.finish()
    (note,) = run.notes
    assert note.startswith("store.at_end_s: ") and "lineage-1/step-1" in note and str(run.directory) in note


async def test_what_was_not_uploaded_is_as_the_run_goes_on(run):
    name, number, step = run.checkpoint(4)
    run.state.checkpoints, run.state.uploads.saved = [(name, number)], step
    async with Uploads(run) as uploads:
        await uploads.finish()
    assert [event.step for event in run.told] == [4]


async def test_the_newest_that_is_not_abandoned_is_fetched_back(run, tmp_path):
    async with Uploads(run) as uploads:
        for step in (1, 2):
            uploads.saved(*run.checkpoint(step))
            await uploads.finish()
        shutil.rmtree(run.directory / "checkpoints")
        run.state.lineage.abandoned = lambda number: number == 3
        assert await uploads.fetch_newest() == "lineage-1/step-1"
        assert (run.directory / "checkpoints/lineage-1/step-1/state.json").is_file()
    directory, name = await fetch_origin(f"file://{run.store}/run-1", tmp_path / "runs", lambda *_: True)
    assert name == "run-1" and directory.startswith(str(tmp_path / "runs"))
    found = tmp_path / "runs" / directory / "checkpoints/lineage-1/step-2/state.json"
    assert json.loads(found.read_text()) == {"step": 2}
    with pytest.raises(StoreProblem, match="has no such checkpoint"):
        await fetch_origin(f"file://{run.store}/run-1", tmp_path / "runs", lambda name, step: step == 7)


async def test_a_killed_process_of_the_store_costs_one_try(run, monkeypatch):
    monkeypatch.setattr(module, "FIRST_AGAIN_S", 0.05)
    async with Uploads(run) as uploads:
        uploads.saved(*run.checkpoint(1))
        await uploads.finish()
        os.kill(uploads._process.pid, signal.SIGKILL)
        uploads.saved(*run.checkpoint(2))
        await uploads.finish()
    assert run.kinds()[0] is run.kinds()[-1] is ev.CheckpointUploaded and run.state.uploads.step == 2
