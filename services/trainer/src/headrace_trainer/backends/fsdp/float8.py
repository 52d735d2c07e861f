"""Products of a model's layers in fp8, by torchao's linear layers: what they need, and what they take.

Each row of a factor has a scale of its own, so that no token's products hang on what lies beside it. Weights, gradients
and what is kept for the backward pass stay as they are. On a CPU the same numbers are computed in wider products.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from headrace_schema.openings import TrainerConfig
from torch import nn

from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import invalid

KEY = "trainer.backend_options.fp8"
SIZES = 16
"""Inputs and outputs of a layer are multiples of it, or its products stay as they are."""
_CAPABILITY = (9, 0)
"""Of the first GPUs that multiply rows with scales of their own."""


def check_float8(options: FsdpOptions, config: TrainerConfig, *, sees: bool) -> None:
    """Raises Refusal INVALID where products in fp8 were asked for and cannot be had."""
    if not options.fp8:
        return
    beside = {
        "deterministic": config.deterministic,
        "trainer.lora": config.trainer.lora is not None,
        "model.dtype: float32": config.model.dtype == "float32",
        "a model that reads images": sees,
    }
    for name in (name for name, there in beside.items() if there):
        raise invalid(f"{KEY}: does not go with {name}; leave one of them out", key=KEY)
    if missing := _missing():
        raise invalid(f"{KEY}: {missing}; leave it out", key=KEY)


def _missing() -> str:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU of compute capability 9.0 (Hopper) or later, and the trainer's host has none"
    if (found := torch.cuda.get_device_capability()) < _CAPABILITY:
        has = ".".join(map(str, found))
        return f"it needs a GPU of compute capability 9.0 (Hopper) or later, and the trainer's has {has}"
    return (
        ""
        if find_spec("torchao")
        else "the trainer's host has no torchao: pip install 'headrace-trainer[fp8]'"
    )


def linear_layers(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Those that can multiply in fp8, each with where it is."""
    return [
        (parent, name, child)
        for layer in layers
        for parent in layer.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not child.in_features % SIZES and not child.out_features % SIZES
    ]


def multiply_in_float8(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Has the linear layers below these multiply in fp8; their weights stay what and where they are."""
    from torchao.float8 import Float8LinearConfig  # of an extra
    from torchao.float8.float8_linear import Float8Linear

    chosen: Any = Float8LinearConfig.from_recipe_name("rowwise")
    made: Any = Float8Linear
    # Padded: a weight's gradient sums over tokens, of which there is any number.
    config = replace(chosen, pad_inner_dim=True, emulate=device.type == "cpu")
    for parent, name, layer in linear_layers(layers):
        setattr(parent, name, made.from_float(layer, config=config))


def copied_bytes(layers: Iterable[nn.Module], tokens: int) -> int:
    """Most fp8 copies that one backward of so many tokens has at a time: of a weight, what came in, and twice of what
    comes back.
    """
    return max(
        (
            each.weight.numel() + tokens * (each.in_features + 2 * each.out_features)
            for _, _, each in linear_layers(layers)
        ),
        default=0,
    )
