"""The models of one rank with FSDP2: loaded, sharded, computed forward, read, moved. Knows no gradient and no step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from headrace_modelkit.critic import Critic, critic_section, hidden_size
from headrace_modelkit.experts import expert_shape, take_routers
from headrace_modelkit.loading import DTYPES, load_architecture
from headrace_modelkit.lora import add_adapters, standing_in
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.products import use_fp32_products
from headrace_modelkit.tensor_files import Tensors, slices
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
    StatePart,
    StateReader,
)
from headrace_trainer.backends.fsdp.context import ContextGroup
from headrace_trainer.backends.fsdp.experts import ExpertMesh
from headrace_trainer.backends.fsdp.layout import GPUS_PER_HOST, Layout, check_ranks
from headrace_trainer.backends.fsdp.loading import is_saved_here, local
from headrace_trainer.backends.fsdp.planned import choose_layout
from headrace_trainer.backends.fsdp.prefixes import attends_along_paths, shares_prefixes
from headrace_trainer.backends.fsdp.reference import Reference, base_facts
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.distributing import (
    Place,
    Read,
    check_files,
    distribute,
    open_source,
    types_of,
    weights_digest,
)
from headrace_trainer.backends.shared.fit import ALPHA, CRITIC, check_fit
from headrace_trainer.backends.shared.losses import Forward
from headrace_trainer.backends.shared.model import LanguageModel
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import Attends, MicroBatch, pack
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Rows, Sequence
from headrace_trainer.memory import MemoryPlan, Rooms


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
        self._layout: Layout | None = None
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
        return self._policy_shares_prefixes and (self._reference is None or self._reference.shares_prefixes)

    @property
    @override
    def costs(self) -> Costs:
        return Costs(self._square_nodes, padded=self._attends is not Attends.SEGMENTS)

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        ranks = self._ranks.world_size
        check_ranks(self._options, ranks)
        return choose_layout(self._config, self._algorithm, self._options, ranks, GPUS_PER_HOST, rooms)[1]

    @property
    def layout(self) -> Layout:
        """How the model lies on the ranks: the same on all of them, chosen once for the least room that one has."""
        if self._layout is None:
            ranks = self._ranks.world_size
            rooms, ranks_per_host = self._ranks.least_rooms()
            self._layout, plan = choose_layout(
                self._config, self._algorithm, self._options, ranks, ranks_per_host, rooms
            )
            self.layout_chosen = plan.reason
        return self._layout

    @override
    def check_files(self, *, initial: bool) -> None:
        if initial or self._lora:
            check_files(self._config.model)
        section = self._config.trainer.reference
        if REFERENCE_LOG_PROBS in self._algorithm.columns and (section is not None or not self._lora):
            check_files(section or self._config.model, "trainer.reference.path" if section else "model.path")
        plan = self._algorithm.critic
        if initial and plan is not None and plan.path is not None:
            check_files(critic_section(self._config.model, plan.path), "algorithm.options.critic_path")

    @override
    def load_initial(self) -> None:
        model, source, types = self._read_model()
        plan, body, body_source = self._algorithm.critic, None, None
        if plan is not None and plan.own_model:
            section = critic_section(self._config.model, plan.path)
            body = empty_model(section)
            body_source, body_types = open_source(self._ranks, section, body), types_of(body)
        self._shard(model, self._critic_of(body))
        self._fill_weights(source, types)
        if body is not None:
            before, prefix = f"{CRITIC}body.", f"{body.base_model_prefix}."
            names = {
                name: prefix + name.removeprefix(before)
                for name in self._sharded.critic_names
                if name.startswith(before)
            }
            own = self._sharded.places(names, {name: body_types[read] for name, read in names.items()})
            found = [replace(place, name=names[place.name]) for place in own]
            distribute(self._ranks, found, body_source.read if body_source else None)

    @override
    def check_state(self, reader: StateReader) -> None:
        check_fit(reader, self._config, self._empty_critic())

    @override
    def load_state(self, reader: StateReader | None) -> None:
        source: Tensors | None = None
        if self._lora:
            model, source, types = self._read_model()
        else:
            model = empty_model(self._config.model, dtype=torch.float32)
        self._shard(model, self._empty_critic())
        if self._lora:
            self._fill_weights(source, types)
            self._fill(self._sharded.adapter_names, reader.adapter if reader else None)
        else:
            self._fill(self._sharded.weight_names, reader.weight if reader else None)
        if self._sharded.critic_names:
            self._fill(self._sharded.critic_names, reader.critic_weight if reader else None)
        steps = self._saved_steps(reader)
        if steps:
            self._adamw.load({kind: self._read_moments(kind, reader) for kind in MOMENTS}, steps)

    def _fill_weights(self, source: Tensors | None, types: dict[str, torch.dtype]) -> None:
        """Master weights start from the values that the engine computes with, not from finer ones: from `types`."""
        own = self._sharded.places(self._sharded.weight_names, types)
        distribute(self._ranks, own, source.read if source else None)

    def _fill(self, names: Many[str], read: Read | None) -> None:
        distribute(self._ranks, self._sharded.places(names), read)

    def _read_moments(self, kind: str, reader: StateReader | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        wanted = [
            Place(name, self._sharded.box(name), torch.float32, partial(found.__setitem__, name))
            for name in self._sharded.learned
        ]
        distribute(self._ranks, wanted, partial(reader.moment, kind) if reader else None)
        return found

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
    def weight_parts(self) -> Iterator[StatePart]:
        for name in self._sharded.weight_names:
            if not self._sharded.is_adapted(name):
                yield from self._part(name, name)
                continue
            # Merged as it is published, to the last bit: of the whole weight.
            whole = self._sharded.weight(name)
            yield from self._part(name, name, whole[slices(self._sharded.box(name))])

    @override
    def moment_parts(self) -> Iterator[StatePart]:
        shards = self._sharded.shards()
        for kind in MOMENTS:
            for name, shard in shards.items():
                own = self._adamw.moment(kind, name) if shard.numel() else shard
                yield from self._part(f"{kind}/{name}", name, own)
        for name in self._sharded.critic_names:
            yield from self._part(f"{CRITIC_KIND}/{name}", name)
        for name in self._sharded.adapter_names:
            yield from self._part(f"{ADAPTER_KIND}/{name}", name)
        if self._lora and self._ranks.leads:
            alpha = torch.tensor(self._lora.alpha, dtype=torch.float64)
            yield StatePart(f"{ADAPTER_KIND}/{ALPHA}", (), (), alpha)

    def _part(self, saved_as: str, name: str, value: Tensor | None = None) -> Iterator[StatePart]:
        """What this rank saves of tensor `name`, or of one that is sharded like it; nothing where another rank does."""
        tensor = self._sharded.tensors()[name]
        if is_saved_here(tensor, leads=self._ranks.leads):
            own = local(tensor) if value is None else value
            yield StatePart(saved_as, self._sharded.shape(name), self._sharded.box(name), own)

    @override
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.adapters()

    @override
    def release(self) -> None:
        self._sharded.release()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes masters, gradients and moments elsewhere; nothing runs until they are back on the device."""
        self._sharded.move(move)
        self._adamw.move(move, self._sharded.shards())

    def _read_model(self) -> tuple[PreTrainedModel, Tensors | None, dict[str, torch.dtype]]:
        """The configured model on meta, its own weights frozen where adapters learn; where to read them, and in which
        types.
        """
        section = self._config.model
        model = empty_model(section)
        source, types = open_source(self._ranks, section, model), types_of(model)
        if self._lora:
            self._base_facts = None
            if self._ranks.leads and source is not None:
                self._base_facts = base_facts(self._config, weights_digest(source, model))
            add_adapters(model, self._lora, self._config.seed, torch.device("cpu"))
        return model, source, types

    def _empty_critic(self) -> Critic | None:
        """The critic whose body, if it has one, lies on meta."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model:
            return self._critic_of(None)
        section = critic_section(self._config.model, plan.path)
        return self._critic_of(empty_model(section, dtype=torch.float32))

    def _critic_of(self, model: PreTrainedModel | None) -> Critic | None:
        if self._algorithm.critic is None:
            return None
        if model is None:
            return Critic(hidden_size(load_architecture(self._config.model)))
        untyped: Any = model
        return Critic(hidden_size(model.config), untyped.base_model)

    def _shard(self, model: PreTrainedModel, critic: Critic | None) -> None:
        bodies = [model] if critic is None or critic.body is None else [model, critic.body]
        for module in [model, critic] if critic else [model]:
            _float_what_learns(module)
        if self.layout.checkpointing:
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
            layout=self.layout,
            critic=critic,
            routing=self._routing,
            experts=self._expert_mesh(),
        )
        self._model.policy.context = self._context
        self._optimizer = self._new_optimizer()
        self._dirty = False

    @property
    def _context(self) -> ContextGroup | None:
        size = self._options.context_parallel
        return ContextGroup(self._ranks, size) if size > 1 else None

    def _expert_mesh(self) -> ExpertMesh | None:
        size = self._options.expert_parallel
        return ExpertMesh(self._ranks, size) if size > 1 else None

    @override
    def _new_optimizer(self) -> ShardedAdamW:
        decays = {name for name, p in self._sharded.learned.items() if p.dim() > 1}
        config: OptimizerSection = self._config.optimizer
        critic = frozenset(self._sharded.critic_names)
        return ShardedAdamW(
            config,
            self._sharded.shards(),
            decays=decays,
            critic=critic,
            moments_on_host=self.layout.offload != "none",
        )

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
            multiple=self._options.context_parallel,
            experts=self._expert_shape,
        )
        if (context := self._context) is not None:
            batch = context.divided(batch)
        return (batch if rows else batch.uncounted()).to(self._ranks.device)

    @property
    def _attends(self) -> Attends:
        """What the attention of all models that see a micro-batch can be told."""
        if not self._policy_along_paths or (self._reference is not None and not self._reference.along_paths):
            return Attends.MASK
        divided = self._options.context_parallel > 1
        return Attends.SEGMENTS if divided or self._ranks.device.type != "cpu" else Attends.CHEAPEST

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
