"""Reading and writing model directories, with and without weights."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import context_limit, load_architecture, load_model, save_model
from headrace_modelkit.model_files import files_of, open_model
from headrace_modelkit.presets import tiny
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.progress import counting
from headrace_schema.sections.generating import ModelSection


def test_an_empty_model_with_given_weights_is_the_model(tiny_config):
    """Buffers such as rotary frequencies are not in the weights and must be right without them."""
    full, empty = load_model(tiny_config), load_model(tiny_config, weights=False)
    load_weights(empty, dict(state_tensors(full)))
    ids = torch.arange(40)[None] % 32
    with torch.no_grad():
        assert torch.equal(full(ids).logits, empty(ids).logits)
    assert not full.training and not empty.training


def test_loading_says_how_far_it_is(tiny_config):
    with counting() as far:
        model = load_model(tiny_config)
        loaded = far.read()
        files = open_model(tiny_config, load_model(tiny_config, weights=False))
        for name in files.names():
            files.read(name)
        read = far.read()
    assert loaded.unit == "tensors" and loaded.done == loaded.total >= len([*state_tensors(model)]) - 1
    size = sum(file.stat().st_size for file in files_of(tiny_config, cached=False))
    assert (read.unit, read.total) == ("bytes", size) and 0.9 * size < read.done <= size


def test_the_type_is_the_configs_unless_told(tiny_config):
    assert load_model(tiny_config).dtype == torch.float32
    assert load_model(tiny_config, dtype=torch.bfloat16).dtype == torch.bfloat16
    bf16 = tiny_config.model_copy(update={"dtype": "bfloat16"})
    assert load_model(bf16, weights=False).dtype == torch.bfloat16


def test_dropout_is_off_whatever_the_directory_says(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))
    model = load_model(ModelSection(path=str(tmp_path / "model"))).train()
    assert all(getattr(module, "attention_dropout", 0.0) == 0.0 for module in model.modules())


def test_the_context_limit_is_the_smaller_one(tiny_config):
    architecture = load_architecture(tiny_config)
    for asked, limit in ((None, 512), (100, 100), (9999, 512)):
        assert context_limit(tiny_config.model_copy(update={"max_context": asked}), architecture) == limit


@pytest.mark.parametrize("weights", [True, False])
def test_unreadable_directories_are_one_sentence(tmp_path, tiny_directory, weights):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{nonsense")
    for name in ("missing", "empty", "broken"):
        with pytest.raises(
            ModelNotReadable, match=r"^model\.path: .*; give a Hugging Face id or a directory"
        ):
            load_model(ModelSection(path=str(tmp_path / name)), weights=weights)
    with pytest.raises(ModelNotReadable, match=r"model\.gguf|it holds no x\.gguf"):
        load_model(ModelSection(path=str(tiny_directory), gguf_file="x.gguf"), weights=weights)


def test_weights_that_are_missing_or_cut_are_refused(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ModelNotReadable, match=r"model\.path"):
        load_model(ModelSection(path=str(tmp_path / "model")))
    weights.unlink()
    with pytest.raises(ModelNotReadable, match=r"model\.path"):
        load_model(ModelSection(path=str(tmp_path / "model")))


def test_pickled_weights_are_never_read(tiny_directory, tmp_path, tiny_config):
    shutil.copytree(tiny_directory, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(load_model(tiny_config).state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelNotReadable, match=r"model\.path"):
        load_model(ModelSection(path=str(tmp_path / "model")))


def test_a_directory_with_layers_missing_is_refused(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))
    with pytest.raises(ModelNotReadable, match=r"weights are missing, first model\.layers\.2"):
        load_model(ModelSection(path=str(tmp_path / "model")))


def test_saving_replaces_a_directory_as_a_whole(tiny_config, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "stale").touch()
    model, codec = load_model(tiny_config), load_tokenizer(tiny_config)
    save_model(model, codec, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert not (target / "stale").exists() and os.stat(target / "model.safetensors").st_mode & 0o044
    again = load_model(ModelSection(path=str(target), dtype="float32"))
    for (name, mine), (other, theirs) in zip(state_tensors(model), state_tensors(again), strict=True):
        assert name == other and torch.equal(mine, theirs)
    assert load_tokenizer(ModelSection(path=str(target))).eos_ids == codec.eos_ids


def test_the_tiny_preset_is_idempotent_and_seeded(tmp_path, capsys):
    target = tmp_path / "tiny"
    tiny.main([str(target), "--seed", "3"])
    first = (target / "model.safetensors").read_bytes()
    tiny.main([str(target), "--seed", "4"])
    assert (target / "model.safetensors").read_bytes() == first
    tiny.main([str(tmp_path / "other"), "--seed", "4"])
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first
    assert capsys.readouterr().out.splitlines()[0] == str(target)
    parameters = sum(parameter.numel() for parameter in tiny.tiny_model().parameters())
    assert 100_000 < parameters < 106_000
