"""Attention of one pass over rows whose keys lie in several tensors: the model's own function, once for each.

A model takes part through transformers' table of attention functions. Knows no cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from headrace_modelkit.attending import Reach
from headrace_modelkit.invariant import NAME as INVARIANT
from headrace_modelkit.invariant import plain_attention
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PREFIX = "headrace_"


@dataclass(frozen=True)
class Parts:
    """Keys or values of consecutive rows, [n, H, L, D] each, and what each part's attention must not see."""

    tensors: list[Tensor]
    masks: list[Tensor]


def attend_by_parts(model: PreTrainedModel) -> bool:
    """Lets `model` take Parts from its cache; False where its layers use attention of their own."""
    text = model.config.get_text_config()
    own = text._attn_implementation
    if not model._supports_attention_backend or own not in ("sdpa", "eager", INVARIANT):
        return False
    AttentionInterface.register(_PREFIX + own, attend)
    AttentionMaskInterface.register(_PREFIX + own, ALL_MASK_ATTENTION_FUNCTIONS[own])
    text._attn_implementation = _PREFIX + own  # a vision tower keeps its own
    return True


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """In the body the model attends as its class has it."""
    text: Any = model.config.get_text_config()
    name = text._attn_implementation
    text._attn_implementation = name.removeprefix(_PREFIX)
    try:
        with plain_attention([model]):
            yield
    finally:
        text._attn_implementation = name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Parts,
    value: Tensor | Parts,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention; (N, T, H, D)."""
    own = _own(module)
    if not isinstance(key, Parts):
        return own(module, query, key, value, attention_mask, **options)[0], None
    assert isinstance(value, Parts)
    if len(key.tensors) == 1:
        return own(module, query, key.tensors[0], value.tensors[0], key.masks[0], **options)[0], None
    queries = torch.split(query, [len(tensor) for tensor in key.tensors])
    parts = zip(queries, key.tensors, value.tensors, key.masks, strict=True)
    return torch.cat([own(module, *part, **options)[0] for part in parts]), None


def _own(module: nn.Module) -> Any:
    config: Any = module.config
    name = str(config._attn_implementation).removeprefix(_PREFIX)
    if name == "eager":  # no entry of the table: each model file has its own
        return vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return ALL_ATTENTION_FUNCTIONS[name]


def mask_of(position_NT: Tensor, visible: int, dtype: torch.dtype, reach: Reach | None) -> Tensor:
    """(N, 1, T, L) -inf where a token at one of these positions does not see a key."""
    key_L = torch.arange(visible, device=position_NT.device)
    hidden_NTL = key_L > position_NT[:, :, None]
    if reach is not None:
        hidden_NTL |= key_L < reach.first(position_NT)[:, :, None]
    mask_NTL = torch.zeros(hidden_NTL.shape, dtype=dtype, device=position_NT.device)
    return mask_NTL.masked_fill_(hidden_NTL, float("-inf"))[:, None]
