"""Adapters as files: as peft writes them, without peft.

Shapes: O outputs, I inputs of a layer, R rank, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from pathlib import Path

from headrace_schema.sections.learning import LoraSection
from safetensors.torch import save_file
from torch import Tensor

from headrace_modelkit.experts import ADAPTER, PROJECTIONS
from headrace_modelkit.loading import sync_directory
from headrace_modelkit.lora import A, B


def save_adapter(directory: Path, lora: LoraSection, adapters: Mapping[str, Tensor], base: str) -> None:
    """Writes the adapters of a model, by the names that its layers give them, into a new directory.

    `base` is where the model below them was read from. Those of experts need peft 0.17 or later (`target_parameters`).
    """
    directory.mkdir()
    layers = {name.rpartition(".")[0] for name in adapters}
    tensors = {name.removesuffix(ADAPTER) for name in layers if name.endswith(ADAPTER)}
    save_file(
        {
            f"base_model.model.{_peft_layer(layer, tensors)}.{part}.weight": _as_peft_has(
                tensor, part
            ).contiguous()
            for (layer, part), tensor in ((_parted(name), tensor) for name, tensor in adapters.items())
        },
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # Whole names: the last part of one may be that of the head or of a layer without adapter too.
        "target_modules": sorted(name for name in layers if not name.endswith(ADAPTER)),
        **({"target_parameters": sorted(tensors)} if tensors else {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sync_directory(directory)


def _parted(name: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(".")
    assert part in (A, B)
    return layer, part


def _peft_layer(layer: str, tensors: Set[str]) -> str:
    """peft wraps a layer of experts once for each of its tensors with an adapter: the last one is outermost."""
    if not layer.endswith(ADAPTER):
        return layer
    owner, _, name = layer.removesuffix(ADAPTER).rpartition(".")
    outer = [each for each in PROJECTIONS[PROJECTIONS.index(name) + 1 :] if f"{owner}.{each}" in tensors]
    return owner + ".base_layer" * len(outer)


def _as_peft_has(tensor: Tensor, part: str) -> Tensor:
    """Of experts (E · R, I) and (O, R · E), whose columns go through the experts for each of the ranks."""
    if tensor.dim() == 2:
        return tensor
    return tensor.flatten(0, 1) if part == A else tensor.permute(1, 2, 0).flatten(1)
