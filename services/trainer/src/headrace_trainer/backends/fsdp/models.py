"""The models of one rank with FSDP2: loaded, sharded, computed forward, read, moved. Knows no gradient and no step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from headrace_modelkit.critic import Critic, critic_section, hidden_size, load_critic
from headrace_modelkit.experts import expert_shape, take_routers
from headrace_modelkit.loading import DTYPES, load_architecture, load_model
from headrace_modelkit.lora import add_adapters, is_adapter, standing_in
from headrace_modelkit.products import use_fp32_products
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import LoraSection, OptimizerSection
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    VALUES,
    Algorithm,
)
from headrace_trainer.backends._base import (
    ADAPTER_KIND,
    CRITIC_KIND,
    AdaptingBackend,
    ReferenceFacts,
    StateReader,
)
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.planned import plan_memory
from headrace_trainer.backends.fsdp.prefixes import attends_along_paths, shares_prefixes
from headrace_trainer.backends.fsdp.reference import Reference, base_facts
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.fit import ALPHA, CRITIC, check_fit
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.backends.shared.model import LanguageModel
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import Attends, MicroBatch, pack
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Rows, Sequence
from headrace_trainer.memory import MemoryPlan


class FsdpModels(LanguageModel, AdaptingBackend):
    """Policy, critic and reference of a run, with the optimizer's state; `Backend` has what each method promises."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: FsdpOptions | None = None,
    ) -> None:
        super().__init__(config, algorithm, ranks)
        self._options = options or FsdpOptions()
        # A rank without work still takes part in every collective of the round.
        nothing = {name: [0.0] for name in (*algorithm.columns, RETURNS)}
        self._dummy: Rows = [[Sequence([0, 0], [1], [math.nan], columns=nothing)]]
        self._dtype = DTYPES[config.model.dtype]
        self._dirty = False
        """Whether a gradient waits to be reduced."""
        self._policy_shares_prefixes = self._policy_along_paths = False
        self._square_nodes = math.inf
        """Length at which attention costs as much as all else."""
        self._reference: Reference | None = None
        self._initial_adapters: dict[str, Tensor] | None = None
        """With adapters the policy itself is its reference: without them, or with those of the warm-up."""
        self._base_facts: tuple[ReferenceFacts, ReferenceFacts] | None = None
        """Of the frozen weights that the leader has read: as base model, and as reference."""
        self._model: ShardedModel | None = None
        self._optimizer: ShardedAdamW | None = None

    @property
    @override
    def replicas(self) -> int:
        """Each rank computes with whole layers."""
        return self._ranks.world_size

    @property
    @override
    def replica(self) -> int:
        return self._ranks.rank

    @property
    @override
    def shares_prefixes(self) -> bool:
        """Both models must follow a tree's mask."""
        return self._policy_shares_prefixes and (self._reference is None or self._reference.shares_prefixes)

    @property
    @override
    def costs(self) -> Costs:
        return Costs(self._square_nodes, padded=self._attends is not Attends.SEGMENTS)

    @override
    def memory_plan(self) -> MemoryPlan:
        return plan_memory(
            self._config,
            self._algorithm,
            self._ranks.world_size,
            reshard=self._options.reshard_micro_batches,
            on_gpu=self._ranks.device.type != "cpu",
        )

    @override
    def load_initial(self) -> None:
        self._shard(self._read_model(), self._load_critic(weights=self._ranks.leads))

    @override
    def check_state(self, reader: StateReader) -> None:
        check_fit(reader, self._config, self._load_critic(weights=False))

    @override
    def load_state(self, reader: StateReader | None) -> None:
        model = self._read_model() if self._lora else self._saved_model(reader)
        if reader is not None and self._lora:
            for name, tensor in state_tensors(model):
                if is_adapter(name):
                    tensor.data.copy_(reader.adapter(name))
        critic = self._load_critic(weights=False, dtype=torch.float32)
        if reader is not None and critic is not None:
            for name, tensor in critic.tensors():
                tensor.data.copy_(reader.critic_weight(f"{CRITIC}{name}"))
        self._shard(model, critic)
        steps = self._saved_steps(reader)
        if steps:
            moments = {
                kind: {
                    name: self._sharded.scatter(name, reader.moment(kind, name) if reader else None)
                    for name in self._sharded.learned
                }
                for kind in MOMENTS
            }
            self._adamw.load(moments, steps)

    @property
    @override
    def reference(self) -> ReferenceFacts | None:
        if self._reference is not None:
            return self._reference.facts
        return self._base_facts[1] if self._base_facts and self._initial_adapters is not None else None

    @property
    @override
    def base_model(self) -> ReferenceFacts | None:
        return self._base_facts[0] if self._base_facts else None

    @property
    @override
    def reference_bytes(self) -> int:
        own = sum(tensor.nbytes for tensor in (self._initial_adapters or {}).values())
        return self._reference.size_bytes if self._reference is not None else own

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        parameters, buffers = self._sharded.parameters, self._sharded.buffers
        layout = []
        for name in self._sharded.weight_names:
            dtype = self._dtype if name in parameters else buffers[name].dtype
            layout.append((name, str(dtype).removeprefix("torch."), self._sharded.shape(name)))
        return layout

    @override
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.weights()

    @override
    def moments(self) -> Iterator[tuple[str, Tensor]]:
        shards = self._sharded.shards()
        for kind in MOMENTS:
            for name, shard in shards.items():
                own = self._adamw.moment(kind, name) if shard.numel() else shard
                yield f"{kind}/{name}", self._sharded.gather(name, own)
        for name, tensor in self._sharded.critic_weights():
            yield f"{CRITIC_KIND}/{name}", tensor
        for name, tensor in self._sharded.adapters():
            yield f"{ADAPTER_KIND}/{name}", tensor
        if self._lora:
            yield f"{ADAPTER_KIND}/{ALPHA}", torch.tensor(self._lora.alpha, dtype=torch.float64)

    @override
    def release(self) -> None:
        self._sharded.release()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes masters, gradients and moments elsewhere; nothing runs until they are back on the device."""
        self._sharded.move(move)
        self._adamw.move(move, self._sharded.shards())

    def _read_model(self) -> PreTrainedModel:
        """The configured model as the leader reads it, its own weights frozen where adapters learn."""
        section, leads = self._config.model, self._ranks.leads
        model = load_model(section, weights=leads)
        if self._lora:
            self._base_facts = base_facts(self._config, model) if leads else None
            add_adapters(model, self._lora, self._config.seed)
        return model

    def _saved_model(self, reader: StateReader | None) -> PreTrainedModel:
        model = load_model(self._config.model, weights=False, dtype=torch.float32)
        if reader is not None:
            load_weights(model, {name: reader.weight(name) for name, _ in state_tensors(model)})
        return model

    def _load_critic(self, *, weights: bool, dtype: torch.dtype | None = None) -> Critic | None:
        plan = self._algorithm.critic
        if plan is None:
            return None
        if not plan.own_model:
            return Critic(hidden_size(load_architecture(self._config.model)))
        return load_critic(critic_section(self._config.model, plan.path), weights=weights, dtype=dtype)

    def _shard(self, model: PreTrainedModel, critic: Critic | None) -> None:
        # Master weights start from the values that the engine computes with, not from finer ones.
        bodies = [model] if critic is None or critic.body is None else [model, critic.body]
        for module in [model, critic] if critic else [model]:
            _float_what_learns(module)
        for _, tensor in [*state_tensors(model), *(critic.tensors() if critic else ())]:
            self._ranks.share(tensor.data)
        if self._config.trainer.gradient_checkpointing:
            for body in bodies:
                untyped: Any = body
                untyped.gradient_checkpointing_enable({"use_reentrant": False})
                body.train()  # transformers checkpoints in training mode only; modelkit has turned dropout off
        for body in bodies:
            use_fp32_products(body, self._ranks.device)
        # 24 D² products a layer and token against 2 D for each token before it.
        self._square_nodes = 12.0 * max(hidden_size(body.config) for body in bodies)
        self._policy_shares_prefixes = shares_prefixes(self._config, [body.config for body in bodies])
        self._policy_along_paths = attends_along_paths(self._config, bodies)
        self._routing = take_routers(model)
        self._expert_shape = expert_shape(model.config)
        self._model = ShardedModel(
            model,
            self._ranks,
            None if self._lora else self._dtype,
            reshard=self._options.reshard_micro_batches,
            critic=critic,
            routing=self._routing,
            experts=self._expert_mesh(),
        )
        self._optimizer = self._new_optimizer()
        self._dirty = False

    def _expert_mesh(self) -> ExpertMesh | None:
        size = self._options.expert_parallel
        return ExpertMesh(self._ranks, size) if size > 1 else None

    @override
    def _new_optimizer(self) -> ShardedAdamW:
        decays = {name for name, p in self._sharded.learned.items() if p.dim() > 1}
        config: OptimizerSection = self._config.optimizer
        critic = frozenset(self._sharded.critic_names)
        return ShardedAdamW(config, self._sharded.shards(), decays=decays, critic=critic)

    def _forward(self, batch: MicroBatch, *, values: bool) -> Forward:
        anchor = torch.zeros((), device=self._ranks.device)
        found: Forward = self._sharded.policy(batch, self._config.sampling.temperature, anchor, values=values)
        return found

    @override
    def _columns(self, names: Many[str], rows: Rows) -> dict[str, Tensor]:
        batch = self._pack(rows)
        known = {OLD_LOG_PROBS, VALUES} if self._algorithm.critic else {OLD_LOG_PROBS}
        if REFERENCE_LOG_PROBS in names and self._reference is None and self._initial_adapters is None:
            raise invalid("the run has no reference model: no option of its algorithm needs one")
        if VALUES in names and VALUES not in known:
            raise invalid("the run has no critic: its algorithm needs none")
        computed: dict[str, Tensor | None] = {}
        if known.intersection(names):
            with torch.no_grad():
                log_probs_K, _, values_K = self._forward(batch, values=VALUES in names)
            computed = {OLD_LOG_PROBS: log_probs_K, VALUES: values_K}
        if REFERENCE_LOG_PROBS in names:
            computed[REFERENCE_LOG_PROBS] = self._reference_log_probs(batch)
        return {name: found_K for name in names if (found_K := computed[name]) is not None}

    def _reference_log_probs(self, batch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.log_probs(batch)
        initial = self._initial_adapters or {}
        placed = {name: tensor.to(self._ranks.device) for name, tensor in initial.items()}
        with torch.no_grad(), standing_in(self._sharded.model, placed):
            return self._forward(batch.unforced(), values=False)[0]

    @override
    def _shards(self) -> dict[str, Tensor]:
        return self._sharded.shards()

    @override
    def _spread(self) -> None:
        self._sharded.release()  # whole parameters of an earlier forward are of other weights

    @property
    @override
    def _has_weights(self) -> bool:
        return self._model is not None

    @override
    def _park(self) -> None:
        if self._reference is not None:
            self._reference.park()

    def _pack(self, rows: Rows) -> MicroBatch:
        batch = pack(
            rows or self._dummy,
            shared=self.shares_prefixes,
            attends=self._attends,
            experts=self._expert_shape,
        )
        return (batch if rows else batch.uncounted()).to(self._ranks.device)

    @property
    def _attends(self) -> Attends:
        """What the attention of all models that see a micro-batch can be told."""
        if not self._policy_along_paths or (self._reference is not None and not self._reference.along_paths):
            return Attends.MASK
        return Attends.CHEAPEST if self._ranks.device.type == "cpu" else Attends.SEGMENTS

    @property
    def _lora(self) -> LoraSection | None:
        return self._config.trainer.lora

    @property
    def _sharded(self) -> ShardedModel:
        if self._model is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._model

    @property
    @override
    def _adamw(self) -> ShardedAdamW:
        if self._optimizer is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._optimizer


def _float_what_learns(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
