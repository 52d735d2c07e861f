"""A model that learns with FSDP2, whatever it learns from: laid out, filled, stepped, moved, published and saved.

Knows no forward and no loss. Gradients are added up unnormalised in fp32 and divided by the step's denominator when it
is known, so the order and the packing in which work comes do not matter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.loading import DTYPES
from headrace_modelkit.tensor_files import Tensors, slices
from headrace_modelkit.weights import CheckpointNames
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import DraftSection, LoraSection, OptimizerSection
from torch import Tensor, nn
from typing_extensions import override

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import (
    ADAPTER_KIND,
    CRITIC_KIND,
    AdaptingBackend,
    Owners,
    ReferenceFacts,
    StatePart,
    StateReader,
)
from headrace_trainer.backends.fsdp.layouts.layout import GPUS_PER_HOST, Layout, check_ranks
from headrace_trainer.backends.fsdp.layouts.planned import Measure, choose_layout
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.backends.fsdp.loading import is_saved_here, local
from headrace_trainer.backends.fsdp.resident import base_mark
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.backends.shared.distributing import Place, Read, distribute
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.fit import ALPHA, CRITIC
from headrace_trainer.backends.shared.model import LearnedModel
from headrace_trainer.backends.shared.muon import ShardedMuon, hidden_matrices
from headrace_trainer.backends.shared.optimizer import KINDS, Aside, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.memory import MemoryPlan, Rooms, check_host


class ShardedBackend(LearnedModel, AdaptingBackend):
    """One rank of a run whose model is divided by fully_shard; `Backend` has what each method promises."""

    _measure: Measure = staticmethod(Sizes.of)
    """What a layout is chosen by."""
    _shares_base = False

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: Algorithm,
        ranks: TrainerGroup,
        options: FsdpOptions | None = None,
    ) -> None:
        super().__init__(config, algorithm, ranks)
        self._options = options or FsdpOptions()
        self._dtype = DTYPES[config.model.dtype]
        self._layout: Layout | None = None
        self._dirty = False
        """Whether a gradient waits to be reduced."""
        self._model: ShardedModel | None = None
        self._optimizer: ShardedAdamW | None = None
        self._base_facts: tuple[ReferenceFacts, ReferenceFacts] | None = None
        """Of the frozen weights that the leader has read: as base model, and as reference."""
        self._base_names: CheckpointNames | None = None

    @property
    @abstractmethod
    def _critic_names(self) -> frozenset[str]:
        """Which of the weights that learn are the critic's own."""

    # The layout

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        ranks, rooms = self._ranks.world_size, self._with_base(rooms)
        check_ranks(self._options, ranks)
        _, plan = choose_layout(
            self._config, self._algorithm, self._options, ranks, GPUS_PER_HOST, rooms, self._measure
        )
        return plan

    @property
    def layout(self) -> Layout:
        """How the model lies on the ranks: the same on all of them, chosen once for the least room that one has.

        Raises Refusal INVALID or MEMORY_SHORT where a host has too little for its ranks.
        """
        if self._layout is None:
            ranks = self._ranks.world_size
            rooms, ranks_per_host = self._ranks.least_rooms()
            rooms = self._with_base(rooms)
            layout, plan = choose_layout(
                self._config, self._algorithm, self._options, ranks, ranks_per_host, rooms, self._measure
            )
            check_host(plan, rooms, min(ranks, ranks_per_host))
            self._layout, self.layout_chosen, self.saves_in_place = layout, plan.reason, plan.saves_in_place
        return self._layout

    @property
    def _base_mark(self) -> str | None:
        """As `base_mark`, of a backend that shares frozen weights."""
        return None if self.bases is None or not self._shares_base else base_mark(self._config, self._ranks)

    def _with_base(self, rooms: Rooms) -> Rooms:
        mark, bases = self._base_mark, self.bases
        return rooms if mark is None or bases is None else replace(rooms, base=bases.has(mark))

    @property
    def _lora(self) -> LoraSection | None:
        return self._config.trainer.lora

    @property
    @override
    def base_model(self) -> ReferenceFacts | None:
        return self._base_facts[0] if self._base_facts else None

    # The step

    @override
    def zero(self) -> None:
        if self._dirty:
            self._sharded.finish_backward()
        self._sharded.drop_gradients()
        self._figures = TokenFigures()
        self._dirty = False

    @override
    def gradient_is_finite(self) -> bool:
        self._finish_backward()
        return math.isfinite(self._global_norm(self._sharded.gradients()))

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The step's whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        self._sharded.finish_backward()
        shards = self._all_gradients()
        whole = {name: self._sharded.gather(name, shard) / denominator for name, shard in shards.items()}
        self._dirty = False
        self.zero()
        return whole

    def _finish_backward(self) -> None:
        if self._dirty:
            self._sharded.finish_backward()
            self._dirty = False

    def _all_gradients(self) -> dict[str, Tensor]:
        """The reduced shards of all that has been accumulated."""
        return self._sharded.gradients()

    @override
    def _reduced(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        if self._dirty:
            self._sharded.finish_backward()
        return self._all_gradients(), self._critic_names

    @override
    def _drop_gradients(self) -> None:
        self._sharded.drop_gradients()
        self._dirty = False

    @override
    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        return math.sqrt(self._sharded.norm_square(gradients.values()))

    @override
    def _shards(self) -> dict[str, Tensor]:
        return self._sharded.shards()

    @override
    def _spread(self) -> None:
        self._sharded.release()  # whole parameters of an earlier forward are of other weights

    @override
    def release(self) -> None:
        self._sharded.release()

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes masters, gradients and moments elsewhere; nothing runs until they are back on the device."""
        self._sharded.move(move)
        self._adamw.move(move, self._sharded.shards())

    @property
    def _draft(self) -> DraftSection | None:
        return self._config.trainer.draft

    def _new_optimizer(self) -> ShardedAdamW:
        sharded, config, draft = self._sharded, self._config.optimizer, self._draft
        heads = frozenset(name for name in sharded.learned if name.startswith(DRAFT))
        made = partial(
            ShardedAdamW if config.name != "muon" else self._muon,
            config,
            sharded.shards(),
            decays={name for name, p in sharded.learned.items() if p.dim() > 1},
            critic=self._critic_names,
            aside=Aside(heads, draft.lr, draft.every) if draft else None,
            moments_on_host=self.layout.offload != "none",
        )
        return made()

    def _muon(self, config: OptimizerSection, shards: dict[str, Tensor], **options: Any) -> ShardedMuon:
        sharded = self._sharded
        hidden = hidden_matrices(sharded.model)
        shapes = {name: tuple(p.shape) for name, p in sharded.learned.items() if name in hidden}
        return ShardedMuon(config, shards, shapes=shapes, through_wholes=sharded.through_wholes, **options)

    @property
    def _sharded(self) -> ShardedModel:
        """What was sharded. Raises Refusal NOT_OPEN."""
        if self._model is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._model

    @property
    @override
    def _adamw(self) -> ShardedAdamW:
        """Of what learns. Raises Refusal NOT_OPEN."""
        if self._optimizer is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._optimizer

    # From files to ranks

    def _fill_weights(self, source: Tensors | None, types: dict[str, torch.dtype]) -> None:
        """Master weights start from the values that the engine computes with, not from finer ones: from `types`."""
        names = [name for name in self._sharded.weight_names if name in types]
        own = self._sharded.places(names, types)
        distribute(self._ranks, own, source.read if source else None)

    def _fill(self, names: Many[str], read: Read | None) -> None:
        distribute(self._ranks, self._sharded.places(names), read)

    def _fill_moments(self, reader: StateReader | None) -> None:
        """Takes the optimizer's state, where the checkpoint has any."""
        steps = self._saved_steps(reader)
        if steps:
            self._adamw.load({kind: self._read_moments(kind, reader) for kind in KINDS}, steps)

    def _read_moments(self, kind: str, reader: StateReader | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        wanted = [
            Place(name, self._sharded.box(name), torch.float32, partial(found.__setitem__, name))
            for name in self._sharded.learned
            if kind in self._adamw.kinds_of(name)
        ]
        distribute(self._ranks, wanted, partial(reader.moment, kind) if reader else None)
        return found

    # From ranks to files and rollouts

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        parameters, buffers = self._sharded.parameters, self._sharded.buffers
        layout = []
        for name in self._sharded.weight_names:
            own = name in parameters or name in self._sharded.quantized
            dtype = self._dtype if own else buffers[name].dtype
            layout.append((name, str(dtype).removeprefix("torch."), self._sharded.shape(name)))
        return layout

    @override
    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.weights(self._dtype if published else None, owners=owners)

    @override
    def head(self) -> Iterator[tuple[str, Tensor]]:
        names = [name for name in self._sharded.critic_names if name.startswith(f"{CRITIC}head.")]
        return ((name, self._sharded.gather(name)) for name in names)

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
        for kind, (name, shard) in product(KINDS, shards.items()):
            if kind in self._adamw.kinds_of(name):
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
    def adapter_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, "float32", self._sharded.shape(name)) for name in self._sharded.adapter_names]

    @override
    def base_weights(self, *, published: bool = False) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.weights(self._dtype if published else None, merged=False)


def float_what_learns(module: nn.Module) -> None:
    """Master weights are fp32; what is frozen stays in its type."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
