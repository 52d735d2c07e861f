"""One rank's part of every round: what each kind of round does to the backend.

The same on leader and followers; a leader also hands in where gathered tensors go. Knows no steps, no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import CheckpointNames, below, own_name
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.bases import Bases
from torch import Tensor

from headrace_trainer.allocator import resident_bytes
from headrace_trainer.backends._base import (
    AdaptingBackend,
    Backend,
    BalancingBackend,
    EpisodeBackend,
    HelpingBackend,
    PrivateGradient,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.policies import Backends
from headrace_trainer.checkpoints.parts import PartWriter
from headrace_trainer.checkpoints.state import STATE, Damaged, read_state
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import Columns, EpisodeScores
from headrace_trainer.learning.step import Version
from headrace_trainer.memory import MemoryPlan, check_rooms, rooms_on
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.device import LeasedDevice, current
from headrace_trainer.ranks.messages import AnyRound
from headrace_trainer.ranks.reduced import Reduced
from headrace_trainer.ranks.relaying import save_part
from headrace_trainer.workloads import run_kind


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


class Rank:
    """The backend of this process in its trainer group, driven by rounds.

    `reader`, `collect` and `contributed` are set by the leader before the round that uses them. Without a leased
    device it computes with as many threads as its caller does. `bases`: where frozen weights are shared; by default
    they are its own.
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
        self._runs = directory.parent if directory is not None else Path()
        self._writer = PartWriter()
        self.config = config
        self.reduced = reduced or Reduced(config)
        """What the leader has reduced after a device had no memory left."""
        self._device, self._bases = device, bases
        self.ranks = ranks
        self.kind = run_kind(config)
        for kind in self.kind.policies.values():
            kind.directory = directory
        self.algorithms = {name: kind.algorithm() for name, kind in self.kind.policies.items()}
        """Of the run's policies by name; "" is the run's own, and in most runs the only one."""
        self.reader: StateReader | None = None
        self.collect: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None
        self.contributed: PrivateGradient | None = None
        self.own_part: OwnPart | None = None
        """What this rank publishes, where versions lie in parts."""
        self.warmup = WarmUp(0)
        self.restored = 0
        self.lends_versions = True
        """Whether the leader's GPU has room for copies of versions."""
        self.replicas: dict[str, list[int]] = {}
        """Of each policy, which replica of it each rank is part of, once weights are loaded."""
        self._backends: Backends | None = None

    @property
    def backends(self) -> Backends:
        """The policies' backends with weights. Raises Refusal NOT_OPEN before a restore round."""
        if self._backends is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._backends

    @property
    def backend(self) -> Backend:
        """That of the run's own policy. Raises Refusal NOT_OPEN before a restore round."""
        return self.backends[""]

    @property
    def loaded(self) -> bool:
        """Whether a restore round has loaded weights."""
        return self._backends is not None

    def algorithm_state(self) -> dict[str, float]:
        """What the algorithms have changed of themselves; another policy's than the run's own stands below its name."""
        return {
            below(name, key): value
            for name, algorithm in self.algorithms.items()
            for key, value in algorithm.state().items()
        }

    def load_algorithm_state(self, state: Mapping[str, float]) -> None:
        """Goes on from an `algorithm_state`."""
        for name, algorithm in self.algorithms.items():
            named = {own_name(key): value for key, value in state.items()}
            algorithm.load_state({key: value for (policy, key), value in named.items() if policy == name})

    def _new_backends(self) -> Backends:
        found = Backends(
            {
                name: kind.backend(self.algorithms[name], self.ranks)
                for name, kind in self.kind.policies.items()
            }
        )
        for backend in found.values():
            if isinstance(backend, AdaptingBackend):
                backend.bases = self._bases
        return found

    def check_files(self, reader: StateReader | None) -> None:
        """Opens the models' files that a restore reads, of a checkpoint with `reader`; loads nothing.

        Raises Refusal MODEL_NOT_READABLE, naming what is wrong, and CHECKPOINT_MISMATCH for a checkpoint of another
        model or optimizer.
        """
        with _readable():
            backends = self._new_backends()
            for name, backend in backends.items():
                if reader is not None:
                    backend.check_state(backends.reader(name, reader))
            for backend in backends.values():
                backend.check_files(initial=reader is None)

    def check_memory(self) -> MemoryPlan:
        """What the run needs here, as the leader. Raises Refusal INVALID or MEMORY_SHORT when it does not fit."""
        with _readable():
            rooms = rooms_on(self.ranks.device)
            plan = self._new_backends().memory_plan(rooms)
        check_rooms(plan, rooms)
        self.lends_versions = plan.lends
        return plan

    def restore_figures(self) -> dict[str, float]:
        """What a restore has loaded here, for people."""
        backends = [*self.backends.values()]
        figures = {
            "resident_bytes": float(resident_bytes()),
            "shared_prefix": float(self.backend.shares_prefixes),
            "check_seconds": sum(backend.check_seconds for backend in backends),
            **self.warmup.figures,
        }
        if referred := [backend for backend in backends if backend.reference is not None]:
            figures["reference_bytes"] = float(sum(backend.reference_bytes for backend in referred))
        return figures

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

    def release(self) -> None:
        """Frees what the next forward gathers from the ranks; all ranks do or none."""
        with current(self.ranks.device):
            for backend in (self._backends or {}).values():
                backend.release()

    def free_memory(self) -> None:
        """After a round for which a device had no room: drops what it has left, of all policies.

        What is accumulated is lost. Of one rank alone: several go on in another group.
        """
        if self.ranks.world_size == 1:
            for backend in (self._backends or {}).values():
                backend.recover()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def reduce(self, micro_batch_tokens: int, *, recomputes: bool) -> None:
        """Lets what is loaded need less memory from the next round on."""
        for backend in self.backends.values():
            backend.reduce(micro_batch_tokens, recomputes=recomputes)

    def suspend(self) -> int:
        """Releases device memory; the bytes released."""
        with current(self.ranks.device):
            return sum(backend.suspend() for backend in self.backends.values())

    def wake(self) -> None:
        """Undoes `suspend`."""
        with current(self.ranks.device):
            for backend in self.backends.values():
                backend.wake()

    def _restore(self, round: messages.RestoreRound) -> None:
        self._backends = None
        self.warmup = WarmUp(0)
        try:
            with _readable():
                backends = self._new_backends()
                if round.checkpoint:
                    for backend in backends.values():
                        backend.load_reference()
                    reader = self._opened(round)
                    if reader is not None and round.weights_only:
                        reader = reader.without_moments()
                    for name, backend in backends.items():
                        backend.load_state(reader and backends.reader(name, reader))
                else:
                    torch.manual_seed(self.config.seed)
                    for backend in backends.values():
                        backend.load_initial()
                    if self.config.trainer.warmup.steps:
                        self.warmup = backends[""].warm_up()
                    for backend in backends.values():
                        backend.load_reference()
        finally:
            self.reader = None
        self._loaded_with(backends)
        if round.reduced is not None:
            self.reduce(round.reduced[0], recomputes=round.reduced[1])
        self.restored = round.number

    def _loaded_with(self, backends: Backends) -> None:
        """Weights are loaded, and the process groups that they need are made."""
        own = msgspec.msgpack.encode({name: backend.replica for name, backend in backends.items()})
        found = [msgspec.msgpack.decode(each, type=dict[str, int]) for each in self.ranks.gather(own)]
        self.replicas = {name: [each[name] for each in found] for name in backends}
        self.ranks.note_connections()
        self._backends = backends

    @property
    def helping(self) -> HelpingBackend:
        """The backend as one that helps, or is helped. Raises Refusal UNIMPLEMENTED for one that cannot."""
        return self._helping(self.backend)

    def _helping(self, backend: Backend) -> HelpingBackend:
        if not isinstance(backend, HelpingBackend):
            raise Refusal(
                "UNIMPLEMENTED",
                f"trainer.helpers: the backend {self.config.trainer.backend} takes no help; set trainer.helpers: 0",
            )
        return backend

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

    def _help(self) -> None:
        assert self.reader is not None
        before, self._backends = self._backends, None  # Half-loaded weights are not used.
        try:
            with _readable():
                backends = before or self._new_backends()
                self._helping(backends[""]).load_base(self.reader)
        finally:
            self.reader = None
        self._loaded_with(backends)

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

    def _opened(self, round: messages.RestoreRound) -> StateReader | None:
        """What this rank reads a checkpoint with: a follower finds the leader's where they share a disk."""
        if self.ranks.leads or not round.directory:
            return self.reader
        path = self._runs / round.directory
        try:
            state = read_state(path / STATE)
            if state.digest != round.digest:
                return None
            return StateReader.of_checkpoint(path, state.files, state.optimizer_steps)
        except (Damaged, Refusal, OSError, ValueError):
            return None


@contextmanager
def _readable() -> Iterator[None]:
    """A model that cannot be read is the user's mistake."""
    try:
        yield
    except ModelNotReadable as error:
        raise invalid(str(error), "MODEL_NOT_READABLE") from error
