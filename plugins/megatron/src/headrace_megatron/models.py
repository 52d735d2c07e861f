"""The models of one rank with megatron-core: loaded, divided, read, moved. Knows no gradient and no step.

The frozen reference model of a run is divided like its policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from headrace_modelkit.loading import DTYPES
from headrace_modelkit.model_files import empty_model
from headrace_modelkit.pinned import rooms_of
from headrace_schema.openings import TrainerConfig
from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends._base import Owners, ReferenceFacts, StatePart, StateReader
from headrace_trainer.backends.fsdp.layouts.planned import FP32, MOMENTS_BYTES
from headrace_trainer.backends.fsdp.reference import reference_facts
from headrace_trainer.backends.shared.distributing import check_files, open_source, types_of, weights_digest
from headrace_trainer.backends.shared.fit import check_fit
from headrace_trainer.backends.shared.model import LanguageModel
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch, pack
from headrace_trainer.learning.samples import Rows, Sample
from headrace_trainer.memory import LENT, MemoryPlan, Rooms, kept_bytes, lent_bytes, with_room_to_lend
from torch import Tensor
from typing_extensions import override

from headrace_megatron.architecture import Architecture, read_architecture
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
        own = replace(settings, dtype=DTYPES[section.dtype], recompute=False)
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
        return self._model.shards.size_bytes

    @property
    def model(self) -> ParallelModel:
        """The model, with its weights on the device."""
        if self._away:
            self._model.shards.move(rooms_of(self._device).to_device)
            self._away = False
        return self._model

    def park(self) -> None:
        """Takes the weights to host memory until they are used again; nothing to do where they are there."""
        if self._device.type != "cpu" and not self._away:
            self._model.shards.move(rooms_of(self._device).to_host)
            self._away = True


@dataclass(frozen=True)
class _Policy:
    """What a restore round makes."""

    groups: Groups
    model: ParallelModel
    pipeline: Pipeline
    adamw: ShardedAdamW


class MegatronModels(LanguageModel):
    """Policy and reference of a run, with the optimizer's state; `Backend` has what each method promises."""

    shares_prefixes = False
    """Megatron's layers attend causally along rows: each sequence has a row of its own."""

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
            DTYPES[config.model.dtype], options.sequence_parallel, bool(config.trainer.gradient_checkpointing)
        )
        self._temperature = config.sampling.temperature
        self._reference: Reference | None = None
        self._loaded: _Policy | None = None

    @property
    @override
    def replicas(self) -> int:
        return self._layout.replicas

    @property
    @override
    def replica(self) -> int:
        return self._layout.replica(self._ranks.rank)

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        on_gpu = self._ranks.device.type != "cpu"
        return with_room_to_lend(
            plan_memory(self._config, self._algorithm, self._layout, on_gpu=on_gpu), rooms
        )

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

    def _join(self) -> Groups:
        return join_groups(self._ranks, self._layout, self._config.seed)

    @override
    def _new_optimizer(self) -> ShardedAdamW:
        return _new_optimizer(self._config, self._model)

    def _parts(self, rows: Rows) -> list[MicroBatch]:
        """The rows as parts that follow each other through the stages; equally many on ranks that divide experts."""
        stages = self._layout.pipeline
        wanted = self._options.pipeline_micro_batches or (2 * stages if stages > 1 else 1)
        size = -(-len(rows) // wanted)
        experts = self._model.architecture.experts
        parts = [
            pack(rows[first : first + size], shared=False, experts=experts)
            for first in range(0, len(rows), size or 1)
        ]
        if self._layout.experts > 1:  # Ranks that exchange tokens compute equally many parts.
            idle = [[Sample([0, 0], [1], [math.nan])]]
            parts += [pack(idle, shared=False, experts=experts).uncounted()] * (wanted - len(parts))
        return [self._model.padded(part).to(self._ranks.device) for part in parts]

    def _log_probs(self, model: ParallelModel, pipeline: Pipeline, rows: Rows) -> Tensor:
        """Log-probs of the trained tokens of all rows, (K,), on every rank of the replica."""
        found = []
        parts = self._parts(rows)
        for part in pipeline.forward(parts if model is self._model else [each.unforced() for each in parts]):
            if part.batch.idle:
                continue
            if self._groups.last_stage:
                log_probs_K, _ = model.log_probs(part.hidden, part.batch, self._temperature)
            else:
                log_probs_K = torch.empty(len(part.batch.index_K), device=self._ranks.device)
            found.append(log_probs_K)
        whole_K = torch.cat([torch.empty(0, device=self._ranks.device), *found])
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


def plan_memory(config: TrainerConfig, algorithm: Algorithm, layout: Layout, *, on_gpu: bool) -> MemoryPlan:
    """The leader's, which alone keeps groups: a share of the model at least. Raises ModelNotReadable."""
    own, experts = _share(read_architecture(config.model), layout)
    same = layout.replicas * layout.context
    slice_ = -(-(own - experts) // same) + -(-experts * layout.experts // same)
    width = DTYPES[config.model.dtype].itemsize
    reference = config.trainer.reference or config.model
    frozen = 0
    if REFERENCE_LOG_PROBS in algorithm.columns:
        frozen, _ = _share(read_architecture(reference, "trainer.reference.path"), layout)
    device = {
        "weights": own * width,
        # A model in fp32 computes with its masters themselves.
        "masters": 0 if width == FP32 else slice_ * FP32,
        "moments": slice_ * MOMENTS_BYTES,
        "gradients": (own + slice_) * FP32,
        "reference": frozen * DTYPES[reference.dtype].itemsize,
    }
    host = {
        "hold": slice_ * (FP32 + MOMENTS_BYTES) if algorithm.passes.several else 0,
        "kept groups": kept_bytes(config, algorithm),
    }
    if not on_gpu:
        return MemoryPlan(device | host, {})
    whole = sum(math.prod(shape) for shape in read_architecture(config.model).shapes.values())
    if lent := lent_bytes(config, whole * width):
        device[LENT] = lent
    # Between the infer rounds that use it, a reference lies in host memory.
    return MemoryPlan(host | {"reference": device["reference"]}, device)


def _share(architecture: Architecture, layout: Layout) -> tuple[int, int]:
    """(All, expert) weights of one rank, were they divided evenly over tensor, pipeline and expert-parallel ranks."""
    each = {name: math.prod(shape) for name, shape in architecture.shapes.items()}
    experts = sum(size for name, size in each.items() if ".mlp.experts." in name)
    held = layout.tensor * layout.pipeline
    own = -(-experts // (held * layout.experts))
    return -(-(sum(each.values()) - experts) // held) + own, own
