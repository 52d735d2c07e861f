"""Damaged, vanished and foreign checkpoints over real gRPC: nothing is loaded that is not as it was written."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model
from headrace_servicekit import failpoints
from headrace_servicekit.rpc.errors import message_of, metadata_of, reason_of
from headrace_trainer.checkpoints import files as checkpoint_files
from headrace_trainer.checkpoints.state import seal
from safetensors.torch import load_file

pytestmark = pytest.mark.timeout(90)
FILES = ["state.json", "weights.safetensors", "optimizer.safetensors", "ledger.json", "step_manifest"]


async def refusal(call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return str(reason_of(caught.value)), message_of(caught.value)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove_field(path: Path) -> None:
    body = json.loads(path.read_text())
    del body["optimizer_steps"]
    path.write_text(json.dumps(body))


@pytest.fixture
async def saved(client, make_config):
    """A trainer whose run has two checkpoints; deterministic, so that weights do not hang on what arrives together."""
    version = (await client.open(make_config(deterministic=True))).version
    for _ in range(2):
        version = await client.train(version, 1)
        await client.save(version.number, ledger=b"ledger of %d" % version.number)
    client.held = version
    return client


async def names(client, source: str = "") -> list[str]:
    return [entry.name for entry in (await client.checkpoints(source)).checkpoints]


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
    from headrace_trainer.checkpoints.saver import Saver

    version = await client.train((await client.open()).version, 1)
    finish = Saver.finish
    monkeypatch.setattr(Saver, "finish", lambda self: finish(self, 0.1))
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


# Forks


@pytest.fixture
async def forked(saved, make_config):
    """Another run is open beside the saved one, of which only files are left."""
    await saved.close_run()
    saved.source, saved.directory = saved.directory, saved.directory.with_name("fork")
    await saved.open_run(make_config())
    await saved.join(2)
    return saved


async def test_a_fork_begins_with_the_other_runs_state_and_leaves_it_alone(forked):
    source = str(forked.source)
    before = sorted(path.relative_to(forked.source) for path in forked.source.rglob("*"))
    assert await names(forked, source) == ["lineage-1/step-2", "lineage-1/step-1"]
    assert await forked.ledger("lineage-1/step-2", source) == [b"ledger of 3"]
    restored = await forked.restore("lineage-1/step-2", 7, source)
    assert (restored.version.number, restored.version.parent, restored.version.ordinal) == (7, 0, 2)
    assert restored.version.digest == forked.held.digest
    assert (await forked.restore("lineage-1/step-2", 7, source)).version == restored.version
    assert await names(forked) == []
    claim = json.loads((forked.directory / "checkpoints" / "lineage-1.json").read_text())
    assert (claim["base_checkpoint"], claim["base_run"]) == ("lineage-1/step-2", "run")
    version = await forked.train(restored.version, 1)
    await forked.save(version.number)
    assert await names(forked) == ["lineage-1/step-3"]
    state = json.loads((forked.directory / "checkpoints" / "lineage-1" / "step-3" / "state.json").read_text())
    assert (state["base"], state["base_run"]) == ("lineage-1/step-2", "run")
    assert state["optimizer_steps"] == 3 and set(state["lineage"]) == {"7", "8"}
    assert sorted(path.relative_to(forked.source) for path in forked.source.rglob("*")) == before


async def test_a_fork_goes_on_as_the_other_run_would_have(saved, make_config):
    straight = await saved.train(saved.held, 1)
    await saved.close_run()
    source, saved.directory = str(saved.directory), saved.directory.with_name("fork")
    await saved.open_run(make_config(deterministic=True))
    await saved.join(2)
    restored = await saved.restore("lineage-1/step-2", 3, source)
    assert (await saved.train(restored.version, 1)).digest == straight.digest


@pytest.mark.parametrize("harm", [flip, truncate])
async def test_a_damaged_checkpoint_of_another_run_is_refused_and_left(forked, harm):
    source = str(forked.source)
    file = forked.source / "checkpoints" / "lineage-1" / "step-2" / "weights.safetensors"
    harm(file)
    reason, message = await refusal(forked.restore("lineage-1/step-2", 7, source))
    assert reason == "CHECKPOINT_DAMAGED"
    assert "run: lineage-1/step-2: weights.safetensors: expected" in message
    assert file.exists() and not list(file.parent.parent.glob("*damaged*"))
    listed = await forked.checkpoints(source)
    assert all(aside.set_aside_as == "" for aside in listed.set_aside)


async def test_a_source_outside_the_runs_is_refused(forked, tmp_path):
    elsewhere = tmp_path / "else" / "run"
    shutil.copytree(forked.source, elsewhere)
    link = forked.directory.with_name("link")
    link.symlink_to(elsewhere)
    inner = forked.directory.with_name("inner")
    inner.mkdir()
    (inner / "checkpoints").symlink_to(elsewhere / "checkpoints")
    sources = [elsewhere, link, inner, f"{forked.directory}/../run", "run", "/", forked.directory]
    for source in map(str, sources):
        for call in (
            forked.restore("lineage-1/step-2", 7, source),
            forked.checkpoints(source),
            forked.ledger("lineage-1/step-2", source),
        ):
            reason, message = await refusal(call)
            assert reason == "INVALID" and "source_run_directory" in message
    missing = str(forked.directory.with_name("missing"))
    assert (await refusal(forked.restore("lineage-1/step-2", 7, missing)))[0] == "NOT_FOUND"
    reason, message = await refusal(forked.restore("", 7, str(forked.source)))
    assert reason == "INVALID" and message.startswith("checkpoint:")


async def test_a_linked_file_does_not_lead_out_of_another_run(forked, tmp_path):
    file = forked.source / "checkpoints" / "lineage-1" / "step-2" / "ledger.json"
    secret = tmp_path / "secret"
    file.rename(secret)
    file.symlink_to(secret)
    reason, message = await refusal(forked.ledger("lineage-1/step-2", str(forked.source)))
    assert reason == "CHECKPOINT_DAMAGED" and "link out of" in message


async def test_a_fork_of_another_shape_is_refused_with_the_key(forked, make_config, tmp_path):
    await forked.close_run()
    save_model(tiny_model(hidden_size=96), character_tokenizer(), tmp_path / "wide")
    await forked.open_run(make_config(model={"path": str(tmp_path / "wide")}))
    await forked.join(3)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await forked.restore("lineage-1/step-2", 7, str(forked.source))
    assert reason_of(caught.value) == "CHECKPOINT_MISMATCH"
    assert metadata_of(caught.value)["key"] == "model.path"
    message = message_of(caught.value)
    assert message.startswith("model.path: ") and "has the shape" in message and "96" in message
    assert (await forked.restore("", 8)).version.number == 8


async def test_a_fork_of_another_optimizer_is_refused_with_the_key(forked):
    directory = forked.source / "checkpoints" / "lineage-1" / "step-2"
    moments = load_file(directory / "optimizer.safetensors")
    (directory / "optimizer.safetensors").unlink()
    renamed = {name.replace("exp_avg_sq/", "momentum/"): tensor for name, tensor in moments.items()}
    body = json.loads((directory / "state.json").read_text())
    body["files"]["optimizer.safetensors"] = checkpoint_files.write_safetensors(
        directory / "optimizer.safetensors", renamed
    )
    del body["digest"]
    (directory / "state.json").write_bytes(seal(body))
    reason, message = await refusal(forked.restore("lineage-1/step-2", 7, str(forked.source)))
    assert reason == "CHECKPOINT_MISMATCH" and message.startswith("optimizer: ") and "momentum" in message


async def test_a_checkpoint_that_another_run_begins_with_is_not_pruned(client, make_config):
    version = (await client.open(make_config(checkpoint={"keep": 1}))).version
    for retained in ([], [], ["lineage-1/step-2"]):
        version = await client.train(version, 1)
        await client.save(version.number, retained=retained)
    assert await names(client) == ["lineage-1/step-3", "lineage-1/step-2"]
    version = await client.train(version, 1)
    await client.save(version.number)
    assert await names(client) == ["lineage-1/step-4"]
