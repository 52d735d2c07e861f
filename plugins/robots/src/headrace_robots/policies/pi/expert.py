"""The action expert of `pi05`: Gemma's layers with norms that the time sets. Shapes as in `flow_policy`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP, GemmaRotaryEmbedding

# transformers' modules are not annotated.
_Mlp: Any = GemmaMLP


class AdaptiveGemma(nn.Module):
    """Gemma's layers with adaptive norms, over a prefix of keys and values; its positions see each other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        layers = config.num_hidden_layers
        self.layers = nn.ModuleList(_AdaptiveLayer(config, index) for index in range(layers))
        self.norm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = GemmaRotaryEmbedding(config)

    def forward(self, hidden: Tensor, condition_BF: Tensor, cache: Any, mask_BN: Tensor) -> Tensor:
        """(B, H, F) features of (B, H, F) embeddings."""
        length = hidden.shape[1]
        seen = F.pad(mask_BN, (0, length), value=True)
        blocked = hidden.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(hidden.dtype).min)
        places = torch.arange(length, device=hidden.device) + mask_BN.sum(-1, keepdim=True)
        angles = self.rotary(hidden, places)
        for layer in self.layers:
            hidden = layer(
                hidden, condition_BF, angles, blocked[:, None, None].expand(-1, 1, length, -1), cache
            )
        found: Tensor = self.norm(hidden, condition_BF)[0]
        return found


class _AdaptiveLayer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn: Any = GemmaAttention(config, index)
        self.mlp = _Mlp(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, condition_BF: Tensor, angles: Any, blocked: Tensor, cache: Any
    ) -> Tensor:
        normed, gate = self.input_layernorm(hidden, condition_BF)
        mixed, _ = self.self_attn(
            normed, position_embeddings=angles, attention_mask=blocked, past_key_values=cache
        )
        hidden = hidden + gate * mixed
        normed, gate = self.post_attention_layernorm(hidden, condition_BF)
        found: Tensor = hidden + gate * self.mlp(normed)
        return found


class AdaptiveNorm(nn.Module):
    """An RMS norm whose scale, shift and gate are linear in a condition; it begins as a plain norm with gate 0."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.dense = nn.Linear(size, 3 * size)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor, condition_BF: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, gate of the residual)."""
        scale, shift, gate = self.dense(condition_BF)[:, None].chunk(3, -1)
        normed = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.epsilon)
        return (normed * (1 + scale) + shift).to(hidden.dtype), gate.to(hidden.dtype)
