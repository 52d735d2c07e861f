"""The models of one rank with megatron-core: loaded, divided, read, moved. Knows no gradient and no step.

The frozen reference model of a run is divided like its policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from headrace_modelkit.loading import DTYPES
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.pinned import rooms_of
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends._base import Owners, ReferenceFacts, StatePart, StateReader
from headrace_trainer.backends.fsdp.reference import reference_facts
from headrace_trainer.backends.shared.distributing import check_files, open_source, types_of, weights_digest
from headrace_trainer.backends.shared.fit import check_fit
from headrace_trainer.backends.shared.model import LanguageModel
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import Attends, MicroBatch, pack
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Rows, Sample
from headrace_trainer.memory import MemoryPlan, Rooms, with_room_to_lend
from torch import Tensor
from typing_extensions import override

from headrace_megatron.architecture import read_architecture
from headrace_megatron.checks import parts_wanted, plan_memory
from headrace_megatron.gpt import kernels_said, uses_engine
from headrace_megatron.groups import Groups, join_groups
from headrace_megatron.layout import Layout
from headrace_megatron.model import ParallelModel, Settings
from headrace_megatron.pipeline import Pipeline
from headrace_megatron.plugin import MegatronOptions


class Reference:
    """`trainer.reference`, or the run's initial policy: `warmed` are its weights where a warm-up has changed them."""

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        groups: Groups,
        settings: Settings,
        warmed: Iterator[tuple[str, Tensor]] | None,
    ) -> None:
        section = config.trainer.reference or config.model
        self._device = ranks.device
        self.facts = ReferenceFacts(section.path, "")
        """Of the weights as they were read; the leader's alone has a digest."""
        model = empty_model(section)
        source = open_source(ranks, section, model)
        if ranks.leads and source is not None:
            self.facts = reference_facts(config, section.path, weights_digest(source, model))
        dtype = DTYPES[section.dtype]
        engine = settings.engine and dtype is DTYPES[config.model.dtype]
        own = replace(settings, dtype=dtype, recompute=False, engine=engine)
        self._model = ParallelModel(read_architecture(section), ranks, groups, own, frozen=True)
        if warmed is None:
            self._model.load(source.read if source else None, types_of(model))
        else:
            self._model.load_whole(warmed)
        self.pipeline = Pipeline(self._model)
        self._away = False
        self.park()

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's part."""
        return self._model.weights.size_bytes

    @property
    def model(self) -> ParallelModel:
        """The model, with its weights on the device."""
        if self._away:
            self._model.weights.move(rooms_of(self._device).to_device)
            self._away = False
        return self._model

    def park(self) -> None:
        """Takes the weights to host memory until they are used again; nothing to do where they are there."""
        if self._device.type != "cpu" and not self._away:
            self._model.weights.move(rooms_of(self._device).to_host)
            self._away = True


@dataclass
class _Policy:
    """What a restore round makes."""

    groups: Groups
    model: ParallelModel
    pipeline: Pipeline
    adamw: ShardedAdamW
    idle: MicroBatch = field(init=False)
    """A part without work."""


