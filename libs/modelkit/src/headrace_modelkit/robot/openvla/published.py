"""OpenVLA as its authors publish it. Facts: see `openvla.model`.

OFT publishes its action head and proprio projector as pickles, which are not read: `action_head.safetensors` and
`proprio_projector.safetensors` stand beside the weights in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.openvla.model import OpenVlaConfig
from headrace_modelkit.robot.openvla.vit import PUBLISHED
from headrace_modelkit.robot.policy import RobotPolicy
from headrace_modelkit.robot.published import Wanted, config_of, filled, read_json, read_tensors
from headrace_modelkit.robot.scaling import ActionBounds

_PARTS = {"action_head": "action_head.", "proprio_projector": "proprio_projector."}


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return "timm_model_ids" in stated


def read(directory: Path, wanted: Wanted) -> RobotPolicy:
    """The policy of a checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    config = published_config(directory, wanted)
    return filled(config.build(seed=0), _tensors(directory))


def published_config(directory: Path, wanted: Wanted) -> OpenVlaConfig:
    """The configuration of a checkpoint. OFT's `dataset_statistics.json` counts before `norm_stats`.

    Raises ModelNotReadable, and ValueError for choices that do not fit.
    """
    stated = read_json(directory / "config.json")
    try:
        names = [str(name) for name in stated["timm_model_ids"]]
        text = dict(stated["text_config"])
        padding, bins = int(stated["pad_to_multiple_of"]), int(stated["n_action_bins"])
    except KeyError as error:
        raise ModelNotReadable(
            f"{directory / 'config.json'} states no {error}; is it an OpenVLA checkpoint?"
        ) from error
    if missing := [name for name in names if name not in PUBLISHED]:
        raise ModelNotReadable(f"{missing[0]} is no known vision encoder; these are: {', '.join(PUBLISHED)}")
    statistics = directory / "dataset_statistics.json"
    norms = read_json(statistics) if statistics.is_file() else stated.get("norm_stats") or {}
    action = _of_data_set(norms, wanted.unnorm_key)["action"]
    fields = {
        "kind": "openvla",
        "cameras": ("image",),
        "featurizers": tuple(PUBLISHED[name] for name in names),
        "text": text,
        "action_vocabulary": int(text["vocab_size"]) - padding,
        "bins": bins,
        "bounds": ActionBounds.of_statistics(action["q01"], action["q99"], action.get("mask")),
    }
    config: OpenVlaConfig = config_of(OpenVlaConfig, fields, wanted)
    return config


def _tensors(directory: Path) -> dict[str, Tensor]:
    found = read_tensors(directory)
    for name, prefix in _PARTS.items():
        if (file := directory / f"{name}.safetensors").is_file():
            found |= {prefix + key: tensor for key, tensor in load_file(file).items()}
    return found


def _of_data_set(norms: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    if key is None and len(norms) == 1:
        key = next(iter(norms))
    if key is None or key not in norms:
        raise ModelNotReadable(
            f"unnorm_key {key!r} names no data set of this checkpoint: {', '.join(sorted(norms))}"
        )
    chosen: Mapping[str, Any] = norms[key]
    return chosen
