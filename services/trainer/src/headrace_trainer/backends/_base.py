"""What a training backend does, on every rank alike. Knows no wire, no steps and no other backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.weights.bases import Bases
from headrace_servicekit.weights.versions import StoredWeights
from torch import Tensor

from headrace_trainer.checkpoints.reader import ADAPTER_KIND as ADAPTER_KIND
from headrace_trainer.checkpoints.reader import CRITIC_KIND as CRITIC_KIND
from headrace_trainer.checkpoints.reader import ReferenceFacts as ReferenceFacts
from headrace_trainer.checkpoints.reader import StatePart as StatePart
from headrace_trainer.checkpoints.reader import StateReader as StateReader
from headrace_trainer.learning.passes import CommitReport as CommitReport
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import (
    Columns,
    CreditData,
    EpisodeData,
    EpisodeScores,
    LentPictures,
    Rows,
)
from headrace_trainer.memory import MemoryPlan, Rooms

Owners = Mapping[str, int]
"""Rank by weight."""


@dataclass(frozen=True)
class WarmUp:
    """Supervised steps before the first RL step: how many, and figures of them."""

    steps: int
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivateGradient:
    """The unnormalised fp32 gradient by weight, on the CPU, with the figures of its tokens; see `CommitReport`."""

    tensors: Mapping[str, Tensor]
    token_sums: Mapping[str, float] = field(default_factory=dict)
    token_maxima: Mapping[str, float] = field(default_factory=dict)

    def difference(self, own: Mapping[str, tuple[int, ...]]) -> str:
        """What differs from a gradient of weights of these shapes; empty when nothing does."""
        given = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        if other := sorted(given.keys() ^ own.keys()):
            return f"{other[0]} is {'missing' if other[0] in own else 'no weight of the model'}"
        for name, tensor in self.tensors.items():
            if given[name] != own[name] or tensor.dtype is not torch.float32:
                return f"{name} is {tensor.dtype} of shape {given[name]}, not float32 of {own[name]}"
        return ""

    def is_finite(self) -> bool:
        """Whether every element is."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())


class Backend(Protocol):
    """A model with its optimizer, sharded over the ranks; all ranks call the same methods in one order."""

    @property
    def replicas(self) -> int:
        """Into how many shares the rows of a round are divided: ranks that compute one model between them take one."""

    @property
    def replica(self) -> int:
        """Which share is this rank's."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether the sequences of a row may be planned and packed as a prefix tree; fixed once weights are loaded."""

    @property
    def costs(self) -> Costs:
        """What micro-batches cost beside each other; fixed once weights are loaded."""

    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        """What this rank will need, by the models' shapes, in the layout that is chosen for these rooms; loads nothing.

        Raises ModelNotReadable.
        """

    layout_chosen: str = ""
    """How the model lies on the ranks, what it needs of each, and why; empty where there is but one way."""
    notes: Many[str] = ()
    """What a restore found of the models, for the run's user; each names the key that it is about."""
    check_seconds: float = 0.0
    """How long it took to find it."""
    saves_in_place: bool = False
    """Whether the host has no room for a copy of the state, which a checkpoint is else written from."""

    def check_files(self, *, initial: bool) -> None:
        """Opens what a restore of the initial model, or of a checkpoint, reads of models; loads nothing.

        Raises ModelNotReadable, naming a file that is missing or damaged.
        """

    def load_initial(self) -> None:
        """The configured model, optimizer state empty."""

    def check_state(self, reader: StateReader) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH, naming the key, for another model or optimizer. Loads nothing."""

    def load_state(self, reader: StateReader | None) -> None:
        """A checkpoint's weights and optimizer state. A rank that cannot read it passes None; rank 0 always can."""

    def load_reference(self) -> None:
        """The frozen reference model, where the algorithm's columns name it: after the initial model and its warm-up,
        or before a checkpoint's state.
        """

    @property
    def reference(self) -> ReferenceFacts | None:
        """The reference that is loaded."""

    @property
    def reference_bytes(self) -> int:
        """Bytes of this rank's part of it, in host memory between uses."""

    def warm_up(self) -> WarmUp:
        """Supervised steps on reference answers or demonstrations; the optimizer is empty again afterwards."""

    def zero(self) -> None:
        """Drops accumulated gradients and figures."""

    def micro(self, rows: Rows, told: list[float] | None = None) -> bool:
        """Accumulates the loss gradient of a micro-batch; no rows: a zero-weight dummy.

        Whether it was finite on every rank: else no rank has accumulated anything. `told` gets the log-probs of the
        trained tokens.
        """

    def use(self, optimizer: OptimizerSection) -> None:
        """Steps with these parameters of AdamW from now on; rates come with each commit."""

    def gradient_is_finite(self) -> bool:
        """Whether what is accumulated so far has a finite norm over all ranks. Costs a reduction."""

    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        """The named columns of the trained tokens for each sequence, in order; no rows: a dummy.

        OLD_LOG_PROBS are those under the weights of the moment. Raises Refusal INVALID for a column it cannot make.
        """

    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        """Reduces, divides, clips and steps; accumulators are empty afterwards."""

    def hold(self) -> None:
        """Keeps weights and optimizer state as they are, in host memory, until `end_hold`."""

    def end_hold(self, *, back: bool) -> None:
        """Drops what `hold` kept; `back` returns to it first and drops what is accumulated."""

    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, published type, shape) of every weight in canonical order."""

    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full weights by name; gathered one at a time, so every rank must exhaust it.

        `published`: they may have their published types already, which moves fewer bytes between ranks and to the host,
        and each may hold only until the next one is asked for. With `owners` each goes to its owner alone, which gets
        no other, in the order of `owners`; else the leader's are on the CPU.
        """

    def head(self) -> Iterator[tuple[str, Tensor]]:
        """The head of its critic, whole, by names that begin with "critic.head."; every rank must exhaust it."""
        return iter(())

    def weight_parts(self) -> Iterator[StatePart]:
        """What this rank saves of the weights; every rank must exhaust it."""

    def moment_parts(self) -> Iterator[StatePart]:
        """What this rank saves of optimizer moments, named kind/weight, of the critic's weights and of adapters; every
        rank must exhaust it.
        """

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps since the state was empty."""

    def suspend(self) -> int:
        """Releases device memory, keeping open accumulators; returns the bytes released."""

    def wake(self) -> None:
        """Undoes `suspend`."""

    def release(self) -> None:
        """Frees what the next forward gathers from the ranks; all ranks do, or none: a gather of some never ends."""

    may_recompute: bool = False
    """Whether activations that are kept for a backward pass can be computed again in it instead."""

    def recover(self) -> None:
        """Alone in its group: drops what an interrupted forward or backward has left, and what is accumulated."""
        self.zero()

    def reduce(self, micro_batch_tokens: int, *, recomputes: bool) -> None:
        """Needs less memory from the next micro-batch on. What a leader plans has no more tokens already."""


@runtime_checkable
class HelpingBackend(Protocol):
    """What a backend can do besides when it lets others add to a step's gradient, or adds to another's.

    A helper's group is itself alone, so what it calls is not called by several ranks.
    """

    def load_base(self, reader: StateReader) -> None:
        """Weights alone, as a helper needs them; again for a later version of the same model."""

    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight that has a gradient."""

    def private_gradient(self) -> PrivateGradient:
        """What is accumulated, not divided. Good until the next `zero`, which the caller asks for."""

    def add_gradient(self, given: PrivateGradient | None) -> None:
        """Adds a helper's to what is accumulated: rank 0 has it whole, the others pass None."""


