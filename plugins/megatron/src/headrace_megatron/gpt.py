"""One stage of a model in megatron-core's layers: tensor-parallel matrices, our own norm, attention and experts.

Norm and attention are torch's, so that neither TransformerEngine nor Apex is needed, sequences may be divided (both
kinds of parallelism), and numbers are those of the fsdp backend.

Experts are divided over the expert-parallel ranks, which have tokens of their own, and every expert's matrices over the
tensor-parallel ranks, which have the same tokens. Routers are on every rank; they and products are the fsdp backend's.

Shapes: S tokens of a row on this rank, B rows, H heads, G groups, D head dimension; in a layer of experts D is the
hidden size, and N = S * B.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.experts import Routing, compute_experts, route
from headrace_trainer.backends.shared.attention import WIDENED_TOKENS, attend_segments
from headrace_trainer.backends.shared.exchange import AllToAll
from headrace_trainer.learning.segments import Segment, Segments
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from headrace_megatron.architecture import Architecture
from headrace_megatron.groups import Groups


class ExpertLayer(nn.Module):
    """In place of Megatron's MLP, in the layer that is the `layer`-th with experts."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        groups: Groups,
        routing: Routing,
        layer: int,
    ) -> None:
        super().__init__()
        assert architecture.experts is not None
        self._architecture, self._groups, self._routing, self._layer = architecture, groups, routing, layer
        self._sequence_parallel = config.sequence_parallel
        shape, layout = architecture.experts, groups.layout
        hidden, inner = architecture.hidden, architecture.expert_inner // layout.tensor
        own = shape.experts // layout.experts

        def weight(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=config.params_dtype))

        router: Any = nn.Module()
        router.weight = weight(shape.experts, hidden)
        self.router = router
        experts: Any = nn.Module()
        experts.gate_up_proj = weight(own, 2 * inner, hidden)
        experts.down_proj = weight(own, hidden, inner)
        experts.act_fn = F.silu
        experts.num_experts, experts.total_experts = own, shape.experts
        if layout.experts > 1:
            experts.exchange = AllToAll(groups.expert)
        self.experts = experts

    def forward(self, hidden_SBD: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """(S, B, D), and no bias."""
        tensor = self._groups.tensor
        if self._sequence_parallel:
            hidden_SBD = gather_from_sequence_parallel_region(hidden_SBD, group=tensor)
        hidden_ND = hidden_SBD.flatten(0, 1)
        if not self._sequence_parallel and tensor.size() > 1:
            hidden_ND = copy_to_tensor_model_parallel_region(hidden_ND, group=tensor)
        weights_NK, index_NK = self._route(hidden_ND)
        found = compute_experts(self.experts, hidden_ND, index_NK, weights_NK).view_as(hidden_SBD)
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(found, group=tensor), None
        if tensor.size() > 1:
            found = reduce_from_tensor_model_parallel_region(found, group=tensor)
        return found, None

    def _route(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
        """On every tensor-parallel rank alike; each has the gradient of its part of the experts' matrices alone."""
        architecture = self._architecture
        assert architecture.experts is not None
        router: Any = self.router
        weight_ED: Tensor = router.weight
        logits_NE = F.linear(hidden_ND, weight_ED)
        weights_NK, index_NK = route(
            logits_NE,
            architecture.experts.chosen,
            self._routing,
            self._layer,
            normed=architecture.experts_normed,
        )
        return weights_NK.to(logits_NE.dtype) if architecture.experts_rounded else weights_NK, index_NK


def expert_layer(architecture: Architecture, groups: Groups, routing: Routing, layer: int) -> type[nn.Module]:
    """The class of a layer's experts, which Megatron builds from its configuration alone."""

    class Own(ExpertLayer):
        def __init__(self, config: TransformerConfig, **_: Any) -> None:
            super().__init__(config, architecture, groups, routing, layer)

    return Own


class StageModel(GPTModel):  # type: ignore[misc]  # Megatron is not annotated
    """A stage that ends with hidden states, also the last one: the head is computed where tokens are trained."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: weights are loaded, and gradients of tied weights added up, by their canonical names."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the head, on the last stage."""
        tied = self.pre_process and self.share_embeddings_and_output_weights
        found: Tensor = self.embedding.word_embeddings.weight if tied else self.output_layer.weight
        return found


def build_stage(
    architecture: Architecture,
    groups: Groups,
    config: TransformerConfig,
    device: torch.device,
    routing: Routing,
) -> StageModel:
    """This rank's part of the model, values undefined."""
    each = architecture.layers // groups.layout.pipeline
    first = groups.stage * each
    model = StageModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[
                _layer(architecture, _mlp(architecture, groups, routing, layer))
                for layer in range(first, first + each)
            ],
            layer_norm=Norm,
        ),
        architecture.vocabulary,
        architecture.context,
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = Rotary(architecture.frequencies, groups)
    ready: StageModel = model.to(device)
    return ready


def transformer_config(
    architecture: Architecture,
    groups: Groups,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    recompute: bool,
    device: torch.device,
) -> TransformerConfig:
    """Megatron's own configuration of the model: no dropout, no fusion that needs Apex or TransformerEngine."""
    layout = groups.layout
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.groups,
        kv_channels=architecture.head,
        ffn_hidden_size=architecture.inner,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(again if recompute else {}),
    )


