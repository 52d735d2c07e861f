"""Heads that draft tokens for an engine: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), and the layers by which models
predict several tokens (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2).

At position t a head reads hidden states of the model behind token t, and the embedding of token t + 1; it says what
token t + 2 may be. Behind that it goes on from its own hidden state. Knows no engine, no loss and no file.

Shapes: S sequences, T positions, N rows; D hidden, F = D or 3 D; H heads, G key heads, E head dimension; V words of the
model, W of the head.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from typing_extensions import override

from headrace_modelkit.experts import compute_here
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.logprobs import Head, chunk_elements

DRAFT = "draft."
"""What names of a head's weights begin with, among those of the model that it is of."""
IDS = "eagle_aux_hidden_state_layer_ids"
_ATTENTION, _FULL = "headrace_drafts", "full_attention"
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(N, T, H E) of queries (N, H, T, E), keys and values (N, G, T, E), and what scores are multiplied by."""


class DraftHead(nn.Module):
    """A head that drafts; what differs is what it reads, and of what layer it is made."""

    layers: tuple[int, ...]
    """Of its hidden states: 0 is the embedding, n what layer n gives, counted from 1; the norm's behind the last."""

    @abstractmethod
    def fused(self, features_NF: Tensor) -> Tensor:
        """(N, D) what the first step reads of the model's hidden states."""

    @abstractmethod
    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """(N, T, D) what `scores` and the next step read, of embeddings, and of `fused`'s or an earlier step's."""

    @abstractmethod
    def scores(self, hidden_ND: Tensor, head: Head) -> Tensor:
        """fp32 (N, W) logits of the head's words; `head`: the model's, which gets no gradient."""

    def words(self) -> Tensor | None:
        """(W,) the numbers that the model gives the head's words; None where it knows all."""
        return None

    def logits(self, hidden_ND: Tensor, head: Head) -> Tensor:
        """fp32 (N, V) logits of the model's words; -inf for one that the head does not know."""
        scores_NW = self.scores(hidden_ND, head)
        if (words_W := self.words()) is None:
            return scores_NW
        whole_NV = scores_NW.new_full((len(scores_NW), head.weight_VD.shape[0]), -math.inf)
        return whole_NV.index_copy_(1, words_W, scores_NW)

    def unrolled(self, features_STF: Tensor, embeds_STD: Tensor, steps: int) -> Iterator[Tensor]:
        """(S, T, D) of each step: at position t, step k has drafted k tokens behind token t + 1 from its own hidden
        states (training-time test), and the next token is t + 2 + k. `embeds_STD`: of token t + 1 at t.

        As an engine drafts: what is behind t is read from the model up to t, and from the head itself beyond.
        """
        hidden_STD = self.fused(features_STF)
        positions_T = torch.arange(hidden_STD.shape[1], device=hidden_STD.device)[None]
        keys, values = list[Tensor](), list[Tensor]()
        for step in range(steps):
            own: list[Tensor] = []

            def attend(
                query: Tensor,
                key: Tensor,
                value: Tensor,
                scaling: float,
                before: tuple[list[Tensor], list[Tensor]] = ([*keys], [*values]),
                own: list[Tensor] = own,
            ) -> Tensor:
                own[:] = key, value  # a layer that is computed again gives them once more
                seen = [*before[0], key], [*before[1], value]
                return attend_along(query, *seen, scaling).transpose(1, 2).flatten(2)

            hidden_STD = self(embeds_STD, hidden_STD, positions_T + step, attend)
            keys.append(own[0])
            values.append(own[1])
            yield hidden_STD
            embeds_STD = F.pad(embeds_STD[:, 1:], (0, 0, 0, 1))


