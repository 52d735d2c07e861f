"""What a run learns from, as the rest of the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Protocol

import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.weights import CheckpointNames
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import NO_BODIES, Bodies

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.passes import EpisodeRounds, Finished
from headrace_trainer.learning.samples import Group, Sequence
from headrace_trainer.learning.step import StepState

DEFAULT_BACKEND = "fsdp"


class AnyLearner(Protocol):
    """What the leader learns a step's groups with."""

    def learn(self, state: StepState, groups: Many[Group]) -> StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""

    def finish(self, state: StepState, rate: float) -> Finished:
        """The step's optimizer steps, or none of them. Raises Quiesced."""

    def reset(self) -> None:
        """Drops what is kept of the attempt."""


class RunKind(Protocol):
    """One run of a kind; what each method raises is a Refusal."""

    def check(self) -> Algorithm:
        """The run's algorithm. Raises INVALID or MODEL_NOT_READABLE, naming the key."""

    def algorithm(self) -> Algorithm:
        """The algorithm, of a run that was checked."""

    def backend(self, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
        """The backend, without weights yet."""

    def sizes(self, config: TrainerConfig, algorithm: Algorithm) -> Sizes:
        """What a layout is chosen by. Raises ModelNotReadable, and Refusal INVALID where there is one layout."""
        return Sizes.of(config, algorithm)

    def learner(self, algorithm: Algorithm, rounds: EpisodeRounds) -> AnyLearner:
        """What the leader learns with."""

    def checkpoint_names(self) -> CheckpointNames:
        """Under which names the model's weights are published."""

    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        """A settled group, with the bodies that it refers to. Raises INVALID or DIGEST_MISMATCH."""

    def own(self, group: Group) -> Group:
        """What the run's own policy said in a group: all, unless several policies learn."""
        return group

    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sequence]:
        """Trajectories to be scored. Raises INVALID."""

    def weight_names(self) -> list[str]:
        """Of the model's weights and buffers, in the order in which `export` takes them. Raises ModelNotReadable."""

    def export(self, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
        """Writes a directory that the model, with its tokenizer, is loaded from; adapters come after the weights."""
