"""A model over the ranks of its replicas: weights in and out by canonical names, one forward of a stage.

Shapes: R = 1 row, L tokens of it, U pairs of a token and the next one, D hidden; as in `packing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.hidden import hidden_log_probs
from headrace_modelkit.logprobs import Head
from headrace_trainer.backends._base import Owners, StatePart
from headrace_trainer.backends.shared.distributing import Place, Read, distribute
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from headrace_megatron.architecture import Architecture
from headrace_megatron.gpt import Packed, build_stage, context_places, transformer_config
from headrace_megatron.groups import Groups
from headrace_megatron.names import OWN_EMBEDDING, OWN_HEAD, Part, Pick, parts_of
from headrace_megatron.publishing import Publication
from headrace_megatron.shards import Shards, Weights, add_up


@dataclass(frozen=True)
class Settings:
    """How a model is computed: its type, two ways of spending less memory, and by whose kernels."""

    dtype: torch.dtype
    sequence_parallel: bool = False
    recompute: bool = False
    engine: bool = False
    """By Transformer Engine's layers."""


class _Pending:
    """Local parameters in fp32 of which not all elements have come yet."""

    def __init__(
        self, shapes: Mapping[str, torch.Size], device: torch.device, done: Callable[[str, Tensor], None]
    ) -> None:
        self._shapes = shapes
        self._device = device
        self._done = done
        self._missing = {name: shape.numel() for name, shape in shapes.items()}
        self._pending: dict[str, Tensor] = {}

    def take(self, part: Part, pick: Pick, value: Tensor) -> None:
        """Elements of a part; the parameter goes on to `done` when they were the last ones."""
        local = part.local
        if local not in self._pending:
            self._pending[local] = torch.empty(self._shapes[local], device=self._device)
        own = pick(part.of_local(self._pending[local]))
        own.copy_(value.reshape(own.shape))
        self._missing[local] -= own.numel()
        if not self._missing[local]:
            self._done(local, self._pending.pop(local))


