"""Weights read one at a time are what transformers loads, and what is exported one at a time is what it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.exporting import export_model
from headrace_modelkit.loading import load_model
from headrace_modelkit.model_files import ModelFiles, empty_model, fingerprint, open_model
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(params=["tied", "experts"])
def section(request, tmp_path) -> ModelSection:
    """A model in several files: with a tied head, or with experts that the files have one by one."""
    torch.manual_seed(0)
    if request.param == "tied":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4))
    model.save_pretrained(tmp_path / "model", max_shard_size="5KB")
    return ModelSection(path=str(tmp_path / "model"), dtype="bfloat16")


def test_every_part_is_that_of_the_loaded_model(section):
    loaded = dict(state_tensors(load_model(section)))
    empty = empty_model(section)
    source = open_model(section, empty)
    assert isinstance(source, ModelFiles) and list(source.names()) == list(loaded)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    for name, whole in loaded.items():
        assert source.read(name).equal(whole.detach()) and source.read(name).dtype is whole.dtype, name
        ends = [(size // 3, max(size // 3 + 1, size - 1)) for size in whole.shape]
        part = whole.detach()[tuple(slice(*end) for end in ends)]
        assert source.read(name, tuple(ends)).equal(part), name
        nothing = ((0, 0), *((0, size) for size in whole.shape[1:]))
        assert source.read(name, nothing).numel() == 0


def test_a_tensor_that_is_missing_is_named(section):
    config = Path(section.path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(ModelNotReadable, match=r"weights are missing, first model\.layers\.2"):
        open_model(section, empty_model(section))


def test_files_of_other_content_have_another_fingerprint(section):
    before = fingerprint(section)
    assert before and before == fingerprint(section)
    file = max(Path(section.path).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(section) not in ("", before)
    file.unlink()
    assert fingerprint(section) == ""


@pytest.mark.parametrize("limit", [4000, 10**9])
def test_an_export_is_what_transformers_saves(section, tmp_path, tiny_config, limit):
    model = load_model(section)
    tensors = ((name, value.detach().float()) for name, value in state_tensors(model))
    export_model(section, tensors, load_tokenizer(tiny_config), tmp_path / "out", limit=limit)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) is (limit == 4000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() is (limit == 4000)
    again = load_model(section.model_copy(update={"path": str(tmp_path / "out")}))
    for (name, mine), (other, theirs) in zip(state_tensors(model), state_tensors(again), strict=True):
        assert name == other and mine.equal(theirs), name
    saved = open_model(section, empty_model(section))._files.names()
    exported = section.model_copy(update={"path": str(tmp_path / "out")})
    assert set(open_model(exported, empty_model(exported))._files.names()) == set(saved)


def test_an_export_refuses_what_is_not_the_model(section, tmp_path, tiny_config):
    tensors = [(name, value.detach()) for name, value in state_tensors(load_model(section))]
    for wrong in (tensors[:-1], tensors[1:], [*tensors, tensors[0]]):
        with pytest.raises(ValueError, match=r"expected|more than the model has"):
            export_model(section, wrong, load_tokenizer(tiny_config), tmp_path / "out")
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.float32])
def test_files_of_another_precision_are_read_in_the_models(kind, tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)).to(kind)
    model.save_pretrained(tmp_path / "model")
    given = ModelSection(path=str(tmp_path / "model"), dtype="bfloat16")
    source = open_model(given, empty_model(given))
    for name, whole in state_tensors(model):
        assert source.read(name).equal(whole.detach().bfloat16()), name
