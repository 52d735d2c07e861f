"""GR00T N1.7 as NVIDIA publishes it (`nvidia/GR00T-N1.7-3B`) and as LeRobot saves it. Facts: LeRobot v0.6.1.

NVIDIA's checkpoints say how they are read in `processor_config.json`, `statistics.json` and `embodiment_id.json`, by
the name of an embodiment; LeRobot's in the steps of `policy_preprocessor.json`. Of weights that there are for each
embodiment a policy has those of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from torch import Tensor

from headrace_robots.policies.groot.model import GrootConfig
from headrace_robots.policies.groot.processors import SEEN, Read, of_lerobot, of_nvidia
from headrace_robots.policies.published import (
    ACTION,
    STATE,
    Checkpoint,
    LeRobot,
    Slice,
    Statistics,
    Wanted,
    bounds_by,
    config_of,
    read_json,
    read_tensors,
    renamed,
)
from headrace_robots.policies.qwen import processor_fields
from headrace_robots.policies.scaling import ActionBounds

NVIDIA, LEROBOT = "Gr00tN1d7", "groot"
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_alternate_vl_dit": (True,),
    "use_vlln": (True,),
    "add_pos_embed": (True,),
    "state_history_length": (1,),
    "exclude_state": (False,),
    "use_mean_std": (False,),
    "apply_sincos_state_encoding": (False,),
    "noise_beta_beta": (1.0,),
    "backbone_model_type": ("qwen",),
    "use_relative_actions": (False,),
}
"""What else a config.json may say is not read."""
FIELDS = {
    "horizon": ("action_horizon", 40),
    "hidden": ("hidden_size", 1024),
    "turn": ("attend_text_every_n_blocks", 2),
    "places": ("max_seq_len", 1024),
    "buckets": ("num_timestep_buckets", 1000),
    "action_width": ("max_action_dim", 132),
    "state_width": ("max_state_dim", 132),
    "beta": ("noise_beta_alpha", 1.5),
    "last_time": ("noise_s", 0.999),
}
"""Ours → NVIDIA's key, and what it is where there is no key."""
DIT = {"num_layers": 32, "num_attention_heads": 32, "attention_head_dim": 48}
MIXERS = {"num_layers": 4, "num_attention_heads": 32}
PARTS = {
    ("diffusion_model_cfg", "norm_type"): ("ada_norm", "ada_norm"),
    ("diffusion_model_cfg", "interleave_self_attention"): (False, True),
    ("diffusion_model_cfg", "positional_embeddings"): ("sinusoidal", None),
    ("vl_self_attention_cfg", "positional_embeddings"): ("sinusoidal", None),
}
"""Of parts of a config.json: what a key is where the part leaves it out, and what is read."""

