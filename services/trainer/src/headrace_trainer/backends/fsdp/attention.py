"""Attention of the trainer's models on a CPU: short sequences in fp32, along the paths of a tree where told so.

A model takes part through transformers' table of attention functions. Knows no packing.

Shapes: R rows, H heads, L nodes of a row, D head dimension, S paths, P nodes of the longest path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace_trainer.learning.packing import Paths

NAME = "headrace_paths"
WIDENED_TOKENS = 512
"""Sequences up to here are attended to in fp32, which loses nothing: torch's CPU kernel, forward and backward together,
is faster in it than in bf16 (twice at 120 tokens; as fast at 512)."""


def attend_along_paths(model: PreTrainedModel, device: torch.device) -> bool:
    """Lets the layers of `model`, which run sdpa over the whole context, take `paths`; False where they cannot.

    A micro-batch that brings no mask is then computed causally, without one being made.
    """
    if device.type != "cpu" or not model._supports_attention_backend:
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.config._attn_implementation = NAME
    return True


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows are padded behind their ends, where a causal model does not look."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    paths: Paths | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    own = [query, key, value]
    if paths is not None:  # in fp32, so that the gradients of a node on several paths add up in it
        own = [_along(paths.nodes_SP, tensor.float()) for tensor in own]
    dtype = torch.float32 if own[0].shape[2] <= WIDENED_TOKENS else query.dtype
    found = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *(tensor.to(dtype) for tensor in own), mask, **options)[0]
    if paths is not None:
        found = found.flatten(0, 1)[paths.places_RL]
    return found.to(query.dtype), None


def _along(nodes_SP: Tensor, tensor_RHLD: Tensor) -> Tensor:
    """(S, H, P, D): what each path's nodes have."""
    nodes = tensor_RHLD.transpose(1, 2).flatten(0, 1)
    return (
        nodes.flatten(1)
        .index_select(0, nodes_SP.flatten())
        .view(*nodes_SP.shape, *nodes.shape[1:])
        .transpose(1, 2)
    )
