"""One stage of a model in megatron-core's layers: tensor-parallel matrices, our own norm, attention and experts.

Where Transformer Engine computes, matrices, norms and attention are its own; else norm and attention are torch's, so
that neither it nor Apex is needed and numbers are those of the fsdp backend. Parameters have the same names in both.

The sequences of a micro-batch lie one after another in one row. Over context-parallel ranks that row is divided.

Experts are divided over the expert-parallel ranks, which have tokens of their own, and every expert's matrices over the
tensor-parallel ranks, which have the same tokens. Routers are on every rank; they and products are the fsdp backend's.

Shapes: S tokens of the row on this rank, H heads, G groups, D head dimension; in a layer of experts B is 1, D the
hidden size, and N = S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.experts import compute_experts, route
from headrace_modelkit.families.routing import Routing
from headrace_trainer.backends.shared.attention import attend_segments
from headrace_trainer.backends.shared.exchange import AllToAll
from headrace_trainer.learning.segments import Segment, Segments
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
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
from megatron.core.utils import get_te_version
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


def build_stage(
    architecture: Architecture,
    groups: Groups,
    config: TransformerConfig,
    device: torch.device,
    routing: Routing,
    *,
    engine: bool,
) -> tuple[nn.ModuleList, Rotary]:
    """This rank's chunks of the model, values undefined, and what turns their queries and keys. `engine`: they are of
    Transformer Engine.
    """
    layout = groups.layout
    each = architecture.layers // (layout.pipeline * layout.virtual)
    kinds = _engine_kinds(layout.context) if engine else OWN_KINDS
    rotary = Rotary(architecture.frequencies, in_row=not kinds.thd)
    chunks = nn.ModuleList()
    for chunk in range(layout.virtual):
        first = layout.first_layer(groups.stage, chunk, architecture.layers)
        layers = [
            _layer(architecture, kinds, _mlp(architecture, kinds, groups, routing, layer))
            for layer in range(first, first + each)
        ]
        model = StageModel(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=kinds.norm),
            architecture.vocabulary,
            architecture.context,
            pre_process=groups.first_stage and chunk == 0,
            post_process=groups.last_stage and chunk == layout.virtual - 1,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            vp_stage=chunk if layout.virtual > 1 else None,
        )
        model.rotary_pos_emb = rotary
        if architecture.tied and layout.pipeline > 1:  # Both copies are cut into slices alike.
            for shared in (getattr(model, "embedding", None), getattr(model, "output_layer", None)):
                for parameter in shared.parameters() if shared is not None else ():
                    parameter.shared_embedding = True
        chunks.append(model.to(device))
    return chunks, rotary


@dataclass(frozen=True)
class Kinds:
    """What a layer is made of. `thd`: attention takes (T, H, D) and the ends of sequences."""

    norm: Any
    column: Any
    row: Any
    attention: Any
    thd: bool


def uses_engine(wanted: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are Transformer Engine's, whose kernels for packed rows compute in bf16 on GPUs."""
    return wanted == "auto" and HAVE_TE and device.type == "cuda" and dtype is torch.bfloat16


def kernels_said(wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Whose kernels compute a layer, and why, for people."""
    if uses_engine(wanted, device, dtype):
        return f"layers of Transformer Engine {get_te_version()}"
    reason = "it computes in bf16 on GPUs" if HAVE_TE else "it is not installed"
    reason = "transformer_engine: off" if wanted == "off" else reason
    return f"layers of Megatron's own, without Transformer Engine: {reason}"


def _engine_kinds(context: int) -> Kinds:
    """Divided rows keep our own attention: Transformer Engine's wants each sequence padded, and divided by itself."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    found = TESpecProvider()
    attention = found.core_attention() if context == 1 else Attention
    return Kinds(
        found.layer_norm(),
        found.column_parallel_linear(),
        found.row_parallel_linear(),
        attention,
        context == 1,
    )


def transformer_config(
    architecture: Architecture,
    groups: Groups,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    recompute: bool,
    engine: bool,
    device: torch.device,
) -> TransformerConfig:
    """Megatron's own configuration of the model: no dropout, and no fusion that needs Apex. Gradients are sums."""
    layout = groups.layout
    chunks: dict[str, Any] = {}
    if layout.virtual > 1:
        chunks = {"virtual_pipeline_model_parallel_size": layout.virtual}
        # Of two stages each is the other's neighbour on both sides, so a batch of messages would mix them up.
        chunks |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
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
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the other one refuses that; ours are computed elsewhere
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Without it Megatron asks the device for the ends of sequences, in each layer.
        apply_rope_fusion=engine and layout.context == 1,
        persist_layer_norm=False,
        **chunks,
        **(again if recompute else {}),
    )


