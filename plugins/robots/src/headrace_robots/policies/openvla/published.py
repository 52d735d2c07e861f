"""OpenVLA as its authors publish it. Facts: see `openvla.model`.

OFT publishes its action head, its projectors and, of FiLM, its vision backbone as pickles beside the weights,
`action_head--150000_checkpoint.pt`, which are not read: `action_head.safetensors` and its like stand there in their
place. What is there is a part of the policy, and is never left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from safetensors.torch import load_file
from torch import Tensor

from headrace_robots.policies.openvla.model import OpenVlaConfig
from headrace_robots.policies.openvla.vit import PUBLISHED
from headrace_robots.policies.peft import merged
from headrace_robots.policies.published import Checkpoint, Wanted, config_of, read_json, read_tensors
from headrace_robots.policies.scaling import ActionBounds

_HEAD, _PROJECTOR, _NOISY, _EYE = (
    "action_head",
    "proprio_projector",
    "noisy_action_projector",
    "vision_backbone",
)
_ALPHA = 16
"""The most that OFT's adapters are scaled by; the vision backbone of FiLM has them beside its weights."""
_PICKLES = (".pt", ".pth", ".bin")


def recognises(stated: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of such a checkpoint."""
    return "timm_model_ids" in stated


def read(directory: Path, wanted: Wanted) -> Checkpoint:
    """A checkpoint. Raises ModelNotReadable, ValueError, OSError and SafetensorError."""
    config = published_config(directory, wanted)
    published = read_tensors(directory, wanted.adapter)
    own = {
        name: each for name, each in published.items() if not (config.film and name.startswith(f"{_EYE}."))
    }
    return Checkpoint(config, {**own, **_parts(directory)}, published)


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
    numbers = _of_data_set(norms, wanted.unnorm_key)
    action = numbers["action"]
    fields = {
        "kind": "openvla",
        "cameras": ("image",),
        "featurizers": tuple(PUBLISHED[name] for name in names),
        "text": text,
        "action_vocabulary": int(text["vocab_size"]) - padding,
        "bins": bins,
        "bounds": ActionBounds.of_statistics(action["q01"], action["q99"], action.get("mask")),
    }
    fields |= _of_oft(directory, numbers, wanted)
    config: OpenVlaConfig = config_of(OpenVlaConfig, fields, wanted)
    return config


def _of_oft(directory: Path, numbers: Mapping[str, Any], wanted: Wanted) -> dict[str, Any]:
    """What the parts beside the weights say of the policy. Raises ModelNotReadable for one that would be left out."""
    head, projector, noisy, eye = (_beside(directory, name) for name in (_HEAD, _PROJECTOR, _NOISY, _EYE))
    if not (head or projector or noisy or eye):
        return {}
    found: dict[str, Any] = {"kind": "openvla_oft"}
    if wanted.chosen.get("kind", "openvla_oft") != "openvla_oft":
        raise ModelNotReadable(
            f"{directory} holds parts of OFT ({head or projector or noisy or eye}): set --kind openvla_oft"
        )
    if eye:
        found["film"] = True
    if bool(noisy) != (head != "" and _denoises(directory / head)):
        raise ModelNotReadable(
            f"{directory} holds {noisy or head}: a diffusion head has both {_HEAD}.safetensors, with a "
            f"noise_predictor, and {_NOISY}.safetensors"
        )
    if head:
        found["head"] = "diffusion" if noisy else "l1"
        if wanted.chosen.get("head", found["head"]) != found["head"]:
            raise ModelNotReadable(
                f"{directory} holds {head}, and --head is no {found['head']}: set it, or remove the file"
            )
    if projector:
        found["proprio"] = wanted.chosen.get("proprio") or _of_state(numbers, projector)
    if "chunk_length" not in wanted.chosen:
        raise ModelNotReadable(
            "no file states OFT's chunk: give --chunk-length (published for LIBERO: 8, ALOHA: 25)"
        )
    return found


def _of_state(numbers: Mapping[str, Any], projector: str) -> ActionBounds:
    state = numbers.get("proprio")
    if not isinstance(state, Mapping) or not {"q01", "q99"} <= set(state):
        raise ModelNotReadable(
            f"{projector} reads a state, and the statistics have no quantiles of it (proprio: q01, q99): put OFT's "
            "dataset_statistics.json beside it"
        )
    return ActionBounds.of_statistics(state["q01"], state["q99"], state.get("mask"))


def _beside(directory: Path, part: str) -> str:
    """Name of the file that a part of OFT is in; "" for none. Raises ModelNotReadable for a pickle alone."""
    if (directory / f"{part}.safetensors").is_file():
        return f"{part}.safetensors"
    pickles = sorted(
        file.name for file in directory.glob(f"{part}*") if file.suffix in (*_PICKLES, ".safetensors")
    )
    if pickles:
        raise ModelNotReadable(
            f"{directory} holds {pickles[0]}, and only {part}.safetensors is read: where you trust the file, write its "
            "tensors there with safetensors.torch.save_file"
        )
    return ""


def _denoises(head: Path) -> bool:
    return any("noise_predictor." in name for name in load_file(head))


def _parts(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in (_HEAD, _PROJECTOR, _NOISY):
        if (file := directory / f"{name}.safetensors").is_file():
            # OFT saves what torch's data parallelism wraps.
            found |= {
                f"{name}.{key.removeprefix('module.')}": tensor for key, tensor in load_file(file).items()
            }
    if (file := directory / f"{_EYE}.safetensors").is_file():
        found |= _seen_by_film(load_file(file))
    return found


def _seen_by_film(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vision backbone under the policy's names: a block's own weights are one level up, adapters are merged."""
    plain = {
        key.removeprefix("module.")
        .replace(".block.", ".")
        .replace(".base_layer.", ".")
        .replace(".default.", "."): tensor
        for key, tensor in tensors.items()
    }
    adapters = {key: tensor for key, tensor in plain.items() if ".lora_" in key}
    weights = {key: tensor for key, tensor in plain.items() if key not in adapters}
    return merged(weights, adapters, lambda rank: min(rank, _ALPHA) / rank)


def _of_data_set(norms: Mapping[str, Any], key: str | None) -> Mapping[str, Any]:
    if key is None and len(norms) == 1:
        key = next(iter(norms))
    if key is None or key not in norms:
        raise ModelNotReadable(
            f"unnorm_key {key!r} names no data set of this checkpoint: {', '.join(sorted(norms))}"
        )
    chosen: Mapping[str, Any] = norms[key]
    return chosen
