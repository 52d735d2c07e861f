"""Checkpoints that LeRobot's own classes write act as LeRobot's own classes and processors do, and go back to them.

LeRobot runs in an environment of its own (`ci/lerobot.sh`), as `peers/lerobot_side.py`. Weights are random.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_robots.convert import convert, deploy
from headrace_robots.policies.directory import load_policy, save_policy
from headrace_robots.policies.gaussian import row_noise
from headrace_robots.policies.language import read_tokenizer
from headrace_robots.policies.pi import published as pi_published
from headrace_robots.policies.policy import Observation
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import CHARACTERS, WORDS, tiny_fields, tiny_tokenizer
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[4]
PEER = ROOT / ".envs/lerobot/bin/python"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PEER.exists(), reason="sh ci/lerobot.sh makes .envs/lerobot"),
]
TASKS = ["Stack the cubes", "open the drawer"]
SEEDS = [4, 5]
CAMERAS = ("front", "wrist")
STATISTICS = {
    "observation.state": {
        "mean": [1.0, 2.0, -0.5],
        "std": [2.0, 0.5, 1.5],
        "min": [-3.0] * 3,
        "max": [4.0, 3.0, 5.0],
        "q01": [-2.0] * 3,
        "q99": [3.5, 3.0, 4.0],
    },
    "action": {
        "mean": [10.0, -1.0],
        "std": [4.0, 0.25],
        "min": [-2.0, -1.0],
        "max": [3.0, 0.5],
        "q01": [-1.5, -1.0],
        "q99": [2.5, 0.25],
    },
    **{
        f"observation.images.{name}": {
            "mean": [[[0.4]], [[0.5]], [[0.6]]],
            "std": [[[0.2]], [[0.3]], [[0.25]]],
        }
        for name in CAMERAS
    },
}
"""Of both ways to normalise; every number another one."""


def asked(family, size, normalization, fields, width=0.02):
    inputs = {"observation.state": ("state", [3])}
    inputs |= {f"observation.images.{name}": ("visual", [3, *size]) for name in CAMERAS}
    outputs = {"action": ("action", [2])}
    given = {"family": family, "inputs": inputs, "outputs": outputs, "statistics": STATISTICS, "tasks": TASKS}
    return {**given, "normalization": normalization, "fields": fields, "width": width}


def smolvla(folder):
    """The tiny SmolVLM is a directory, as the hub has the real one."""
    vlm, base = tiny_fields("smolvla", 2, state=3)["vlm"], folder / "base"
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.save_pretrained(base)
    (base / "config.json").write_text(json.dumps({"model_type": "smolvlm", "image_token_id": 1, **vlm}))
    fields = {
        "vlm_model_name": str(base),
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_state_dim": 6,
        "max_action_dim": 5,
    }
    fields |= {
        "num_steps": 3,
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": [56, 56],
        "load_vlm_weights": False,
    }
    norms = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    return asked("smolvla", (40, 48), norms, fields), (4, 5)


def act(folder):
    fields = {"chunk_size": 5, "n_action_steps": 3, "dim_model": 16, "n_heads": 2, "dim_feedforward": 24}
    fields |= {"n_encoder_layers": 2, "n_decoder_layers": 2, "latent_dim": 4, "n_vae_encoder_layers": 1}
    norms = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    return asked("act", (64, 96), norms, {**fields, "pretrained_backbone_weights": None}), (5, 2)


def diffusion(folder):
    fields = {"horizon": 8, "n_action_steps": 3, "n_obs_steps": 1, "down_dims": [16, 32], "n_groups": 4}
    fields |= {
        "kernel_size": 3,
        "diffusion_step_embed_dim": 16,
        "spatial_softmax_num_keypoints": 8,
        "pretrained_backbone_weights": None,
    }
    fields |= {
        "noise_scheduler_type": "DDIM",
        "num_train_timesteps": 20,
        "num_inference_steps": 5,
        "crop_shape": [56, 56],
    }
    norms = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
    return asked("diffusion", (64, 64), norms, fields), (8, 2)


TEXT = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
VARIANTS = {
    name: {"hidden_size": width, "intermediate_size": 20}
    for name, width in (("gemma_2b", 16), ("gemma_300m", 12))
}
EYE = {
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def pi(folder, family):
    character_tokenizer(CHARACTERS).save_pretrained(folder / "base")
    names = {"hidden_size": "width", "intermediate_size": "mlp_dim", "num_hidden_layers": "depth"}
    names |= {
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
    }
    sizes = {
        variant: {names[key]: value for key, value in {**TEXT, **own}.items()}
        for variant, own in VARIANTS.items()
    }
    fields = {
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_state_dim": 6,
        "max_action_dim": 5,
        "num_inference_steps": 3,
    }
    mode = "QUANTILES" if family == "pi05" else "MEAN_STD"
    norms = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    given = asked(family, (40, 48), norms, {**fields, "image_resolution": [56, 56]}, width=0.1)
    return {**given, "sizes": {**sizes, "vision": EYE, "vocab_size": WORDS + 1}}, (4, 5)


def qwen(base):
    """A tiny Qwen3-VL's directory, as the hub has the real one."""
    tiny_tokenizer("groot").save_pretrained(base)
    vlm = tiny_fields("groot", 2, state=3)["vlm"]
    vlm["text_config"] |= {"num_hidden_layers": 3, "tie_word_embeddings": True}
    vlm["vision_config"] |= {"patch_size": 16}
    tokens = {
        "video_token_id": WORDS + 1,
        "vision_start_token_id": WORDS + 2,
        "vision_end_token_id": WORDS + 3,
    }
    whole = {"model_type": "qwen3_vl", "tie_word_embeddings": True, **tokens, **vlm}
    (base / "config.json").write_text(json.dumps(whole))
    processor(base, "Qwen3VLVideoProcessor", 16, {"shortest_edge": 65536, "longest_edge": 16777216})


