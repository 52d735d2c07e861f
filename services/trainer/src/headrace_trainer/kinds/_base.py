"""What a run learns from, as the rest of the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from headrace_trainer.learning.passes import EpisodeRounds
from headrace_trainer.learning.policies import AnyLearner as AnyLearner
from headrace_trainer.learning.samples import Group, Sample


class RunKind(Protocol):
    """What a run learns from; what each method raises is a Refusal."""

    @property
    def policies(self) -> Mapping[str, PolicyKind]:
        """What each of its policies learns from; "" is the run's own, and in most runs the only one."""

    def check(self) -> Algorithm:
        """The own policy's algorithm. Raises INVALID or MODEL_NOT_READABLE, naming the key."""

    def checkpoint_names(self) -> CheckpointNames:
        """Under which names the weights are published."""

    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        """A settled group, with the bodies that it refers to. Raises INVALID or DIGEST_MISMATCH."""

    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sample]:
        """Trajectories to be scored by the run's own policy. Raises INVALID."""

    def weight_names(self) -> list[str]:
        """Of the models' weights and buffers, in the order in which `export` takes them. Raises ModelNotReadable."""

    def export(self, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
        """Writes a directory that the model, with its tokenizer, is loaded from; adapters come after the weights."""


class PolicyKind(RunKind, Protocol):
    """What one policy learns from: also a run of it alone."""

    config: TrainerConfig
    directory: Path | None = None
    """The run's, on this host, for what a backend keeps beside checkpoints; known once ranks are."""

    @property
    def policies(self) -> Mapping[str, PolicyKind]:
        """The run's own alone."""
        return {"": self}

    def algorithm(self) -> Algorithm:
        """The algorithm, of a run that was checked."""

    def backend(self, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
        """The backend, without weights yet."""

    def sizes(self, config: TrainerConfig, algorithm: Algorithm) -> Sizes:
        """What a layout is chosen by. Raises ModelNotReadable, and Refusal INVALID where there is one layout."""
        return Sizes.of(config, algorithm)

    def learner(self, algorithm: Algorithm, rounds: EpisodeRounds) -> AnyLearner:
        """What the leader learns with."""