@runtime_checkable
class BalancingBackend(Protocol):
    """What a backend can do besides when it balances the experts of a model.

    Before a minibatch's micro-batches, all of its rows are counted once; then the loss is fixed.
    """

    def count_experts(self, rows: Rows) -> None:
        """Counts which experts the rows' tokens go to; no rows: takes part alone."""

    def balance_experts(self, denominator: float) -> None:
        """Adds up what all ranks have counted, and fixes the load-balance loss of the micro-batches until the next
        commit, as a sum that is to be divided by `denominator`. What was counted is dropped.
        """


@runtime_checkable
class AdaptingBackend(Protocol):
    """What a backend has besides when it can train adapters beside frozen weights."""

    bases: Bases | None = None
    """Where the processes of this host share frozen weights."""
    base: StoredWeights | None = None
    """Those that it shares, as they are published; None where they are its own."""

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Every part of an adapter, whole; all ranks exhaust it."""

    def adapter_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape) of each, in that order; empty where more learns than adapters."""

    def base_weights(self, *, published: bool = False) -> Iterator[tuple[str, Tensor]]:
        """As `Backend.weights`, without what adapters add."""

    @property
    def base_model(self) -> ReferenceFacts | None:
        """The frozen weights that the leader has read; None where all weights learn."""


@runtime_checkable
class EpisodeBackend(Protocol):
    """What a backend of robot policies does in place of `micro` and `infer`: each rank holds a step's episodes, and
    pictures of its own.
    """

    def read(self, episodes: Many[EpisodeData], own: Many[int]) -> list[EpisodeScores]:
        """Keeps episodes, and scores the rank's own, which are numbered here, under the weights of the moment."""

    def credit(self, data: CreditData) -> None:
        """Lays out the named episodes for learning, with what their chunks are worth."""

    def learn(self, chunks: list[int], lent: LentPictures) -> bool:
        """As `micro`, of these chunks, with pictures of some; none: takes part alone."""

    def end_episodes(self, *, learned: bool) -> None:
        """Drops the episodes; when `learned`, what the policy saw in them goes into its normaliser first."""
