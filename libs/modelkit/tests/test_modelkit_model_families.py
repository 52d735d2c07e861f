"""Families of models: heads, names of published weights, and exports that others read."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.exporting import export_model
from headrace_modelkit.loading import load_architecture, load_model, quantisation
from headrace_modelkit.logprobs import Head
from headrace_modelkit.model_files import check_model
from headrace_modelkit.presets.families import FAMILIES, SHAPE, tiny_of, write_family
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors, weight_layout
from headrace_schema.sections.generating import ModelSection
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

COMMIT = "0123456789" * 4
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


def test_a_model_that_sees_is_published_by_the_names_of_its_checkpoint(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config={**SHAPE, **FAMILIES["qwen3_5_text"]}, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path), dtype="float32")
    found, files = published(section), names_in(tmp_path)
    assert found == files and any("visual" in name for name in found)
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
    assert quantisation(load_architecture(section))
    tensors = list(state_tensors(tiny_of("llama")))
    for limit in (10**9, 10**4):  # in one file, and in several
        export_model(section, tensors, character_tokenizer(), tmp_path / str(limit), limit=limit)
        written = json.loads((tmp_path / str(limit) / "config.json").read_text())
        assert "quantization_config" not in written
    assert not quantisation(load_architecture(ModelSection(path=str(tmp_path / "10000"))))


def test_a_model_of_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    """transformers asks on the terminal whether to run it, unless it was told."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    own = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it runs')")
    with pytest.raises(ModelNotReadable, match=r"model\.path: .*auto_map.*model\.trust_remote_code"):
        load_architecture(ModelSection(path=str(tmp_path)))
    with pytest.raises(
        ModelNotReadable, match=r"model\.trust_remote_code: .*a directory, whose code has none"
    ):
        load_architecture(ModelSection(path=str(tmp_path), trust_remote_code=COMMIT))
    with pytest.raises(ModelNotReadable, match=r"is not allowed here.*HEADRACE_REMOTE_CODE"):
        load_architecture(ModelSection(path="someone/own", trust_remote_code=COMMIT))
    with pytest.raises(ValidationError, match="leave revision out"):
        ModelSection(path="someone/own", trust_remote_code=COMMIT, revision="main")


OWN_CONFIG = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
OWN_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
READ = """
import sys
from headrace_modelkit.loading import load_model
from headrace_schema.sections.generating import ModelSection
section = ModelSection(path="someone/own", dtype="float32", trust_remote_code=sys.argv[1])
print(type(load_model(section)).__name__, type(load_model(section, weights=False)).__name__)
"""


def test_the_code_of_a_commit_that_spec_and_host_name_runs(tmp_path):
    """From a hub's cache, without a network."""
    snapshot = tmp_path / "hub" / "models--someone--own" / "snapshots" / COMMIT
    write_family(tmp_path / "llama", "llama")
    shutil.copytree(tmp_path / "llama", snapshot)
    own = json.loads((snapshot / "config.json").read_text())
    own |= {"model_type": "own", "architectures": ["OwnModel"]}
    own["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (snapshot / "config.json").write_text(json.dumps(own))
    (snapshot / "configuration_own.py").write_text(OWN_CONFIG)
    (snapshot / "modeling_own.py").write_text(OWN_MODEL)
    own_variables = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HEADRACE_REMOTE_CODE": COMMIT}
    found = subprocess.run(
        [sys.executable, "-c", READ, COMMIT], env=os.environ | own_variables, capture_output=True, text=True
    )
    assert found.stdout.split() == ["OwnModel", "OwnModel"], found.stderr[-2000:]


def test_layers_that_the_configuration_does_not_count_are_refused(tmp_path):
    write_family(tmp_path / "llama", "llama", num_hidden_layers=3)
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 2, "layer_types": None}))
    with pytest.raises(
        ModelNotReadable, match=r"9 weights more than config.json has layers .*model\.layers\.2\."
    ):
        check_model(ModelSection(path=str(tmp_path / "llama")))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("deepseek_v3", "nemotron_h") else (pytest.mark.nightly,))
        for name in FAMILIES
    ],
)
def test_an_export_is_what_it_came_from(family, tmp_path):
    """Names, types and tied weights; and the numbers, to the bit."""
    write_family(tmp_path / "model", family)
    section = ModelSection(path=str(tmp_path / "model"), dtype="float32")
    tensors = [(name, value.clone()) for name, value in state_tensors(load_model(section))]
    export_model(section, tensors, character_tokenizer(), tmp_path / "out")
    given, made = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "out"))
    if family == "kimi_linear":  # whose dense layer transformers writes by a name that checkpoints have not
        given = {
            name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): own for name, own in given.items()
        }
    assert made.keys() == given.keys()
    assert all(made[name].dtype is own.dtype and torch.equal(made[name], own) for name, own in given.items())
    kept = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("model", "out")]
    # Dropout is off, as it was trained.
    before, after = ({key: value for key, value in own.items() if "drop" not in key} for own in kept)
    assert {**before, "dtype": ""} == {**after, "dtype": ""}
