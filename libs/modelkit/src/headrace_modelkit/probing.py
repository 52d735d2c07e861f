"""What trainer and engine try a model with as it is loaded: a few tokens, and how far log-probs may be apart.

Knows no forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

OFF = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Nats from the class's own log-probs: the largest in fp32; the mean in bf16, where right models have up to 0.12."""


BROKEN = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)
"""What the code of a model raises that was not written for how it is called here."""


def in_words(error: Exception) -> str:
    """What it is, in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def breaks(path: str, kind: str, error: str, *, by: str) -> str:
    """The error for a model that cannot be computed."""
    return (
        f"model.path: {path!r} breaks in {by} ({error}), which cannot compute a {kind} model; use a model of another "
        "family"
    )


def probe_tokens(architecture: PreTrainedConfig, count: int) -> list[int]:
    """Ids in an order of chance, different ones as far as there are, without those that a configuration has a name for,
    such as an image's.
    """
    text: Any = architecture.get_text_config()
    named = {**architecture.to_dict(), **text.to_dict()}
    marks = [value for key, value in named.items() if key.endswith(("token_id", "token_ids", "token_index"))]
    flat = {each for value in marks for each in (value if isinstance(value, list) else [value])}
    order = torch.randperm(int(text.vocab_size), generator=torch.Generator().manual_seed(0), device="cpu")
    plain = [each for each in order[: count + len(flat)].tolist() if each not in flat]
    return (plain * (count // len(plain) + 1))[:count]


def apart(one: Tensor, other: Tensor) -> Tensor:
    """Distances; 0 where both are the same infinity, or no number. Of hidden states, in their root mean square."""
    same = (one == other) | (one.isnan() & other.isnan())
    scale = 1.0 if one.dim() == 1 else other.float().square().mean().sqrt().clamp(min=1e-6)
    found = (one.float() - other.float()).abs() / scale
    return found.masked_fill(same, 0.0).nan_to_num(nan=float("inf"))


def distance(one: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """What is compared with `OFF`, for a model of this type."""
    found = apart(one, other)
    return float(found.max() if dtype is torch.float32 else found.mean())


def wrong(path: str, kind: str, off: float, *, by: str) -> str:
    """The error for a model whose log-probs are wrong."""
    return (
        f"model.path: {path!r} would be computed wrong by {by}: its log-probs are {off:.2g} nats away from those of "
        f"transformers' own class. A {kind} model does something with its positions or behind its last layer that "
        "Headrace does not compute; use a model of another family, or take keys out of its config.json that its class "
        "does not read"
    )
