"""Damaged, vanished and foreign checkpoints over real gRPC: nothing is loaded that is not as it was written."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from checkpoint_harm import flip, remove_field, truncate
from headrace_servicekit import failpoints
from headrace_trainer.checkpoints import files as checkpoint_files
from trainer_calls import names, refusal

pytestmark = pytest.mark.timeout(90)
FILES = ["state.json", "weights.safetensors", "optimizer.safetensors", "ledger.json", "step_manifest"]


@pytest.mark.parametrize(
    "harm, file",
    [
        *((flip, file) for file in FILES),
        *((truncate, file) for file in FILES),
        *((Path.unlink, file) for file in FILES),
        (remove_field, "state.json"),
    ],
)
async def test_the_newest_is_set_aside_and_the_one_before_is_restored(saved, harm, file):
    directory = saved.directory / "checkpoints" / "lineage-1"
    harm(directory / "step-2" / file)
    reason, message = await refusal(saved.restore("lineage-1/step-2", 50))
    assert reason == "CHECKPOINT_DAMAGED" and file in message and "lineage-1/step-2.damaged-1" in message
    listed = await saved.checkpoints()
    assert [entry.name for entry in listed.checkpoints] == ["lineage-1/step-1"]
    [aside] = listed.set_aside
    assert (aside.name, aside.set_aside_as) == ("lineage-1/step-2", "lineage-1/step-2.damaged-1")
    assert aside.reason.startswith(file) and (directory / "step-2.damaged-1").is_dir()
    assert not (await saved.checkpoints()).set_aside
    # What was held is held still: the refusal came before anything was loaded.
    assert (await saved.state()).version == saved.held
    assert (await saved.restore("lineage-1/step-1", 50)).version.ordinal == 1
    assert await saved.ledger("lineage-1/step-1") == [b"ledger of 2"]


async def test_a_listing_sets_aside_what_is_torn(saved):
    truncate(saved.directory / "checkpoints" / "lineage-1" / "step-2" / "weights.safetensors")
    listed = await saved.checkpoints()
    assert [entry.name for entry in listed.checkpoints] == ["lineage-1/step-1"]
    [aside] = listed.set_aside
    assert "weights.safetensors: expected" in aside.reason and "bytes, found" in aside.reason


async def test_a_flipped_byte_in_a_ledger_is_never_served(saved):
    flip(saved.directory / "checkpoints" / "lineage-1" / "step-2" / "ledger.json")
    reason, message = await refusal(saved.ledger("lineage-1/step-2"))
    assert reason == "CHECKPOINT_DAMAGED" and "ledger.json: expected digest" in message
    assert await names(saved) == ["lineage-1/step-1"]


async def test_a_directory_moved_away_lists_none_and_the_next_save_makes_it_anew(saved):
    root = saved.directory / "checkpoints"
    root.rename(root.with_name("elsewhere"))
    assert await names(saved) == []
    assert (await refusal(saved.restore("lineage-1/step-2", 50)))[0] == "NOT_FOUND"
    assert (await saved.save(saved.held.number)).durable
    assert await names(saved) == ["lineage-1/step-2"]
    assert (await saved.restore("lineage-1/step-2", 50)).version.digest == saved.held.digest


async def test_a_ledger_larger_than_a_piece_comes_whole(client):
    version = await client.train((await client.open()).version, 1)
    ledger = bytes(range(256)) * 14_000
    await client.save(version.number, ledger=ledger)
    pieces = await client.ledger("lineage-1/step-1")
    assert b"".join(pieces) == ledger and [len(piece) for piece in pieces] == [2**20] * 3 + [438_272]
    await client.train(version, 1)
    assert (await refusal(client.ledger("lineage-1/step-9")))[0] == "NOT_FOUND"


# Saving


async def test_a_run_without_checkpoints_is_saved_when_asked(client, make_config):
    version = (await client.open(make_config(checkpoint={"enabled": False}))).version
    assert not (client.directory / "checkpoints").exists()
    version = await client.train(version, 1)
    first = await client.save(version.number)
    assert first.durable and first.checkpoint.name == "lineage-1/step-1"
    assert await names(client) == ["lineage-1/step-1"]


async def test_a_second_save_of_a_version_gives_the_first(saved):
    state = saved.directory / "checkpoints" / "lineage-1" / "step-2" / "state.json"
    before = state.stat().st_ino
    again = await saved.save(saved.held.number, ledger=b"another")
    assert again.durable and again.checkpoint.name == "lineage-1/step-2"
    assert state.stat().st_ino == before and await saved.ledger("lineage-1/step-2") == [b"ledger of 3"]
    truncate(state)
    assert (await saved.save(saved.held.number, ledger=b"another")).durable
    assert await saved.ledger("lineage-1/step-2") == [b"another"]
    assert [aside.name for aside in (await saved.checkpoints()).set_aside] == ["lineage-1/step-2"]


async def test_saves_that_wait_take_turns_and_share(client):
    version = await client.train((await client.open()).version, 1)
    failpoints.arm("trainer.checkpoint.before_rename=delay:0.5@1")
    try:
        begun = await client.save(version.number, wait=False)
        assert not begun.durable
        version = await client.train(version, 1)
        found = await asyncio.gather(*(client.save(version.number) for _ in range(3)))
    finally:
        failpoints.arm("")
    assert all(reply.durable and reply.checkpoint.name == "lineage-1/step-2" for reply in found)
    assert await names(client) == ["lineage-1/step-2", "lineage-1/step-1"]


async def test_a_caller_that_stops_waiting_does_not_stop_the_write(client):
    version = await client.train((await client.open()).version, 1)
    failpoints.arm("trainer.checkpoint.before_rename=delay:0.5@1")
    try:
        call = asyncio.ensure_future(client.save(version.number))
        await asyncio.sleep(0.2)
        call.cancel()
        assert (await client.save(version.number)).durable
    finally:
        failpoints.arm("")
    assert await names(client) == ["lineage-1/step-1"]


async def test_closing_a_run_finishes_its_save(client, make_config):
    version = await client.train((await client.open()).version, 1)
    failpoints.arm("trainer.checkpoint.before_rename=delay:0.5@1")
    try:
        assert not (await client.save(version.number, wait=False)).durable
        await client.close_run()
        steps = list((client.directory / "checkpoints" / "lineage-1").iterdir())
    finally:
        failpoints.arm("")
    assert [path.name for path in steps] == ["step-1"]
    await client.open_run(make_config())
    assert await names(client) == ["lineage-1/step-1"]


async def test_a_save_that_does_not_end_is_abandoned_when_the_run_closes(client, monkeypatch):
    from headrace_trainer.session.saving import RunCheckpoints

    version = await client.train((await client.open()).version, 1)
    finish = RunCheckpoints.finish
    monkeypatch.setattr(RunCheckpoints, "finish", lambda self: finish(self, 0.1))
    failpoints.arm("trainer.checkpoint.before_rename=delay:1.0@1")
    try:
        await client.save(version.number, wait=False)
        waiting = asyncio.ensure_future(client.save(version.number))
        await client.state()
        await client.close_run()
        reason, message = await refusal(waiting)
    finally:
        failpoints.arm("")
    assert reason == "CHECKPOINT_FAILED" and "the run was closed" in message
    assert not list((client.directory / "checkpoints" / "lineage-1").iterdir())


async def test_a_checkpoint_that_reads_back_wrong_replaces_nothing(saved, monkeypatch, make_config):
    version = await saved.train(saved.held, 1)
    rename = checkpoint_files.os.rename

    def harming(source, target):
        rename(source, target)
        if str(target).endswith("step-3"):
            flip(Path(target) / "weights.safetensors")

    monkeypatch.setattr(checkpoint_files.os, "rename", harming)
    reason, message = await refusal(saved.save(version.number))
    monkeypatch.undo()
    assert reason == "CHECKPOINT_FAILED" and "weights.safetensors: expected digest" in message
    assert await names(saved) == ["lineage-1/step-2", "lineage-1/step-1"]


async def test_a_start_removes_what_a_cut_off_write_left(saved, make_config):
    left = saved.directory / "checkpoints" / "lineage-1" / ".step-3.0123abcd.partial"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half")
    await saved.close_run()
    await saved.open(make_config(), checkpoint="lineage-1/step-2", number=50)
    assert not left.exists() and "lineage-1/step-2" in await names(saved)


async def test_a_failure_is_forgotten_when_the_next_write_begins(client):
    version = await client.train((await client.open()).version, 1)
    failpoints.arm("trainer.checkpoint.write=error@1")
    assert (await refusal(client.save(version.number)))[0] == "CHECKPOINT_FAILED"
    assert (await client.checkpoints()).last_failure.startswith("lineage-1/step-1: ")
    failpoints.arm("trainer.checkpoint.before_rename=delay:0.5@1")
    try:
        assert not (await client.save(version.number, wait=False)).durable
        assert not (await client.checkpoints()).last_failure
    finally:
        failpoints.arm("")
    assert (await client.save(version.number)).durable


@pytest.fixture
def disk(client):
    """The run's directory as a disk of its own: 2 MiB, and a function that mounts it anew with other options."""
    client.directory.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2m", "headrace-test", str(client.directory)]
    done = subprocess.run(mounting, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.strip()}")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(client.directory)], check=True, timeout=30)

    yield remount
    subprocess.run(["umount", "-l", str(client.directory)], check=True, timeout=30)