class ParallelModel:
    """This rank's part of a model. All ranks call `load` and `gather` in one order of names."""

    def __init__(
        self,
        architecture: Architecture,
        ranks: TrainerGroup,
        groups: Groups,
        settings: Settings,
        *,
        frozen: bool = False,
    ) -> None:
        self.architecture = architecture
        self._ranks = ranks
        self.groups = groups
        self._sequence_parallel = settings.sequence_parallel
        self.config = transformer_config(
            architecture,
            groups,
            settings.dtype,
            sequence_parallel=settings.sequence_parallel,
            recompute=settings.recompute,
            engine=settings.engine,
            device=ranks.device,
        )
        self.routing = Routing()
        """What this stage's routers are told, where there are any."""
        chunks, self._rotary = build_stage(
            architecture, groups, self.config, ranks.device, self.routing, engine=settings.engine
        )
        chunks.train()  # Megatron recomputes in training mode only; there is no dropout.
        self._first: Any = chunks[0]
        self._last: Any = chunks[-1]
        self._thd = settings.engine and groups.layout.context == 1
        if frozen:
            self.weights = Weights(chunks)
        else:
            apart = groups.layout.experts > 1
            self.weights = self.shards = Shards(
                chunks,
                self.config,
                lambda name: apart and ".mlp.experts." in name,
                overlap=groups.sum.size() > 1 or groups.expert_sum.size() > 1,
            )
        self.modules = self.weights.modules
        """What Megatron's schedules call: this stage's chunks of layers."""
        self._parts = parts_of(
            architecture, groups.layout, groups.tensor.rank(), groups.stage, groups.expert.rank()
        )
        self._publication = Publication(architecture, ranks, groups)
        copies = {part.local for part in self._parts.values() if part.copy}
        self.counted = [name for name in self.weights.shapes() if name not in copies]
        """Local parameters that no other rank counts: each weight of the model is counted once over all ranks."""

    def load(self, read: Read | None, types: Mapping[str, torch.dtype] | None = None) -> None:
        """Sets all weights, which `distribute` brings in `types`, by default in fp32."""
        self._distribute(read, self.weights.fill, types)

    def pieces(self, read: Read | None) -> dict[str, Tensor]:
        """This rank's pieces, flat and in fp32 by local name, of tensors that are shaped like the weights."""
        found: dict[str, Tensor] = {}

        def take(name: str, value: Tensor) -> None:
            found[name] = self.shards.piece(name, value).clone()

        self._distribute(read, take)
        return found

    def load_whole(self, found: Iterator[tuple[str, Tensor]]) -> None:
        """Sets all weights from whole canonical tensors, which every rank has one after another."""
        pending = _Pending(self.weights.shapes(), self._ranks.device, self.weights.fill)
        for name, value in found:
            if (part := self._parts.get(name)) is not None:
                pending.take(part, lambda view: view, part.of_whole(value))

    def _distribute(
        self,
        read: Read | None,
        take: Callable[[str, Tensor], None],
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Gives `take` every parameter of this rank, by local name and in fp32."""
        pending = _Pending(self.weights.shapes(), self._ranks.device, take)
        places = [
            Place(name, box, types[name] if types else torch.float32, partial(pending.take, part, pick))
            for name, part in self._parts.items()
            for box, pick in part.boxes(self.architecture.shapes[name])
        ]
        distribute(self._ranks, places, read)

    def state_parts(self, pieces: Mapping[str, Tensor]) -> Iterator[StatePart]:
        """What this rank saves of tensors whose pieces are given by local name; every rank exhausts it.

        The ranks that have the same parameters divide them: each of n ranks assembles and saves every n-th one.
        """
        by_local: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            if not part.copy:
                by_local.setdefault(part.local, []).append(name)
        for index, local in enumerate(self.shards.shapes()):
            group = self.shards.group_of(local)
            own = self.shards.whole(local, pieces[local])
            owner = index % group.size()
            if group.size() > 1:
                # A rank's whole is 0 where others have the values, so the bits add up.
                dist.reduce(own.view(torch.int32), dist.get_global_rank(group, owner), group=group)
            if group.rank() != owner:
                continue
            for name in by_local.get(local, ()):
                part, shape = self._parts[name], self.architecture.shapes[name]
                for box, pick in part.boxes(shape):
                    value = pick(part.of_local(own)).reshape([end - first for first, end in box])
                    yield StatePart(name, shape, box, value)

    def gather(self, pieces: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole canonical tensors by name, on every rank, of this rank's pieces by local name; every rank exhausts it.
        The leader's are on the CPU.

        A rank's whole is 0 where others have the values, so the bits add up.
        """
        for name, shape in self.architecture.shapes.items():
            whole = torch.zeros(shape, dtype=torch.float32, device=self._ranks.device)
            part = self._parts.get(name)
            if part is not None and not part.copy:
                own = self.shards.whole(part.local, pieces[part.local])
                part.of_whole(whole).copy_(part.of_local(own))
            if self._ranks.world_size > 1:
                dist.all_reduce(whole.view(torch.int32))
            yield name, whole.cpu() if self._ranks.leads else whole

    def published(self, owners: Owners | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole canonical tensors in the model's type, on the host of the leader or each of its owner; see
        `Publication`.
        """
        return self._publication.wholes(self.shards.values(), owners)

    def finish_gradients(self, *, keep: bool) -> None:
        """Adds the gradient of the micro-batch that went backward last to those before it, summed over the ranks that
        have computed parts of it; or forgets it.
        """
        self.shards.finish()
        if not keep:
            self.shards.drop_fresh()
            return
        fresh, groups = self.shards.fresh(), self.groups
        add_up([piece for name, piece in fresh.items() if self._partial(name)], groups.tensor)
        if self.architecture.tied and groups.embedding is not None and groups.layout.pipeline > 1:
            name = f"0.{OWN_EMBEDDING}" if groups.first_stage else f"{groups.layout.virtual - 1}.{OWN_HEAD}"
            add_up([fresh[name]], groups.embedding)
        self.shards.keep()

    def _partial(self, name: str) -> bool:
        """Whether each tensor-parallel rank has its own heads', tokens' or matrices' gradient of an equal weight."""
        of_heads = name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        of_tokens = self._sequence_parallel and name.endswith("layernorm.weight")
        of_experts = name.endswith("router.weight")
        return self.groups.layout.tensor > 1 and (of_heads or of_tokens or of_experts)

    @property
    def multiple(self) -> int:
        """What a row's length must be a multiple of, so that ranks can divide it."""
        layout = self.groups.layout
        return layout.multiple * (layout.tensor if self._sequence_parallel else 1)

    def message_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """Of the hidden states between two stages: tokens of this rank, rows, hidden size."""
        divided = self.groups.layout.context * (self.groups.layout.tensor if self._sequence_parallel else 1)
        return batch.tokens_RL.shape[1] // divided, 1, self.architecture.hidden

    def tell(self, batch: MicroBatch) -> None:
        """Sets what this stage's routers are told in a forward over these tokens, or when layers of it are computed
        again in the backward pass.
        """
        if batch.nodes is None:
            return
        visits_RL, routes = batch.nodes.visits_RL, batch.nodes.routes_MNK
        self.routing.visits_N = self._own_tokens(visits_RL).T.flatten()
        if routes is None:
            self.routing.forced_MNK = None
            return
        rows, length = visits_RL.shape
        by_place = routes.view(len(routes), rows, length, -1).movedim(2, 0)  # (L, M, R, K)
        own = self._own_tokens(by_place.flatten(1).T).T.reshape(-1, *by_place.shape[1:])
        self.routing.forced_MNK = own.transpose(0, 1).flatten(1, 2)

    def forward(self, module: Any, batch: MicroBatch) -> Tensor:
        """Hidden states that leave one of `modules`."""
        self.tell(batch)
        context = self.groups.context
        assert batch.segments is not None
        self._rotary.positions_S = self._own_tokens(batch.positions_RL)[0]
        packed = Packed.of(batch.segments, thd=self._thd, context=context.size(), rank=context.rank())
        found: Tensor = module(self._own_tokens(batch.tokens_RL), None, None, packed_seq_params=packed)
        return found

    def log_probs(self, hidden: Tensor, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) of the trained tokens, (K,), from the last stage's hidden states."""
        hidden_UD = self._whole(hidden)[batch.sources_U]
        ranks = self.groups.layout.tensor
        if ranks > 1 and not self._sequence_parallel:
            # Here, where its gradient is contiguous: Megatron loses the sum of one that is not.
            hidden_UD = copy_to_tensor_model_parallel_region(hidden_UD, group=self.groups.tensor)
        tied = self.architecture.tied and self.groups.first_stage
        weight_VD = self._first.embedding.word_embeddings.weight if tied else self._last.output_layer.weight
        if isinstance(self.weights, Shards):
            self.weights.settle(weight_VD)
        first = self.groups.tensor.rank() * len(weight_VD)
        found_U, entropy_U = hidden_log_probs(
            Head(weight_VD, None, 1.0, None),
            hidden_UD,
            batch.targets_U - first,
            batch.at(temperature),
            entropy=True,
            gather=self.groups.gather_tensor_parallel if ranks > 1 else None,
        )
        assert entropy_U is not None
        return found_U[batch.index_K], entropy_U[batch.index_K]

    def _whole(self, hidden: Tensor) -> Tensor:
        """(R * L, D) hidden states of all tokens, whose gradients are added up over the ranks that divide them."""
        groups = self.groups
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.tensor)
        if groups.layout.context > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=groups.context)
            hidden = hidden[context_places(len(hidden), groups.layout.context).to(hidden.device).argsort()]
        return hidden.transpose(0, 1).flatten(0, 1)

    def _own_tokens(self, tokens_RL: Tensor) -> Tensor:
        context = self.groups.layout.context
        if context == 1:
            return tokens_RL
        places = context_places(tokens_RL.shape[1], context).chunk(context)[self.groups.context.rank()]
        return tokens_RL[:, places.to(tokens_RL.device)]
