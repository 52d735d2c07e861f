"""Checkpoints as their authors publish them: files, statistics, and what of them a policy takes. Knows no family.

LeRobot's statistics are beside the weights (`policy_preprocessor.json` and the file that it names), in older
checkpoints among them (`normalize_inputs.buffer_…`); openpi's in `assets/…/norm_stats.json`. Executes nothing.
Facts: huggingface/lerobot at 7427f318, Physical-Intelligence/openpi (its `normalize.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import load_weights, state_tensors
from safetensors.torch import load_file
from torch import Tensor

from headrace_robots.policies.peft import Adapter
from headrace_robots.policies.policy import PolicyConfig, RobotPolicy
from headrace_robots.policies.scaling import ActionBounds

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
ENVIRONMENT = "observation.environment_state"
OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
NORMALIZERS = ("normalizer_processor", "groot_n1_7_pack_inputs_v1")
"""Steps of LeRobot's processors that have statistics."""
OPENPI_QUANTILE, LEROBOT_QUANTILE = 1e-6, 1e-8
"""What is added to the distance of two quantiles; LeRobot does where they are equal."""


@dataclass(frozen=True)
class Wanted:
    """What a checkpoint does not state: fields of the policy's configuration (cameras, kind, flow, …), a directory of
    the language model that it began with (tokenizer, sizes), a file of a data set's statistics, and the data set of
    several.
    """

    chosen: Mapping[str, Any] = field(default_factory=dict)
    base: Path | None = None
    statistics: Path | None = None
    unnorm_key: str | None = None
    clip: tuple[float, float] | None = None
    """What an environment takes of each number of an action, where statistics let it lie beyond."""
    beside: Path | None = None
    """The checkpoint that an adapter was trained beside, in place of the one that it names."""
    adapter: Adapter | None = None
    """What is merged on the weights of another checkpoint, which are read in place of the directory's."""


Statistics = Mapping[str, Mapping[str, list[float]]]
"""Numbers by what they are of (STATE, ACTION, a camera's name) and what they say (mean, std, q01, …)."""


def read_json(file: Path) -> dict[str, Any]:
    """Raises ModelNotReadable."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelNotReadable(f"{file} cannot be read: {error}") from error
    return found


def read_tensors(directory: Path, adapter: Adapter | None = None) -> dict[str, Tensor]:
    """All tensors of a checkpoint, in one file or several. Raises ModelNotReadable, OSError and SafetensorError."""
    if adapter is not None:
        return adapter.merged_on(read_tensors(adapter.base))
    index = directory / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    found: dict[str, Tensor] = {}
    for name in files:
        found |= load_file(directory / name)
    return found


def filled(policy: RobotPolicy, found: Mapping[str, Tensor]) -> RobotPolicy:
    """The policy with a checkpoint's tensors, by its own names and in its types.

    Strict: every weight but those that reinforcement learning adds must be there, in its shape, and no other. Raises
    ValueError.
    """
    own = dict(state_tensors(policy))
    added = {name: tensor for name, tensor in own.items() if name.startswith(policy.shape.added)}
    load_weights(policy, {**added, **found})
    return policy


@dataclass(frozen=True)
class Slice:
    """Where a policy's weight lies among those that a checkpoint has for each of several robots; a matrix is turned."""

    name: str
    index: int

    def put(self, tensor: Tensor, weight: Tensor) -> Tensor:
        """`tensor` with the weight in its place."""
        found = tensor.clone()
        found[self.index] = (weight.T if weight.dim() > 1 else weight).to(tensor.dtype)
        return found


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, as a policy has it and as it is."""

    config: PolicyConfig
    own: Mapping[str, Tensor]
    """By the policy's names."""
    published: Mapping[str, Tensor]
    """By its own names; the same tensors, and those that the policy does not use."""
    slices: Mapping[str, Slice] = field(default_factory=dict)
    """Of published tensors that the policy has one part of."""

    def policy(self) -> RobotPolicy:
        """The policy with its weights. Raises ValueError, see `filled`."""
        return filled(self.config.build(seed=0), self.own)

    def with_weights(self, policy: RobotPolicy) -> dict[str, Tensor]:
        """The checkpoint with a policy's weights in place of its own, by its names and in its types.

        Raises ModelNotReadable for a policy of another shape, and for a weight that has no place there.
        """
        weights = {
            name: tensor for name, tensor in state_tensors(policy) if not name.startswith(policy.shape.added)
        }
        misshapen = [
            name
            for name in {**self.own, **weights}
            if name not in weights or name not in self.own or weights[name].shape != self.own[name].shape
        ]
        if misshapen:
            raise ModelNotReadable(
                f"the policy was not made of this checkpoint: they differ in {misshapen[0]}"
            )
        names = {id(tensor): name for name, tensor in self.own.items()}
        found, placed = {}, set()
        for name, tensor in self.published.items():
            part = self.slices.get(name)
            own = part.name if part else names.get(id(tensor)) or self._tied(tensor)
            if own is None:
                found[name] = tensor
            else:
                weight = weights[own].detach()
                found[name] = part.put(tensor, weight) if part else weight.to(tensor.dtype).clone()
            placed.add(own)
        for name in weights.keys() - placed:
            if not torch.equal(weights[name].to(self.own[name].dtype), self.own[name]):
                raise ModelNotReadable(
                    f"{name} has no place in model.safetensors: it lies in a file of its own"
                )
        return found

    def _tied(self, tensor: Tensor) -> str | None:
        """The weight that a matrix which the policy leaves out is equal to, such as the head over words."""
        like = {name: own for name, own in self.own.items() if tensor.dim() > 1 and own.shape == tensor.shape}
        return next((name for name, own in like.items() if torch.equal(own, tensor)), None)


