"""A run whose conversations several policies learn from: each is a run of its own kind, and all make one version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.weights import CheckpointNames, below, own_name
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import NO_BODIES, Bodies

from headrace_trainer.algorithms._base import Algorithm, Barrier, Refill
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.policies import PoliciesBackend
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.kinds._base import RunKind
from headrace_trainer.kinds.answers import AnswersRun
from headrace_trainer.learning.learner import BatchLearner, Learner
from headrace_trainer.learning.passes import StepRounds
from headrace_trainer.learning.policies import OWN, Learning, PoliciesLearner, PolicyRounds, part_of
from headrace_trainer.learning.samples import Group, Sequence
from headrace_trainer.wire.messages import read_group

_KEYS = ("model", "algorithm", "optimizer", "trainer")


class PoliciesAlgorithm:
    """The policies' algorithms as the run has them: what is asked of a step holds for all."""

    def __init__(self, parts: Mapping[str, Algorithm]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        """What is no matter of the step is the run's own policy's."""
        return getattr(self._parts[OWN], name)

    @property
    def barrier(self) -> Barrier:
        """BATCH where one policy waits for the whole step."""
        found = {part.barrier for part in self._parts.values()}
        return Barrier.BATCH if Barrier.BATCH in found else Barrier.GROUP

    @property
    def refill(self) -> Refill:
        """A group is replaced that none learns from."""
        found = [part.refill for part in self._parts.values()]
        return Refill(all(each.drop_equal for each in found), min(each.most for each in found))

    @property
    def every_token(self) -> bool:
        """Whether tokens without an advantage are computed."""
        return any(part.every_token for part in self._parts.values())

    def observe(self, figures: Mapping[str, float], sequences: int) -> None:
        """Each has heard of its own figures."""

    def state(self) -> dict[str, float]:
        """Of each policy, below its name."""
        return {below(name, key): v for name, part in self._parts.items() for key, v in part.state().items()}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from a `state`."""
        for name, part in self._parts.items():
            part.load_state({own_name(key)[1]: v for key, v in state.items() if own_name(key)[0] == name})


class PoliciesRun(RunKind):
    """As `RunKind` says. `kinds` are those of the policies, by name; "" is the run's own."""

    def __init__(self, config: TrainerConfig, kinds: Mapping[str, AnswersRun]) -> None:
        self._config, self._kinds = config, kinds
        self._algorithms: dict[str, Algorithm] = {}

    def check(self) -> Algorithm:
        """The run's algorithm. Raises Refusal INVALID or MODEL_NOT_READABLE, naming the key."""
        own = self._kinds[OWN].check()
        for name in self._config.policies:
            try:
                found = self._kinds[name].check()
            except Refusal as refusal:
                raise _of_policy(name, self._config, refusal) from refusal
            if found.greedy_first != own.greedy_first:
                reason = "some policies compare with a greedy first sample and others learn from it"
                raise invalid(f"policies.{name}.algorithm.name: {reason}; take remax for all, or none")
        return self.algorithm()

    def algorithm(self) -> Algorithm:
        """The algorithm, of a run that was checked."""
        self._algorithms = {name: kind.algorithm() for name, kind in self._kinds.items()}
        return cast(Algorithm, PoliciesAlgorithm(self._algorithms))

    def backend(self, algorithm: Algorithm, ranks: TrainerGroup) -> Backend:
        """The backends of all policies, without weights yet."""
        parts = {name: kind.backend(self._algorithms[name], ranks) for name, kind in self._kinds.items()}
        return PoliciesBackend(parts, leads=ranks.leads)

    def learner(self, algorithm: Algorithm, rounds: StepRounds) -> PoliciesLearner:
        """What the leader learns with."""
        policies = []
        for number, (name, kind) in enumerate(self._kinds.items()):
            own, view = self._algorithms[name], PolicyRounds(rounds, number)
            learner = kind.learner(own, view)
            assert isinstance(learner, Learner | BatchLearner)
            policies.append(Learning(name, self._config.of_policy(name), own, learner, view))
        return PoliciesLearner(self._config, policies, rounds)

    def checkpoint_names(self) -> CheckpointNames:
        """Under which names the weights are published."""
        return CheckpointNames.of_policies(
            {name: kind.checkpoint_names() for name, kind in self._kinds.items()}
        )

    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        """A settled group. Raises INVALID or DIGEST_MISMATCH.

        An id may lie below the largest vocabulary; the templates of a policy make none above its own.
        """
        vocabulary = max(kind.vocabulary for kind in self._kinds.values())
        group = read_group(message, self._config.sampling, vocabulary)
        branches = [branch for member in group.members for branch in member.branches]
        if any(branch.trained and not branch.role for branch in branches):
            raise invalid(f"prompt {group.prompt_ordinal}: turns without roles, and policies play roles")
        return group

    def own(self, group: Group) -> Group:
        """What the run's own policy said in a group."""
        return part_of(group, OWN, self._config.played)

    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sequence]:
        """Trajectories of the run's own policy to be scored. Raises INVALID."""
        return self._kinds[OWN].read_sequences(messages)

    def weight_names(self) -> list[str]:
        """Of all policies' weights, in the order in which `export` takes them. Raises ModelNotReadable."""
        return [below(name, tensor) for name, kind in self._kinds.items() for tensor in kind.weight_names()]

    def export(self, tensors: Iterator[tuple[str, torch.Tensor]], target: Path) -> None:
        """The run's own policy as it would be alone, and the others in directories of their names below it."""
        for name, own in groupby(tensors, lambda tensor: own_name(tensor[0])[0]):
            self._kinds[name].export(((own_name(full)[1], value) for full, value in own), target / name)


def _of_policy(name: str, config: TrainerConfig, refusal: Refusal) -> Refusal:
    """A refusal of one policy, which names its key where the policy has that section."""
    section, (own, _, rest) = config.policies[name], refusal.message.partition(".")
    where = f"policies.{name}"
    given = own in _KEYS and getattr(section, own) is not None
    text = f"{where}.{refusal.message}" if given else f"{where}: {refusal.message}"
    more = {"key": f"{where}.{own}.{rest.partition(':')[0]}" if given else where}
    return Refusal(refusal.reason, text, refusal.kind, **more)
