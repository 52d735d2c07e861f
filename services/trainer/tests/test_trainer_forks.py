"""A run begins with another run's checkpoint: with its state, or with a refusal that names the key."""

from __future__ import annotations

import json
import shutil

import grpc
import pytest
from checkpoint_harm import flip, truncate
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model
from headrace_servicekit.rpc.errors import message_of, metadata_of, reason_of
from headrace_trainer.checkpoints import files as checkpoint_files
from headrace_trainer.checkpoints.state import seal
from safetensors.torch import load_file
from trainer_calls import names, refusal

pytestmark = pytest.mark.timeout(90)

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
    assert (
        reason == "CHECKPOINT_MISMATCH" and message.startswith("optimizer.name: ") and "momentum" in message
    )


async def test_a_checkpoint_that_another_run_begins_with_is_not_pruned(client, make_config):
    version = (await client.open(make_config(checkpoint={"keep": 1}))).version
    for retained in ([], [], ["lineage-1/step-2"]):
        version = await client.train(version, 1)
        await client.save(version.number, retained=retained)
    assert await names(client) == ["lineage-1/step-3", "lineage-1/step-2"]
    version = await client.train(version, 1)
    await client.save(version.number)
    assert await names(client) == ["lineage-1/step-4"]
