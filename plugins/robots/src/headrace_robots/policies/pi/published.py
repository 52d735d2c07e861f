"""π0 and π0.5 as LeRobot (`lerobot/pi0_base`, `lerobot/pi05_base`) and openpi (its PyTorch conversion) publish them.

Facts: huggingface/lerobot at 7427f318 (`policies/pi05`, `policies/pi0`), Physical-Intelligence/openpi at 27b8a01
(`models_pytorch`, `transforms.py`, `models/model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from torch import Tensor

from headrace_robots.policies.language import read_tokenizer
from headrace_robots.policies.pi.model import PiConfig
from headrace_robots.policies.pi.words import StateWords
from headrace_robots.policies.published import (
    ACTION,
    OLD_STATISTICS,
    OPENPI_QUANTILE,
    STATE,
    Checkpoint,
    LeRobot,
    Statistics,
    Wanted,
    bounds_by,
    config_of,
    renamed,
)
from headrace_robots.policies.scaling import ActionBounds

GEMMA = {
    "gemma_300m": {"hidden_size": 1024, "intermediate_size": 4096},
    "gemma_2b": {"hidden_size": 2048, "intermediate_size": 16384},
}
LAYERS = {
    "model_type": "gemma",
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 257152,
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

_VLM = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") in ("pi0", "pi05") or "paligemma_variant" in stated


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    found = LeRobot.of(directory, wanted)
    stated = found.stated
    tensors = {name.removeprefix("model."): tensor for name, tensor in found.tensors.items()}
    kind = "pi05" if "time_mlp_in.weight" in tensors else "pi0"
    if stated.get("use_proprioceptive_memory") or stated.get("use_visual_memory"):
        raise ModelNotReadable("config.json: memory of observations (use_…_memory) is not supported")
    if stated.get("use_relative_actions"):
        raise ModelNotReadable(
            "config.json: use_relative_actions is not supported; its actions are not the robot's"
        )
    fields = {
        "kind": kind,
        "model": published_sizes(stated, tensors),
        "chunk_length": int(stated.get("n_action_steps") or stated.get("action_horizon") or 50),
        "flow": {"steps": int(stated.get("num_inference_steps", 10))},
        **_statistics(found, kind),
    }
    if kind == "pi05":
        fields["words"] = StateWords.of(read_tokenizer(wanted.base or directory))
    config: PiConfig = config_of(PiConfig, fields, wanted)
    return Checkpoint(config, own_names(tensors, kind), found.tensors)


def published_sizes(stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of transformers' PI0Config. Raises ModelNotReadable for a variant that is not known."""
    variants = {
        part: stated.get(f"{part}_variant", default)
        for part, default in {"paligemma": "gemma_2b", "action_expert": "gemma_300m"}.items()
    }
    for part, variant in variants.items():
        if variant not in GEMMA:
            raise ModelNotReadable(f"config.json: {part}_variant {variant!r} is none of {', '.join(GEMMA)}")
    text = {**LAYERS, **GEMMA[variants["paligemma"]]}
    places = tensors[f"{_VLM}model.vision_tower.vision_model.embeddings.position_embedding.weight"].shape[0]
    width = tensors["action_in_proj.weight"].shape[1]
    state = tensors["state_proj.weight"].shape[1] if "state_proj.weight" in tensors else width
    times = {name: stated[name] for name in ("min_period", "max_period") if name in stated}
    return {
        "vlm_config": {
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": {**SIGLIP, "image_size": SIGLIP["patch_size"] * math.isqrt(places)},
            "projection_dim": text["hidden_size"],
            "image_token_id": LAYERS["vocab_size"],
        },
        "dit_config": {**LAYERS, **GEMMA[variants["action_expert"]]},
        "chunk_size": int(stated.get("chunk_size") or stated.get("action_horizon") or 50),
        "max_state_dim": int(state),
        "max_action_dim": int(width),
        **times,
    }


def own_names(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """A checkpoint's tensors as the policy names them. The head over words is unused, and ties the words' embedding."""
    vlm = "vlm." if kind == "pi05" else "model.model.vlm."
    words = f"{vlm}language_model.embed_tokens.weight"
    found = renamed(
        tensors,
        (
            (f"{_VLM}model.vision_tower.vision_model.", f"{vlm}vision_tower."),
            (f"{_VLM}model.", vlm),
            (f"{_VLM}lm_head.", f"{vlm}language_model.embed_tokens."),
            (f"{_EXPERT}lm_head.", None),
            (f"{_EXPERT}model.", "expert." if kind == "pi05" else "model.model.dit."),
            ("action_out_proj.", "action_out_proj." if kind == "pi05" else "model.action_out_proj."),
            *(() if kind == "pi05" else (("", "model.embed_action_time."),)),
        ),
        unused=lambda name: name.startswith(OLD_STATISTICS),
    )
    if kind == "pi0":  # no word is read with it, and no checkpoint has it
        rows = found[words].shape[0]
        width = found["model.model.dit.norm.weight"].shape[0]
        found["model.model.dit.embed_tokens.weight"] = found[words].new_zeros(rows, width)
    return found


def _statistics(found: LeRobot, kind: str) -> dict[str, Any]:
    """Bounds of actions and states, and cameras. openpi normalises π0 by mean and deviation, π0.5 by quantiles."""
    if "type" in found.stated:
        cameras = found.cameras()
        bounds = {key: found.bounds(key) for key in (ACTION, STATE)}
    else:
        cameras = tuple(found.wanted.chosen.get("cameras") or OPENPI_CAMERAS)
        bounds = {key: _openpi_bounds(found.statistics, key, kind) for key in (ACTION, STATE)}
    return {"cameras": cameras, "bounds": bounds[ACTION], "state": bounds[STATE]}


def _openpi_bounds(statistics: Statistics, key: str, kind: str) -> ActionBounds:
    found = statistics.get(key)
    if not found:
        raise ModelNotReadable(
            f"the checkpoint has no assets/…/norm_stats.json with {key!r}; give the file by --statistics"
        )
    if kind == "pi0":
        return bounds_by("MEAN_STD", _shifted(found, "std"), key, 0.0)
    return bounds_by("QUANTILES", _shifted(found, "q99"), key, 0.0)


def _shifted(found: Mapping[str, list[float]], name: str) -> dict[str, list[float]]:
    """openpi adds to every deviation, and to every distance of quantiles."""
    return {
        **found,
        **({name: [value + OPENPI_QUANTILE for value in found[name]]} if name in found else {}),
    }