async def test_a_full_or_read_only_disk_costs_the_write_and_nothing_else(client, disk):
    version = await client.train((await client.open()).version, 1)
    assert (await client.save(version.number)).durable
    version = await client.train(version, 1)
    for options, reason in (("size=2m", "No space left"), ("size=64m,ro", "Read-only file system")):
        disk(options)
        refused, message = await refusal(client.save(version.number))
        assert refused == "CHECKPOINT_FAILED" and reason in message and "lineage-1/step-2" in message
        listed = await client.checkpoints()
        assert [entry.name for entry in listed.checkpoints] == ["lineage-1/step-1"] and not listed.set_aside
        assert reason in listed.last_failure
        assert not list(client.directory.glob("checkpoints/*/.*"))
    disk("size=64m,rw")
    assert (await client.save(version.number)).durable
    assert await names(client) == ["lineage-1/step-2", "lineage-1/step-1"]


async def test_a_damaged_checkpoint_on_a_read_only_disk_is_passed_over(client, disk):
    disk("size=64m")
    version = (await client.open()).version
    for _ in range(2):
        version = await client.train(version, 1)
        await client.save(version.number)
    flip(client.directory / "checkpoints" / "lineage-1" / "step-2" / "weights.safetensors")
    disk("ro")
    reason, message = await refusal(client.restore("lineage-1/step-2", 50))
    assert reason == "CHECKPOINT_DAMAGED" and "left in its place" in message
    listed = await client.checkpoints()
    assert [entry.name for entry in listed.checkpoints] == ["lineage-1/step-1"]
    assert listed.set_aside[0].set_aside_as == ""
    assert (await client.restore("lineage-1/step-1", 50)).version.ordinal == 1
