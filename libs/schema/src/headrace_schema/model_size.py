"""How large a language model is, by its configuration alone: what engines and their caches need. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_schema.hub import HUB_ID, hub_config
from headrace_schema.sections.generating import ModelSection, dividing_sizes
from headrace_schema.stores import described

BF16_BYTES = 2
KEPT_WIDTH, KEPT_INNER, KEPT_EXPERT = 20.5, 8.0, 5.0
"""Bytes that a layer keeps of a token: for each unit of its width (norms, attention, both residuals), for each of its
feed-forward's (gate, up, the gate's activation, their product), and for each of the width again an expert.
"""
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
    layers: int
    width: int
    head: int
    """Weights of the output's layer."""
    active_parameters: int
    """Those that one token is computed with."""
    kept_bytes: float
    """Activations that a layer keeps of a token for its backward, in bfloat16, by the trainer's kernels."""

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
    own = (_count(config.get("moe_intermediate_size")) or inner) if experts else inner
    chosen = _count(config.get("num_experts_per_tok")) if experts else 1
    routed = layers * experts * 3 * width * own
    linear = layers * attention + (routed or layers * 3 * width * inner)
    embeddings = words * width * (1 if config.get("tie_word_embeddings") else 2)
    return ModelSize(
        linear + embeddings,
        linear,
        routed,
        layers * (4 * width + 2 * numbers * (heads + keys) + (0 if routed else 3 * (width + inner))),
        2 * BF16_BYTES * layers * keys * numbers,
        tuple(dividing_sizes(heads, keys)),
        layers,
        width,
        words * width,
        layers * (attention + chosen * 3 * width * own) + embeddings,
        KEPT_WIDTH * width + KEPT_EXPERT * chosen * width * bool(experts) + KEPT_INNER * chosen * own,
    )


def model_config(model: ModelSection) -> Mapping[str, Any]:
    """config.json of a directory, or of an id of the hub by this host's cache or the hub; empty where there is none."""
    path = model.path
    try:
        found = json.loads((described(path) / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return hub_config(path, model.revision).config if is_hub_id(path) else {}


def unread_config(model: ModelSection) -> str:
    """Why the configuration of an id of the hub is not known here; empty where it is, and of directories."""
    if not is_hub_id(model.path) or model_config(model):
        return ""
    return hub_config(model.path, model.revision).missing


def is_hub_id(path: str) -> bool:
    """Whether a model is one of the hub, owner/name, and no directory of that name is here."""
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def text_config(model: ModelSection) -> Mapping[str, Any]:
    """A model's configuration, of its language part; empty where `model_config` is."""
    config = model_config(model)
    found = config.get("text_config", config)
    return found if isinstance(found, dict) else {}


def _count(found: object) -> int:
    return found if type(found) is int and found > 0 else 0
