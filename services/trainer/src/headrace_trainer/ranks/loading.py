"""The models of one rank, of all policies of a run: checked, loaded, suspended. Of rounds it knows a restore's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import below, own_name
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.memory.allocator import resident_bytes
from headrace_servicekit.weights.bases import Bases

from headrace_trainer.backends._base import (
    AdaptingBackend,
    Backend,
    HelpingBackend,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.policies import Backends
from headrace_trainer.checkpoints.state import STATE, Damaged, read_state
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.memory import MemoryPlan, check_rooms, rooms_on
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.device import current
from headrace_trainer.ranks.reduced import Reduced
from headrace_trainer.workloads import run_kind


class LoadedModels:
    """The backends of this process in its trainer group, with weights once a restore round has loaded them.

    `reader` is set by the leader before the round that uses it. `bases`: where frozen weights are shared; by default
    they are its own.
    """

    def __init__(
        self,
        config: TrainerConfig,
        ranks: TrainerGroup,
        directory: Path | None = None,
        reduced: Reduced | None = None,
        bases: Bases | None = None,
    ) -> None:
        self._runs = directory.parent if directory is not None else Path()
        self.config = config
        self.reduced = reduced or Reduced(config)
        """What the leader has reduced after a device had no memory left."""
        self._bases = bases
        self.ranks = ranks
        self.kind = run_kind(config)
        for kind in self.kind.policies.values():
            kind.directory = directory
        self.algorithms = {name: kind.algorithm() for name, kind in self.kind.policies.items()}
        """Of the run's policies by name; "" is the run's own, and in most runs the only one."""
        self.reader: StateReader | None = None
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
