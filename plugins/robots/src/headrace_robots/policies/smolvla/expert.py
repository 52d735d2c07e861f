"""The action expert of `smolvla`: Llama's layers, narrower, which read keys and values of the prefix layer by layer.

The first of so many layers attends to the prefix and, causally, to the actions; the others project the prefix's
keys and values and attend to those alone. Shapes as in `flow_policy`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

# transformers' modules are not annotated.
_Mlp: Any = LlamaMLP
_Norm: Any = LlamaRMSNorm
_Rotary: Any = LlamaRotaryEmbedding
_turned: Any = apply_rotary_pos_emb

MULTIPLE = 256


def expert_sizes(text: Any, hidden: int) -> Any:
    """The language model's configuration, with the widths of an expert."""
    sizes = copy.deepcopy(text)
    between = 4 * int(2 * hidden / 3)
    sizes.hidden_size, sizes.intermediate_size = hidden, MULTIPLE * -(-between // MULTIPLE)
    return sizes


class SmolVlaExpert(nn.Module):
    """As many layers as the language model has."""

    def __init__(self, sizes: Any, text: Any, every: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            _ExpertLayer(sizes, text, crosses=bool(index % every)) for index in range(sizes.num_hidden_layers)
        )
        self.norm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.rotary = _Rotary(sizes)

    def forward(self, hidden: Tensor, cache: Any, mask_BN: Tensor) -> Tensor:
        """(B, H, F) features of (B, H, F) embeddings."""
        length = hidden.shape[1]
        places_H = torch.arange(length, device=hidden.device)
        behind = self.rotary(hidden, places_H + mask_BN.sum(-1, keepdim=True))
        alone = self.rotary(hidden, places_H[None])
        to_prefix = mask_BN[:, None, :].expand(-1, length, -1)
        causal = (places_H <= places_H[:, None])[None].expand(len(mask_BN), -1, -1)
        seen = torch.cat([to_prefix, causal], -1)
        for layer, prefix in zip(self.layers, cache.layers, strict=True):
            chosen = (alone, to_prefix) if layer.crosses else (behind, seen)
            hidden = layer(hidden, prefix.keys, prefix.values, *chosen)
        found: Tensor = self.norm(hidden)
        return found


class _ExpertLayer(nn.Module):
    def __init__(self, sizes: Any, text: Any, *, crosses: bool) -> None:
        super().__init__()
        self.crosses = crosses
        self.self_attn = _ExpertAttention(sizes, text, crosses=crosses)
        self.mlp = _Mlp(sizes)
        self.input_layernorm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.post_attention_layernorm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, angles: Any, seen: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), keys, values, angles, seen)
        found: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class _ExpertAttention(nn.Module):
    def __init__(self, sizes: Any, text: Any, *, crosses: bool) -> None:
        super().__init__()
        self.crosses, self.head = crosses, int(sizes.head_dim)
        queries, read = sizes.num_attention_heads * self.head, sizes.num_key_value_heads * self.head
        given = text.num_key_value_heads * text.head_dim if crosses else sizes.hidden_size
        bias = bool(sizes.attention_bias)
        self.q_proj = nn.Linear(sizes.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(given, read, bias=bias)
        self.v_proj = nn.Linear(given, read, bias=bias)
        self.o_proj = nn.Linear(queries, sizes.hidden_size, bias=bias)

    def forward(self, hidden: Tensor, keys: Tensor, values: Tensor, angles: Any, seen: Tensor) -> Tensor:
        """(B, H, F); `keys` and `values` of the prefix are (B, heads, N, size of a head), and turned."""
        queries = self._heads(self.q_proj(hidden))
        if self.crosses:
            keys, values = (
                self._heads(project(_flat(given).to(hidden.dtype)))
                for project, given in ((self.k_proj, keys), (self.v_proj, values))
            )
            queries, _ = _turned(queries, queries, *angles)
        else:
            queries, own = _turned(queries, self._heads(self.k_proj(hidden)), *angles)
            keys = torch.cat([keys, own], 2)
            values = torch.cat([values, self._heads(self.v_proj(hidden))], 2)
        times = queries.shape[1] // keys.shape[1]
        found = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(times, 1),
            values.repeat_interleave(times, 1),
            attn_mask=seen[:, None],
        )
        mixed: Tensor = self.o_proj(_flat(found))
        return mixed

    def _heads(self, values: Tensor) -> Tensor:
        return values.view(*values.shape[:2], -1, self.head).transpose(1, 2)


def _flat(heads: Tensor) -> Tensor:
    """(B, T, heads × size) of (B, heads, T, size)."""
    return heads.transpose(1, 2).flatten(2)
