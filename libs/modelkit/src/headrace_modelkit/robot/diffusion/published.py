"""Diffusion policies as LeRobot publishes them (`lerobot/diffusion_pusht`). Facts: huggingface/lerobot at 005002b."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.diffusion.denoising import ScheduleConfig
from headrace_modelkit.robot.diffusion.model import DiffusionConfig
from headrace_modelkit.robot.policy import RobotPolicy
from headrace_modelkit.robot.published import (
    ACTION,
    ENVIRONMENT,
    IMAGES,
    OLD_STATISTICS,
    STATE,
    Wanted,
    config_of,
    filled,
    lerobot_bounds,
    lerobot_cameras,
    lerobot_pixels,
    read_json,
    read_statistics,
    read_tensors,
    renamed,
)
from headrace_modelkit.robot.scaling import ActionBounds

SAME = (
    *("horizon", "vision_backbone", "resize_shape", "crop_shape", "crop_is_random", "use_group_norm"),
    *("spatial_softmax_num_keypoints", "use_separate_rgb_encoder_per_camera", "down_dims", "kernel_size"),
    *("n_groups", "diffusion_step_embed_dim", "use_film_scale_modulation"),
)
DEFAULTS = {"n_obs_steps": 2, "n_action_steps": 8, "horizon": 16, "noise_scheduler_type": "DDPM"}
"""What the config.json of first checkpoints leaves out."""


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") == "diffusion"


def read(directory: Path, wanted: Wanted) -> RobotPolicy:
    """The policy of a checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    stated = {**DEFAULTS, **read_json(directory / "config.json")}
    tensors = read_tensors(directory)
    statistics = read_statistics(directory, tensors, wanted)
    seen = stated.get("input_features", {})
    moments = int(stated["n_obs_steps"])
    states = [lerobot_bounds(stated, statistics, STATE)]
    pictures = any(feature.get("type") == "VISUAL" for feature in seen.values())
    cameras = lerobot_cameras(stated, wanted) if pictures else ()
    if ENVIRONMENT in seen:
        if cameras:
            raise ModelNotReadable(f"config.json: {ENVIRONMENT} beside images is not supported")
        states.append(lerobot_bounds(stated, statistics, ENVIRONMENT))
    fields: dict[str, Any] = {
        "kind": "diffusion",
        "cameras": cameras,
        "n_obs_steps": moments,
        "channels": 3 * moments,
        "chunk_length": int(stated["n_action_steps"]),
        "bounds": lerobot_bounds(stated, statistics, ACTION),
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
    if cameras:
        _, height, width = (seen.get(IMAGES + cameras[0]) or seen.get(cameras[0]) or {}).get("shape") or (
            3,
            0,
            0,
        )
        fields |= {"height": int(height), "width": int(width), **lerobot_pixels(stated, statistics, cameras)}
    config: DiffusionConfig = config_of(DiffusionConfig, fields, wanted)
    return filled(config.build(seed=0), renamed(tensors, (), unused=_unused))


def _unused(name: str) -> bool:
    return name.startswith(OLD_STATISTICS) or name.endswith((".pool.pos_grid", ".num_batches_tracked"))
