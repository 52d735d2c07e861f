"""A trainer saves, resumes, exports and serves what it holds, beside its work and on a full disk."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch
from headrace.common.v1 import weights_pb2, weights_pb2_grpc
from headrace_modelkit.presets.tiny import write_tiny
from headrace_servicekit import failpoints
from headrace_servicekit.memory.capacity import HostMemory
from headrace_trainer import memory
from safetensors.numpy import load_file
from trainer_calls import refused

pytestmark = pytest.mark.timeout(90)


async def test_resume_gives_the_weights_of_the_uninterrupted_run(client, make_config):
    config = make_config(deterministic=True, optimizer={"schedule": {"name": "linear"}})
    version = (await client.open(config)).version
    version = await client.train(version, 2)
    saved = await client.save(version.number, ledger=b"the ledger")
    assert saved.durable and saved.checkpoint.name == "lineage-1/step-2"
    straight = await client.train(version, 2)

    await client.close_run()
    resumed = await client.open(config, checkpoint="lineage-1/step-2", number=50)
    assert (resumed.version.number, resumed.version.parent, resumed.version.ordinal) == (
        50,
        version.number,
        2,
    )
    assert resumed.version.digest == version.digest
    again = await client.train(resumed.version, 2)
    assert again.digest == straight.digest

    await client.save(again.number, ledger=b"later")
    listed = (await client.checkpoints()).checkpoints
    assert [entry.name for entry in listed] == ["lineage-2/step-4", "lineage-1/step-2"]
    assert not any(entry.ledger for entry in listed)
    assert [await client.ledger(entry.name) for entry in listed] == [[b"later"], [b"the ledger"]]
    assert listed[0].version.digest == straight.digest and listed[0].store_id == "store"


async def test_a_save_runs_beside_the_next_step_one_at_a_time(client):
    version = (await client.open()).version
    version = await client.train(version, 1)
    failpoints.arm("trainer.checkpoint.before_rename=delay:1.0@1")
    try:
        begun = await client.save(version.number, wait=False)
        assert not begun.durable
        version = await client.train(version, 1)
        assert await refused(client.save(version.number, wait=False)) == "BUSY"
        done = await client.save(version.number)
        assert done.durable
    finally:
        failpoints.arm("")
    names = [entry.name for entry in (await client.checkpoints()).checkpoints]
    assert names == ["lineage-1/step-2", "lineage-1/step-1"]


async def test_a_host_without_room_for_a_copy_saves_in_place_to_the_same_bits(
    client, make_config, monkeypatch
):
    config = make_config(deterministic=True)
    version = await client.train((await client.open(config)).version, 1)
    copied = await client.save(version.number)
    before = files_of(client.directory / "checkpoints" / copied.checkpoint.name)
    await client.close_run()

    plan = (await client.open(config, number=20)).figures["planned_host_bytes"]
    await client.close_run()
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(2**40, int(plan) - 1))
    opened = await client.open(config, number=30)
    assert "training waits while a checkpoint is written" in opened.layout
    assert opened.figures["planned_host_bytes"] < plan
    version = await client.train(opened.version, 1)
    copies = []
    monkeypatch.setattr(torch.Tensor, "to", _noted(torch.Tensor.to, copies))
    saved = await client.save(version.number)
    assert saved.durable and not copies
    assert files_of(client.directory / "checkpoints" / saved.checkpoint.name) == before


def files_of(directory):
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


def _noted(to, copies):
    def noted(tensor, *args, **options):
        if options.get("copy"):
            copies.append(tensor)
        return to(tensor, *args, **options)

    return noted


async def test_a_full_disk_fails_the_save_and_not_the_training(client, monkeypatch):
    from headrace_trainer.checkpoints import files as checkpoint_files

    version = (await client.open()).version
    version = await client.train(version, 1)
    first = (await client.save(version.number)).checkpoint.name
    version = await client.train(version, 1)
    monkeypatch.setattr(checkpoint_files.HashedFile, "write", _no_space)
    assert await refused(client.save(version.number)) == "CHECKPOINT_FAILED"
    listed = await client.checkpoints()
    assert [entry.name for entry in listed.checkpoints] == [first]
    assert "lineage-1/step-2: " in listed.last_failure and "No space left" in listed.last_failure
    assert not list(client.directory.glob("checkpoints/*/.*"))
    monkeypatch.undo()
    assert (await client.save(version.number)).durable


def _no_space(self, data):
    raise OSError(28, "No space left on device")


async def test_an_export_stops_and_samples_as_its_base_does(client, make_config, tmp_path):
    write_tiny(tmp_path / "model")
    given = '{"eos_token_id": [1, 5],  "do_sample": true, "temperature": 0.6}'
    (tmp_path / "model" / "generation_config.json").write_text(given)
    await client.open(make_config(model={"path": str(tmp_path / "model")}))
    exported = Path((await client.export("final")).path)
    assert (exported / "generation_config.json").read_text() == given


async def test_export_writes_a_model_directory(client):
    from transformers import AutoModelForCausalLM

    version = (await client.open()).version
    version = await client.train(version, 1)
    published = await client.publish(version.number)
    exported = await client.export("final")
    tensors = load_file(Path(exported.path) / "model.safetensors")
    assert {entry.name for entry in published.manifest.entries} == set(tensors)
    body = await client.body(version.number)
    for entry in published.manifest.entries:
        data = body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        assert tensors[entry.name].tobytes() == data
    assert AutoModelForCausalLM.from_pretrained(exported.path).config.model_type == "qwen3"
    assert await refused(client.export("../elsewhere")) == "INVALID"


async def test_a_full_disk_fails_the_export_with_path_and_bytes_and_leaves_nothing(client, monkeypatch):
    from headrace_modelkit import exporting

    version = (await client.open()).version
    version = await client.train(version, 1)

    def full(file, group, coming):
        next(coming)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_write_file", full)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await client.export("final")
    assert await refused(client.export("final")) == "EXPORT_FAILED"
    size = sum(entry.size_bytes for entry in (await client.publish(version.number)).manifest.entries)
    said = failed.value.details()
    assert str(client.directory / "final") in said and "No space left" in said and f"{size:,} bytes" in said
    assert not list(client.directory.glob(".final*")) and not (client.directory / "final").exists()
    monkeypatch.undo()
    assert (Path((await client.export("final")).path) / "model.safetensors").exists()


async def test_weights_are_served(client):
    await client.open()
    await client.publish(1)
    stub = weights_pb2_grpc.WeightServiceStub(client.channel)
    request = weights_pb2.GetManifestRequest(run="runs/test", number=1)
    assert (await stub.GetManifest(request)).version.number == 1
