"""PPO moves every kind of robot policy toward rewarded actions, at each level of log-probs.

A bandit: the reward of a chunk is how near its first numbers come to a target; of `cnn` the image's brightness is the
target, so that it has to be seen. Tiny random models, one process.
"""

from __future__ import annotations

import algorithm_losses as losses
import pytest
import torch
from headrace_robots.policies.directory import freeze, policy_config
from headrace_robots.policies.policy import Observation, at_level
from headrace_trainer import algorithms as alg

BATCH = 48
UNIT = {"low": (-1.0, -1.0), "high": (1.0, 1.0)}
VIT = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 16, "image_size": 14, "patch_size": 14}
LLAMA = {
    "vocab_size": 364,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 14,
    "vision_use_head": False,
}
PI = {
    "vlm_config": {
        "model_type": "paligemma",
        "text_config": GEMMA,
        "vision_config": SIGLIP,
        "projection_dim": 16,
        "image_token_id": 63,
    },
    "dit_config": GEMMA,
    "chunk_size": 3,
    "max_state_dim": 2,
    "max_action_dim": 4,
}
OPENVLA = {
    "featurizers": [VIT],
    "text": LLAMA,
    "action_vocabulary": 300,
    "bounds": UNIT,
    "cameras": ["image"],
}
OFT = {"kind": "openvla_oft", **OPENVLA, "chunk_length": 2}
PI0 = {"kind": "pi0", "model": PI, "bounds": UNIT, "state": UNIT, "cameras": ["image"], "chunk_length": 2}
NUMBERS = {"numbers": [[5 + number % 50] for number in range(257)], "ending": [7]}
PI05 = {**PI0, "kind": "pi05", "words": NUMBERS}
SMOLVLA = {
    "kind": "smolvla",
    "vlm": {
        "text_config": {**GEMMA, "model_type": "llama", "hidden_size": 32, "pad_token_id": 0},
        "vision_config": {**SIGLIP, "image_size": 28},
        "scale_factor": 2,
    },
    "horizon": 3,
    "action_width": 4,
    "state_width": 2,
    **{name: PI0[name] for name in ("bounds", "state", "cameras", "chunk_length")},
}
GROOT = {
    "kind": "groot",
    "vlm": {
        "text_config": {
            **{name: GEMMA[name] for name in GEMMA if name != "model_type"},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_heads": 1,
            "num_position_embeddings": 4,
            "out_hidden_size": 16,
            "patch_size": 7,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 5,  # the prompt's second word is where the picture goes
    },
    "pictures": {"height": 14, "width": 14, "least": 1},
    "horizon": 3,
    "places": 3,
    "action_width": 4,
    "state_width": 2,
    "hidden": 16,
    "layers": 4,
    "heads": 2,
    "head_size": 8,
    "mixers": 1,
    "mixer_heads": 2,
    **{name: PI0[name] for name in ("bounds", "state", "cameras", "chunk_length")},
}
WALL = {
    "kind": "wall",
    "vlm": {
        "text_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 60,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "patch_size": 7,
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 5,  # the prompt's second word is where the picture goes, the third where the state does
    },
    "pictures": {"side": 28, "least": 1},
    "state_token": 6,
    "expert_width": 16,
    "horizon": 3,
    "action_width": 4,
    "state_width": 2,
    **{name: PI0[name] for name in ("bounds", "state", "cameras", "chunk_length")},
}
ACT = {
    "kind": "act",
    **{name: PI0[name] for name in ("bounds", "state", "cameras", "chunk_length")},
    "height": 14,
    "width": 14,
    "horizon": 3,
    "dim_model": 16,
    "n_heads": 2,
    "dim_feedforward": 24,
    "n_encoder_layers": 2,
    "latent_dim": 4,
    "n_vae_encoder_layers": 1,
    "log_std": -1.2,
}
DIFFUSION = {
    "kind": "diffusion",
    **{name: PI0[name] for name in ("bounds", "state", "cameras", "chunk_length")},
    "height": 14,
    "width": 14,
    "horizon": 4,
    "spatial_softmax_num_keypoints": 4,
    "down_dims": (8, 16),
    "kernel_size": 3,
    "n_groups": 4,
    "diffusion_step_embed_dim": 8,
    "denoising": {"steps": 3, "least_width": 0.2},
}
CNN = {"kind": "cnn", "bounds": UNIT, "cameras": ["image"], "height": 36, "width": 36}

KINDS = {
    "cnn": (CNN, "action", 24, 1e-3),
    "openvla": ({"kind": "openvla", **OPENVLA}, "token", 12, 3e-3),
    "openvla_oft tokens": (OFT, "action", 16, 3e-3),
    "openvla_oft l1": ({**OFT, "head": "l1", "log_std": -1.2}, "chunk", 10, 3e-4),
    "pi0 flow-noise": (
        {**PI0, "flow": {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.2, 0.4)}},
        "chunk",
        14,
        3e-3,
    ),
    "pi05 flow-sde": ({**PI05, "flow": {"steps": 3}}, "chunk", 12, 3e-3),
    "smolvla flow-noise": (
        {**SMOLVLA, "flow": {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.2, 0.4)}},
        "chunk",
        14,
        3e-3,
    ),
    "smolvla flow-cps": (
        {**SMOLVLA, "flow": {"steps": 3, "noise": "cps", "drawn": "all"}},
        "chunk",
        14,
        3e-3,
    ),
    "groot flow-noise": (
        {**GROOT, "flow": {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.2, 0.4)}},
        "chunk",
        14,
        3e-3,
    ),
    "wall flow-noise": (
        {**WALL, "flow": {"steps": 3, "noise": "learned", "drawn": "all", "width": (0.2, 0.4)}},
        "chunk",
        14,
        3e-3,
    ),
    "act": (ACT, "chunk", 16, 3e-3),
    "diffusion": (DIFFUSION, "chunk", 14, 3e-3),
}


