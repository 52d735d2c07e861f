"""LoRA adapters as peft writes them, merged on the weights that they were trained beside. Knows no family, no peft.

Shapes: a weight (O, I) has A (R, I) and B (O, R), in files `lora_A.weight` and `lora_B.weight` behind its layer's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.lora import merged_weight
from safetensors.torch import load_file
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
NOTHING: tuple[Any, ...] = (None, False, "none", {}, [])
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": NOTHING,
    "bias": NOTHING,
    "lora_bias": NOTHING,
    "fan_in_fan_out": NOTHING,
    "rank_pattern": NOTHING,
    "alpha_pattern": NOTHING,
    "layer_replication": NOTHING,
    "target_parameters": NOTHING,
    "init_lora_weights": (True, False, "gaussian", None),
}
"""What else an adapter_config.json may say changes more than a product of two matrices, and is not read."""


@dataclass(frozen=True)
class Adapter:
    """A directory with adapters, what it says of them, and the checkpoint that they were trained beside."""

    directory: Path
    stated: Mapping[str, Any]
    base: Path

    def __post_init__(self) -> None:
        """Raises ModelNotReadable where a key has a value that is not read."""
        for key, known in SUPPORTED.items():
            if (value := self.stated.get(key, known[0])) not in known:
                raise ModelNotReadable(f"{CONFIG}: {key} {value!r} is not supported, only {known[0]!r}")

    def merged_on(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The base's weights with the adapters in them, and layers that were trained whole in place of theirs.

        Raises ModelNotReadable for what has no place, and OSError and SafetensorError.
        """
        found = load_file(self.directory / WEIGHTS)
        stray = [name for name in found if not name.startswith(PREFIX)]
        if stray:
            raise ModelNotReadable(
                f"{WEIGHTS}: {stray[0]} is no tensor of peft's LoRA, which begin with {PREFIX}"
            )
        alpha, root = float(self.stated.get("lora_alpha", 8)), bool(self.stated.get("use_rslora"))
        own = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        return merged(weights, own, lambda rank: alpha / (rank**0.5 if root else rank))


def merged(
    weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: Callable[[int], float]
) -> dict[str, Tensor]:
    """Weights with W + scale(R) · B A in place of W; a name that is one of theirs takes its place.

    Raises ModelNotReadable for an adapter that lacks its other half, or that no weight fits.
    """
    found = dict(weights)
    for name, tensor in adapters.items():
        if name.endswith(B) and name.removesuffix(B) + A in adapters:
            continue
        layer = name.removesuffix(A)
        weight = f"{layer}.weight" if name.endswith(A) else name
        if weight not in weights:
            raise ModelNotReadable(
                f"the adapter's {name} has no weight in the checkpoint that it was trained beside"
            )
        before, shape = weights[weight], tuple(tensor.shape)
        if name.endswith(A):
            if layer + B not in adapters:
                raise ModelNotReadable(f"the adapter has {name} and no {layer}{B}")
            up = adapters[layer + B]
            shape = (up.shape[0], tensor.shape[1])
        if shape != tuple(before.shape):
            raise ModelNotReadable(
                f"the adapter's {name} is of {shape}, and {weight} is {tuple(before.shape)}"
            )
        if name.endswith(A):
            found[weight] = merged_weight(before, tensor.float(), up.float(), scale(len(tensor)))
        else:
            found[weight] = tensor.to(before.dtype)
    return found
