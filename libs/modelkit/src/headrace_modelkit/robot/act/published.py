"""ACT as LeRobot publishes it (`lerobot/act_aloha_sim_transfer_cube_human`). Facts: huggingface/lerobot at 7427f318."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.act.model import ActConfig
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

SAME = ("vision_backbone", "pre_norm", "feedforward_activation", "dim_model", "n_heads", "dim_feedforward")
COUNTS = (
    "n_encoder_layers",
    "n_decoder_layers",
    "use_vae",
    "latent_dim",
    "n_vae_encoder_layers",
    "kl_weight",
)
SUPPORTED = {
    "temporal_ensemble_coeff": None,
    "replace_final_stride_with_dilation": False,
    "n_obs_steps": 1,
}
UNUSED = ("model.vae_encoder_pos_enc", *OLD_STATISTICS)


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") == "act"


def read(directory: Path, wanted: Wanted) -> RobotPolicy:
    """The policy of a checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    stated = read_json(directory / "config.json")
    for key, known in SUPPORTED.items():
        if (value := stated.get(key, known) or known) != known:
            raise ModelNotReadable(f"config.json: {key} {value!r} is not supported, only {known!r}")
    if ENVIRONMENT in stated.get("input_features", {}):
        raise ModelNotReadable(f"config.json: {ENVIRONMENT} is not supported; give images")
    tensors = read_tensors(directory)
    statistics = read_statistics(directory, tensors, wanted)
    cameras = lerobot_cameras(stated, wanted)
    _, height, width = (stated["input_features"].get(IMAGES + cameras[0]) or {}).get("shape") or (3, 0, 0)
    reads_state = STATE in stated.get("input_features", {})
    fields = {
        "kind": "act",
        "cameras": cameras,
        "height": int(height),
        "width": int(width),
        **lerobot_pixels(stated, statistics, cameras),
        "horizon": int(stated.get("chunk_size", 100)),
        "chunk_length": int(stated.get("n_action_steps", 100)),
        "bounds": lerobot_bounds(stated, statistics, ACTION),
        "state": lerobot_bounds(stated, statistics, STATE) if reads_state else None,
        **{name: stated[name] for name in (*SAME, *COUNTS) if name in stated},
    }
    config: ActConfig = config_of(ActConfig, fields, wanted)
    return filled(config.build(seed=0), renamed(tensors, (), unused=lambda name: name.startswith(UNUSED)))
