"""GR00T as NVIDIA publishes it becomes a policy of one robot and goes back; what does not fit is named."""

from __future__ import annotations

import json

import pytest
import torch
from flow_checks import shaken
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, deploy, load_published
from headrace_robots.policies.directory import load_policy, policy_config, save_policy
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import tiny_tokenizer
from safetensors.torch import load_file, save_file
from test_robots_groot import CAMERAS, WIDTH, fields

EACH = ("state_encoder.", "action_encoder.", "action_decoder.")
NAMES = {
    "eye.": "backbone.model.model.visual.",
    "reader.": "backbone.model.model.language_model.",
    "normed.": "action_head.vlln.",
    "mixers.": "action_head.vl_self_attention.transformer_blocks.",
    "dit.blocks.": "action_head.model.transformer_blocks.",
    "dit.time.": "action_head.model.timestep_encoder.timestep_embedder.",
    "dit.": "action_head.model.",
}
STATED = {
    "model_type": "Gr00tN1d7",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "num_inference_timesteps": 3,
    "action_horizon": 4,
    "max_action_dim": 5,
    "max_state_dim": 6,
    "hidden_size": 32,
    "max_seq_len": 4,
    "diffusion_model_cfg": {
        "num_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "interleave_self_attention": True,
        "positional_embeddings": None,
    },
    "vl_self_attention_cfg": {"num_layers": 1, "num_attention_heads": 2, "positional_embeddings": None},
}
MODALITIES = {
    "state": {"modality_keys": ["arm", "hand"]},
    "action": {
        "modality_keys": ["arm", "hand"],
        "delta_indices": [0, 1, 2],
        "action_configs": [{"rep": "ABSOLUTE"}] * 2,
    },
    "video": {"modality_keys": list(CAMERAS), "delta_indices": [0]},
}
STATISTICS = {
    "state": {"arm": {"min": [0.0, 0.0], "max": [2.0, 4.0]}, "hand": {"min": [1.0], "max": [1.0]}},
    "action": {"arm": {"min": [-3.0], "max": [5.0]}, "hand": {"min": [0.0], "max": [1.0]}},
}


def published(policy):
    """Its weights as NVIDIA names them: those of a robot are the second of three, which all differ."""
    found = {"backbone.model.model.language_model.norm.weight": torch.ones(48)}
    for name, tensor in state_tensors(policy):
        if name.startswith(EACH):
            layer, _, part = name.rpartition(".")
            own = tensor.T if part == "weight" else tensor
            found[f"action_head.{layer}.{'W' if part == 'weight' else 'b'}"] = torch.stack(
                [own + 1, own, own - 1]
            )
        elif not name.startswith(("value_head.", "noise_head.")):
            begin = next((each for each in NAMES if name.startswith(each)), "")
            found[NAMES.get(begin, "action_head.") + name.removeprefix(begin)] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}


@pytest.fixture
def checkpoint(tmp_path):
    """A directory as NVIDIA publishes it, and (beside it) its language model's, which has more layers."""
    policy, own, base = (
        shaken(policy_config(fields()).build(0), WIDTH),
        tmp_path / "published",
        tmp_path / "base",
    )
    tiny_tokenizer("groot").save_pretrained(base)
    vlm = fields()["vlm"]
    text = {**vlm["text_config"], "num_hidden_layers": 8}
    (base / "config.json").write_text(json.dumps({**vlm, "text_config": text}))
    own.mkdir()
    told = {
        "modality_configs": {"one": MODALITIES, "other": {}},
        "image_target_size": [56, 56],
        "crop_fraction": 0.9,
    }
    for name, content in {
        "config": STATED,
        "processor_config": {"processor_kwargs": told},
        "statistics": {"one": STATISTICS},
        "embodiment_id": {"one": 1, "other": 2},
    }.items():
        (own / f"{name}.json").write_text(json.dumps(content))
    save_file(published(policy), own / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(published(policy), "model-00001-of-00001.safetensors")}
    (own / "model.safetensors.index.json").write_text(json.dumps(index))
    return own, base, policy


def wanted(base, **chosen):
    return Wanted(base=base, chosen={"embodiment": "one", **chosen})