class DraftAttention(nn.Module):
    """Attention that reads an embedding and a hidden state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        untyped: Any = config
        self.head_dim = int(untyped.head_dim)
        self.scaling = self.head_dim**-0.5
        heads, key_heads = config.num_attention_heads, int(untyped.num_key_value_heads)
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, key_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)

    def forward(self, given: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """(N, T, D) of (N, T, 2 D)."""
        query, key, value = (
            layer(given).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        found: Tensor = self.o_proj(attend(query, key, value, self.scaling))
        return found


class DraftLayer(nn.Module):
    """The head's one layer, which the model's files call `midlayer`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        made: Any = LlamaMLP
        self.mlp = made(config)
        norms = (LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, embeds: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """(N, T, D) of an embedding and a hidden state (N, T, D) each."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        given = torch.cat([self.input_layernorm(embeds), normed], -1)
        hidden = residual + self.self_attn(given, rotary, attend)
        found: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class Eagle3(DraftHead):
    """An EAGLE-3 head, which reads three hidden states; its parameters have the names of its files."""

    d2t: Tensor | None
    """(W,) what is added to a word's number among the head's to get the model's; None where the head knows all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        untyped: Any = config
        self.config, self.layers = config, tuple(untyped.eagle_config[IDS])
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        words = int(untyped.draft_vocab_size)
        self.lm_head = nn.Linear(config.hidden_size, words, bias=False)
        fewer = words < config.vocab_size
        self.register_buffer("d2t", torch.zeros(words, dtype=torch.long, device="cpu") if fewer else None)
        self.rotary = LlamaRotaryEmbedding(config)

    @override
    def fused(self, features_NF: Tensor) -> Tensor:
        found: Tensor = self.fc(features_NF)
        return found

    @override
    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        found: Tensor = self.midlayer(embeds, hidden, self.rotary(hidden, positions), attend)
        return found

    @override
    def scores(self, hidden_ND: Tensor, head: Head) -> Tensor:
        return Head(self.lm_head.weight, None, 1.0, None).logits(self.norm(hidden_ND))

    @override
    def words(self) -> Tensor | None:
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


class Mtp(DraftHead):
    """A layer of a checkpoint that predicts one token more, as the model's last one with full attention; it reads what
    the model's own head reads, and says words by that head.

    It goes on from its normed hidden state, as vLLM and SGLang let DeepSeek's go on.
    """

    def __init__(self, body: Any, config: PreTrainedConfig) -> None:
        """`body`: of the model that it is of."""
        super().__init__()
        own: Any = deepcopy(config)
        AttentionInterface.register(_ATTENTION, _attend_as_told)
        own._attn_implementation = _ATTENTION
        if expert_shape(config) is not None:
            compute_here(own)
        self.config, self.layers = own, (own.num_hidden_layers + 1,)
        norm = type(body.norm)
        made = (norm(own.hidden_size, eps=own.rms_norm_eps) for _ in range(3))
        self.enorm, self.hnorm, self.norm = made
        self.eh_proj = nn.Linear(2 * own.hidden_size, own.hidden_size, bias=False)
        kinds = list(getattr(own, "layer_types", None) or [_FULL] * own.num_hidden_layers)
        if _FULL not in kinds:  # a model of fewer layers, whose size is measured
            kinds[-1] = _FULL
            own.layer_types = kinds
        self.layer = type(body.layers[-1])(own, len(kinds) - 1 - kinds[::-1].index(_FULL))
        self.rotary = type(body.rotary_emb)(own)

    @override
    def fused(self, features_NF: Tensor) -> Tensor:
        return features_NF

    @override
    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        rotary = self.rotary(given, positions)
        layer: Any = self.layer
        given = layer(given, attention_mask=None, position_embeddings=rotary, attend=attend)
        found: Tensor = self.norm(given)
        return found

    @override
    def scores(self, hidden_ND: Tensor, head: Head) -> Tensor:
        bias = None if head.bias_V is None else head.bias_V.detach()
        return replace(head, weight_VD=head.weight_VD.detach(), bias_V=bias).logits(hidden_ND)


def _attend_as_told(
    _: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    __: Any,
    *,
    scaling: float,
    attend: Attend,
    **___: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention."""
    return attend(query, key, value, scaling), None


def attend_along(query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float) -> Tensor:
    """(S, H, T, E): position t attends to the first keys up to t, and of later ones to its own."""
    if len(keys) == 1:
        grouped: dict[str, Any] = {"scale": scaling, "is_causal": True, "enable_gqa": True}
        return F.scaled_dot_product_attention(query, keys[0], values[0], **grouped)
    groups = query.shape[1] // keys[0].shape[1]
    first_key, first_value = (each[0].repeat_interleave(groups, 1) for each in (keys, values))
    # (S, H, T, steps, E)
    own_key, own_value = (torch.stack(each[1:], -2).repeat_interleave(groups, 1) for each in (keys, values))
    count, heads, length, _ = query.shape
    block = max(1, chunk_elements(query.device) // (count * heads * length))
    parts = [slice(first, min(first + block, length)) for first in range(0, length, block)]

    def attended(part: slice) -> Tensor:
        own, places = query[:, :, part], torch.arange(length, device=query.device)
        scores = own @ first_key.transpose(-1, -2)
        scores = scores.masked_fill(places > places[part, None], -math.inf)
        beside = (own[..., None, :] * own_key[:, :, part]).sum(-1)
        both = torch.cat([scores, beside], -1).float() * scaling
        weights = both.softmax(-1).to(query.dtype)
        of_own: Tensor = (weights[..., length:, None] * own_value[:, :, part]).sum(-2)
        return torch.matmul(weights[..., :length], first_value) + of_own

    if len(parts) == 1:
        return attended(parts[0])
    found: list[Any] = [checkpoint(attended, part, use_reentrant=False) for part in parts]
    return torch.cat(found, 2)


class Features:
    """In its body, takes from a forward of `body` the hidden states that a head reads."""

    def __init__(self, body: nn.Module, layers: tuple[int, ...]) -> None:
        untyped: Any = body
        self._layers, self._read = untyped.layers, layers
        self._norm: Any = getattr(untyped, "norm", None)
        self._found: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for at in self._read:
            self._hooks.append(self._hook(at))
        return self

    def _hook(self, at: int) -> Any:
        def given(_: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self._found[at] = args[0] if args else named["hidden_states"]

        def made(_: nn.Module, __: Any, output: Any) -> None:
            self._found[at] = output if isinstance(output, Tensor) else output[0]

        if at == 0:
            return self._layers[0].register_forward_pre_hook(given, with_kwargs=True)
        return (self._layers[at - 1] if at <= len(self._layers) else self._norm).register_forward_hook(made)

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def taken(self) -> Tensor:
        """(…, F)."""
        return torch.cat([self._found[at] for at in self._read], -1)
