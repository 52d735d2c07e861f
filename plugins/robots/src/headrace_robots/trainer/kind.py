"""A run that learns from episodes of a robot policy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.exporting import save_adapter
from headrace_modelkit.lora import is_adapter
from headrace_modelkit.weights import CheckpointNames, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import NO_BODIES, Bodies
from headrace_trainer.algorithms._base import (
    Algorithm,
)
from headrace_trainer.backends import choose_backend
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.fsdp.layouts.layout import check_run as check_layout
from headrace_trainer.backends.fsdp.layouts.sizes import Sizes
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.kinds._base import AnyLearner, PolicyKind
from headrace_trainer.learning.learner import BatchLearner
from headrace_trainer.learning.passes import EpisodeRounds
from headrace_trainer.learning.reading import read_given_group
from headrace_trainer.learning.samples import Group, Sample
from typing_extensions import override

from headrace_robots.policies.directory import (
    empty_policy,
    learning_policy,
    parts_problem,
    write_policy,
)
from headrace_robots.trainer.algorithms import build_episode_algorithm
from headrace_robots.trainer.algorithms._base import EpisodeAlgorithm
from headrace_robots.trainer.backend.cloning import IMITATION, check_demonstrations
from headrace_robots.trainer.backend.sharded import ShardedRobot
from headrace_robots.trainer.backend.whole import WholeRobot
from headrace_robots.trainer.learner import EpisodeLearner
from headrace_robots.trainer.moments import MomentReader
from headrace_robots.trainer.off_policy.algorithm import OffPolicyAlgorithm
from headrace_robots.trainer.off_policy.backend import OffPolicyRobot
from headrace_robots.trainer.off_policy.checks import check_off_policy
from headrace_robots.trainer.off_policy.learner import OffPolicyLearner
from headrace_robots.trainer.sizes import WORDS, robot_sizes
from headrace_robots.trainer.wire import Spaces, read_episodes

if TYPE_CHECKING:
    from headrace_robots.policies.policy import PolicyConfig


class EpisodesRun(PolicyKind):
    """A run that learns from episodes of a robot policy."""

    def __init__(self, config: TrainerConfig, policy: PolicyConfig) -> None:
        self.config = config
        self._policy = policy

    @override
    def check(self) -> Algorithm:
        algorithm = self.algorithm()
        if isinstance(algorithm, OffPolicyAlgorithm):
            check_off_policy(self.config, self._policy, algorithm)
        if self._policy.large:
            self._check_large(algorithm)
        else:
            self._check_small()
        check_demonstrations(self.config)
        return algorithm

    def _check_small(self) -> None:
        """Raises Refusal INVALID for what a policy that every rank has whole cannot be given."""
        trainer = self.config.trainer
        idle = {
            "trainer.backend_options": bool(trainer.backend_options),
            "trainer.lora": trainer.lora is not None,
            "trainer.freeze": bool(trainer.freeze),
            "trainer.gradient_checkpointing": bool(trainer.gradient_checkpointing),
        }
        for key in (key for key, given in idle.items() if given):
            reason = f"is for large models, and every rank has all of a policy of kind {self._policy.kind}"
            raise invalid(f"{key}: {reason}; leave it out", key=key)

    def _check_large(self, algorithm: Algorithm) -> None:
        """Raises Refusal INVALID, naming the key, for a layout, parts or adapters that the policy cannot have."""
        trainer = self.config.trainer
        options = choose_backend(trainer).options
        assert isinstance(options, FsdpOptions)
        check_layout(options, self.config, algorithm)
        if problem := parts_problem(empty_policy(self.config.model), trainer.freeze or []):
            raise invalid(f"trainer.freeze: {problem}", key="trainer.freeze")
        try:
            learning_policy(self.config.model, trainer.freeze or [], trainer.lora, self.config.seed)
        except ValueError as error:
            raise invalid(f"trainer.lora.targets: {error}", key="trainer.lora.targets") from error

    @override
    def algorithm(self) -> Algorithm:
        return build_episode_algorithm(self.config.algorithm)

    @override
    def backend(self, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
        if isinstance(algorithm, OffPolicyAlgorithm):
            return OffPolicyRobot(self.config, algorithm, ranks, self.directory)
        episodes = cast(EpisodeAlgorithm, algorithm)
        if not self._policy.large:
            return WholeRobot(self.config, episodes, ranks)
        return ShardedRobot(self.config, episodes, ranks, options=choose_backend(self.config.trainer).options)

    @override
    def sizes(self, config: TrainerConfig, algorithm: Algorithm) -> Sizes:
        if not self._policy.large:
            raise invalid(
                f"model: every rank has all of a policy of kind {self._policy.kind}: there is one layout"
            )
        return robot_sizes(config, algorithm)

    @override
    def learner(self, algorithm: Algorithm, rounds: EpisodeRounds) -> AnyLearner:
        if isinstance(algorithm, OffPolicyAlgorithm):
            return OffPolicyLearner(self.config, algorithm, rounds)
        if self._imitates:
            return BatchLearner(self.config, algorithm, rounds)
        return EpisodeLearner(self.config, cast(EpisodeAlgorithm, algorithm), rounds)

    @override
    def checkpoint_names(self) -> CheckpointNames:
        return CheckpointNames({})

    @override
    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        if self._imitates:
            return read_given_group(message, self._moments)
        return read_episodes(message, Spaces.of(self._policy), bodies)

    @override
    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sample]:
        if not self._imitates:
            raise invalid("a robot policy scores no answers; the figures of a step compare its log-probs")
        rows = (each.branches[0].given_json if each.branches else "" for each in messages)
        return [self._moments.read(given, {}, "a held-out row")[-1] for given in rows]

    @property
    def _imitates(self) -> bool:
        return self.config.algorithm.name == IMITATION

    @cached_property
    def _moments(self) -> MomentReader:
        """What reads rows that name moments; how many ids an instruction has, nobody knows yet."""
        policy = empty_policy(self.config.model)
        return MomentReader(policy.horizon, policy.chunk_tokens + (WORDS if self._policy.reads else 0))

    @override
    def weight_names(self) -> list[str]:
        return [name for name, _ in state_tensors(empty_policy(self.config.model))]

    @override
    def export(self, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
        """A policy directory in the run's type. Adapters, which are merged into the weights, go by themselves into
        `adapter/`, in peft's format.
        """
        section, lora = self.config.model, self.config.trainer.lora
        own = {name: tensor.dtype for name, tensor in state_tensors(empty_policy(section))}
        found = {name: tensor.to(own.get(name, tensor.dtype), copy=True) for name, tensor in tensors}
        adapters = {name: found.pop(name) for name in [*found] if is_adapter(name)}

        def save_beside(directory: Path) -> None:
            if lora is not None:
                save_adapter(directory / "adapter", lora, adapters, section.path)

        write_policy(self._policy, found, target, tokenizer=section.path or None, beside=save_beside)
