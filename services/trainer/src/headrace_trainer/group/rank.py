"""One rank's part of every round: what each kind of round does to the backend.

The same on leader and followers; a leader also hands in where gathered tensors go. Knows no steps, no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path

import msgspec
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import below
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.errors import ServiceError
from torch import Tensor

from headrace_trainer.allocator import resident_bytes
from headrace_trainer.backends._base import (
    AdaptingBackend,
    Backend,
    BalancingBackend,
    EpisodeBackend,
    HelpingBackend,
    PrivateGradient,
    ReferenceFacts,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.policies import PoliciesBackend
from headrace_trainer.checkpoints.parts import PartWriter, StateCopy, copy_state, write_and_report, write_part
from headrace_trainer.checkpoints.reader import TensorReader
from headrace_trainer.checkpoints.state import STATE, Damaged, read_state
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group import messages
from headrace_trainer.group.device import LeasedDevice, current
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.group.messages import AnyRound
from headrace_trainer.group.relaying import relay_part, send_part
from headrace_trainer.kinds import run_kind
from headrace_trainer.learning.samples import Columns, EpisodeScores
from headrace_trainer.learning.step import Version
from headrace_trainer.memory import MemoryPlan, check_rooms, rooms_on
from headrace_trainer.session.parts import RankPart


class Rank:
    """The backend of this process in its trainer group, driven by rounds.

    `reader`, `collect` and `contributed` are set by the leader before the round that uses them. Without a leased
    device it computes with as many threads as its caller does. `runs` has the directories of all runs.
    """

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        device: LeasedDevice | None = None,
        runs: Path | None = None,
    ) -> None:
        self._runs = runs or Path()
        self._writer = PartWriter()
        self.config = config
        self._device = device
        self.ranks = ranks
        self.kind = run_kind(config)
        self.algorithm = self.kind.algorithm()
        self.reader: StateReader | None = None
        self.collect: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None
        self.contributed: PrivateGradient | None = None
        self.own_part: RankPart | None = None
        """What this rank publishes, where versions lie in parts."""
        self.warmup = WarmUp(0)
        self.restored = 0
        self.lends_versions = True
        """Whether the leader's GPU has room for copies of versions."""
        self.replica_of: list[int] = [0] * ranks.world_size
        """Which replica each rank is part of, once weights are loaded."""
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The backend with weights. Raises Refusal NOT_OPEN before a restore round."""
        if self._backend is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._backend

    def part(self, policy: int) -> Backend:
        """That of one of the run's policies, where they are several."""
        backend = self.backend
        return backend.parts[policy] if isinstance(backend, PoliciesBackend) else backend

    @property
    def loaded(self) -> bool:
        """Whether a restore round has loaded weights."""
        return self._backend is not None

    def _new_backend(self) -> Backend:
        return self.kind.backend(self.algorithm, self.ranks)

    def check_state(self, reader: StateReader) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH when a checkpoint is of another model or optimizer."""
        try:
            self._new_backend().check_state(reader)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error

    def check_files(self, *, initial: bool) -> None:
        """Opens the models' files that a restore reads. Raises Refusal MODEL_NOT_READABLE, naming what is wrong."""
        try:
            self._new_backend().check_files(initial=initial)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error

    def check_memory(self) -> MemoryPlan:
        """What the run needs here, as the leader. Raises Refusal INVALID or MEMORY_SHORT when it does not fit."""
        try:
            rooms = rooms_on(self.ranks.device)
            plan = self._new_backend().memory_plan(rooms)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error
        check_rooms(plan, rooms)
        self.lends_versions = plan.lends
        return plan

    def restore_figures(self) -> dict[str, float]:
        """What a restore has loaded here, for people."""
        figures = {
            "resident_bytes": float(resident_bytes()),
            "shared_prefix": float(self.backend.shares_prefixes),
            "check_seconds": self.backend.check_seconds,
            **self.warmup.figures,
        }
        if self.backend.reference is not None:
            figures["reference_bytes"] = float(self.backend.reference_bytes)
        return figures

    def execute(self, round: AnyRound) -> object:
        """Does this rank's part of a round; what it returns matters on the leader only."""
        with self._computing(round):
            match round:
                case messages.MicroRound():
                    if not self.ranks.leads:
                        self.algorithm.load_state(round.algorithm_state)
                    return [self.part(round.policy).micro(rows).finite for rows in round.work]
                case messages.CountRound():
                    self._balancing(round.policy).count_experts(round.work)
                case messages.BalanceRound():
                    self._balancing(round.policy).balance_experts(round.denominator)
                case messages.CheckRound():
                    return self.part(round.policy).gradient_is_finite()
                case messages.InferRound():
                    return self._infer(round)
                case messages.ReadRound():
                    return self._read(round)
                case messages.CreditRound():
                    self._episodes.credit(round.credit)
                case messages.ChunksRound():
                    return self._episodes.learn(round.chunks, round.lent).finite
                case messages.EndEpisodesRound():
                    self._episodes.end_episodes(learned=round.learned)
                case messages.CommitRound():
                    rates = round.learning_rate, round.critic_rate
                    return self.part(round.policy).commit(round.denominator, *rates)
                case messages.SnapshotRound():
                    return self._snapshot(round)
                case messages.HoldRound():
                    self.backend.hold()
                case messages.EndHoldRound():
                    self.backend.end_hold(back=round.back)
                case messages.RestoreRound():
                    self._restore(round)
                case messages.HelpRound():
                    self._help()
                case messages.AddRound():
                    self.helping.add_gradient(self.contributed)
                case messages.PublishRound():
                    self._collect(round.what, published=round.published)
                case messages.StagePartsRound():
                    return self._stage_part(round.number)
                case messages.PublishPartsRound():
                    source = self._own_part.publish(Version(round.number, round.parent, round.ordinal))
                    return self.ranks.gather_on_leader(source.SerializeToString() if source else b"")
                case messages.AbortRound():
                    self.backend.zero()
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
        fixed = self.config.deterministic
        return self._device.computing(self.ranks.device, round.kind, size, fixed=fixed)

    def release(self) -> None:
        """Frees what the next forward gathers from the ranks; all ranks do or none."""
        if self._backend is not None:
            with current(self.ranks.device):
                self._backend.release()

    def _restore(self, round: messages.RestoreRound) -> None:
        self._backend = None
        backend = self._new_backend()
        self.warmup = WarmUp(0)
        try:
            if round.checkpoint:
                backend.load_reference()
                backend.load_state(self._opened(round))
            else:
                torch.manual_seed(self.config.seed)
                backend.load_initial()
                if self.config.trainer.warmup.steps:
                    self.warmup = backend.warm_up()
                backend.load_reference()
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error
        finally:
            self.reader = None
        self._loaded_with(backend)
        self.restored = round.number

    def _loaded_with(self, backend: Backend) -> None:
        """Weights are loaded, and the process groups that they need are made."""
        found = self.ranks.gather(backend.replica.to_bytes(4, "big"))
        self.replica_of = [int.from_bytes(each, "big") for each in found]
        self.ranks.note_connections()
        self._backend = backend

    @property
    def helping(self) -> HelpingBackend:
        """The backend as one that helps, or is helped. Raises Refusal UNIMPLEMENTED for one that cannot."""
        if not isinstance(self.backend, HelpingBackend):
            raise Refusal(
                "UNIMPLEMENTED",
                f"trainer.helpers: the backend {self.config.trainer.backend} takes no help; set trainer.helpers: 0",
            )
        return self.backend

    def _balancing(self, policy: int) -> BalancingBackend:
        """The backend as one that balances experts. Raises Refusal UNIMPLEMENTED for one that cannot."""
        backend = self.part(policy)
        if not isinstance(backend, BalancingBackend):
            raise Refusal(
                "UNIMPLEMENTED",
                f"algorithm.options.balance_loss_coef: the backend {self.config.trainer.backend} does not balance "
                "experts; set it to 0",
            )
        return backend

    @property
    def base_model(self) -> ReferenceFacts | None:
        """The frozen weights beside which adapters learn, as the leader; None where all weights do."""
        backend = self.backend
        return backend.base_model if isinstance(backend, AdaptingBackend | PoliciesBackend) else None

    def _help(self) -> None:
        assert self.reader is not None
        before, self._backend = self._backend, None  # Half-loaded weights are not used.
        backend = before or self._new_backend()
        try:
            if not isinstance(backend, HelpingBackend):
                raise Refusal(
                    "UNIMPLEMENTED",
                    f"the backend {self.config.trainer.backend} cannot help; set trainer.helpers: 0",
                )
            backend.load_base(self.reader)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error
        finally:
            self.reader = None
        self._loaded_with(backend)

    def _infer(self, round: messages.InferRound) -> list[list[Columns]]:
        """The columns of each replica's rows, by replica, on the leader."""
        found = self.part(round.policy).infer(round.work, round.columns)
        parts = self.ranks.gather_on_leader(msgspec.msgpack.encode((self.backend.replica, found)))
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

    def adapter_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Of a version of adapters alone; empty where the run's versions are whole."""
        parts = [(name, part) for name, part in self._parts if isinstance(part, AdaptingBackend)]
        return [
            (below(name, tensor), kind, shape)
            for name, part in parts
            for tensor, kind, shape in part.adapter_layout()
        ]

    @property
    def _parts(self) -> list[tuple[str, Backend]]:
        """Of each policy, by its name; "" is the run's own, which comes first."""
        backend = self.backend
        return [*backend.by_name.items()] if isinstance(backend, PoliciesBackend) else [("", backend)]

    def _collect(self, what: messages.Gathered, *, published: bool) -> None:
        """Gathers tensors; the leader's `collect` takes them, the others only take part. Of bases the first: they are
        one.
        """
        parts = self._parts[:1] if what == "base" else self._parts
        weights = chain.from_iterable(
            ((below(name, tensor), value) for tensor, value in _whole(part, what, published=published))
            for name, part in parts
        )
        try:
            if self.collect is not None:
                self.collect(weights)
        finally:
            for _ in weights:  # The others wait for this rank, whatever it thinks of a tensor.
                pass

    def _stage_part(self, number: int) -> list[tuple[str, str, bytes]]:
        """(reason, message, manifest) of each rank's part, on the leader: one that cannot does not end the group."""
        answer = "", "", b""
        try:
            manifest = self._own_part.stage(self.backend, self.kind.checkpoint_names, number)
            answer = "", "", manifest.SerializeToString()
        except (Refusal, ServiceError) as error:
            answer = error.reason, error.message, b""
        answers = self.ranks.gather_on_leader(msgspec.msgpack.encode(answer))
        return [msgspec.msgpack.decode(each, type=tuple[str, str, bytes]) for each in answers]

    @property
    def _own_part(self) -> RankPart:
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
            return TensorReader.of_checkpoint(path, state.files, state.optimizer_steps)
        except (Damaged, Refusal, OSError, ValueError):
            return None

    def _snapshot(self, round: messages.SnapshotRound) -> StateCopy | None:
        """Copies this rank's part; the leader gets its own. A rank that does not see the directory sends its part."""
        directory, own, ranks = self._runs / round.directory, self.ranks.rank, self.ranks.world_size
        self._writer.wait()
        seen = [found for [found] in self.ranks.votes(directory.is_dir())]
        copy = copy_state(self.backend, in_place=round.in_place, leads=self.ranks.leads)
        if self.ranks.leads:
            for rank in (rank for rank in range(1, ranks) if not seen[rank]):
                relay_part(self.ranks, rank, directory, durable=round.durable)
            if round.in_place:
                files = write_part(directory, copy, own, ranks, durable=round.durable)
                return StateCopy({}, {}, copy.optimizer_steps, files=files)
            return copy
        if not seen[own]:
            send_part(self.ranks, copy)
        elif round.in_place:
            write_and_report(directory, copy, own, ranks, round.durable)
        else:
            self._writer.start(directory, copy, own, ranks, durable=round.durable)
        return None


def _whole(part: Backend, what: messages.Gathered, *, published: bool) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of one policy."""
    adapting = part if isinstance(part, AdaptingBackend) else None
    if what == "base":
        assert adapting is not None
        yield from adapting.base_weights(published=published)
    elif what != "adapters":
        yield from part.weights(published=published)
    if what in ("all", "adapters") and adapting is not None:
        yield from adapting.adapters()
