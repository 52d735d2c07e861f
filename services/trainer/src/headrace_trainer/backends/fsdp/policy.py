"""The root module of the sharded model: token ids in, log-probs of the wanted tokens out.

Shapes as in `packing`; D hidden size.
"""

from __future__ import annotations

from typing import Any

from headrace_modelkit.logprobs import Head, gather_in_fp32, hidden_log_probs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from headrace_trainer.learning.packing import MicroBatch


class Policy(nn.Module):
    """A causal language model whose forward runs the head at trained positions only, in fp32."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch | None, temperature: float, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the K trained tokens, fp32, both differentiable.

        Without a batch returns the anchor itself: a backward through it runs no layer and only lets
        fully_shard finish what earlier backwards have accumulated.
        """
        if batch is None:
            return anchor * 1.0, anchor.detach()
        self._gather_in_fp32()
        body: Any = self.model.base_model
        hidden_RLD = body(
            input_ids=batch.tokens_RL,
            position_ids=batch.positions_RL,
            attention_mask=batch.mask_R1LL,
            use_cache=False,
        ).last_hidden_state
        hidden_UD = hidden_RLD.flatten(0, 1)[batch.sources_U]
        # Taken anew each time: fully_shard swaps the parameters between sharded and whole.
        head = Head.of(self.model)
        log_probs_U, entropy_U = hidden_log_probs(head, hidden_UD, batch.targets_U, temperature, entropy=True)
        assert entropy_U is not None
        return log_probs_U[batch.index_K], entropy_U[batch.index_K]

    def _gather_in_fp32(self) -> None:
        """fully_shard reduces a module's gradients together and in one type: the head's is fp32, so all of them are.

        Set at each forward, when the parameters are whole: it is a property of the whole ones.
        """
        pending: list[nn.Module] = [self]
        while pending:
            module = pending.pop()
            pending += [child for child in module.children() if not isinstance(child, FSDPModule)]
            for parameter in module.parameters(recurse=False):
                gather_in_fp32(parameter)