def processor(base, films, patch, size, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)):
    seen = {"size": size, "patch_size": patch, "merge_size": 2}
    seen |= {"temporal_patch_size": 2, "image_mean": mean, "image_std": std}
    for name, kind in {"": "image_processor_type", "video_": "video_processor_type"}.items():
        own = {kind: films if name else "Qwen2VLImageProcessor", **seen}
        (base / f"{name}preprocessor_config.json").write_text(json.dumps(own))


GROOT = {
    "select_layer": 2,
    "backbone_embedding_dim": 48,
    "hidden_size": 24,
    "input_embedding_dim": 32,
    "action_horizon": 4,
    "max_state_dim": 6,
    "max_action_dim": 5,
    "max_num_embodiments": 12,
    "max_seq_len": 8,
    "num_inference_timesteps": 3,
    "diffusion_model_cfg": {
        "num_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "output_dim": 24,
        "norm_type": "ada_norm",
        "interleave_self_attention": True,
        "positional_embeddings": None,
    },
    "vl_self_attention_cfg": {
        "num_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "positional_embeddings": None,
        "final_dropout": True,
    },
}


def groot(folder):
    """Fine-tuned by LeRobot: its data set's statistics, and a new embodiment."""
    qwen(folder / "base")
    fields = {"base_model_path": str(folder / "raw"), "chunk_size": 4, "n_action_steps": 3}
    fields |= {"max_state_dim": 6, "max_action_dim": 5, "use_bf16": False}
    norms = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")
    given = asked("groot", (40, 48), norms, fields, width=0.1)
    return {**given, "sizes": GROOT, "beside": {}}, (4, 5)


def groot_raw(folder):
    """As NVIDIA publishes it: groups of numbers by percentiles, cameras by name, pictures as cv2 scales them."""
    given, shape = groot(folder)
    number = {name: [value] for name, value in {"min": -9.0, "max": 9.0, "mean": 0.0, "std": 1.0}.items()}
    groups = {
        "state": {"x": (-2.0, 1.5), "y": (-1.0, 3.0), "z": (0.0, 4.0)},
        "action": {"x": (-1.0, 2.0), "gripper": (0.0, 1.0)},
    }
    statistics = {
        kind: {name: {**number, "q01": [low], "q99": [high]} for name, (low, high) in each.items()}
        for kind, each in groups.items()
    }
    modalities = {kind: {"modality_keys": [*each], "delta_indices": [0]} for kind, each in groups.items()}
    modalities["action"] |= {"delta_indices": [0, 1, 2], "action_configs": [{"rep": "ABSOLUTE"}] * 2}
    modalities["video"] = {"modality_keys": ["wrist", "front"], "delta_indices": [0]}
    told = {
        "modality_configs": {"libero_sim": modalities},
        "use_percentiles": True,
        "formalize_language": False,
    }
    told |= {
        "image_target_size": [256, 256],
        "use_albumentations": True,
        "crop_fraction": 0.95,
        "letter_box_transform": True,
    }
    beside = {
        "processor_config.json": {"processor_kwargs": told},
        "statistics.json": {"libero_sim": statistics},
        "embodiment_id.json": {"libero_sim": 7},
    }
    fields = {**given["fields"], "embodiment_tag": "libero_sim", "action_decode_transform": "none"}
    return {**given, "fields": fields, "beside": beside, "width": 0.05}, shape


