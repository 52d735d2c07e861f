"""A loaded model computes the same in training mode, twice, whatever its configuration drops out or jitters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from headrace_modelkit.loading import load_architecture, load_model
from headrace_modelkit.presets.tiny_vision import write_tiny_vision
from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.generating import ModelSection
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "vocab_size": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "phi", "starcoder2", "stablelm"), SIZES
    ),
    **dict.fromkeys(("granite", "nemotron", "cohere", "olmo", "persimmon", "phi3"), SIZES),
    "gemma2": {**SIZES, "head_dim": 8, "num_key_value_heads": 2},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "rotary_dim": 4},
    "gpt_bigcode": GPT,
    "bloom": {"vocab_size": 40, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"vocab_size": 40, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "biogpt": SIZES,
    "mpt": {"vocab_size": 40, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "mixtral": {**SIZES, **EXPERTS},
    "phimoe": {**SIZES, **EXPERTS},
}


def spoil(config: PreTrainedConfig) -> int:
    """Sets every dropout and jitter of a configuration to a half, nested ones too; how many there are."""
    changed = 0
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            changed += spoil(value)
        elif any(word in key for word in ("drop", "jitter")) and isinstance(value, float):
            setattr(config, key, 0.5)
            changed += 1
    return changed


def section_of(directory: Any) -> ModelSection:
    return ModelSection(path=str(directory), dtype="float32")


def forwards(model: Any) -> list[torch.Tensor]:
    """In eval mode and twice in training mode."""
    ids, found = torch.tensor([[1, 5, 7, 9, 3, 11, 4]]), []
    torch.manual_seed(0)
    for training in (False, True, True):
        model.train(training)
        with torch.no_grad():
            found.append(model(input_ids=ids, use_cache=False)[0])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_no_forward_in_training_mode_is_random(tmp_path, family):
    config = AutoConfig.for_model(family, **FAMILIES[family])
    spoil(config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for model in (load_model(section_of(tmp_path)), load_model(section_of(tmp_path), weights=False)):
        for parameter in model.parameters():  # of the second one they are undefined
            torch.nn.init.normal_(parameter, std=0.2)
        evaluated, *trained = forwards(model)
        assert all(torch.equal(each, evaluated) for each in trained)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_no_forward_of_a_vision_language_model_is_random(tmp_path, family):
    write_tiny_vision(tmp_path, family=family)
    config = AutoConfig.from_pretrained(tmp_path)
    assert spoil(config), "its text configuration has some"
    config.save_pretrained(tmp_path)
    evaluated, *trained = forwards(load_model(section_of(tmp_path)))
    assert all(torch.equal(each, evaluated) for each in trained)


def test_dropouts_of_layers_in_lists_and_mappings_are_off(tmp_path):
    config = AutoConfig.for_model("llama", **SIZES)
    config.layer_dropouts, config.dropouts = [0.1, 0.2], {"attention": 0.1, "by_layer": [0.2]}
    config.blocks = [{"resid_pdrop": 0.3, "size": 0.5}, {"attn": {"dropout": 0.1}}]
    config.head = {"classifier_dropout": 0.4, "drop_path_rate": 0.2, "token_dropout": True}
    config.save_pretrained(tmp_path)
    found: Any = load_architecture(section_of(tmp_path))
    assert found.layer_dropouts == [0.0, 0.0] and found.dropouts == {"attention": 0.0, "by_layer": [0.0]}
    assert found.blocks == [{"resid_pdrop": 0.0, "size": 0.5}, {"attn": {"dropout": 0.0}}]
    assert found.head == {"classifier_dropout": 0.0, "drop_path_rate": 0.0, "token_dropout": True}
    assert found.hidden_size == 32


def test_a_dropout_that_a_model_has_in_its_code_is_off(tmp_path, monkeypatch):
    """Some are numbers in the code, which no configuration names."""
    config = AutoConfig.for_model("llama", **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    built = type(AutoModelForCausalLM.from_config(config))
    own = built.__init__

    def with_dropout(self: Any, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        self.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), self.lm_head)

    monkeypatch.setattr(built, "__init__", with_dropout)
    model: Any = load_model(section_of(tmp_path), weights=False)
    assert model.lm_head[0].p == 0.0