def _mlp(architecture: Architecture, kinds: Kinds, groups: Groups, routing: Routing, layer: int) -> Any:
    if layer in architecture.sparse:
        return expert_layer(architecture, groups, routing, architecture.sparse.index(layer))
    return ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=kinds.column, linear_fc2=kinds.row))


def _layer(architecture: Architecture, kinds: Kinds, mlp: Any) -> ModuleSpec:
    norm = kinds.norm if architecture.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=kinds.column,
        core_attention=kinds.attention,
        linear_proj=kinds.row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    causal = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=kinds.norm,
            self_attention=ModuleSpec(SelfAttention, params=causal, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=kinds.norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """The sequences of a row: their ends, for Megatron's attention, and what each of this rank's tokens sees."""

    segments: Segments | None = None

    @classmethod
    def of(cls, segments: Segments, *, thd: bool, context: int, rank: int) -> Packed:
        """`segments` are the whole row's; `thd` is that of `Kinds`."""
        ends, longest = segments.query_ends, segments.longest_query
        own = segments if context == 1 else divided_segments(segments, context, rank).to(ends.device)
        return cls(
            qkv_format="thd" if thd else None,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            segments=own,
        )


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Angles by the model's own frequencies: `in_row` of each token of the row, else of each place of a sequence."""

    def __init__(self, frequencies: Tensor, *, in_row: bool) -> None:
        super().__init__(2 * len(frequencies), 1.0, use_cpu_initialization=True)
        self.inv_freq = frequencies
        self._in_row = in_row
        self.positions_S: Tensor | None = None
        """Places of this rank's tokens in their sequences, set before a forward."""

    def forward(self, length: int, **_: Any) -> Tensor:
        """(S, 1, 1, D)."""
        angles: Tensor = self.get_emb(length)
        return angles[self.positions_S] if self._in_row else angles


class Norm(nn.RMSNorm):
    """RMSNorm as Megatron builds one: from the model's configuration."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


class Attention(nn.Module):
    """Attention of the sequences of a row. With context parallelism keys and values are gathered first."""

    def __init__(self, config: TransformerConfig, *, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._context = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> Tensor:
        """(S, 1, H * D) from (S, 1, H, D) and (S, 1, G, D)."""
        assert packed_seq_params.segments is not None
        # See the fsdp backend's attention: a CPU loses nothing by it.
        dtype = torch.float32 if query.device.type == "cpu" else query.dtype
        q, k, v = (each.squeeze(1) for each in (query, self._whole(key), self._whole(value)))
        found = attend_segments(q.to(dtype), k.to(dtype), v.to(dtype), packed_seq_params.segments)
        return found.flatten(1)[:, None].to(query.dtype)

    def _whole(self, own: Tensor) -> Tensor:
        """Keys or values of the whole row, in their order."""
        if self._context.size() == 1:
            return own
        both: Tensor = gather_from_sequence_parallel_region(own.contiguous(), group=self._context)
        return both[context_places(len(both), self._context.size()).argsort().to(own.device)]


OWN_KINDS = Kinds(Norm, ColumnParallelLinear, RowParallelLinear, Attention, thd=False)


def divided_segments(segments: Segments, ranks: int, rank: int) -> Segments:
    """What a context-parallel rank's tokens see of the row: of it they are an early and a late part."""
    length = segments.queries // (2 * ranks)
    found = []
    for first, place in ((0, rank), (length, 2 * ranks - 1 - rank)):
        low = place * length
        for part in segments.parts:
            start, stop = max(part.start, low), min(part.stop, low + length)
            if start < stop:
                before = ((part.start, start),) if start > part.start else ()
                found.append(Segment(first + start - low, first + stop - low, start, before))
    return Segments.of(found, segments.queries)


def context_places(length: int, ranks: int) -> Tensor:
    """Which tokens of the row the context-parallel ranks have, rank after rank: each an early and a late part."""
    halves = torch.arange(length).chunk(2 * ranks)
    return torch.cat([part for rank in range(ranks) for part in (halves[rank], halves[2 * ranks - 1 - rank])])
