"""The root module that is sharded: token ids in, log-probs of the wanted tokens and the values before them out, and
what a head that drafts tokens learns from: hidden states and distributions of the same forward.

Shapes as in `packing`; D hidden size. Of drafts S sequences, T their tokens before the last trained one, N rows, W
words of the head, F what the head reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.critic import Critic
from headrace_modelkit.families.drafts import DraftHead, Features
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.hidden import gather_in_fp32, hidden_log_probs
from headrace_modelkit.loading import body_of
from headrace_modelkit.logprobs import Head, chunk_elements, token_log_probs
from headrace_modelkit.vision import language_inputs, vision_tower
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headrace_trainer.backends.fsdp.attending.context import ContextGroup
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.gathering import Root
from headrace_trainer.backends.fsdp.layers import kept_on_host
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.learning.packing import DraftPaths, MicroBatch


class Policy(Root):
    """A causal language model, maybe with a critic, whose forward runs heads at trained positions only, in fp32."""

    def __init__(
        self, model: PreTrainedModel, critic: Critic | None = None, routing: Routing | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.critic = critic
        self.routing = routing
        """What its routers are told, of a model with experts."""
        tower = vision_tower(model)
        self.sees = tower is not None and any(own.requires_grad for own in tower.parameters())
        """Whether gradients go into its vision tower."""
        self.context: ContextGroup | None = None
        """The ranks that divide the micro-batches it gets; set by who divides them."""
        self.unrolled = 0
        """Tokens one behind the other that the model's head learns to draft; 0 where it has none."""
        self.offloads_activations = False
        """Whether inputs of layers wait for the backward pass on the host; set by who computes them again."""

    def forward(
        self, batch: MicroBatch | None, anchor: Tensor, temperature: float = 1.0, *, values: bool = False
    ) -> Forward:
        """What losses take of the K trained tokens, fp32, all differentiable; and what `draft_loss` gives of a
        micro-batch that the model's head learns from.

        At the temperature that each was drawn at, which is `temperature` where the batch does not say.

        The value of a token is the critic's, of what the policy has read when it samples that token; none unless
        `values` asks for them.

        Without a batch returns the anchor itself; see `Root`.
        """
        if batch is None:
            return Forward(anchor * 1.0, anchor.detach())
        self._gather_in_fp32()
        if self.routing is not None:
            batch.tell(self.routing)
        # Taken anew each time: fully_shard swaps the parameters between sharded and whole.
        head, drafted = Head.of(self.model), None
        if batch.drafts is None:
            hidden_UD = self._hidden(body_of(self.model), batch)
        else:
            draft: DraftHead = self.model.draft
            with Features(body_of(self.model), draft.layers) as features:
                hidden_UD = self._hidden(body_of(self.model), batch)
            read_NF = features.taken().flatten(0, -2)
            embedding = self.model.get_input_embeddings()
            drafted = draft_loss(draft, head, embedding, read_NF, hidden_UD, batch.drafts, self.unrolled)
        log_probs_UM, entropy_U = hidden_log_probs(
            head, hidden_UD, batch.words_UM, batch.at(temperature), entropy=True
        )
        assert entropy_U is not None
        found = [log_probs_UM[:, 0], entropy_U, *([self._values(batch, hidden_UD)] if values else [])]
        if self.context is not None:
            found = [self.context.whole(own_U, batch) for own_U in found]
        own_K = [each_U[batch.index_K] for each_U in found]
        top_KM = None if batch.teacher_ids_UM is None else log_probs_UM[batch.index_K, 1:]
        return Forward(own_K[0], own_K[1], own_K[2] if values else None, top_KM, drafted)

    @torch.no_grad()
    def probe(self, batch: MicroBatch, *, plain: bool) -> list[Tensor]:
        """Log-probs of the trained tokens at temperature 1, and the hidden states (K, D) of a critic's own body.

        `plain`: the model's class computes the one row by itself, head and all.
        """
        if self.routing is not None:
            batch.tell(self.routing)
        bodies = [self.critic.body] if self.critic is not None and self.critic.body is not None else []
        if plain:
            inputs: Any = {"input_ids": batch.tokens_RL, "use_cache": False}
            logits_UV = self.model(**inputs).logits.flatten(0, 1)[batch.sources_U]
            hidden = [body(**inputs).last_hidden_state.flatten(0, 1)[batch.sources_U] for body in bodies]
            found = [token_log_probs(logits_UV, batch.targets_U, 1.0), *hidden]
        else:
            hidden_UD = self._hidden(body_of(self.model), batch)
            own_U, _ = hidden_log_probs(Head.of(self.model), hidden_UD, batch.targets_U, 1.0)
            found = [own_U, *(self._hidden(body, batch) for body in bodies)]
        if self.context is not None and batch.mine_U is not None:
            found = [self.context.whole(own_U, batch) for own_U in found]
        return [each_U[batch.index_K] for each_U in found]

    def _values(self, batch: MicroBatch, hidden_UD: Tensor) -> Tensor:
        assert self.critic is not None
        if self.critic.body is not None:
            hidden_UD = self._hidden(self.critic.body, batch)
        found_U: Tensor = self.critic.head(hidden_UD)
        return found_U

    def _hidden(self, body: Any, batch: MicroBatch) -> Tensor:
        """(U, D') last hidden states of a body, at the nodes from which tokens are wanted."""
        # Only bodies whose attention takes them are given any.
        context = self.context if batch.mine_U is not None else None
        told = {"paths": batch.paths, "segments": batch.segments, "context": context}
        options = {name: value for name, value in told.items() if value is not None}
        inputs = {"position_ids": batch.positions_RL, "attention_mask": batch.mask_R1LL}
        if batch.pictures is not None:
            inputs |= language_inputs(body, batch.tokens_RL, batch.pictures, trained=self.sees)
        else:
            inputs["input_ids"] = batch.tokens_RL
        body = getattr(body, "language_model", body)
        away = kept_on_host(batch.tokens_RL.device) if self.offloads_activations else nullcontext()
        with away:
            hidden_RLD: Tensor = body(**inputs, use_cache=False, **options).last_hidden_state
        return hidden_RLD.flatten(0, 1)[batch.sources_U]

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