def _mlp(architecture: Architecture, groups: Groups, routing: Routing, layer: int) -> Any:
    if layer in architecture.sparse:
        return expert_layer(architecture, groups, routing, architecture.sparse.index(layer))
    return ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def _layer(architecture: Architecture, mlp: Any) -> ModuleSpec:
    norm = Norm if architecture.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=Attention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """The angles of this rank's tokens, by the model's own frequencies."""

    def __init__(self, frequencies: Tensor, groups: Groups) -> None:
        super().__init__(2 * len(frequencies), 1.0, use_cpu_initialization=True)
        self.inv_freq = frequencies
        self._ranks, self._rank = groups.layout.context, groups.context.rank()

    def forward(self, length: int, **_: Any) -> Tensor:
        """(S, 1, 1, D) of rows of `length` tokens."""
        angles: Tensor = self.get_emb(length)
        if self._ranks == 1:
            return angles
        return angles[context_places(length, self._ranks).chunk(self._ranks)[self._rank].to(angles.device)]


class Norm(nn.RMSNorm):
    """RMSNorm as Megatron builds one: from the model's configuration."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


class Attention(nn.Module):
    """Causal attention of whole rows. With context parallelism keys and values are gathered first."""

    def __init__(self, config: TransformerConfig, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._context = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """(S, B, H * D) from (S, B, H, D) and (S, B, G, D)."""
        if self._context.size() > 1:
            return self._divided(query, key, value)
        short = query.device.type == "cpu" and len(key) <= WIDENED_TOKENS  # see the fsdp backend's attention
        dtype = torch.float32 if short else query.dtype
        q, k, v = (each.permute(1, 2, 0, 3).to(dtype) for each in (query, key, value))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return found.permute(2, 0, 1, 3).flatten(2).to(query.dtype)

    def _divided(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each of the rank's two parts of a row sees the row up to itself: no mask, which would keep flash away."""
        dtype = torch.float32 if query.device.type == "cpu" else query.dtype
        whole = self._whole(key, value)
        flat = [each.transpose(0, 1).flatten(0, 1).to(dtype) for each in (query, *whole)]
        segments = context_segments(len(whole[0]), query.shape[1], self._context.size(), self._context.rank())
        found = attend_segments(flat[0], flat[1], flat[2], segments.to(query.device))
        return found.reshape(query.shape[1], query.shape[0], -1).transpose(0, 1).to(query.dtype)

    def _whole(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole rows, in their order."""
        both = [
            gather_from_sequence_parallel_region(each.contiguous(), group=self._context)
            for each in (key, value)
        ]
        order = context_places(len(both[0]), self._context.size()).argsort().to(key.device)
        return both[0][order], both[1][order]


@lru_cache(maxsize=8)  # of all layers, and of their backward passes when they are recomputed
def context_segments(length: int, rows: int, ranks: int, rank: int) -> Segments:
    """What a rank's queries see of `rows` rows of `length` keys each: of each row it has an early and a late part."""
    part = length // (2 * ranks)
    found = [
        Segment(first, first + part, own, ((row * length, own),) if own > row * length else ())
        for row in range(rows)
        for half, place in enumerate((rank, 2 * ranks - 1 - rank))
        for first, own in [((2 * row + half) * part, row * length + place * part)]
    ]
    return Segments.of(found, rows * length)


def context_places(length: int, ranks: int) -> Tensor:
    """Which tokens of a row the context-parallel ranks have, one rank after another: each an early and a late part."""
    halves = torch.arange(length).chunk(2 * ranks)
    return torch.cat([part for rank in range(ranks) for part in (halves[rank], halves[2 * ranks - 1 - rank])])