def world(seed, size, *, by_pixels):
    """(observation, (B,) targets)."""
    generator = torch.Generator().manual_seed(seed)
    bright = torch.randint(0, 256, (BATCH,), generator=generator) if by_pixels else torch.full((BATCH,), 180)
    image = bright[:, None, None, None].expand(BATCH, size, size, 3).to(torch.uint8)
    observation = Observation(torch.zeros(BATCH, 2), {"image": image}, ((1, 5, 6),) * BATCH)
    return observation, bright / 127.5 - 1 if by_pixels else torch.full((BATCH,), 0.5)


def reward(chunk, target_B):
    return 1 - (chunk.executed_BCA[..., 0] - target_B[:, None]).abs().mean(1)


@pytest.mark.parametrize("name", KINDS)
def test_ppo_moves_a_policy_toward_rewarded_actions(name):
    fields, level, iterations, rate = KINDS[name]
    policy, by_pixels = policy_config(fields).build(seed=0), name == "cnn"
    freeze(policy, ["vision"] if name == "act" else [])  # a new ResNet has no norms to hold its features
    size = 36 if by_pixels else 14
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=rate)
    earned = []
    for iteration in range(iterations):
        observation, target_B = world(iteration, size, by_pixels=by_pixels)
        chunk = policy.act(observation, range(iteration * BATCH, (iteration + 1) * BATCH))
        earned.append(reward(chunk, target_B).mean())
        old, mask = at_level(chunk.log_probs_BCA, chunk.valid_BC, level)
        advantages_B = alg.whiten(reward(chunk, target_B))
        for _ in range(4):
            now, _ = at_level(
                policy.evaluate(observation, chunk.sampled).log_probs_BCA, chunk.valid_BC, level
            )
            spread = advantages_B.view(-1, *[1] * (now.dim() - 1)).expand_as(now)
            loss = losses.ppo_loss(now.flatten(1), old.flatten(1), spread.flatten(1), mask.flatten(1)).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    before, after = (torch.stack(part).mean() for part in (earned[:2], earned[-3:]))
    assert after - before > 0.1