def test_a_published_checkpoint_becomes_a_policy_of_one_robot(checkpoint, tmp_path):
    own, base, policy = checkpoint
    convert(own, tmp_path / "policy", wanted(base))
    found = load_policy(tmp_path / "policy")
    config = found.config
    assert (config.embodiment, config.cameras, config.taught, config.chunk_length) == ("one", CAMERAS, 3, 3)
    assert (config.pictures.height, config.pictures.crop, config.pictures.by_area) == (56, 0.9, False)
    for name, tensor in state_tensors(policy):
        if not name.startswith(("value_head.", "noise_head.")):
            assert torch.equal(dict(state_tensors(found))[name], tensor), name
    torch.testing.assert_close(found.scaling(torch.tensor([[0.5, -2.0]])), torch.tensor([[3.0, 0.0]]))
    state = found._state(Observation(torch.tensor([[2.0, 1.0, 7.0]])), torch.device("cpu"), 6)
    torch.testing.assert_close(state, torch.tensor([[1.0, -0.5, 0.0, 0.0, 0.0, 0.0]]))
    assert instruction_encoder(config, str(tmp_path / "policy"))("push"), "the chat template came along"


def test_trained_weights_go_back_to_their_robot_alone(checkpoint, tmp_path):
    own, base, _ = checkpoint
    convert(own, tmp_path / "policy", wanted(base))
    trained = shaken(load_policy(tmp_path / "policy"), WIDTH)
    save_policy(trained, tmp_path / "trained", tokenizer=base)
    deploy(own, tmp_path / "trained", tmp_path / "deployed", Wanted(base=base))
    again = dict(state_tensors(load_published(tmp_path / "deployed", wanted(base))))
    for name, tensor in state_tensors(trained):
        if not name.startswith(("value_head.", "noise_head.")):
            assert torch.equal(again[name], tensor), name
    name = "model-00001-of-00001.safetensors"
    before, after = (load_file(each / name) for each in (own, tmp_path / "deployed"))
    assert before.keys() == after.keys()
    weight = "action_head.state_encoder.layer1.W"
    assert torch.equal(before[weight][0], after[weight][0]) and torch.equal(
        before[weight][2], after[weight][2]
    )
    assert not torch.equal(before[weight][1], after[weight][1])


def rewritten(file, **changed):
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({**stated, **changed}))


@pytest.mark.parametrize(
    ("file", "changed", "said"),
    [
        ("config", {"model_type": "gr00t_n1_5"}, "'gr00t_n1_5' is not supported, only 'Gr00tN1d7'"),
        ("config", {"use_alternate_vl_dit": False}, "use_alternate_vl_dit False is not supported"),
        (
            "config",
            {"diffusion_model_cfg": {"num_layers": 4}},
            "diffusion_model_cfg.interleave_self_attention False",
        ),
        ("embodiment_id", {"one": 3}, "embodiment number 3: the checkpoint has weights of 3 embodiments"),
        ("statistics", {"one": {"state": STATISTICS["state"], "action": {}}}, "action.arm has no min"),
    ],
)
def test_what_is_not_read_is_named(checkpoint, file, changed, said):
    own, base, _ = checkpoint
    rewritten(own / f"{file}.json", **changed)
    with pytest.raises(ModelNotReadable, match=said):
        load_published(own, wanted(base))


def test_what_a_checkpoint_lacks_is_named(checkpoint, tmp_path):
    own, base, policy = checkpoint
    with pytest.raises(ModelNotReadable, match=r"began with 'nvidia/Cosmos-Reason2-2B'.* by --base"):
        load_published(own, Wanted(chosen={"embodiment": "one"}))
    with pytest.raises(
        ModelNotReadable, match=r"embodiment None is none of this checkpoint's: one, other; .* --embodiment"
    ):
        load_published(own, Wanted(base=base))
    relative = {**MODALITIES, "action": {**MODALITIES["action"], "action_configs": [{}, {"rep": "RELATIVE"}]}}
    rewritten(
        own / "processor_config.json",
        processor_kwargs={"modality_configs": {"one": relative}, "use_relative_action": True},
    )
    with pytest.raises(ModelNotReadable, match="action 'hand' is relative to the state"):
        load_published(own, wanted(base))
    rewritten(own / "processor_config.json", processor_kwargs={"modality_configs": {"one": MODALITIES}})
    tensors = published(policy)
    tensors.pop("action_head.vl_self_attention.transformer_blocks.0.attn1.to_q.weight")
    save_file(tensors, own / "model-00001-of-00001.safetensors")
    with pytest.raises(ModelNotReadable, match=r"1 missing, first mixers\.0\.attn1\.to_q\.weight"):
        load_published(own, wanted(base))
