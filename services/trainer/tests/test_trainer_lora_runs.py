"""A run with adapters through the service: checkpoints, resumes, forks, what is refused, and the export for peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from headrace.common.v1 import weights_pb2, weights_pb2_grpc
from headrace_modelkit.adapters import merged
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.weights.versions import base_name
from headrace_trainer.versions.publishing import published_tensors
from peft import PeftModel
from safetensors.torch import load_file
from trainer_calls import TrainerClient
from transformers import AutoModelForCausalLM

LORA = {"rank": 4, "alpha": 8.0}
KL = {"options": {"kl_loss_coef": 0.3, "kl_target": 1e-4}}
WARMUP = {"warmup": {"steps": 3, "lr": 1e-2, "batch": 6}}
EXAMPLES = [{"text": f"copy {n}: ", "answer": str(n)} for n in range(10, 20)]


@pytest.fixture
def own_model(tmp_path) -> Path:
    """A tiny model that the test may change."""
    write_tiny(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make_lora(make_config):
    """Builds the JSON of OpenRun for a deterministic run with adapters."""

    def make(lora: dict[str, Any] | None = None, trainer=(), **sections) -> dict[str, Any]:
        trainer = {"lora": LORA | (lora or {}), **dict(trainer)}
        return make_config(deterministic=True, trainer=trainer, optimizer={"lr": 1e-2}, **sections)

    return make


async def refusal(call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return reason_of(caught.value), caught.value.details()


@pytest.mark.parametrize(
    ("dtype", "algorithm", "warmed"),
    [
        ("float32", KL, False),
        ("bfloat16", KL, True),
        ("float32", {"name": "ppo", "options": {"epochs": 2, "critic": "head"}}, False),
    ],
    ids=["reference", "warmed reference", "value head"],
)
async def test_a_resume_goes_on_to_the_same_bits(client: TrainerClient, make_lora, dtype, algorithm, warmed):
    sections = {"trainer": WARMUP, "warmup_examples": EXAMPLES} if warmed else {}
    config = make_lora(**sections, algorithm=algorithm, model={"dtype": dtype})
    first = await client.train((await client.open(config)).version, 1)
    saved = (await client.save(first.number)).checkpoint
    straight = await client.train(first, 2)
    again = await client.restore(saved.name, 20)
    assert again.version.digest == first.digest, "rewound"
    assert (await client.train(again.version, 2)).digest == straight.digest
    await client.close_run()
    again = await client.open(config, checkpoint=saved.name, number=40)
    assert again.version.digest == first.digest and again.warmup_steps == 0
    assert (await client.train(again.version, 2)).digest == straight.digest


async def test_a_checkpoint_holds_merged_weights_adapters_and_their_moments_alone(
    client: TrainerClient, make_lora, tiny_directory
):
    config = make_lora(model={"path": str(tiny_directory), "dtype": "bfloat16"})
    version = await client.train((await client.open(config)).version, 1)
    saved = client.directory / "checkpoints" / (await client.save(version.number)).checkpoint.name
    weights, optimizer = (load_file(saved / f"{name}.safetensors") for name in ("weights", "optimizer"))
    model = load_model(ModelSection(path=str(tiny_directory)))
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}, "as they are published"
    adapters = [name for name in optimizer if name.startswith("adapter/")]
    assert len(adapters) == 2 * 14 + 1 and len(optimizer) == 3 * 28 + 2
    assert float(optimizer["adapter/alpha"]) == 8.0
    state = json.loads((saved / "state.json").read_text())
    assert state["base_model"]["name"] == str(tiny_directory) and state["base_model"]["digest"]


async def test_adapters_are_published_alone_and_are_with_their_base_the_merged_version(
    client: TrainerClient, make_lora
):
    found: dict[str, dict[str, torch.Tensor]] = {}
    for lora in ("merged", "auto"):
        config = make_lora(model={"dtype": "bfloat16"}) | {"weights": {"lora": lora}}
        version = await client.train((await client.open(config)).version, 2)
        published = await client.publish(version.number)
        body = memoryview(bytearray(await client.body(version.number)))
        found[lora] = published_tensors(published.manifest, body)
        assert published.manifest.digest == version.digest
        if lora == "merged":
            assert not published.manifest.HasField("adapter")
            await client.close_run()
    below = published.manifest.adapter
    described = await weights_pb2_grpc.WeightServiceStub(client.channel).GetManifest(
        weights_pb2.GetManifestRequest(run=base_name(client.run), number=1)
    )
    assert described.version.digest == below.digest and below.scales == {"": 2.0}
    assert published.manifest.size_bytes < described.manifest.size_bytes / 4
    with open(described.source.shm_path, "rb") as file:  # noqa: ASYNC230
        base = published_tensors(described.manifest, memoryview(bytearray(file.read())))
    whole = dict(merged(base.items(), found["auto"], below.scales[""]))
    assert whole.keys() == found["merged"].keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in found["merged"].items())
    changed = [name for name, tensor in base.items() if not torch.equal(tensor, whole[name])]
    assert len(changed) == len(found["auto"]) // 2 == 14


@pytest.mark.parametrize(
    ("changed", "key", "words"),
    [
        ({"lora": {**LORA, "rank": 8}}, "trainer.lora.rank", "[4, 192] there and [8, 192] here"),
        ({"lora": {**LORA, "alpha": 4.0}}, "trainer.lora.alpha", "set trainer.lora.alpha: 8"),
        ({"lora": {**LORA, "targets": ["q_proj"]}}, "trainer.lora.targets", "which the model has not"),
        ({}, "trainer.lora", "this run trains all weights"),
    ],
)
async def test_other_adapters_than_the_checkpoints_are_refused_by_their_key(
    client: TrainerClient, make_lora, make_config, changed, key, words
):
    version = await client.train((await client.open(make_lora())).version, 1)
    saved = (await client.save(version.number)).checkpoint
    await client.close_run()
    reason, message = await refusal(client.open(make_config(trainer=changed), saved.name, 40))
    assert reason == "CHECKPOINT_MISMATCH" and message.startswith(f"{key}: ") and words in message


async def test_a_checkpoint_without_adapters_is_refused(client: TrainerClient, make_lora, make_config):
    version = await client.train((await client.open()).version, 1)
    saved = (await client.save(version.number)).checkpoint
    await client.close_run()
    reason, message = await refusal(client.open(make_lora(), saved.name, 40))
    assert reason == "CHECKPOINT_MISMATCH" and message.startswith("trainer.lora: ")
    assert "leave trainer.lora out" in message


async def test_adapters_beside_other_weights_than_theirs_are_refused(
    client: TrainerClient, make_lora, own_model
):
    config = make_lora(model={"path": str(own_model)})
    version = await client.train((await client.open(config)).version, 1)
    saved = (await client.save(version.number)).checkpoint
    await client.close_run()
    section = ModelSection(path=str(own_model), dtype="float32")
    model = load_model(section)
    model.get_submodule("model.layers.1.mlp.up_proj").weight.data[0, 0] += 1e-3
    save_model(model, load_tokenizer(section), own_model)
    reason, message = await refusal(client.open(config, saved.name, 40))
    assert reason == "CHECKPOINT_MISMATCH" and message.startswith("model.path: ")
    assert version.number == 2 and str(own_model) in message


async def test_a_fork_begins_with_the_other_runs_adapters(client: TrainerClient, make_lora, tmp_path):
    config = make_lora()
    version = await client.train((await client.open(config)).version, 1)
    saved = (await client.save(version.number)).checkpoint
    straight = await client.train(version, 1)
    await client.close_run()
    origin, client.directory = client.directory, tmp_path / "fork"
    await client.open_run(config)
    await client.join(2)
    forked = await client.restore(saved.name, 50, source=str(origin))
    assert forked.version.digest == version.digest
    assert (await client.train(forked.version, 1)).digest == straight.digest


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"lora": {"targets": ["q_proj", "query"]}}, "trainer.lora.targets", "'query'"),
        ({"lora": {"rank": 0}}, "trainer.lora.rank", "greater than or equal to 1"),
        ({"lora": {"ranks": 8}}, "trainer.lora.ranks", "did you mean"),
    ],
)
async def test_what_cannot_be_trained_is_refused_as_the_run_opens(
    client: TrainerClient, make_lora, sections, key, words
):
    reason, message = await refusal(client.open_run(make_lora(**sections)))
    assert reason == "INVALID" and f"{key}: " in message and words in message, message


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
async def test_peft_reads_the_exported_adapter_as_the_merged_model(
    client: TrainerClient, make_lora, tiny_directory, targets
):
    version = await client.train((await client.open(make_lora({"targets": targets}))).version, 2)
    exported = Path((await client.export("final")).path)
    assert version.number == 3 and not list(client.directory.glob(".final*"))
    ids = torch.arange(3, 30)[None]

    def logits(model) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits

    base = AutoModelForCausalLM.from_pretrained(tiny_directory)
    merged = logits(AutoModelForCausalLM.from_pretrained(exported))
    assert (logits(base) - merged).abs().max() > 0.1, "it has learned"
    with_adapter = PeftModel.from_pretrained(base, exported / "adapter")
    torch.testing.assert_close(logits(with_adapter), merged, rtol=1e-4, atol=1e-4)
