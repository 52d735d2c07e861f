"""A model with its adapters merged into it by plain operations: what backends with adapters are held against."""

from __future__ import annotations

from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection

SCALE = 2.0
"""alpha / rank of the tests' adapters."""


def base_model(backend):
    return load_model(ModelSection(path=backend._config.model.path, dtype=backend._config.model.dtype))


def merged(backend, adapters):
    """W + alpha / rank · B A of every weight, by plain differentiable operations."""
    found = dict(state_tensors(base_model(backend)))
    for name in found:
        layer = name.removesuffix(".weight") if name.endswith(".weight") else f"{name}_adapter"
        if f"{layer}.lora_A" in adapters:
            product = adapters[f"{layer}.lora_B"] @ adapters[f"{layer}.lora_A"]
            found[name] = found[name].detach() + SCALE * product
    return found
