"""Configurations of published robot policies, without weights: what a directory's policy.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_robots.policies.openvla.vit import PUBLISHED
from headrace_robots.policies.scaling import ActionBounds

ACTIONS, STATE = 7, 8
"""Numbers of an action and of a state: LIBERO's."""
_LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32064,
    "pad_token_id": 32000,
}
_OPENVLA = {
    "featurizers": [shape.model_dump() for shape in PUBLISHED.values()],
    "text": _LLAMA_2_7B,
    "action_vocabulary": 32000,
    "bounds": ActionBounds.unit(ACTIONS).model_dump(),
}
_GEMMA = {
    "model_type": "gemma",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_hidden_layers": 18,
    "vocab_size": 257152,
}
_PI = {
    "vlm_config": {
        "model_type": "paligemma",
        "projection_dim": 2048,
        "image_token_id": 257151,
        "text_config": _GEMMA | {"hidden_size": 2048, "intermediate_size": 16384},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "dit_config": _GEMMA | {"hidden_size": 1024, "intermediate_size": 4096},
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
}
_PI_RUN = {
    "model": _PI,
    "bounds": ActionBounds.unit(ACTIONS).model_dump(),
    "state": ActionBounds.unit(STATE).model_dump(),
    "cameras": ["image", "wrist"],
    "chunk_length": 10,
    "flow": {"steps": 4, "noise": "sde"},
}
_SMOLVLM = {
    "text_config": {
        "model_type": "llama",
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 16,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 49280,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    "scale_factor": 4,
}
_QWEN3_VL_2B = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "image_token_id": 151655,
}
_QWEN25_VL_3B = {
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "image_token_id": 151655,
}
_RUN = {name: _PI_RUN[name] for name in ("bounds", "state", "cameras")}
ROBOTS: dict[str, dict[str, Any]] = {
    "openvla-7b": _OPENVLA | {"kind": "openvla", "cameras": ["image"]},
    "openvla-oft-7b": _OPENVLA | {"kind": "openvla_oft", "cameras": ["image", "wrist"], "chunk_length": 8},
    "pi0-3b": _PI_RUN | {"kind": "pi0"},
    "smolvla-450m": _RUN | {"kind": "smolvla", "vlm": _SMOLVLM, "chunk_length": 10, "flow": _PI_RUN["flow"]},
    "groot-3b": _RUN | {"kind": "groot", "vlm": _QWEN3_VL_2B, "chunk_length": 10, "flow": _PI_RUN["flow"]},
    "wall-4b": _RUN
    | {
        "kind": "wall",
        "vlm": _QWEN25_VL_3B,
        "state_token": 151657,
        "chunk_length": 10,
        "flow": _PI_RUN["flow"],
    },
    "act-52m": _RUN | {"kind": "act", "height": 480, "width": 640, "chunk_length": 100},
    "diffusion-260m": _RUN
    | {"kind": "diffusion", "height": 96, "width": 96, "crop_shape": [84, 84], "chunk_length": 8}
    | {"denoising": {"steps": 5}},
    "pi05-3b": _PI_RUN | {"kind": "pi05", "words": {"numbers": [[1] * 4] * 257, "ending": [1] * 5}},
}
"""Name → policy.json."""


def write_robot(directory: Path, name: str) -> Path:
    """A directory with the configuration of `name` alone."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.json").write_text(json.dumps(ROBOTS[name]))
    return folder
