"""Families of models: heads, names of published weights, and exports that others read."""

import json

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.exporting import export_model
from headrace_modelkit.loading import is_quantised, load_architecture, load_model
from headrace_modelkit.logprobs import Head
from headrace_modelkit.presets.families import FAMILIES, SHAPE, tiny_of, write_family
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors, weight_layout
from headrace_schema.sections.generating import ModelSection
from safetensors import safe_open
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

HEADS = ("granite", "cohere", "hyperclovax", "falcon_h1", "recurrent_gemma", "gemma2")


@pytest.mark.parametrize("family", HEADS)
def test_a_head_does_with_logits_what_the_class_does(family):
    model = tiny_of(family, **({"final_logit_softcapping": 2.0} if family == "gemma2" else {}))
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits[0]
        hidden = model.base_model(input_ids=tokens).last_hidden_state[0]
        torch.testing.assert_close(Head.of(model).logits(hidden), expected, rtol=1e-5, atol=1e-5)


def names_in(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return set(file.keys())


def published(section):
    return {name for name, _, _ in weight_layout(load_model(section), torch.float32)}


def test_the_language_part_of_a_larger_model_is_published_by_the_names_of_its_checkpoint(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config={**SHAPE, **FAMILIES["qwen3_5_text"]}, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), dtype="float32")
    found, files = published(section), names_in(tmp_path)
    assert found < files and not any("visual" in name for name in found)
    assert {name for name in files - found if "visual" not in name} == set()
    model = load_model(section)
    assert "model.language_model.embed_tokens.weight" in found
    load_weights(model, {name: value.clone() for name, value in state_tensors(model)})


def test_the_text_model_alone_keeps_its_own_names(tmp_path):
    write_family(tmp_path / "text", "qwen3_5_text")
    section = ModelSection(path=str(tmp_path / "text"), dtype="float32")
    assert published(section) == names_in(tmp_path / "text")


def test_a_dense_layer_beside_layers_of_experts_keeps_its_name(tmp_path):
    write_family(tmp_path / "kimi", "kimi_linear")
    section = ModelSection(path=str(tmp_path / "kimi"), dtype="float32")
    found = published(section)
    assert {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")} < found
    assert "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight" in found
    assert not any("layers.0.block_sparse_moe" in name for name in found)
    tensors = list(state_tensors(load_model(section)))
    export_model(section, tensors, character_tokenizer(), tmp_path / "out")
    assert names_in(tmp_path / "out") == found
    again = dict(state_tensors(load_model(ModelSection(path=str(tmp_path / "out"), dtype="float32"))))
    assert all(torch.equal(again[name], value) for name, value in tensors)


def test_an_export_of_what_was_quantised_says_that_it_is_not(tmp_path):
    write_family(tmp_path / "model", "llama")
    file = tmp_path / "model" / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": [16, 16], "dequantize": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": scheme}))
    section = ModelSection(path=str(tmp_path / "model"), dtype="bfloat16")
    assert is_quantised(load_architecture(section))
    tensors = list(state_tensors(tiny_of("llama")))
    for limit in (10**9, 10**4):  # in one file, and in several
        export_model(section, tensors, character_tokenizer(), tmp_path / str(limit), limit=limit)
        written = json.loads((tmp_path / str(limit) / "config.json").read_text())
        assert "quantization_config" not in written
    assert not is_quantised(load_architecture(ModelSection(path=str(tmp_path / "10000"))))


def test_a_model_of_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    """transformers asks on the terminal whether to run it, unless it was told."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it runs')")
    with pytest.raises(ModelNotReadable, match=r"model\.path"):
        load_architecture(ModelSection(path=str(tmp_path)))