class MegatronModels(LanguageModel):
    """Policy and reference of a run, with the optimizer's state; `Backend` has what each method promises."""

    shares_prefixes = False
    """Megatron's layers attend along sequences, which follow no tree."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: MegatronOptions,
    ) -> None:
        super().__init__(config, algorithm, ranks)
        self._options = options
        self._layout = Layout.of(options, ranks.world_size)
        self._settings = Settings(
            DTYPES[config.model.dtype],
            options.sequence_parallel,
            bool(config.trainer.gradient_checkpointing),
            uses_engine(options.transformer_engine, ranks.device, DTYPES[config.model.dtype]),
        )
        self._temperature = config.sampling.temperature
        self._reference: Reference | None = None
        self._loaded: _Policy | None = None

    @property
    def layout_chosen(self) -> str:  # type: ignore[override]
        """How the ranks are divided, and whose kernels compute."""
        wanted, dtype = self._options.transformer_engine, DTYPES[self._config.model.dtype]
        return f"{self._layout}; {kernels_said(wanted, self._ranks.device, dtype)}"

    @property
    @override
    def replicas(self) -> int:
        return self._layout.replicas

    @property
    @override
    def replica(self) -> int:
        return self._layout.replica(self._ranks.rank)

    @property
    @override
    def costs(self) -> Costs:
        return Costs(padded=False)

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        on_gpu = self._ranks.device.type != "cpu"
        plan = plan_memory(self._config, self._algorithm, self._options, self._layout, on_gpu=on_gpu)
        return with_room_to_lend(replace(plan, layout=self.layout_chosen), rooms)

    @override
    def check_files(self, *, initial: bool) -> None:
        if initial:
            check_files(self._config.model)
        if REFERENCE_LOG_PROBS in self._algorithm.columns:
            section = self._config.trainer.reference
            check_files(section or self._config.model, "trainer.reference.path" if section else "model.path")

    @override
    def load_initial(self) -> None:
        section = self._config.model
        model = empty_model(section)
        source = open_source(self._ranks, section, model)
        self._build()
        self._model.load(source.read if source else None, types_of(model))

    @override
    def check_state(self, reader: StateReader) -> None:
        check_fit(reader, self._config, None)

    @override
    def load_state(self, reader: StateReader | None) -> None:
        self._build()
        self._model.load(reader.weight if reader else None)
        steps = self._saved_steps(reader)
        if steps:
            read = {kind: partial(reader.moment, kind) if reader else None for kind in MOMENTS}
            self._adamw.load({kind: self._model.pieces(own) for kind, own in read.items()}, steps)

    @override
    def _take_reference(self, *, warmed: bool) -> None:
        weights = self.weights() if warmed else None
        self._reference = Reference(self._config, self._ranks, self._join(), self._settings, weights)

    @property
    @override
    def reference(self) -> ReferenceFacts | None:
        return self._reference.facts if self._reference is not None else None

    @property
    @override
    def reference_bytes(self) -> int:
        return self._reference.size_bytes if self._reference is not None else 0

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        published = self._config.model.dtype
        return [(name, published, shape) for name, shape in self._model.architecture.shapes.items()]

    @override
    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if published or owners is not None:
            return self._model.published(owners)
        return self._model.gather(self._model.shards.masters())

    @override
    def weight_parts(self) -> Iterator[StatePart]:
        return self._model.state_parts(self._model.shards.masters())

    @override
    def moment_parts(self) -> Iterator[StatePart]:
        masters = self._model.shards.masters()
        for kind in MOMENTS:
            own = {
                name: self._adamw.moment(kind, name) if piece.numel() else piece
                for name, piece in masters.items()
            }
            for part in self._model.state_parts(own):
                yield replace(part, name=f"{kind}/{part.name}")

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes values, masters, gradients and moments elsewhere; nothing runs until they are back on the device."""
        self._model.shards.move(move)
        self._adamw.move(move, self._model.shards.masters())

    def _build(self) -> None:
        """A model and an optimizer whose values are not set yet."""
        groups = self._join()
        architecture = read_architecture(self._config.model)
        model = ParallelModel(architecture, self._ranks, groups, self._settings)
        self._expert_shape = architecture.experts
        self._routing = model.routing if architecture.experts is not None else None
        self._balance_share = 1.0 / self._layout.tensor
        self._loaded = _Policy(groups, model, Pipeline(model), _new_optimizer(self._config, model))
        self._loaded.idle = self._packed([[Sample([0, 0], [1], [math.nan])]]).uncounted()

    def _join(self) -> Groups:
        return join_groups(self._ranks, self._layout, self._config.seed)

    @override
    def _new_optimizer(self) -> ShardedAdamW:
        return _new_optimizer(self._config, self._model)

    def _parts(self, rows: Rows) -> list[MicroBatch]:
        """The rows as parts that follow each other through the stages, of about as many tokens each.

        Idle ones are added where a schedule, or ranks that exchange tokens, need more; there is one at least.
        """
        stages, wanted = self._layout.pipeline, parts_wanted(self._options, self._layout)
        found = [self._packed(part) for part in divided_rows(rows, wanted)]
        least = wanted if self._layout.experts > 1 else max(1, len(found))
        if self._layout.virtual > 1:
            least = -(-least // stages) * stages
        return found + [self._open.idle] * (least - len(found))

    def _packed(self, rows: Rows) -> MicroBatch:
        model = self._model
        batch = pack(
            rows,
            shared=False,
            attends=Attends.SEGMENTS,
            multiple=model.multiple,
            experts=model.architecture.experts,
        )
        return batch.to(self._ranks.device)

    def _log_probs(self, model: ParallelModel, pipeline: Pipeline, rows: Rows) -> Tensor:
        """Log-probs of the trained tokens of all rows, (K,), on every rank of the replica."""
        parts = self._parts(rows)

        def finish(hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            found_K, _ = model.log_probs(hidden, batch, self._temperature)
            return found_K.sum(), found_K

        counted = [part is not self._open.idle for part in parts]
        # A reference has routers of its own.
        given = parts if model is self._model else [part.unforced() for part in parts]
        found = pipeline.run(given, finish, backward=False)
        if not self._groups.last_stage:
            found = [torch.empty(len(part.index_K), device=self._ranks.device) for part in parts]
        own = [found_K for found_K, counts in zip(found, counted, strict=True) if counts]
        whole_K = torch.cat([torch.empty(0, device=self._ranks.device), *own])
        self._groups.share_from_last_stage(whole_K)
        return whole_K

    @override
    def _shards(self) -> dict[str, Tensor]:
        return self._model.shards.masters()

    @override
    def _spread(self) -> None:
        self._model.shards.spread()

    @property
    @override
    def _has_weights(self) -> bool:
        return self._loaded is not None

    @override
    def _park(self) -> None:
        if self._reference is not None:
            self._reference.park()

    @property
    def counts_tokens(self) -> bool:  # type: ignore[override]
        """By the groups that the ranks are divided into."""
        return self._groups.routes_alone

    @property
    def _groups(self) -> Groups:
        return self._open.groups

    @property
    def _model(self) -> ParallelModel:
        return self._open.model

    @property
    def _pipeline(self) -> Pipeline:
        return self._open.pipeline

    @property
    @override
    def _adamw(self) -> ShardedAdamW:
        return self._open.adamw

    @property
    def _open(self) -> _Policy:
        if self._loaded is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._loaded


def _new_optimizer(config: TrainerConfig, model: ParallelModel) -> ShardedAdamW:
    decays = {name for name, shape in model.shards.shapes().items() if len(shape) > 1}
    return ShardedAdamW(config.optimizer, model.shards.masters(), decays=decays)


def divided_rows(rows: Rows, parts: int) -> list[Rows]:
    """The rows in their order, as so many parts of about as many tokens each; fewer of fewer rows."""
    sizes = [sum(len(sample.tokens) for sample in row) for row in rows]
    each, before = sum(sizes) / parts, 0
    found: dict[int, Rows] = {}
    for row, size in zip(rows, sizes, strict=True):
        found.setdefault(min(int((before + size / 2) / each), parts - 1), []).append(row)
        before += size
    return list(found.values())
