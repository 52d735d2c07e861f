"""ACT as LeRobot publishes it (`lerobot/act_aloha_sim_transfer_cube_human`). Facts: huggingface/lerobot at 7427f318."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable

from headrace_robots.policies.act.model import ActConfig
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

SAME = ("vision_backbone", "pre_norm", "feedforward_activation", "dim_model", "n_heads", "dim_feedforward")
COUNTS = (
    "n_encoder_layers",
    "n_decoder_layers",
    "use_vae",
    "latent_dim",
    "n_vae_encoder_layers",
    "kl_weight",
)
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "temporal_ensemble_coeff": (None,),
    "replace_final_stride_with_dilation": (False, None),
    "n_obs_steps": (1, None),
}
UNUSED = ("model.vae_encoder_pos_enc", *OLD_STATISTICS)


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return stated.get("type") == "act"


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    found = LeRobot.of(directory, wanted)
    found.check(SUPPORTED)
    if ENVIRONMENT in found.inputs:
        raise ModelNotReadable(f"config.json: {ENVIRONMENT} is not supported; give images")
    cameras = found.cameras()
    fields = {
        "kind": "act",
        "cameras": cameras,
        **found.pictures(cameras),
        "horizon": int(found.stated.get("chunk_size", 100)),
        "chunk_length": int(found.stated.get("n_action_steps", 100)),
        "bounds": found.bounds(ACTION),
        "state": found.bounds(STATE) if STATE in found.inputs else None,
        **{name: found.stated[name] for name in (*SAME, *COUNTS) if name in found.stated},
    }
    config: ActConfig = config_of(ActConfig, fields, wanted)
    return Checkpoint(config, renamed(found.tensors, (), lambda name: name.startswith(UNUSED)), found.tensors)
