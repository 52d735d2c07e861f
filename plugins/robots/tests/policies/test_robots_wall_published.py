"""WALL-OSS as X-Square and LeRobot publish it becomes a policy and goes back; what does not fit is named."""

from __future__ import annotations

import json

import pytest
import torch
from flow_checks import shaken
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, deploy, load_published
from headrace_robots.policies.directory import load_policy, policy_config, save_policy
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import WORDS, tiny_tokenizer
from safetensors.torch import load_file, save_file
from test_robots_wall import CAMERAS, MEAN, STATE, STD, WIDTH, fields

NAMES = {
    "eye.": "visual.",
    "reader.mlps.": "model.layers.{}.moe.experts.0.",
    "expert.": "model.layers.{}.moe.experts.1.",
    "reader.": "model.",
    "action_head.": "action_preprocessor.",
}
STATISTICS = {
    "observation.state": {"mean": [1.0, 0.0, 0.0], "std": [2.0, 1.0, 1.0]},
    "action": {"mean": [10.0, 0.0], "std": [4.0, 1.0]},
}
LEROBOT = {
    "type": "wall_x",
    "pretrained_name_or_path": "x-square-robot/wall-oss-flow",
    "chunk_size": 4,
    "n_action_steps": 3,
    "max_action_dim": 5,
    "max_state_dim": 6,
    "input_features": {f"observation.images.{name}": {"type": "VISUAL"} for name in CAMERAS},
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
}
FLOW = fields()["flow"]


def published(policy):
    """Its weights as X-Square names them, with what no policy has: a third expert and a data set's statistics."""
    found = {"action_preprocessor.normalizer_action.min.one": torch.zeros(5)}
    found["model.layers.0.moe.experts.2.up_proj.weight"] = torch.ones(3, 48)
    for name, tensor in state_tensors(policy):
        if not name.startswith(("value_head.", "noise_head.")):
            begin = next(each for each in NAMES if name.startswith(each))
            rest = name.removeprefix(begin)
            if "{}" in NAMES[begin]:
                index, _, rest = rest.partition(".")
                found[NAMES[begin].format(index) + rest] = tensor
            else:
                found[NAMES[begin] + rest] = tensor
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def stated(**changed):
    """X-Square's config.json, its sizes beside the tower's."""
    vlm = fields()["vlm"]
    experts = [{"hidden_size": 48, "intermediate_size": width, "hidden_act": "silu"} for width in (96, 32, 3)]
    moe = {"experts": experts, "num_experts": 3, "dim_inputs": [48, 48, 48], "mlp_moe": True}
    parts = {"dof_config": {"arm": 4, "gripper": 1}, "agent_pos_config": {"arm": 6}}
    rest = {"vision_config": vlm["vision_config"], "image_token_id": WORDS, "model_type": "qwen2_5_vl"}
    return {**vlm["text_config"], **moe, **parts, **rest, **changed}


@pytest.fixture
def directories(tmp_path):
    """(X-Square's, LeRobot's, the policy whose weights both have)."""
    policy = shaken(policy_config(fields()).build(0), WIDTH)
    raw, own = tmp_path / "raw", tmp_path / "own"
    tiny_tokenizer("wall").save_pretrained(raw)
    own.mkdir()
    (raw / "config.json").write_text(json.dumps(stated()))
    seen = {"min_pixels": 3136, "max_pixels": 12845056, "image_mean": MEAN, "image_std": STD}
    (raw / "preprocessor_config.json").write_text(json.dumps(seen))
    save_file(published(policy), raw / "model.safetensors")
    (own / "config.json").write_text(json.dumps(LEROBOT))
    save_file({f"model.{name}": each for name, each in published(policy).items()}, own / "model.safetensors")
    (tmp_path / "stats.json").write_text(json.dumps(STATISTICS))
    return raw, own, policy