def wall(folder):
    """Fine-tuned by LeRobot from X-Square's directory, whose sizes lie beside the tower's as older files have them."""
    base, own = folder / "base", tiny_fields("wall", 2, state=3)["vlm"]
    words = tiny_tokenizer("wall")
    words.save_pretrained(base)
    text = {name: value for name, value in own["text_config"].items() if name != "rope_parameters"}
    names = {
        f"{name}_token_id": words.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
    }
    sizes = {"hidden_size": 48, "hidden_act": "silu"}
    whole = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLMoEForAction"],
        "tie_word_embeddings": True,
        **text,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "experts": [{**sizes, "intermediate_size": width} for width in (96, 40, 24)],
        "num_experts": 3,
        "dim_inputs": [48, 48, 48],
        "mlp_moe": True,
        "dof_config": {"arm": 4, "gripper": 1},
        "agent_pos_config": {"arm": 5, "gripper": 1},
        "vision_config": {**own["vision_config"], "window_size": 112},
        "image_token_id": own["image_token_id"],
        "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
        **names,
    }
    (base / "config.json").write_text(json.dumps(whole))
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    processor(base, "Qwen2VLVideoProcessor", 14, size, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    fields = {"pretrained_name_or_path": str(base), "chunk_size": 4, "n_action_steps": 3}
    fields |= {"max_state_dim": 6, "max_action_dim": 5}
    norms = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    return asked("wall_x", (40, 48), norms, fields, width=0.1), (4, 5)


def wall_raw(folder):
    """As X-Square publishes it, with a data set's statistics."""
    given, _ = wall(folder)
    fields = {**given["fields"], "chunk_size": 32}
    (folder / "stats.json").write_text(json.dumps(STATISTICS))
    return {**given, "fields": fields, "as_published": True, "width": 0.05}, (32, 5)


FAMILIES = {
    "pi0": partial(pi, family="pi0"),
    "pi05": partial(pi, family="pi05"),
    "smolvla": smolvla,
    "groot": groot,
    "groot raw": groot_raw,
    "wall": wall,
    "wall raw": wall_raw,
    "act": act,
    "diffusion": diffusion,
}


def lerobot(folder):
    """What LeRobot chooses; see its side."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [PEER, Path(__file__).with_name("peers") / "lerobot_side.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(folder / "said.safetensors")["actions"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_lerobot_acts_as_in_lerobot(family, tmp_path, monkeypatch):
    monkeypatch.setattr(pi_published, "GEMMA", VARIANTS)
    monkeypatch.setattr(pi_published, "LAYERS", {"model_type": "gemma", **TEXT, "vocab_size": WORDS + 1})
    monkeypatch.setattr(
        pi_published, "SIGLIP", {"model_type": "siglip_vision_model", "vision_use_head": False, **EYE}
    )
    given, shape = FAMILIES[family](tmp_path)
    generator = torch.Generator().manual_seed(1)
    height, width = given["inputs"]["observation.images.front"][1][1:]
    images = {
        name: torch.randint(0, 256, (2, height, width, 3), generator=generator, dtype=torch.uint8)
        for name in CAMERAS
    }
    state = torch.rand(2, 3, generator=generator) * 4 - 1
    noise = row_noise(SEEDS, shape, torch.device("cpu"))
    pictures = {f"observation.images.{name}": image for name, image in images.items()}
    save_file({"state": state, "noise": noise, **pictures}, tmp_path / "seen.safetensors")
    (tmp_path / "asked.json").write_text(json.dumps(given))
    wanted = lerobot(tmp_path)

    base = tmp_path / "base" if (tmp_path / "base").exists() else None
    checkpoint = tmp_path / {"groot raw": "raw", "wall raw": "base"}.get(family, "checkpoint")
    told = {"chosen": {"cameras": CAMERAS, "chunk_length": 3}, "statistics": tmp_path / "stats.json"}
    named = Wanted(base=base, **(told if family == "wall raw" else {}))
    convert(checkpoint, tmp_path / "policy", named)
    policy = load_policy(tmp_path / "policy")
    prompts = None
    if policy.config.reads:
        words = read_tokenizer(tmp_path / "policy")
        prompts = tuple(policy.config.prompt_ids(words, task) for task in TASKS)
    chunk = policy.act(Observation(state, images, prompts), SEEDS, deterministic=True)
    if "path" in chunk.sampled:
        assert torch.equal(chunk.sampled["path"][:, 0], noise)
    torch.testing.assert_close(
        chunk.executed_BCA, wanted[:, : policy.config.chunk_length], rtol=1e-4, atol=1e-4
    )
    assert wanted.std() > 0.1, "actions that say nothing"

    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if not name.endswith("dit.embed_tokens.weight"):  # no checkpoint has it, and nothing reads it
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    save_policy(policy, tmp_path / "trained", tokenizer=tmp_path / "policy" if policy.config.reads else None)
    deploy(checkpoint, tmp_path / "trained", tmp_path / "exported", named)
    found = policy.act(Observation(state, images, prompts), SEEDS, deterministic=True).executed_BCA
    wanted_again = lerobot(tmp_path)[:, : policy.config.chunk_length]
    torch.testing.assert_close(found, wanted_again, rtol=1e-4, atol=1e-4)
    assert (wanted_again - wanted[:, : policy.config.chunk_length]).abs().max() > 1e-2, (
        "weights were not taken"
    )