def renamed(
    tensors: Mapping[str, Tensor], rules: Iterable[tuple[str, str | None]], unused: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Tensors by names whose beginning is replaced, by the first rule that fits; without what is unused."""
    found: dict[str, Tensor] = {}
    known = list(rules)
    for name, tensor in tensors.items():
        if unused(name):
            continue
        begin, replacement = next(((old, new) for old, new in known if name.startswith(old)), ("", ""))
        if replacement is not None:
            found[replacement + name.removeprefix(begin)] = tensor
    return found


@dataclass(frozen=True)
class LeRobot:
    """A checkpoint of LeRobot: what its config.json, its weights and its statistics say of any family."""

    stated: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    statistics: Statistics
    wanted: Wanted

    @classmethod
    def of(cls, directory: Path, wanted: Wanted, left_out: Mapping[str, Any] | None = None) -> LeRobot:
        """Reads it; `left_out` is what a config.json may not say. Raises ModelNotReadable, OSError, SafetensorError."""
        tensors = read_tensors(directory, wanted.adapter)
        stated = {**(left_out or {}), **read_json(directory / "config.json")}
        return cls(stated, tensors, read_statistics(directory, tensors, wanted), wanted)

    @property
    def inputs(self) -> Mapping[str, Mapping[str, Any]]:
        """What the policy reads, by name."""
        found: Mapping[str, Mapping[str, Any]] = self.stated.get("input_features", {})
        return found

    def check(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ModelNotReadable where a key has none of these values; the first counts where it is left out."""
        for key, known in supported.items():
            if (value := self.stated.get(key, known[0])) not in known:
                raise ModelNotReadable(f"config.json: {key} {value!r} is not supported, only {known[0]!r}")

    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras: those chosen, or all that the checkpoint states, without what stands before each.

        A camera that is left out is an empty one, which no position attends to. Raises ModelNotReadable.
        """
        named = [
            name.removeprefix(IMAGES)
            for name, feature in self.inputs.items()
            if feature.get("type") == "VISUAL" and ".empty_camera_" not in name
        ]
        chosen = tuple(self.wanted.chosen.get("cameras") or named)
        if not chosen:
            raise ModelNotReadable("config.json states no cameras; name them with --cameras")
        return chosen

    def bounds(self, key: str) -> ActionBounds:
        """What normalises a state (STATE, ENVIRONMENT) or un-normalises actions (ACTION). Raises ModelNotReadable."""
        names = {ACTION: "ACTION", ENVIRONMENT: "ENV"}
        mode = self.stated.get("normalization_mapping", {}).get(names.get(key, "STATE"), "IDENTITY")
        if found := self.statistics.get(key):
            return bounds_by(str(mode), found, key, LEROBOT_QUANTILE)
        feature = {**self.inputs, **self.stated.get("output_features", {})}.get(key) or {}
        if not (size := int((feature.get("shape") or [0])[0])):
            raise ModelNotReadable(
                f"the checkpoint has no statistics of {key!r}; give its data set's meta/stats.json by --statistics"
            )
        return identity(size)

    def pictures(self, cameras: tuple[str, ...]) -> dict[str, Any]:
        """Fields of what a policy sees that reads one size: height, width, and how pixels are normalised.

        Raises ModelNotReadable where cameras differ.
        """
        feature = self.inputs.get(IMAGES + cameras[0]) or self.inputs.get(cameras[0]) or {}
        _, height, width = feature.get("shape") or (3, 0, 0)
        fields = {"height": int(height), "width": int(width)}
        if self.stated.get("normalization_mapping", {}).get("VISUAL", "MEAN_STD") == "IDENTITY":
            return {**fields, "image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}
        own = [
            self.statistics.get(camera) or self.statistics.get(camera.replace(".", "_")) for camera in cameras
        ]
        found = [each for each in own if each]
        if any(each != found[0] for each in found):
            raise ModelNotReadable(
                "the statistics of its cameras differ; give a file in which they are one by --statistics"
            )
        return fields | (
            {f"image_{name}": tuple(found[0][name]) for name in ("mean", "std")} if found else {}
        )


def identity(size: int) -> ActionBounds:
    """Numbers as they are."""
    return ActionBounds(low=(None,) * size, high=(None,) * size, clip=False)


def bounds_by(mode: str, found: Mapping[str, list[float]], key: str, equal: float) -> ActionBounds:
    """Bounds of a way to normalise (LeRobot's names). Raises ModelNotReadable for statistics that it needs.

    `equal` is the distance of two quantiles that are the same.
    """
    names = {"MEAN_STD": ("mean", "std"), "MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99")}
    names["QUANTILE10"] = ("q10", "q90")
    if mode == "IDENTITY":
        return identity(len(next(iter(found.values()))))
    if mode not in names:
        raise ModelNotReadable(f"normalization_mapping: {mode!r} is none of {', '.join(names)}, IDENTITY")
    first, second = names[mode]
    if missing := [name for name in (first, second) if name not in found]:
        raise ModelNotReadable(
            f"the statistics of {key!r} have no {missing[0]}, which {mode} needs; give others by --statistics"
        )
    one, other = (numbers(found[name]) for name in (first, second))
    if mode == "MEAN_STD":
        low = [mean - std for mean, std in zip(one, other, strict=True)]
        high = [mean + std for mean, std in zip(one, other, strict=True)]
    else:
        low, high = one, [b if b != a else a + equal for a, b in zip(one, other, strict=True)]
    return ActionBounds(low=tuple(low), high=tuple(high), clip=False)


def numbers(found: Any) -> list[float]:
    """Numbers of any nesting, flat."""
    if isinstance(found, list):
        return [number for each in found for number in numbers(each)]
    return [float(found)]


# Statistics


def read_statistics(directory: Path, tensors: Mapping[str, Tensor], wanted: Wanted) -> Statistics:
    """Those of the file that is wanted, or of the checkpoint; none where there are none. Raises ModelNotReadable."""
    if wanted.statistics is not None:
        return _of_json(read_json(wanted.statistics))
    if (described := directory / "policy_preprocessor.json").is_file():
        return _of_processor(directory, read_json(described))
    assets = sorted(directory.glob("assets/**/norm_stats.json"))
    if wanted.unnorm_key is not None:
        assets = [file for file in assets if wanted.unnorm_key in file.parent.as_posix()]
    if len(assets) > 1 or (wanted.unnorm_key is not None and not assets):
        have = ", ".join(file.parent.name for file in sorted(directory.glob("assets/**/norm_stats.json")))
        raise ModelNotReadable(
            f"unnorm_key {wanted.unnorm_key!r} names no data set of this checkpoint: {have}"
        )
    return _of_json(read_json(assets[0])) if assets else _of_buffers(tensors)


def _of_json(stated: Mapping[str, Any]) -> Statistics:
    """LeRobot's `meta/stats.json`, or openpi's `norm_stats.json`."""
    stated = stated.get("norm_stats", stated)
    names = {"state": STATE, "actions": ACTION}
    return {
        names.get(key, key.removeprefix(IMAGES)): {
            name: numbers(values) for name, values in each.items() if values is not None
        }
        for key, each in stated.items()
        if isinstance(each, Mapping)
    }


def _of_processor(directory: Path, described: Mapping[str, Any]) -> Statistics:
    files = [
        step["state_file"]
        for step in described.get("steps", ())
        if step.get("registry_name") in NORMALIZERS and step.get("state_file")
    ]
    if not files or not (file := directory / Path(files[0]).name).is_file():
        return {}
    found: dict[str, dict[str, list[float]]] = {}
    for name, tensor in load_file(file).items():
        key, _, what = name.rpartition(".")
        found.setdefault(key.removeprefix(IMAGES), {})[what] = numbers(tensor.flatten().tolist())
    return found


def _of_buffers(tensors: Mapping[str, Tensor]) -> Statistics:
    found: dict[str, dict[str, list[float]]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OLD_STATISTICS):
            key, _, what = name.split(".", 1)[1].removeprefix("buffer_").rpartition(".")
            for whole in (STATE, ACTION, ENVIRONMENT, IMAGES):
                flat = whole.replace(".", "_")
                if key.startswith(flat):
                    key = (whole + key.removeprefix(flat)).removeprefix(IMAGES)
                    break
            found.setdefault(key, {})[what] = numbers(tensor.flatten().tolist())
    return found


def config_of(kind: type[PolicyConfig], fields: Mapping[str, Any], wanted: Wanted) -> Any:
    """A configuration: what the checkpoint states, and what is chosen beside it. Raises ValueError."""
    bounds: ActionBounds = fields["bounds"]
    if wanted.clip is not None:
        bounds = bounds.model_copy(update={"clip": wanted.clip})
    return kind(**{**fields, "bounds": bounds, **wanted.chosen})