_HEAD = "action_head."
_OF_EACH = ("state_encoder.", "action_encoder.", "action_decoder.")
_READER = "reader."


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint, or of another GR00T."""
    kinds = (stated.get("type"), stated.get("model_type"), *(stated.get("architectures") or ()))
    return any(str(kind).lower().startswith(("groot", "gr00t")) for kind in kinds)


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    stated = read_json(directory / "config.json")
    published = read_tensors(directory, wanted.adapter)
    if stated.get("type") == LEROBOT:
        found = of_lerobot(directory, stated, published, wanted)
    elif stated.get("model_type") == NVIDIA:
        found = of_nvidia(directory, stated, published, wanted)
    else:
        raise ModelNotReadable(
            f"config.json: {stated.get('model_type')!r} is not supported, only {NVIDIA!r} (GR00T N1.7): the language "
            "model of an older GR00T is code in its checkpoint, which is never executed"
        )
    _check(found.sizes)
    whole, slices = own_names(found)
    base = _base(wanted, found.sizes)
    fields = {
        "kind": "groot",
        "embodiment": found.embodiment,
        "vlm": _vlm(base, whole),
        "pictures": _pictures(found.seen, base),
        "plain": found.plain,
        "clip_state": found.clip_state,
        "taught": found.taught,
        "chunk_length": found.executed,
        "cameras": wanted.chosen.get("cameras") or found.cameras,
        "bounds": _bounds(found.statistics, ACTION),
        "state": _bounds(found.statistics, STATE),
        **{name: found.sizes.get(key, default) for name, (key, default) in FIELDS.items()},
        **_transformers(found.sizes),
        "flow": {"steps": int(found.sizes.get("num_inference_timesteps", 4))},
    }
    config: GrootConfig = config_of(GrootConfig, fields, wanted)
    own = whole | {name: _cut(found.tensors[each], found.index) for each, name in slices.items()}
    placed = {each: Slice(name, found.index) for each, name in slices.items()}
    prefix = "_groot_model." if stated.get("type") == LEROBOT else ""
    return Checkpoint(config, own, published, {f"{prefix}{name}": each for name, each in placed.items()})


def _check(sizes: Mapping[str, Any]) -> None:
    """Raises ModelNotReadable where a key has a value that is not read."""
    LeRobot(sizes, {}, {}, Wanted()).check(SUPPORTED)
    for (part, key), (unstated, known) in PARTS.items():
        if part in sizes and (value := (sizes[part] or {}).get(key, unstated)) != known and sizes[part]:
            raise ModelNotReadable(f"config.json: {part}.{key} {value!r} is not supported, only {known!r}")


def _transformers(sizes: Mapping[str, Any]) -> dict[str, Any]:
    dit = {**DIT, **sizes.get("diffusion_model_cfg", {})}
    mixers = {**MIXERS, **(sizes.get("vl_self_attention_cfg", MIXERS) or {"num_layers": 0})}
    return {
        "layers": dit["num_layers"],
        "heads": dit["num_attention_heads"],
        "head_size": dit["attention_head_dim"],
        "mixers": mixers["num_layers"],
        "mixer_heads": mixers["num_attention_heads"],
    }


def _bounds(statistics: Statistics, key: str) -> ActionBounds:
    if not (found := statistics.get(key)):
        raise ModelNotReadable(
            f"the checkpoint has no statistics of {key!r}; give its data set's meta/stats.json by --statistics"
        )
    bounds = bounds_by("MIN_MAX", found, key, 0.0)
    return bounds.model_copy(update={"clip": True}) if key == ACTION else bounds


# Weights, and what the language model's directory says


def own_names(found: Read) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors as the policy names them, and of those that there are for each embodiment NVIDIA's names → ours). The
    norm behind the last layer is unused, and so is the head over words, unless it stands for their embedding.
    """
    tensors = dict(found.tensors)
    words, head = "backbone.model.model.language_model.embed_tokens.weight", "backbone.model.lm_head.weight"
    if head in tensors and words not in tensors:
        tensors[words] = tensors[head]
    each = {
        name: f"{name.removeprefix(_HEAD)}"
        for name in tensors
        if name.startswith(tuple(_HEAD + p for p in _OF_EACH))
    }
    whole = renamed(
        {name: tensor for name, tensor in tensors.items() if name not in each},
        (
            ("backbone.model.model.visual.", "eye."),
            ("backbone.model.model.language_model.norm.", None),
            ("backbone.model.model.language_model.", _READER),
            ("backbone.model.lm_head.", None),
            (f"{_HEAD}vlln.", "normed."),
            (f"{_HEAD}vl_self_attention.transformer_blocks.", "mixers."),
            (f"{_HEAD}model.transformer_blocks.", "dit.blocks."),
            (f"{_HEAD}model.timestep_encoder.timestep_embedder.", "dit.time."),
            (f"{_HEAD}model.", "dit."),
            (_HEAD, ""),
        ),
        unused=lambda name: False,
    )
    parts = {".W": ".weight", ".b": ".bias"}
    return whole, {name: own[:-2] + parts[own[-2:]] for name, own in each.items()}


def _cut(tensor: Tensor, index: int) -> Tensor:
    """One embodiment's, as a linear layer has it."""
    if index >= len(tensor):
        raise ModelNotReadable(
            f"embodiment number {index}: the checkpoint has weights of {len(tensor)} embodiments"
        )
    return tensor[index].T if tensor.dim() == 3 else tensor[index]


def _base(wanted: Wanted, sizes: Mapping[str, Any]) -> Path:
    if wanted.base is None:
        name = sizes.get("model_name", "nvidia/Cosmos-Reason2-2B")
        raise ModelNotReadable(
            f"the checkpoint began with {name!r}: give a directory with its config.json and tokenizer by --base"
        )
    return wanted.base


def _vlm(base: Path, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sizes of the language model, with the layers that are kept. Raises ModelNotReadable."""
    stated = read_json(base / "config.json")
    if missing := [name for name in ("text_config", "vision_config", "image_token_id") if name not in stated]:
        raise ModelNotReadable(f"{base / 'config.json'} states no {missing[0]}; is it a Qwen3-VL?")
    layers = {name.split(".")[2] for name in found if name.startswith("reader.layers.")}
    text = {**stated["text_config"], "num_hidden_layers": len(layers)}
    return {
        "text_config": text,
        "vision_config": stated["vision_config"],
        "image_token_id": stated["image_token_id"],
    }


def _pictures(seen: Mapping[str, Any], base: Path) -> dict[str, Any]:
    if not seen.get("image_target_size"):
        raise ModelNotReadable(
            f"the step {SEEN} has no image_target_size: pictures as they come are not supported"
        )
    height, width = seen["image_target_size"]
    crop, edge = seen.get("crop_fraction"), seen.get("shortest_image_edge")
    if crop is None and seen.get("image_crop_size"):
        crop = seen["image_crop_size"][0] / height
    return {
        "height": height,
        "width": width,
        "edge": edge,
        "crop": crop if crop and 0 < crop < 1 else 1.0,
        "square": bool(seen.get("letter_box_transform", False)),
        "by_area": bool(seen.get("use_albumentations", False)),
        **processor_fields(base),
    }
