"""How large a language model is, by its configuration alone: what engines and their caches need. Knows no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_schema.sections.generating import dividing_sizes

BF16_BYTES = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelSize:
    """Of a decoder with gated feed-forward layers, as the open families have them."""

    parameters: int
    linear_parameters: int
    """Those that engines quantise: all but embeddings and the output head."""
    expert_parameters: int
    adapter_sides: int
    """Inputs and outputs, together, of all linear layers that get an adapter by default: of rank R it has R times so
    many numbers.
    """
    token_bytes: int
    """Keys and values of one token in bfloat16, in all layers."""
    sizes: tuple[int, ...]
    """Tensor parallel sizes that divide its heads."""

    def weight_bytes(self, quantization: object) -> int:
        """Of an engine's weights: in bfloat16, with those that are quantised in a byte each."""
        found = self.expert_parameters if quantization == "int8" else self.linear_parameters
        return BF16_BYTES * self.parameters - (found if quantization else 0)


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """By config.json of its language part; None where that lacks a number or is of another form.

    >>> model_size({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4,
    ...             "intermediate_size": 128, "num_key_value_heads": 2}).token_bytes
    256
    """
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    width, layers, words, heads = (_count(config.get(name)) for name in names)
    inner = _count(config.get("intermediate_size"))
    if not (width and layers and words and heads and inner):
        return None
    keys = _count(config.get("num_key_value_heads")) or heads
    numbers = _count(config.get("head_dim")) or width // heads
    attention = 2 * width * numbers * (heads + keys)
    experts = next((count for name in _EXPERTS if (count := _count(config.get(name)))), 0)
    routed = layers * experts * 3 * width * (_count(config.get("moe_intermediate_size")) or inner)
    linear = layers * attention + (routed or layers * 3 * width * inner)
    embeddings = words * width * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        linear + embeddings,
        linear,
        routed,
        layers * (4 * width + 2 * numbers * (heads + keys) + (0 if routed else 3 * (width + inner))),
        2 * BF16_BYTES * layers * keys * numbers,
        tuple(dividing_sizes(heads, keys)),
    )


def local_config(path: str) -> Mapping[str, Any]:
    """config.json of a local model; empty for an id, and for what cannot be read."""
    try:
        found = json.loads((Path(os.path.expanduser(path)) / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def text_config(path: str) -> Mapping[str, Any]:
    """A local model's configuration, of its language part; empty where `local_config` is."""
    config = local_config(path)
    found = config.get("text_config", config)
    return found if isinstance(found, dict) else {}


def _count(found: object) -> int:
    return found if type(found) is int and found > 0 else 0
