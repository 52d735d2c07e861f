"""How a GR00T checkpoint is read, whoever wrote it: NVIDIA's files or LeRobot's processors. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from torch import Tensor

from headrace_robots.policies.published import (
    ACTION,
    STATE,
    Statistics,
    Wanted,
    numbers,
    read_json,
    read_statistics,
)

PACKED, SEEN = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1"
LIBERO, LIBERO_EXECUTES = "libero_sim", 8
"""NVIDIA's own evaluation on LIBERO executes half a chunk."""
PLAIN = {
    "image_target_size": (256, 256),
    "image_crop_size": (230, 230),
    "shortest_image_edge": None,
    "crop_fraction": None,
}
"""How pictures are scaled where a checkpoint does not say it."""


@dataclass(frozen=True)
class Read:
    """How a checkpoint is read, whoever wrote it."""

    sizes: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """By NVIDIA's names."""
    statistics: Statistics
    seen: Mapping[str, Any]
    embodiment: str
    index: int
    cameras: tuple[str, ...]
    taught: int
    executed: int
    plain: bool
    clip_state: bool


# LeRobot's


def of_lerobot(
    directory: Path, stated: Mapping[str, Any], tensors: Mapping[str, Tensor], wanted: Wanted
) -> Read:
    """Sizes of the heads are those of the checkpoint that it began with, where that is a directory; else N1.7's."""
    steps = {
        str(step.get("registry_name")): step.get("config") or {}
        for step in read_json(directory / "policy_preprocessor.json").get("steps", ())
    }
    packed = steps.get(PACKED)
    if packed is None:
        raise ModelNotReadable(f"policy_preprocessor.json has no step {PACKED}: it is of no GR00T N1.7")
    began = Path(str(stated.get("base_model_path"))) / "config.json"
    sizes = {**(read_json(began) if began.is_file() else {}), **_given(stated, "num_inference_timesteps")}
    sizes |= _given(stated, "use_relative_actions", "max_state_dim", "max_action_dim")
    _refuse_relative(packed.get("modality_config") or {})
    features = stated.get("input_features", {})
    named = [
        name.removeprefix("observation.images.")
        for name, each in features.items()
        if each.get("type") == "VISUAL"
    ]
    taught = min(int(packed.get("valid_action_horizon", 40)), int(stated.get("chunk_size", 40)))
    statistics = dict(read_statistics(directory, tensors, wanted))
    size = int(stated["output_features"]["action"]["shape"][0])
    if ACTION in statistics:
        statistics[ACTION] = {name: values[:size] for name, values in statistics[ACTION].items()}
    embodiment = str(packed.get("embodiment_tag", "new_embodiment"))
    if wanted.chosen.get("embodiment", embodiment) != embodiment:
        raise ModelNotReadable(
            f"the checkpoint is of embodiment {embodiment!r} alone: leave --embodiment out"
        )
    return Read(
        sizes,
        {name.removeprefix("_groot_model."): tensor for name, tensor in tensors.items()},
        statistics,
        steps.get(SEEN, PLAIN),
        embodiment,
        int(packed.get("embodiment_mapping", {}).get(embodiment, 0)),
        tuple(packed.get("video_modality_keys") or sorted(named)),
        taught,
        min(int(stated.get("n_action_steps", 40)), _executed(embodiment, taught)),
        bool(packed.get("formalize_language", True)),
        bool(packed.get("clip_outliers", True)),
    )


def _given(stated: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: stated[name] for name in names if stated.get(name) is not None}


def _executed(embodiment: str, taught: int) -> int:
    return min(taught, LIBERO_EXECUTES) if embodiment == LIBERO else taught


# NVIDIA's


def of_nvidia(
    directory: Path, stated: Mapping[str, Any], tensors: Mapping[str, Tensor], wanted: Wanted
) -> Read:
    told = read_json(directory / "processor_config.json").get("processor_kwargs") or {}
    modalities = told.get("modality_configs") or {}
    embodiment = _embodiment(modalities, wanted)
    of_this = modalities[embodiment]
    indices = read_json(directory / "embodiment_id.json")
    if embodiment not in indices:
        raise ModelNotReadable(f"embodiment_id.json has no number of embodiment {embodiment!r}")
    if told.get("use_relative_action"):
        _refuse_relative(of_this)
    if len((of_this.get("video") or {}).get("delta_indices") or [0]) > 1:
        raise ModelNotReadable(
            f"processor_config.json: embodiment {embodiment!r} reads several moments of video; only one is supported"
        )
    if wanted.statistics is not None:
        statistics = read_statistics(directory, {}, wanted)
    else:
        known = read_json(directory / "statistics.json").get(embodiment) or {}
        by_share = bool(told.get("use_percentiles", False))
        statistics = {
            key: _flat(known.get(name) or {}, of_this.get(name) or {}, name, by_share)
            for key, name in ((STATE, "state"), (ACTION, "action"))
        }
    taught = len(
        (of_this.get("action") or {}).get("delta_indices") or range(int(stated.get("action_horizon", 40)))
    )
    return Read(
        stated,
        tensors,
        statistics,
        {**told, **(PLAIN if told.get("image_target_size") is None else {})},
        embodiment,
        int(indices[embodiment]),
        tuple((of_this.get("video") or {}).get("modality_keys") or ()),
        taught,
        _executed(embodiment, taught),
        bool(told.get("formalize_language", True)),
        bool(told.get("clip_outliers", True)),
    )


def _embodiment(modalities: Mapping[str, Any], wanted: Wanted) -> str:
    chosen = wanted.chosen.get("embodiment") or (
        LIBERO if LIBERO in modalities else next(iter(modalities), None) if len(modalities) == 1 else None
    )
    if chosen not in modalities:
        raise ModelNotReadable(
            f"embodiment {chosen!r} is none of this checkpoint's: {', '.join(sorted(modalities))}; choose one by "
            "--embodiment"
        )
    return str(chosen)


def _refuse_relative(modalities: Mapping[str, Any]) -> None:
    """Raises ModelNotReadable for actions that are relative to a state."""
    action = modalities.get("action") or {}
    for name, each in zip(
        action.get("modality_keys") or (), action.get("action_configs") or (), strict=False
    ):
        if str((each or {}).get("rep", "")).lower().endswith("relative"):
            raise ModelNotReadable(
                f"processor_config.json: action {name!r} is relative to the state, which is not supported"
            )


def _flat(
    known: Mapping[str, Any], config: Mapping[str, Any], what: str, by_share: bool
) -> dict[str, list[float]]:
    """The least and greatest of each number, group by group in the checkpoint's order."""
    names = {"min": "q01", "max": "q99"} if by_share else {"min": "min", "max": "max"}
    groups = config.get("modality_keys") or ()
    for group in groups:
        if missing := [name for name in names.values() if name not in (known.get(group) or {})]:
            raise ModelNotReadable(
                f"statistics.json: {what}.{group} has no {missing[0]}; give others by --statistics"
            )
    return {
        name: [each for group in groups for each in numbers(known[group][own])] for name, own in names.items()
    }
