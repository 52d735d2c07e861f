"""Adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`. Needs no peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from headrace_schema.sections.learning import LoraSection
from safetensors.torch import save_file
from torch import Tensor

from headrace_modelkit.loading import sync_directory
from headrace_modelkit.lora import A, B


def save_adapter(directory: Path, lora: LoraSection, adapters: Mapping[str, Tensor], base: str) -> None:
    """Writes the adapters of a model, by the names that its layers give them, into a new directory.

    `base` is where the model below them was read from.
    """
    directory.mkdir()
    save_file(
        {_peft_name(name): tensor.contiguous() for name, tensor in adapters.items()},
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
        "target_modules": sorted({name.rpartition(".")[0] for name in adapters}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    sync_directory(directory)


def _peft_name(name: str) -> str:
    layer, _, part = name.rpartition(".")
    assert part in (A, B)
    return f"base_model.model.{layer}.{part}.weight"