def computed(
    mesh: ExpertMesh | None,
    model: PreTrainedModel,
    routing: Routing | None,
    batch: MicroBatch,
    compute: Callable[[], Forward],
) -> Forward:
    """What `compute` gives, the model's forward of a micro-batch, whether its experts are divided or not."""
    shape = None if mesh is None else expert_shape(model.config)
    if mesh is None or shape is None:
        return compute()
    return mesh.forward(batch.tokens_RL.numel(), shape.chosen, routing, compute)


DECAY = 0.8
"""Weight of a step of the unrolled head against the one before it, as SpecForge has it."""


def draft_loss(
    draft: DraftHead,
    head: Head,
    embedding: Any,
    features_NF: Tensor,
    hidden_UD: Tensor,
    paths: DraftPaths,
    steps: int,
) -> Tensor:
    """(4,): the loss, then of the first step the cross-entropies, the shares of probability that head and policy have
    in common, which sampled drafts are accepted by, and how many tokens these are sums over. Sums, not means.

    Only the first has a gradient, in the head alone. `features_NF` are of all nodes. The policy's distribution is that
    at temperature 1, of the head's words; where its likeliest word is none of these, nothing is learned.
    """
    with torch.no_grad():
        embeds_STD = embedding(paths.next_ST)
    features_STF = features_NF.detach()[paths.nodes_ST]
    hidden_UD = hidden_UD.detach()
    total = features_STF.new_zeros(4, dtype=torch.float32)
    for step, found_STD in enumerate(draft.unrolled(features_STF, embeds_STD, steps)):
        rows_ST = F.pad(paths.rows_ST[:, 1 + step :], (0, min(1 + step, paths.rows_ST.shape[1])), value=-1)
        learned_ST = rows_ST >= 0
        sums = _compared(draft, head, found_STD[learned_ST], hidden_UD[rows_ST[learned_ST]])
        weighed = sums[:1] * DECAY**step
        total = total + torch.cat([weighed, sums.detach() if step == 0 else torch.zeros_like(sums)])
    return total


def _compared(draft: DraftHead, head: Head, own_ND: Tensor, policy_ND: Tensor) -> Tensor:
    """(3,) cross-entropies, overlaps and rows, added up; of many rows their logits are made again in the backward."""
    size = max(1, chunk_elements(own_ND.device) // head.weight_VD.shape[0])
    total = own_ND.new_zeros(3, dtype=torch.float32)
    for first in range(0, len(own_ND), size):
        part = draft, head, own_ND[first : first + size], policy_ND[first : first + size]
        found: Any = _rows(*part) if len(own_ND) <= size else checkpoint(_rows, *part, use_reentrant=False)
        total = total + found
    return total


def _rows(draft: DraftHead, head: Head, own_ND: Tensor, policy_ND: Tensor) -> Tensor:
    with torch.no_grad():
        wanted_NV = head.logits(policy_ND)
        known_N, wanted_NW = wanted_NV.new_ones(len(wanted_NV)), wanted_NV
        if (words_W := draft.words()) is not None:
            known_N, wanted_NW = torch.isin(wanted_NV.argmax(-1), words_W).float(), wanted_NV[:, words_W]
        wanted_NW = wanted_NW.softmax(-1)
    log_probs_NW = draft.scores(own_ND, head).log_softmax(-1)
    off_N = -(wanted_NW * log_probs_NW).sum(-1)
    common_N = torch.minimum(wanted_NW, log_probs_NW.detach().exp()).sum(-1)
    return torch.stack([(off_N * known_N).sum(), (common_N * known_N).sum(), known_N.sum()])
