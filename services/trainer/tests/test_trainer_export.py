"""A checkpoint is exported from its files alone, as the run itself would export that version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace_modelkit.presets.families import write_family
from headrace_trainer.errors import Refusal
from headrace_trainer.export import export_checkpoint, main
from safetensors.torch import load_file, save_file
from trainer_calls import refusal

LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path there."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


CODED = [{"lora": {**LORA["lora"], "quantization": form}} for form in ("nf4", "int8", "fp8")]


@pytest.mark.parametrize(
    "trainer", [{}, LORA, *CODED], ids=["whole", "adapters", "nf4 base", "int8 base", "fp8 base"]
)
async def test_each_checkpoint_is_exported_as_the_run_exports_that_version(
    client, make_config, tmp_path, trainer
):
    config = make_config(trainer=trainer, model={"dtype": "bfloat16"}, optimizer={"lr": 1e-2})
    version = (await client.open(config)).version
    for step in (1, 2):
        version = await client.train(version, 1)
        await client.save(version.number)
        await client.export(f"step-{step}")
    before = files_of(client.directory)
    for step in (1, 2):
        exported = export_checkpoint(client.directory, lambda number: tmp_path / str(number), step)
        assert exported.step == step and exported.digest
        assert files_of(exported.directory) == files_of(client.directory / f"step-{step}")
    assert files_of(tmp_path / "1") != files_of(tmp_path / "2")
    assert files_of(client.directory) == before, "nothing of the run has changed"


async def test_the_newest_one_is_exported_by_the_command(client, tmp_path, capsys):
    version = await client.train((await client.open()).version, 1)
    await client.save(version.number)
    assert main([str(client.directory), "--to", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"


async def test_of_a_quantised_model_plain_weights_are_exported_and_it_is_said(client, make_config, tmp_path):
    write_family(tmp_path / "model", "deepseek_v3")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        tensors[name] = (tensors[name] / 0.01).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.tensor(0.01)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "model" / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": None}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": scheme}))
    config = make_config(model={"path": str(tmp_path / "model"), "dtype": "bfloat16"})
    version = await client.train((await client.open(config)).version, 1)
    await client.save(version.number)
    exported = export_checkpoint(client.directory, lambda _: tmp_path / "out")
    assert exported.weights == "bfloat16, dequantised from fp8"
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert {each for each in tensors if "scale_inv" not in each} == made.keys()
    assert made["model.layers.1.mlp.experts.0.down_proj.weight"].dtype is torch.bfloat16


async def test_what_cannot_be_exported_is_named_and_leaves_nothing(client, tmp_path):
    def problem(target: Path, step: int | None = None) -> str:
        with pytest.raises(Refusal) as refused:
            export_checkpoint(client.directory, lambda _: target, step)
        return refused.value.message

    version = (await client.open()).version
    assert "has no checkpoint" in problem(tmp_path / "out")
    version = await client.train(version, 1)
    name = (await client.save(version.number)).checkpoint.name
    assert "those of steps 1" in problem(tmp_path / "out", 7)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "is not empty" in problem(tmp_path / "full")
    assert "cannot be written" in problem(tmp_path / "full" / "mine.txt" / "below")
    weights = client.directory / "checkpoints" / name / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert "weights.safetensors: expected digest" in problem(tmp_path / "out")
    (client.directory / "checkpoints" / "model.json").unlink()
    assert "has no model.json" in problem(tmp_path / "out")
    assert not (tmp_path / "out").exists() and weights.exists(), "the run's own look sets it aside"


async def test_no_model_is_exported_through_a_link(client, make_config, tmp_path):
    await client.open(make_config())
    outside = tmp_path / "outside"
    client.directory.rename(outside)
    client.directory.symlink_to(outside)
    kept = sorted(outside.rglob("*"))
    reason, message = await refusal(client.export("model"))
    assert reason == "EXPORT_FAILED" and "symbolic link" in message
    assert sorted(outside.rglob("*")) == kept
