"""One rank's part of every round: what each kind of round does to the backend.

The same on leader and followers; a leader also hands in where gathered tensors go. Knows no steps, no wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
from headrace_modelkit.devices import free_bytes, total_bytes, used_bytes
from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.process.capacity import host_memory
from torch import Tensor

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.allocator import resident_bytes
from headrace_trainer.backends._base import (
    AdaptingBackend,
    Backend,
    CommitReport,
    HelpingBackend,
    PrivateGradient,
    ReferenceFacts,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.robot.backend import RobotBackend
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.group.rounds import Round
from headrace_trainer.kinds import run_algorithm, run_backend
from headrace_trainer.learning.episodes.data import EpisodeScores
from headrace_trainer.learning.samples import Columns
from headrace_trainer.memory import MemoryPlan, Room, check_room


@dataclass
class Copies:
    """Whole tensors of a snapshot round, in host memory."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    optimizer_steps: int


class Rank:
    """The backend of this process in its trainer group, driven by rounds.

    `reader`, `collect` and `contributed` are set by the leader before the round that uses them.
    """

    def __init__(self, config: TrainerConfig, ranks: TrainerGroup) -> None:
        self.config = config
        self.ranks = ranks
        self.algorithm: Algorithm = run_algorithm(config)
        self.reader: StateReader | None = None
        self.collect: Callable[[Iterator[tuple[str, Tensor]]], None] | None = None
        self.contributed: PrivateGradient | None = None
        self.warmup = WarmUp(0)
        self.restored = 0
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The backend with weights. Raises Refusal NOT_OPEN before a restore round."""
        if self._backend is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._backend

    @property
    def loaded(self) -> bool:
        """Whether a restore round has loaded weights."""
        return self._backend is not None

    def _new_backend(self) -> Backend:
        return run_backend(self.config, self.algorithm, self.ranks)

    def check_state(self, reader: StateReader) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH when a checkpoint is of another model or optimizer."""
        try:
            self._new_backend().check_state(reader)
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error

    def check_memory(self) -> MemoryPlan:
        """What the run needs here, as the leader. Raises Refusal INVALID or MEMORY_SHORT when it does not fit."""
        try:
            plan = self._new_backend().memory_plan()
        except ModelNotReadable as error:
            raise invalid(str(error), "MODEL_NOT_READABLE") from error
        host = host_memory()
        # What is loaded already is dropped before anything is loaded anew.
        check_room(plan.host, Room("host memory", host.available + resident_bytes(), host.total))
        if (device := self.ranks.device).type != "cpu":
            free = free_bytes(device) + used_bytes(device)
            check_room(plan.device, Room("GPU memory", free, total_bytes(device)))
        return plan

    def execute(self, header: Round) -> object:
        """Does this rank's part of a round; what it returns matters on the leader only."""
        if header.kind == "micro":
            if not self.ranks.leads:
                self.algorithm.load_state(header.algorithm_state)
            return self.backend.micro(header.work[self.backend.replica]).finite
        if header.kind == "check":
            return self.backend.gradient_is_finite()
        if header.kind == "infer":
            return self._infer(header)
        if header.kind == "read":
            return self._read(header)
        if header.kind == "credit" and header.credit is not None:
            self._episodes.credit(header.credit)
        if header.kind == "chunks":
            return self._episodes.learn(header.chunks[self.backend.replica]).finite
        if header.kind == "end_episodes":
            self._episodes.end_episodes(learned=header.learned)
        if header.kind == "commit":
            return self.backend.commit(header.denominator, header.learning_rate, header.critic_rate)
        if header.kind == "snapshot":
            return self._snapshot()
        if header.kind == "hold":
            self.backend.hold()
        if header.kind == "end_hold":
            self.backend.end_hold(back=header.back)
        if header.kind == "restore":
            self._restore(header)
        if header.kind == "help":
            self._help()
        if header.kind == "add":
            self.helping.add_gradient(self.contributed)
        if header.kind == "publish":
            self._collect()
        if header.kind == "abort":
            self.backend.zero()
        return None

    def _restore(self, header: Round) -> None:
        self._backend = None
        backend = self._new_backend()
        self.warmup = WarmUp(0)
        try:
            if header.checkpoint:
                backend.load_reference()
                backend.load_state(self.reader)
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
        self._backend = backend
        self.restored = header.number

    @property
    def helping(self) -> HelpingBackend:
        """The backend as one that helps, or is helped. Raises Refusal UNIMPLEMENTED for one that cannot."""
        if not isinstance(self.backend, HelpingBackend):
            raise Refusal(
                "UNIMPLEMENTED",
                f"trainer.helpers: the backend {self.config.trainer.backend} takes no help; set trainer.helpers: 0",
            )
        return self.backend

    @property
    def base_model(self) -> ReferenceFacts | None:
        """The frozen weights beside which adapters learn, as the leader; None where all weights do."""
        return self.backend.base_model if isinstance(self.backend, AdaptingBackend) else None

    def _help(self) -> None:
        assert self.reader is not None
        before, self._backend = self._backend, None  # Half-loaded weights are nobody's.
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
        self._backend = backend

    def _infer(self, header: Round) -> list[list[Columns]]:
        """The columns of each replica's rows, by replica."""
        own = self.backend.replica
        found = self.backend.infer(header.work[own], header.columns)
        bodies = self.ranks.gather(msgspec.msgpack.encode((own, found)))
        by_replica = dict(msgspec.msgpack.decode(body, type=tuple[int, list[Columns]]) for body in bodies)
        return [by_replica[replica] for replica in sorted(by_replica)]

    def _read(self, header: Round) -> list[EpisodeScores]:
        found = self._episodes.read(header.episodes)
        bodies = self.ranks.gather(msgspec.msgpack.encode(found))
        return [own for body in bodies for own in msgspec.msgpack.decode(body, type=list[EpisodeScores])]

    @property
    def _episodes(self) -> RobotBackend:
        assert isinstance(self.backend, RobotBackend)
        return self.backend

    def _collect(self) -> None:
        """Gathers every weight; the leader's `collect` takes them, the others only take part."""
        weights = self.backend.weights()
        if self.collect is not None:
            self.collect(weights)
        for _ in weights:
            pass

    def _snapshot(self) -> Copies | None:
        leads = self.ranks.leads
        weights = {name: tensor.clone() for name, tensor in self.backend.weights() if leads}
        optimizer = {name: tensor.clone() for name, tensor in self.backend.moments() if leads}
        if not leads:
            return None
        optimizer["random_state"] = torch.get_rng_state()
        return Copies(weights, optimizer, self.backend.optimizer_steps)


def is_finite(result: object) -> bool:
    """The result of a micro or a check round."""
    assert isinstance(result, bool)
    return result


def commit_report(result: object) -> CommitReport:
    """The result of a commit round."""
    assert isinstance(result, CommitReport)
    return result
