"""A run whose conversations several policies learn from: each of its own kind, and all make one version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_modelkit.weights import CheckpointNames, below, own_name
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.episodes import NO_BODIES, Bodies
from typing_extensions import override

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.kinds._base import RunKind
from headrace_trainer.kinds.answers import AnswersRun
from headrace_trainer.learning.policies import OWN
from headrace_trainer.learning.reading import read_group
from headrace_trainer.learning.samples import Group, Sample

_KEYS = ("model", "algorithm", "optimizer", "trainer")


class PoliciesRun(RunKind):
    """A run whose conversations several policies learn from; `kinds` are those of the policies, by name."""

    def __init__(self, config: TrainerConfig, kinds: Mapping[str, AnswersRun]) -> None:
        self._config, self._kinds = config, kinds

    @property
    @override
    def policies(self) -> Mapping[str, AnswersRun]:
        return self._kinds

    @override
    def check(self) -> Algorithm:
        own = self._kinds[OWN].check()
        for name in self._config.policies:
            try:
                found = self._kinds[name].check()
            except Refusal as refusal:
                raise _of_policy(name, self._config, refusal) from refusal
            if found.greedy_first != own.greedy_first:
                reason = "some policies compare with a greedy first sample and others learn from it"
                raise invalid(f"policies.{name}.algorithm.name: {reason}; take remax for all, or none")
        return own

    @override
    def checkpoint_names(self) -> CheckpointNames:
        return CheckpointNames.of_policies(
            {name: kind.checkpoint_names() for name, kind in self._kinds.items()}
        )

    @override
    def read_group(self, message: trainer_pb2.SettledGroup, bodies: Bodies = NO_BODIES) -> Group:
        """An id may lie below the largest vocabulary; the templates of a policy make none above its own."""
        vocabulary = max(kind.vocabulary for kind in self._kinds.values())
        group = read_group(message, self._config.sampling, vocabulary)
        samples = [sample for member in group.members for sample in member.samples]
        if any(sample.trained and not sample.role for sample in samples):
            raise invalid(f"prompt {group.prompt_ordinal}: turns without roles, and policies play roles")
        return group

    @override
    def read_sequences(self, messages: list[common_pb2.Trajectory]) -> list[Sample]:
        return self._kinds[OWN].read_sequences(messages)

    @override
    def weight_names(self) -> list[str]:
        return [below(name, tensor) for name, kind in self._kinds.items() for tensor in kind.weight_names()]

    @override
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
