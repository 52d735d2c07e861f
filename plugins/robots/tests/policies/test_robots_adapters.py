"""Adapters that peft writes are merged on their checkpoint as peft merges them, and go back as a whole one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import deploy, load_published, main
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import CHARACTERS
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_robots_smolvla import STATED, fields, published, shaken
from torch import nn

TARGETS = r"(model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|model\.(state_proj|action_out_proj))"
"""LeRobot's, of SmolVLA."""
STATISTICS = {
    f"{key}.{name}": torch.ones(size)
    for key, size in (("observation.state", 3), ("action", 2))
    for name in ("mean", "std")
}


class Named(nn.Module):
    """Modules below the names that LeRobot gives them."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


@pytest.fixture
def adapters(tmp_path):
    """(what LeRobot's training with peft leaves behind, the language model's directory, the merged weights)."""
    policy, own, base = shaken(policy_config(fields()).build(0)), tmp_path / "own", tmp_path / "base"
    own.mkdir()
    save_file(published(policy), own / "model.safetensors")
    character_tokenizer(CHARACTERS).save_pretrained(base)
    (base / "config.json").write_text(json.dumps(fields()["vlm"]))
    whole = Named(
        model=Named(
            vlm_with_expert=Named(lm_expert=policy.expert),
            **{name: getattr(policy, name) for name in ("state_proj", "action_in_proj", "action_out_proj")},
        )
    )
    chosen = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, modules_to_save=["action_in_proj"])
    wrapped = get_peft_model(whole, chosen)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    target = tmp_path / "adapters"
    wrapped.save_pretrained(target)
    stated = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**stated, "base_model_name_or_path": str(own)}))
    (target / "config.json").write_text(json.dumps({**STATED, "use_peft": True}))
    step = {"registry_name": "normalizer_processor", "state_file": "statistics.safetensors"}
    (target / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
    save_file(STATISTICS, target / "statistics.safetensors")
    return target, base, wrapped.merge_and_unload().state_dict()


def test_adapters_are_merged_as_peft_merges_them(adapters, tmp_path):
    target, base, merged = adapters
    assert main([str(target), str(tmp_path / "policy"), "--base", str(base)]) == 0
    found = dict(state_tensors(load_policy(tmp_path / "policy")))
    own = load_file(tmp_path / "own" / "model.safetensors")
    moved = set()
    for name, tensor in merged.items():
        ours = name.removeprefix("model.").replace("vlm_with_expert.lm_expert.", "expert.")
        torch.testing.assert_close(found[ours], tensor, rtol=1e-5, atol=1e-6)
        if not torch.allclose(tensor, own[name]):
            moved.add(ours)
    assert {"action_in_proj.weight", "state_proj.weight", "expert.layers.0.self_attn.v_proj.weight"} <= moved


def test_a_trained_policy_goes_back_as_a_whole_checkpoint(adapters, tmp_path):
    target, base, _ = adapters
    assert main([str(target), str(tmp_path / "policy"), "--base", str(base)]) == 0
    deploy(target, tmp_path / "policy", tmp_path / "deployed", Wanted(base=base))
    assert json.loads((tmp_path / "deployed/config.json").read_text())["use_peft"] is False
    assert not list((tmp_path / "deployed").glob("adapter_*"))
    again = dict(state_tensors(load_published(tmp_path / "deployed", Wanted(base=base))))
    for name, tensor in state_tensors(load_policy(tmp_path / "policy")):
        if not name.startswith("value_head."):
            assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"peft_type": "VERA"}, "peft_type 'VERA' is not supported, only 'LORA'"),
        ({"rank_pattern": {"state_proj": 8}}, "rank_pattern .* is not supported"),
        ({"base_model_name_or_path": "/nowhere"}, r"'/nowhere' is no directory: .* by --beside"),
    ],
)
def test_what_an_adapter_says_beyond_two_matrices_is_refused(adapters, changed, said):
    target, base, _ = adapters
    stated = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**stated, **changed}))
    with pytest.raises(ModelNotReadable, match=said):
        load_published(target, Wanted(base=base))


def test_nothing_of_an_adapter_is_dropped_in_silence(adapters, tmp_path):
    target, base, _ = adapters
    file, begin = target / "adapter_model.safetensors", "base_model.model.model."
    tensors = load_file(file)
    for added, said in {
        f"{begin}state_proj.lora_magnitude_vector.weight": r"state_proj\.lora_magnitude_vector\.weight has no weight",
        f"{begin}gone.lora_A.weight": r"model\.gone\.lora_A\.weight has no weight in the checkpoint",
        "other.lora_A.weight": r"other\.lora_A\.weight is no tensor of peft's LoRA",
    }.items():
        save_file({**tensors, added: torch.zeros(4, 6)}, file)
        with pytest.raises(ModelNotReadable, match=said):
            load_published(target, Wanted(base=base))
    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("state_proj.lora_B.weight")}
    save_file(half, file)
    with pytest.raises(
        ModelNotReadable, match=r"has model\.state_proj\.lora_A\.weight and no model\.state_proj"
    ):
        load_published(target, Wanted(base=base))
    shutil.copy(tmp_path / "own" / "model.safetensors", file)
    with pytest.raises(
        ModelNotReadable, match=r"is no tensor of peft's LoRA, which begin with base_model\.model\."
    ):
        load_published(target, Wanted(base=base))
