"""What a run has on the disk after its data directory moved, its writers were killed, or its store lost its end."""

import shutil

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.versions import plan_lost_rewind
from headrace_coordinator.run.checkpointing import ledger_of, lost_steps, read_ledger
from history_parts import Opened, committed, ended, restored, submitted, train


async def test_a_data_directory_may_be_moved_while_its_coordinator_is_down(server, tmp_path):
    one = await Opened.on(server, tmp_path / "before")
    asked = {
        "spec": {"samples": 1, "suite": {"name": "made"}},
        "model": "m",
        "items": 1,
        "checkpoint_run": "r",
        "checkpoint_directory": str(tmp_path / "before/runs/r/checkpoints/c"),
    }
    one.event_log.post(
        submitted(str(tmp_path / "before/runs/r")),
        submitted(str(tmp_path / "before/runs/gone"), "gone"),
        submitted(str(tmp_path / "before/runs/e"), "e", asked),
        *ended("gone"),
    )
    await train(one.event_log, 3)
    await one.coordinator.archive.once()
    await one.kill()
    (tmp_path / "before").rename(tmp_path / "after")
    two = await Opened.on(server, tmp_path / "after")
    await two.kill()
    for name in ("r", "gone", "e"):
        assert two.coordinator.reads.run(name).run_directory == str(tmp_path / "after/runs" / name)
    checkpoint = two.event_log.state.runs["e"].evaluation.checkpoint_directory
    assert checkpoint == str(tmp_path / "after/runs/r/checkpoints/c")
    assert not (tmp_path / "before").exists()


async def test_what_killed_writers_left_is_removed_once_a_run_has_ended(server, tmp_path):
    """Before that it may be in hand: the trainer removes what a killed one left when the run is restored."""
    one = await Opened.on(server, tmp_path)
    left = (
        "checkpoints/lineage-1/.step-7.0a1b2c3d.partial/weights.safetensors",
        "checkpoints/.carried-0a1b2c3d/state.json",
        ".export.0a1b2c3d.partial/model.safetensors",
        "videos/.0001-0-reach-success.mp4.partial",
    )
    for run in ("r", "gone"):
        one.event_log.post(submitted(str(tmp_path / "runs" / run), run))
        for name in (*left, "checkpoints/lineage-1/step-6/state.json"):
            path = tmp_path / "runs" / run / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x")
    one.event_log.post(*ended("gone"))
    await one.coordinator.archive.once()
    await one.kill()
    assert [name for name in left if (tmp_path / "runs/r" / name).exists()] == [*left]
    assert not [name for name in left if (tmp_path / "runs/gone" / name).exists()]
    assert (tmp_path / "runs/gone/checkpoints/lineage-1/step-6/state.json").exists()


@pytest.mark.parametrize("removed", [True, False], ids=["whole", "killed before its files were removed"])
async def test_a_deleted_run_does_not_come_back_with_the_store_s_events(server, tmp_path, removed):
    one = await Opened.on(server, tmp_path)
    for run in ("r", "gone"):
        one.event_log.post(submitted(str(tmp_path / "runs" / run), run))
    one.event_log.post(*ended("gone"))
    await one.coordinator.archive.once()
    if removed:
        await one.coordinator.run_changes.delete("gone", "key")
        assert not (tmp_path / "runs/gone").exists()
    else:
        await one.event_log.commit(ev.RunDeleted(at=1.0, run="gone"))
    await one.kill()
    two = await Opened.on(server, tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["r"]
    assert [*two.event_log.state.runs] == ["r"] and not two.event_log.state.ended
    await two.kill()


async def test_a_store_that_lost_its_end_is_said_and_rebuilt_from_history_and_checkpoint(server, tmp_path):
    """The checkpoint's ledger repeats steps 9 and 10; those since the store's end are in the history alone."""
    one = await Opened.on(server, tmp_path)
    one.event_log.post(submitted(str(tmp_path / "runs/r")), restored(1))
    await train(one.event_log, 3)
    server.kill()
    shutil.copytree(server.directory, tmp_path / "copy")
    server.start()
    await train(one.event_log, 2, 3)
    one.event_log.post(restored(20, parent=5, ordinal=4, frontier=4), committed(4, number=21, parent=20))
    for step in range(5, 10):
        one.event_log.post(committed(step, number=step + 17))
    one.event_log.post(ev.CheckpointSaved(at=0, run="r", name="c", number=24, step=8))
    one.event_log.post(submitted(str(tmp_path / "runs/gone"), "gone"), *ended("gone"))
    await one.event_log.flush()
    ledger = read_ledger(await ledger_of(one.event_log, "r"))
    await one.coordinator.archive.once()
    one.event_log.post(submitted(str(tmp_path / "runs/new"), "new"))
    await one.event_log.flush()
    await one.event_log.history.write()
    one.event_log.mark()
    await one.kill()
    server.kill()
    shutil.rmtree(server.directory)
    shutil.copytree(tmp_path / "copy", server.directory)
    server.start()
    two = await Opened.on(server, tmp_path)
    log = two.event_log
    await log.flush()
    assert log.state.runs["r"].ledger.step == 3 and log.state.ended["gone"].state == "CANCELLED"
    assert "it is an older copy" in log.loss and "of new it knows nothing" in log.loss
    assert two.coordinator.vitals.view().reason == log.loss and two.coordinator.vitals.view().status == "ok"
    steps = await lost_steps(log, "r", 26, ledger)
    assert [step.certificate.number for step in steps] == [5, 21, 22, 23, 24, 25, 26]
    for step in steps:
        await log.commit(*plan_lost_rewind(log.state.runs["r"].lineage, step), step)
    assert log.state.runs["r"].ledger.step == 10
    page, _ = await two.coordinator.past.certificates("r", 50)
    assert [view.version.ordinal for view in page] == [*range(1, 11)]
    events = await log.history.page("r", 0)
    assert any("it is an older copy" in event.text for _, event in events if isinstance(event, ev.Noted))
    await two.kill()
