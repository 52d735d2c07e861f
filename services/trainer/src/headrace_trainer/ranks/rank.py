"""One rank's part of every round: what each kind of round does to the backend.

The same on leader and followers; a leader also hands in where gathered tensors go. Knows no steps, no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
from headrace.common.v1 import common_pb2
from headrace_modelkit.weights import CheckpointNames
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.bases import Bases
from torch import Tensor

from headrace_trainer.backends._base import (
    BalancingBackend,
    EpisodeBackend,
    PrivateGradient,
)
from headrace_trainer.backends.policies import Backends
from headrace_trainer.checkpoints.parts import PartWriter
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import Columns, EpisodeScores
from headrace_trainer.learning.step import Version
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.device import LeasedDevice
from headrace_trainer.ranks.loading import LoadedModels
from headrace_trainer.ranks.messages import AnyRound
from headrace_trainer.ranks.reduced import Reduced
from headrace_trainer.ranks.relaying import save_part


class OwnPart(Protocol):
    """What a rank publishes of the run's versions, where they lie in parts."""

    def stage(
        self, backends: Backends, names: Callable[[], CheckpointNames], number: int
    ) -> common_pb2.WeightManifest:
        """Gathers and casts this rank's tensors of a version; all ranks call it. Raises Refusal and ServiceError."""

    def publish(self, version: Version) -> common_pb2.WeightSource | None:
        """Makes what is staged visible; None for a rank that has none."""

    def close(self) -> None:
        """Drops everything of the run."""


