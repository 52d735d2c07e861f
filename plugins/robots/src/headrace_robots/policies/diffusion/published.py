"""Diffusion policies as LeRobot publishes them (`lerobot/diffusion_pusht`). Facts: huggingface/lerobot at 005002b."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable

from headrace_robots.policies.diffusion.denoising import ScheduleConfig
from headrace_robots.policies.diffusion.model import DiffusionConfig
from headrace_robots.policies.published import (
    ACTION,
    ENVIRONMENT,
    OLD_STATISTICS,
    STATE,
    Checkpoint,
    LeRobot,
    Wanted,
    config_of,
    renamed,
)
from headrace_robots.policies.scaling import ActionBounds

SAME = (
    *("horizon", "vision_backbone", "resize_shape", "crop_shape", "crop_is_random", "use_group_norm"),
    *("spatial_softmax_num_keypoints", "use_separate_rgb_encoder_per_camera", "down_dims", "kernel_size"),
    *("n_groups", "diffusion_step_embed_dim", "use_film_scale_modulation"),
)
LEFT_OUT = {"n_obs_steps": 2, "n_action_steps": 8, "horizon": 16, "noise_scheduler_type": "DDPM"}
"""What the config.json of first checkpoints leaves out."""


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") == "diffusion"


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    found = LeRobot.of(directory, wanted, left_out=LEFT_OUT)
    stated, moments = found.stated, int(found.stated["n_obs_steps"])
    cameras = found.cameras() if any(each.get("type") == "VISUAL" for each in found.inputs.values()) else ()
    states = [found.bounds(STATE)]
    if ENVIRONMENT in found.inputs:
        if cameras:
            raise ModelNotReadable(f"config.json: {ENVIRONMENT} beside images is not supported")
        states.append(found.bounds(ENVIRONMENT))
    fields: dict[str, Any] = {
        "kind": "diffusion",
        "cameras": cameras,
        **(found.pictures(cameras) if cameras else {}),
        "n_obs_steps": moments,
        "channels": 3 * moments,
        "chunk_length": int(stated["n_action_steps"]),
        "bounds": found.bounds(ACTION),
        "state": ActionBounds(
            low=tuple(low for own in states for low in own.low) * moments,
            high=tuple(high for own in states for high in own.high) * moments,
            clip=False,
        ),
        "schedule": {name: stated[name] for name in ScheduleConfig.model_fields if name in stated},
        "denoising": {
            "sampler": str(stated["noise_scheduler_type"]).lower(),
            "steps": stated.get("num_inference_steps") or stated.get("num_train_timesteps", 100),
        },
        **{name: stated[name] for name in SAME if stated.get(name) is not None},
    }
    config: DiffusionConfig = config_of(DiffusionConfig, fields, wanted)
    return Checkpoint(config, renamed(found.tensors, (), _unused), found.tensors)


def _unused(name: str) -> bool:
    return name.startswith(OLD_STATISTICS) or name.endswith((".pool.pos_grid", ".num_batches_tracked"))
