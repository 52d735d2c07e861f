"""WALL-OSS as X-Square publishes it (`x-square-robot/wall-oss-flow`) and as LeRobot saves it. Facts: LeRobot v0.6.1.

X-Square's directory has the sizes, the tokenizer and the weights of the model that every fine-tuning begins with;
LeRobot's has weights alone, and names that directory, which `--base` gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from torch import Tensor

from headrace_robots.policies.language import read_tokenizer
from headrace_robots.policies.published import (
    ACTION,
    STATE,
    Checkpoint,
    LeRobot,
    Wanted,
    config_of,
    read_json,
    read_statistics,
    read_tensors,
    renamed,
)
from headrace_robots.policies.qwen import processor_fields
from headrace_robots.policies.wall.model import STATE_TOKEN, WallConfig

LEROBOT, X_SQUARE = "wall_x", "Qwen2_5_VLMoEForAction"
SUPPORTED: Mapping[str, tuple[Any, ...]] = {"prediction_mode": ("diffusion",), "n_obs_steps": (1,)}
"""Of LeRobot's config.json: what is read; `fast` draws tokens of actions."""
SIZES: Mapping[str, tuple[Any, ...]] = {
    "mlp_moe": (True,),
    "attention_moe": (False,),
    "use_sliding_window": (False,),
    "hidden_act": ("silu",),
}
"""Of the model's."""
TEXT = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
)
"""Keys of the language model, which older files have beside `vision_config`."""
WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT = re.compile(r"model\.layers\.(\d+)\.moe\.experts\.(\d+)\.")


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    of_x_square = X_SQUARE in (stated.get("architectures") or ()) or "dof_config" in stated
    return stated.get("type") == LEROBOT or of_x_square


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    if read_json(directory / "config.json").get("type") == LEROBOT:
        found, prefix = LeRobot.of(directory, wanted), "model."
        found.check(SUPPORTED)
        base = _base(found)
    else:
        tensors = read_tensors(directory, wanted.adapter)
        statistics = read_statistics(directory, tensors, wanted)
        modes = {"normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}}
        found, prefix = LeRobot(modes, tensors, statistics, wanted), ""
        base = directory
    named = {name.removeprefix(prefix): tensor for name, tensor in found.tensors.items()}
    stated = read_json(base / "config.json")
    fields = {
        "kind": "wall",
        "pictures": processor_fields(base),
        "state_token": _state_token(base),
        "cameras": found.cameras(),
        "bounds": found.bounds(ACTION),
        "state": found.bounds(STATE),
        "horizon": found.stated.get("chunk_size", 32),
        "chunk_length": found.stated.get("n_action_steps", 32),
        "action_width": _width(found.stated, "max_action_dim", stated, "dof_config"),
        "state_width": _width(found.stated, "max_state_dim", stated, "agent_pos_config"),
        **_sizes(stated, named),
    }
    config: WallConfig = config_of(WallConfig, fields, wanted)
    return Checkpoint(config, own_names(named), found.tensors)


def _base(found: LeRobot) -> Path:
    if found.wanted.base is None:
        name = found.stated.get("pretrained_name_or_path", "x-square-robot/wall-oss-flow")
        raise ModelNotReadable(
            f"the checkpoint began with {name!r}: give a directory with its config.json and tokenizer by --base"
        )
    return found.wanted.base


def _state_token(base: Path) -> int:
    found = read_tokenizer(base).get_vocab().get(STATE_TOKEN)
    if found is None:
        raise ModelNotReadable(f"the tokenizer in {base} has no {STATE_TOKEN}; is it that of WALL-OSS?")
    return int(found)


def _width(own: Mapping[str, Any], key: str, sizes: Mapping[str, Any], parts: str) -> int:
    """Numbers that are drawn or read: LeRobot's key, which is the sum of the model's. Raises ModelNotReadable."""
    if not (known := sizes.get(parts)):
        raise ModelNotReadable(f"the model's config.json states no {parts}; is it that of WALL-OSS?")
    width = sum(int(part) for part in known.values())
    if (stated := own.get(key, width)) != width:
        raise ModelNotReadable(f"config.json: {key} is {stated}, and the model's {parts} has {width} numbers")
    return width


def _sizes(stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of the model's sizes. Raises ModelNotReadable for what is not read."""
    text = stated.get("text_config") or stated
    LeRobot({**text, **stated}, {}, {}, Wanted()).check(SIZES)
    experts = text.get("experts") or stated.get("experts") or []
    widths = text.get("dim_inputs") or stated.get("dim_inputs") or []
    if len(experts) < 2 or "vision_config" not in stated or "image_token_id" not in stated:
        raise ModelNotReadable(
            "the model's config.json states no vision_config, image_token_id, or two of experts"
        )
    hidden = text["hidden_size"]
    if any(each.get("hidden_act", "silu") != "silu" for each in experts[:2]) or set(widths[:2]) != {hidden}:
        raise ModelNotReadable(
            f"config.json: dim_inputs {list(widths)} and experts other than silu are not supported, only {hidden} for "
            "each expert, which is hidden_size"
        )
    head = tensors.get(WORDS, tensors.get(HEAD))
    if head is None:
        raise ModelNotReadable(f"model.safetensors has no {WORDS}")
    chosen = {name: text[name] for name in TEXT if text.get(name) is not None}
    more = {"intermediate_size": experts[0]["intermediate_size"], "vocab_size": len(head)}
    return {
        "vlm": {
            "text_config": {**chosen, **more},
            "vision_config": stated["vision_config"],
            "image_token_id": stated["image_token_id"],
        },
        "expert_width": experts[1]["intermediate_size"],
    }


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as the policy names them. The head over words is unused, unless it stands for their embedding; so are
    experts that no token goes to, and statistics of X-Square's data sets."""
    ours = {"0": "reader.mlps", "1": "expert"}
    named = {
        _EXPERT.sub(lambda each: f"{ours.get(each[2], 'unused')}.{each[1]}.", name): tensor
        for name, tensor in tensors.items()
    }
    if HEAD in named and WORDS not in named:
        named[WORDS] = named[HEAD]
    return renamed(
        named,
        (
            ("visual.", "eye."),
            ("model.", "reader."),
            ("unused.", None),
            ("lm_head.", None),
            ("action_preprocessor.normalizer", None),
            ("action_preprocessor.", "action_head."),
        ),
        unused=lambda name: False,
    )