class Rank(LoadedModels):
    """The models of this process, driven by rounds.

    `collect` and `contributed` are set by the leader before the round that uses them, as `reader` is. Without a leased
    device it computes with as many threads as its caller does.
    """

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        device: LeasedDevice | None = None,
        directory: Path | None = None,
        reduced: Reduced | None = None,
        bases: Bases | None = None,
    ) -> None:
        super().__init__(config, ranks, directory, reduced, bases)
        self._writer, self._device = PartWriter(), device
        self.collect: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None
        self.contributed: PrivateGradient | None = None
        self.own_part: OwnPart | None = None
        """What this rank publishes, where versions lie in parts."""

    def execute(self, round: AnyRound) -> object:
        """Does this rank's part of a round; what it returns matters on the leader only."""
        with self._computing(round):
            match round:
                case messages.MicroRound():
                    if not self.ranks.leads:
                        self.algorithms[round.policy].load_state(round.algorithm_state)
                    if round.tells:
                        return self._told(round)
                    return [self.backends[round.policy].micro(rows) for rows in round.work]
                case messages.CountRound():
                    self._balancing(round.policy).count_experts(round.work)
                case messages.BalanceRound():
                    self._balancing(round.policy).balance_experts(round.denominator)
                case messages.CheckRound():
                    return self.backends[round.policy].gradient_is_finite()
                case messages.InferRound():
                    return self._infer(round)
                case messages.ReadRound():
                    return self._read(round)
                case messages.CreditRound():
                    self._episodes.credit(round.credit)
                case messages.ChunksRound():
                    return self._episodes.learn(round.chunks, round.lent)
                case messages.EndEpisodesRound():
                    self._episodes.end_episodes(learned=round.learned)
                case messages.CommitRound():
                    if round.optimizer:
                        section = OptimizerSection.model_validate_json(round.optimizer)
                        self.backends[round.policy].use(section)
                    rates = round.learning_rate, round.critic_rate
                    return self.backends[round.policy].commit(round.denominator, *rates)
                case messages.SnapshotRound():
                    return save_part(self.backends, self.ranks, self._writer, self._runs, round)
                case messages.HoldRound():
                    for backend in self.backends.values():
                        backend.hold()
                case messages.EndHoldRound():
                    for backend in self.backends.values():
                        backend.end_hold(back=round.back)
                case messages.RestoreRound():
                    self._restore(round)
                case messages.HelpRound():
                    self._help()
                case messages.AddRound():
                    self.helping.add_gradient(self.contributed)
                case messages.PublishRound():
                    weights = self.backends.gathered(round.what, published=round.published)
                    try:
                        if self.collect is not None:
                            self.collect(weights)
                    finally:
                        for _ in weights:  # The others wait for this rank, whatever it thinks of a tensor.
                            pass
                case messages.StagePartsRound():
                    return self._stage_part(round.number)
                case messages.PublishPartsRound():
                    source = self._own_part.publish(Version(round.number, round.parent, round.ordinal))
                    return self.ranks.gather_on_leader(source.SerializeToString() if source else b"")
                case messages.AbortRound():
                    for backend in self.backends.values():
                        backend.zero()
                case messages.LeaveRound():
                    pass
        return None

    def _computing(self, round: AnyRound) -> AbstractContextManager[None]:
        if self._device is None:
            return nullcontext()
        size = 0  # What a rank's seconds in a round rise with: tokens, or chunks of actions.
        if isinstance(round, messages.MicroRound | messages.InferRound | messages.CountRound):
            batches = round.work if isinstance(round, messages.MicroRound) else [round.work]
            size = sum(len(sequence.tokens) for rows in batches for row in rows for sequence in row)
        elif isinstance(round, messages.ChunksRound):
            size = len(round.chunks)
        single = self.config.deterministic
        return self._device.computing(self.ranks.device, round.kind, size, single=single)

    def _balancing(self, policy: str) -> BalancingBackend:
        """The backend as one that balances experts. Raises Refusal UNIMPLEMENTED for one that cannot."""
        backend = self.backends[policy]
        if not isinstance(backend, BalancingBackend):
            raise Refusal(
                "UNIMPLEMENTED",
                "algorithm.options.balance_loss_coef, expert_bias_rate: the backend "
                f"{self.config.trainer.backend} does not balance experts; leave both out",
            )
        return backend

    def _told(self, round: messages.MicroRound) -> list[tuple[bool, list[list[list[float]]]]]:
        """Of each micro-batch whether it was finite, and by replica the log-probs of each sequence, on the leader."""
        backend, found = self.backends[round.policy], list[tuple[bool, list[list[float]]]]()
        for rows in round.work:
            told: list[float] = []
            finite = backend.micro(rows, told)
            values = iter(told)
            found.append((finite, [[next(values) for _ in own.trained] for row in rows for own in row]))
        parts = self.ranks.gather_on_leader(msgspec.msgpack.encode((backend.replica, found)))
        kind = tuple[int, list[tuple[bool, list[list[float]]]]]
        by_replica = dict(msgspec.msgpack.decode(part, type=kind) for part in parts)
        mine = [by_replica[replica] for replica in sorted(by_replica)]
        return [(each[0][0], [values for _, values in each]) for each in zip(*mine, strict=True)]

    def _infer(self, round: messages.InferRound) -> list[list[Columns]]:
        """The columns of each replica's rows, by replica, on the leader."""
        found = self.backends[round.policy].infer(round.work, round.columns)
        replica = self.backends[round.policy].replica
        parts = self.ranks.gather_on_leader(msgspec.msgpack.encode((replica, found)))
        by_replica = dict(msgspec.msgpack.decode(part, type=tuple[int, list[Columns]]) for part in parts)
        return [by_replica[replica] for replica in sorted(by_replica)]

    def _read(self, round: messages.ReadRound) -> list[EpisodeScores]:
        found = self._episodes.read(round.episodes, round.own)
        parts = self.ranks.gather_on_leader(msgspec.msgpack.encode(found))
        return [own for part in parts for own in msgspec.msgpack.decode(part, type=list[EpisodeScores])]

    @property
    def _episodes(self) -> EpisodeBackend:
        assert isinstance(self.backend, EpisodeBackend)
        return self.backend

    def _stage_part(self, number: int) -> list[tuple[str, str, bytes]]:
        """(reason, message, manifest) of each rank's part, on the leader: one that cannot does not end the group."""
        answer = "", "", b""
        try:
            manifest = self._own_part.stage(self.backends, self.kind.checkpoint_names, number)
            answer = "", "", manifest.SerializeToString()
        except (Refusal, ServiceError) as error:
            answer = error.reason, error.message, b""
        answers = self.ranks.gather_on_leader(msgspec.msgpack.encode(answer))
        return [msgspec.msgpack.decode(each, type=tuple[str, str, bytes]) for each in answers]

    @property
    def _own_part(self) -> OwnPart:
        assert self.own_part is not None
        return self.own_part
