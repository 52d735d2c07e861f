"""One rank of a run that learns with FSDP2: models laid out, sharded and computed; gradients, contributions, commits.

Knows no steps and no wire. Gradients of micro-batches are added up unnormalised in fp32 and divided by the step's
denominator when it is known, so the order and the packing in which groups come do not matter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial

import torch
from headrace_modelkit.critic import Critic, hidden_size
from headrace_modelkit.experts import take_routers
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.invariant import is_invariant, make_invariant
from headrace_modelkit.loading import body_prefix
from headrace_modelkit.lora import standing_in
from headrace_modelkit.pictures import ImageReader
from headrace_modelkit.processors import load_images
from headrace_modelkit.products import use_fp32_products
from headrace_schema.openings import TrainerConfig
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, RETURNS, VALUES, Algorithm
from headrace_trainer.backends._base import HelpingBackend, PrivateGradient, ReferenceFacts, StateReader
from headrace_trainer.backends.fsdp.attending.checking import Attention, FormCheck
from headrace_trainer.backends.fsdp.attending.context import ContextGroup
from headrace_trainer.backends.fsdp.checks import compiles
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.float8 import multiply_in_float8
from headrace_trainer.backends.fsdp.layers import Layers
from headrace_trainer.backends.fsdp.loading import layers_of
from headrace_trainer.backends.fsdp.policy import Policy, computed
from headrace_trainer.backends.fsdp.reference import Reference
from headrace_trainer.backends.fsdp.sharded import float_what_learns
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.fsdp.state import FsdpState
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.attention import use_newest_flash
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.fit import CRITIC
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.backends.shared.model import LossOf
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import Attends, MicroBatch, pack
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Rows, Sample


class FsdpBackend(FsdpState, HelpingBackend):
    """Policy, critic and reference of a run, divided by fully_shard; `Backend` has what each method promises."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: FsdpOptions | None = None,
    ) -> None:
        super().__init__(config, algorithm, ranks, options)
        # A rank without work still takes part in every collective of the round.
        nothing = {name: [0.0] for name in (*algorithm.columns, RETURNS)}
        self._dummy: Rows = [[Sample([1, 1], [1], [math.nan], columns=nothing)]]
        self._attention = Attention(shares=False, along=False)
        """What the policy takes, and its critic's body."""
        self._check_seconds = 0.0
        self._images: ImageReader | None = None
        """What reads the images of prompts, where the model takes any."""
        self._square_nodes = math.inf
        """Length at which attention costs as much as all else."""
        self._reference: Reference | None = None
        self._experts: ExpertMesh | None = None
        self._layers = Layers(())
        """Of policy and critic."""
        self._initial_adapters: dict[str, Tensor] | None = None
        """With adapters the policy itself is its reference: without them, or with those of the warm-up."""
        self._contributed: dict[str, Tensor] = {}
        """Shards of what helpers have added to the step's gradient."""

    @property
    @override
    def replicas(self) -> int:
        """Each rank computes with whole layers, and with whole rows unless ranks divide them."""
        return self._ranks.world_size // self._options.context_parallel

    @property
    @override
    def replica(self) -> int:
        return self._ranks.rank // self._options.context_parallel

    @property
    def speaks(self) -> bool:  # type: ignore[override]
        """The ranks that divide rows have the figures of all of them."""
        return self._ranks.rank % self._options.context_parallel == 0

    @property
    @override
    def shares_prefixes(self) -> bool:
        """Both models must follow a tree's mask."""
        return all(each.shares for each in self._attentions)

    @property
    def _attentions(self) -> list[Attention]:
        """Of all models that see a micro-batch."""
        return [self._attention, *([self._reference.attention] if self._reference is not None else [])]

    @property
    def notes(self) -> list[str]:  # type: ignore[override]
        """Why rows are not as cheap as they could be, and of which model that is so."""
        known = {"model.path": self._attention.note, "trainer.lora": self._attention.idle}
        if self._reference is not None:
            known |= {"the reference model": self._reference.attention.note}
        return [f"{which}: {note}" for which, note in known.items() if note]

    @property
    def check_seconds(self) -> float:  # type: ignore[override]
        """Of policy and reference."""
        return self._check_seconds + (self._reference.check_seconds if self._reference is not None else 0.0)

    @property
    @override
    def costs(self) -> Costs:
        return Costs(self._square_nodes, padded=self._attends is not Attends.SEGMENTS)

    @property
    @override
    def reference(self) -> ReferenceFacts | None:
        if self._reference is not None:
            return self._reference.facts
        return self._base_facts[1] if self._base_facts and self._initial_adapters is not None else None

    @property
    @override
    def reference_bytes(self) -> int:
        own = sum(tensor.nbytes for tensor in (self._initial_adapters or {}).values())
        return self._reference.size_bytes if self._reference is not None else own

    @override
    def _shard(self, model: PreTrainedModel, critic: Critic | None) -> None:
        bodies = [model] if critic is None or critic.body is None else [model, critic.body]
        for module in [model, critic] if critic else [model]:
            float_what_learns(module)
        self._layers = Layers(bodies)
        if self.layout.checkpointing:
            self._layers.recompute()
        if self.layout.keeps_attention:
            self._layers.keep_attention()
        self._routing = take_routers(model)
        self._expert_shape = expert_shape(model.config)
        if self._config.deterministic:
            try:
                make_invariant(model)
            except ValueError as error:
                what = f"the model at {self._config.model.path!r} has bits that hang on its batch: {error}"
                raise invalid(
                    f"deterministic: {what}; set deterministic: false", key="deterministic"
                ) from error
        if self._options.fp8:
            multiply_in_float8(layers_of(model), self._ranks.device)
        for body in bodies:
            if not is_invariant(body):
                use_fp32_products(body, self._ranks.device)
            use_newest_flash(self._ranks.device)
            if compiles(self._options, self._config, self._ranks.device):
                self._layers.compile(body)
        # 24 D² products a layer and token against 2 D for each token before it.
        self._square_nodes = 12.0 * max(hidden_size(body.config) for body in bodies)
        self._experts = self._expert_mesh()
        self._images = load_images(self._config.model) if self._config.sees else None
        policy = Policy(model, critic, self._routing)
        policy.context, policy.offloads_activations = self._context, self._options.offload_activations
        policy.unrolled = self._draft.unrolled if self._draft else 0
        layers = [layer for body in bodies for layer in layers_of(body)]
        dtype = None if self._lora else self._dtype
        self._model = ShardedModel(
            policy, layers, self._ranks, dtype, layout=self.layout, experts=self._experts
        )
        self._optimizer = self._new_optimizer()
        self._dirty = False

    @property
    def may_recompute(self) -> bool:  # type: ignore[override]
        """Unless it does."""
        return not self.layout.checkpointing

    @override
    def reduce(self, micro_batch_tokens: int, *, recomputes: bool) -> None:
        if self.layout.keeps_attention:
            self._layers.compute_attention_again()
            self._layout = replace(self.layout, keeps_attention=False)
        if recomputes and self.may_recompute:
            self._layers.recompute()
            self._layout = replace(self.layout, checkpointing=True)

    @override
    def recover(self) -> None:
        self._layers.drop_kept()
        if self._model is not None:
            self._model.recover()
        super().recover()

    @override
    def _check_forms(self) -> None:
        started = time.monotonic()
        with torch.compiler.set_stance("force_eager"):  # what is compiled is for rows of usual length
            self._attention = FormCheck(self._config, self._sharded, self._ranks).settle()
        self._layers.drop_kept()
        self._check_seconds = time.monotonic() - started

    @property
    def _context(self) -> ContextGroup | None:
        size = self._options.context_parallel
        return ContextGroup(self._ranks, size) if size > 1 else None

    def _expert_mesh(self) -> ExpertMesh | None:
        size = self._options.expert_parallel
        return ExpertMesh(self._ranks, size) if size > 1 else None

    def _forward(self, batch: MicroBatch, *, values: bool) -> Forward:
        policy, temperature = self._sharded.policy, self._config.sampling.temperature
        run = partial(policy, batch, torch.zeros((), device=self._ranks.device), temperature, values=values)
        return computed(self._experts, self._sharded.model, self._routing, batch, run)

    @override
    def _columns(self, names: Many[str], rows: Rows) -> dict[str, Tensor]:
        batch = self._pack(rows)
        if REFERENCE_LOG_PROBS in names and self._reference is None and self._initial_adapters is None:
            raise invalid("the run has no reference model: no option of its algorithm needs one")
        if VALUES in names and self._algorithm.critic is None:
            raise invalid("the run has no critic: its algorithm needs none")
        made: dict[str, Tensor | None] = {}
        if {OLD_LOG_PROBS, VALUES}.intersection(names):
            with torch.no_grad():
                found = self._forward(batch, values=VALUES in names)
            made = {OLD_LOG_PROBS: found.log_probs_K, VALUES: found.values_K}
        if REFERENCE_LOG_PROBS in names:
            made[REFERENCE_LOG_PROBS] = self._reference_log_probs(batch)
        return {name: found_K for name in names if (found_K := made[name]) is not None}

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.log_probs(batch)
        placed = {name: own.to(self._ranks.device) for name, own in (self._initial_adapters or {}).items()}
        with torch.no_grad(), standing_in(self._sharded.model, placed):
            return self._forward(batch.unforced(), values=False)[0]

    @property
    @override
    def _critic_names(self) -> frozenset[str]:
        return frozenset(self._sharded.critic_names)

    @property
    @override
    def _has_weights(self) -> bool:
        return self._model is not None

    @override
    def _park(self) -> None:
        if self._reference is not None:
            self._reference.park()

    def _pack(self, rows: Rows, *, drafts: bool = False) -> MicroBatch:
        batch = pack(
            rows or self._dummy,
            shared=self.shares_prefixes,
            attends=self._attends,
            multiple=self._options.context_parallel,
            experts=self._expert_shape,
            images=self._images,
            drafts=drafts,
        )
        if (context := self._context) is not None:
            batch = context.divided(batch)
        return (batch if rows else batch.uncounted()).to(self._ranks.device)

    @property
    def _attends(self) -> Attends:
        """What the attention of all models that see a micro-batch can be told."""
        if not all(each.along for each in self._attentions):
            return Attends.MASK
        if self._config.deterministic:
            return Attends.PATHS
        along = self._options.context_parallel > 1 or self._ranks.device.type != "cpu"
        return (
            Attends.SEGMENTS if along or any(each.windowed for each in self._attentions) else Attends.CHEAPEST
        )

    # --- gradients

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        self._contributed = {name: move(shard) for name, shard in self._contributed.items()}

    @override
    def _warmed_up(self) -> None:
        """A critic that begins as the policy does begins as the warmed-up one."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model or plan.path is not None:
            return
        shards = self._sharded.shards()
        body = body_prefix(self._sharded.model)
        policy = {name.removeprefix(body): shard for name, shard in shards.items()}
        for name in self._sharded.critic_names:
            if name.startswith(f"{CRITIC}body."):
                shards[name].copy_(policy[name.removeprefix(f"{CRITIC}body.")])
        self._sharded.release()

    @override
    def _take_reference(self, *, warmed: bool) -> None:
        trainer = self._config.trainer
        if trainer.lora is None or trainer.reference is not None:
            weights = self._sharded.weights() if warmed else None
            how = (self.layout.shard_ranks, self._expert_mesh(), self._context)
            self._reference = Reference(self._config, self._ranks, weights, *how)
        else:
            adapters = self._sharded.adapters() if warmed else ()
            self._initial_adapters = {
                name: self._sharded.computed_here(name, tensor).clone() for name, tensor in adapters
            }

    @override
    def zero(self) -> None:
        super().zero()
        self._contributed = {}

    @override
    def load_base(self, reader: StateReader) -> None:
        if self._model is None:
            self.load_state(reader)
            return
        self.zero()
        self._fill(self._sharded.weight_names, reader.weight)
        self._sharded.release()

    @override
    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._sharded.shape(name) for name in self._sharded.parameters}

    @override
    def private_gradient(self) -> PrivateGradient:
        self._finish_backward()
        shards = self._sharded.gradients()
        whole = {name: self._sharded.gather(name, shard) for name, shard in shards.items()}
        return PrivateGradient(whole, self._figures.sums(), self._figures.maxima())

    @override
    def add_gradient(self, given: PrivateGradient | None) -> None:
        for name in self._sharded.parameters:
            shard = self._sharded.scatter(name, given.tensors[name] if given else None)
            own = self._contributed.get(name)
            self._contributed[name] = shard if own is None else own.add_(shard)
        if given is not None:
            self._figures.merge(TokenFigures.of(given.token_sums, given.token_maxima))

    @override
    def _all_gradients(self) -> dict[str, Tensor]:
        """The reduced shards with what helpers have added, which is then part of them and of nothing else."""
        gradients = self._sharded.gradients()
        for name, shard in self._contributed.items():
            gradients[name].add_(shard.to(gradients[name].device))
        self._contributed = {}
        return gradients

    @override
    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> bool:
        self._park()
        batch = self._pack(rows, drafts=self._adamw.learns_aside)
        found_K = self._forward(batch, values=values)
        loss = loss_of(found_K, batch)
        if (drafted := found_K.drafted) is not None:
            loss = loss + drafted[0].where(drafted[0].isfinite(), 0.0)
        # The one moment of a micro-batch in which the host waits for the device.
        finite = bool(torch.isfinite(loss) & torch.isfinite(found_K[0]).all())
        if not self._ranks.all_true(finite):
            self._layers.drop_kept()
            return False
        self._dirty = True
        torch.autograd.backward(loss)
        if drafted is not None and rows:
            self._figures.add_drafts(drafted.detach())
        return True
