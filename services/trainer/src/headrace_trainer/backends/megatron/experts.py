"""A layer of experts in megatron-core's groups: routers on every rank, experts divided, and their matrices too.

Experts are divided over the expert-parallel ranks, which have tokens of their own, and every expert's matrices over the
tensor-parallel ranks, which have the same tokens. Routers and products are those of the fsdp backend.

Shapes: S tokens of a row on this rank, B rows, D hidden; N = S * B.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.experts import Routing, compute_experts, route
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from headrace_trainer.backends.megatron.architecture import Architecture
from headrace_trainer.backends.megatron.groups import Groups
from headrace_trainer.backends.shared.exchange import AllToAll


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
