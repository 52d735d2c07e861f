"""SmolVLA as LeRobot publishes it (`lerobot/smolvla_base`). Facts: huggingface/lerobot at 7427f318.

Its config.json names the SmolVLM that it began with, whose own config.json and tokenizer a directory (`--base`) holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from torch import Tensor

from headrace_robots.policies.published import (
    ACTION,
    OLD_STATISTICS,
    STATE,
    Checkpoint,
    LeRobot,
    Wanted,
    config_of,
    read_json,
    renamed,
)
from headrace_robots.policies.smolvla.model import SmolVlaConfig

SIZES = ("text_config", "vision_config", "scale_factor")
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "attention_mode": ("cross_attn",),
    "add_image_special_tokens": (False,),
    "adapt_to_pi_aloha": (False,),
    "self_attn_every_n_layers": (2, *range(1, 33)),
}
"""What else a config.json may say is not read."""


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") == "smolvla"


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    found = LeRobot.of(directory, wanted)
    found.check(SUPPORTED)
    stated, tensors = found.stated, own_names(found.tensors)
    fields = {
        "kind": "smolvla",
        "vlm": _vlm(stated, wanted, tensors),
        "horizon": int(stated.get("chunk_size", 50)),
        "chunk_length": int(stated.get("n_action_steps", 50)),
        "action_width": int(stated.get("max_action_dim", 32)),
        "state_width": int(stated.get("max_state_dim", 32)),
        "expert_width": float(stated.get("expert_width_multiplier", 0.75)),
        "self_attention_every": int(stated.get("self_attn_every_n_layers", 2)),
        "min_period": float(stated.get("min_period", 4e-3)),
        "max_period": float(stated.get("max_period", 4.0)),
        "flow": {"steps": int(stated.get("num_steps", 10))},
        "cameras": found.cameras(),
        "bounds": found.bounds(ACTION),
        "state": found.bounds(STATE),
    }
    config: SmolVlaConfig = config_of(SmolVlaConfig, fields, wanted)
    return Checkpoint(config, tensors, found.tensors)


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors as the policy names them; the head over words is unused."""
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    rules = (
        ("vlm_with_expert.vlm.lm_head.", None),
        ("vlm_with_expert.vlm.model.", "vlm."),
        ("vlm_with_expert.lm_expert.", "expert."),
    )
    return renamed(plain, rules, unused=lambda name: name.startswith(OLD_STATISTICS))


def _vlm(stated: Mapping[str, Any], wanted: Wanted, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sizes of the language model, with the layers that are kept. Raises ModelNotReadable."""
    if wanted.base is None:
        raise ModelNotReadable(
            f"config.json names the model that it began with, {stated.get('vlm_model_name')!r}: give a directory with "
            "its config.json and its tokenizer by --base"
        )
    base = read_json(wanted.base / "config.json")
    if missing := [name for name in SIZES if name not in base]:
        raise ModelNotReadable(f"{wanted.base / 'config.json'} states no {missing[0]}; is it a SmolVLM?")
    layers = {name.split(".")[3] for name in found if name.startswith("vlm.text_model.layers.")}
    expert = {name.split(".")[2] for name in found if name.startswith("expert.layers.")}
    if layers != expert:
        raise ModelNotReadable(
            f"the expert has {len(expert)} layers and the language model {len(layers)}: only as many are supported"
        )
    text = {**base["text_config"], "num_hidden_layers": len(layers)}
    sides = stated.get("resize_imgs_with_padding") or [512, 512]
    if len(set(sides)) > 1:
        raise ModelNotReadable(f"config.json: resize_imgs_with_padding {sides} is no square")
    return {**{name: base[name] for name in SIZES}, "text_config": text}