@pytest.mark.parametrize("whose", ["x-square", "lerobot"])
def test_a_checkpoint_becomes_a_policy_and_goes_back(directories, tmp_path, whose):
    raw, own, policy = directories
    checkpoint = raw if whose == "x-square" else own
    chosen = {"chunk_length": 3, "cameras": CAMERAS, "flow": FLOW}
    wanted = Wanted(base=raw, statistics=tmp_path / "stats.json", chosen=chosen)
    convert(checkpoint, tmp_path / "policy", wanted)
    found = load_policy(tmp_path / "policy")
    config = found.config
    assert (config.state_token, config.cameras, config.chunk_length) == (STATE, CAMERAS, 3)
    assert config.horizon == (32 if whose == "x-square" else 4)
    assert (config.action_width, config.state_width, config.expert_width) == (5, 6, 32)
    assert (config.pictures.least, config.pictures.mean) == (3136, MEAN)
    for name, tensor in state_tensors(policy):
        if not name.startswith(("value_head.", "noise_head.")):
            assert torch.equal(dict(state_tensors(found))[name], tensor), name
    torch.testing.assert_close(found.scaling(torch.tensor([[0.5, -2.0]])), torch.tensor([[12.0, -2.0]]))

    save_policy(trained := shaken(found, WIDTH), tmp_path / "trained", tokenizer=raw)
    deploy(checkpoint, tmp_path / "trained", tmp_path / "deployed", wanted)
    before, after = (load_file(each / "model.safetensors") for each in (checkpoint, tmp_path / "deployed"))
    begin = "" if whose == "x-square" else "model."
    assert before.keys() == after.keys()
    for name, tensor in published(trained).items():
        same = ".experts.2." in name or "normalizer" in name
        assert (
            torch.equal(after[begin + name], tensor) and torch.equal(before[begin + name], tensor) == same
        ), name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mlp_moe": False}, "mlp_moe False is not supported"),
        ({"attention_moe": True}, "attention_moe True is not supported"),
        ({"dim_inputs": [48, 24]}, r"dim_inputs \[48, 24\] .* only 48 for each expert"),
        ({"experts": []}, "or two of experts"),
        ({"dof_config": {"arm": 7}}, "max_action_dim is 5, and the model's dof_config has 7"),
        ({"agent_pos_config": None}, "states no agent_pos_config"),
    ],
)
def test_sizes_that_are_not_read_are_named(directories, tmp_path, changed, said):
    raw, own, _ = directories
    (raw / "config.json").write_text(json.dumps(stated(**changed)))
    with pytest.raises(ModelNotReadable, match=said):
        load_published(own, Wanted(base=raw, statistics=tmp_path / "stats.json"))


def test_what_a_checkpoint_lacks_is_named(directories, tmp_path):
    raw, own, policy = directories
    told = Wanted(base=raw, statistics=tmp_path / "stats.json")
    with pytest.raises(ModelNotReadable, match=r"began with 'x-square-robot/wall-oss-flow'.* by --base"):
        load_published(own, Wanted(statistics=tmp_path / "stats.json"))
    with pytest.raises(ModelNotReadable, match="name them with --cameras"):
        load_published(raw, told)
    with pytest.raises(ModelNotReadable, match=r"no statistics of 'action'; .* by --statistics"):
        load_published(own, Wanted(base=raw))
    tensors = {f"model.{name}": each for name, each in published(policy).items()}
    tensors.pop("model.model.layers.1.moe.experts.1.up_proj.weight")
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(ModelNotReadable, match=r"1 missing, first expert\.1\.up_proj\.weight"):
        load_published(own, told)
    (own / "config.json").write_text(json.dumps({**LEROBOT, "prediction_mode": "fast"}))
    with pytest.raises(ModelNotReadable, match="prediction_mode 'fast' is not supported, only 'diffusion'"):
        load_published(own, told)
    (own / "config.json").write_text(json.dumps(LEROBOT))
    tiny_tokenizer("groot").save_pretrained(raw)
    with pytest.raises(ModelNotReadable, match=r"has no <\|propri\|>; is it that of WALL-OSS"):
        load_published(own, told)
