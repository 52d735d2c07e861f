"""One trainer process: the run it has open, the trainer group it is in, and its device. Knows no gRPC.

A leader gets a `Session`; a follower a thread that does what the leader's rounds say.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from headrace_modelkit.device_memory import DeviceCopies
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.lease.leases import Memory
from headrace_servicekit.logs import get_logger
from headrace_servicekit.memory.allocator import give_freed_memory_back
from headrace_servicekit.stores.files import localized
from headrace_servicekit.stores.problems import StoreProblem
from headrace_servicekit.weights.store import WeightStore

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.checkpoints.directory import CheckpointDirectory, foreign_checkpoints
from headrace_trainer.errors import Refusal, away, conflict, invalid
from headrace_trainer.group.forming import join_trainer_group, own_facts, secret_of
from headrace_trainer.group.group import Member, OnLost, TrainerGroup
from headrace_trainer.group.liveness import SILENT_S
from headrace_trainer.kinds._base import RunKind
from headrace_trainer.learning.step import StepState
from headrace_trainer.ranks.device import LeasedDevice, current
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.ranks.reduced import Reduced
from headrace_trainer.ranks.rounds import RoundLost, Rounds
from headrace_trainer.session.helping import check_helped
from headrace_trainer.session.session import Session
from headrace_trainer.versions.parts import RankPart
from headrace_trainer.workloads import run_kind

_log = get_logger(__name__)
FOLLOWER_STOP_S = 60.0


class Trainer:
    """Everything a process holds. All methods but the read-only ones run on the compute thread."""

    def __init__(
        self,
        store: Callable[[], WeightStore],
        holds_lease: Callable[[], bool],
        *,
        deadlines: bool = True,
        name: str = "",
        incarnation: str = "",
        on_lost: OnLost = lambda _members: None,
        listen: str = "",
        token: str | None = None,
    ) -> None:
        """`listen` is the host at which ranks meet here, by default where the coordinator says; `token` the fleet's."""
        self._store = store
        self._holds_lease = holds_lease
        self._deadlines = deadlines
        self._name, self._incarnation, self._on_lost = name, incarnation, on_lost
        self._listen, self._token = listen, token
        self._run = ""
        self._config: TrainerConfig | None = None
        self._directory = Path()
        self._ranks: TrainerGroup | None = None
        self._joined: tuple[int, int, int, str] | None = None
        self._rank: Rank | None = None
        self._rounds: Rounds | None = None
        self._session: Session | None = None
        self._follower: threading.Thread | None = None
        self.device = LeasedDevice()
        self.copies = DeviceCopies(self.own_device, withheld=self._lends_nothing)
        """Versions on this rank's GPU that others map."""
        self.suspended = False
        self._kept = False
        self._kind: RunKind | None = None
        self._reduced: Reduced | None = None
        """What the open run has reduced after a device had no memory left, in whichever trainer group."""

    @property
    def config(self) -> TrainerConfig:
        """The open run's. Raises Refusal NOT_OPEN."""
        if self._config is None:
            raise Refusal("NOT_OPEN", "no run is open: call OpenRun first")
        return self._config

    @property
    def kind(self) -> RunKind:
        """What the open run learns from. Raises Refusal NOT_OPEN."""
        _ = self.config
        assert self._kind is not None
        return self._kind

    @property
    def generation(self) -> int:
        """Generation of this rank's trainer group; 0 for none, also when the group has lost a rank."""
        lost = (
            self._session.rounds.lost if self._session else not (self._follower and self._follower.is_alive())
        ) or bool(self._ranks and self._ranks.lost)
        return 0 if self._ranks is None or lost else self._last_generation

    @property
    def _last_generation(self) -> int:
        return self._joined[0] if self._joined else 0

    def check_run(self, run: str) -> None:
        """Raises Refusal NOT_OPEN unless `run` is open."""
        if run != self._run:
            raise Refusal(
                "NOT_OPEN", f"{run} is not open here ({self._run or 'no run is'}): call OpenRun first"
            )

    def open_run(self, run: str, config: TrainerConfig, directory: Path) -> list[Algorithm]:
        """Prepares for a run; its policies' algorithms, the run's own first. Raises Refusal INVALID or
        MODEL_NOT_READABLE.
        """
        self.device.measure_anew()
        try:
            config = localized(config)
        except StoreProblem as problem:
            raise away(problem) from problem
        kind = run_kind(config)
        kind.check()
        algorithms = [each.algorithm() for each in kind.policies.values()]
        if config.trainer.helpers:
            check_helped(algorithms[0])
        if self._reduced is None or (run, config) != (self._run, self._config):
            self._reduced = Reduced(config)
        self._run, self._config, self._directory, self._kind = run, config, directory, kind
        self._assemble()
        return algorithms

    def close_run(self) -> None:
        """Drops the run and what it held, and leaves its trainer group. Repeated calls do nothing."""
        opened = bool(self._run)
        self._disband()
        self._end_session()
        self._run, self._config, self._joined, self._reduced = "", None, None, None
        self._kept = False
        self.suspended = False  # A run that is opened next has released nothing.
        gc.collect()  # Session and learner refer to each other: the model must not stay until the next collection.
        if opened:
            self._store().bases.reap()
        give_freed_memory_back()  # Else a run's largest step would stay with the process for good.

    def join(
        self,
        generation: int,
        rank: int,
        world_size: int,
        rendezvous: str,
        timeout_s: float,
        stopped: threading.Event | None = None,
    ) -> None:
        """Joins a trainer group; what an older generation held and `leave` did not keep is lost.

        `stopped` ends the wait for the other ranks: its caller has gone. Raises Refusal CONFLICT, RENDEZVOUS_TIMEOUT,
        or INVALID for ranks that do not fit together.
        """
        key = (generation, rank, world_size, rendezvous)
        if self._joined == key and self._ranks is not None:
            return
        if self._joined and generation <= self._last_generation:
            raise conflict(
                f"generation {generation} is not above {self._last_generation}, which was joined as "
                f"{self._joined[1:]}"
            )
        self._disband()
        self._await_follower()
        device = self.device.device
        dtype = self._config.model.dtype if self._config is not None else ""
        with current(device):
            self._ranks = join_trainer_group(
                generation,
                rank,
                world_size,
                rendezvous,
                timeout_s,
                device,
                listen=self._listen,
                secret=secret_of(self._token, self._run, generation),
                member=Member(self._name or f"rank {rank}", self._incarnation, own_facts(device, dtype)),
                on_lost=self._on_lost,
                stopped=stopped,
                silent_s=SILENT_S if self._deadlines else math.inf,
            )
        self._joined = key
        self._assemble()

    def leave(self, generation: int, *, carry: bool = False) -> None:
        """Leaves the trainer group between steps; as its leader, with the run's state where `carry` says so.

        Raises Refusal INVALID for another generation, and what `Session.carry` raises.
        """
        if self._ranks is None and generation <= self._last_generation:
            return
        if generation != self._last_generation:
            raise invalid(
                f"generation {generation} is not the trainer group's, which is {self._last_generation or 'none'}"
            )
        if carry:
            self.session().carry()
        self._disband()

    def session(self) -> Session:
        """The leader's session. Raises Refusal NOT_OPEN or NOT_LEADER."""
        _ = self.config
        if self._ranks is None:
            raise Refusal("NOT_OPEN", "the trainer is in no trainer group: call JoinTrainerGroup first")
        if self._session is None:
            raise Refusal(
                "NOT_LEADER", f"rank {self._ranks.rank} follows; send this to rank 0 of the trainer group"
            )
        return self._session

    def awake_session(self) -> Session:
        """The leader's session, when the device is not released. Raises Refusal SUSPENDED too."""
        if self.suspended:
            raise Refusal("SUSPENDED", "the trainer is suspended: call Wake first")
        return self.session()

    @property
    def carried_number(self) -> int:
        """Number of the version that `leave` has carried and that is not taken up yet; 0 for none."""
        return self._session.carried_number if self._session is not None else 0

    def state(self) -> StepState:
        """The state of the leader's steps; empty on a follower and before a trainer group is joined."""
        return self._session.state if self._session is not None else StepState()

    def checkpoints(self, source: str = "") -> CheckpointDirectory:
        """The run's checkpoints, or those of the run with directory `source`, on any rank.

        Raises Refusal NOT_OPEN, INVALID or NOT_FOUND.
        """
        _ = self.config
        if source:
            return foreign_checkpoints(self._directory, source)
        return self._session.checkpoints.directory if self._session else CheckpointDirectory(self._directory)

    def last_failure(self) -> str:
        """Name of the last checkpoint whose write failed, with the reason."""
        return self._session.checkpoints.last_failure if self._session else ""

    @property
    def world_size(self) -> int:
        """Ranks of its trainer group; 1 while it is in none."""
        ranks = self._ranks  # The compute thread may leave it meanwhile.
        return 1 if ranks is None else ranks.world_size

    def follows(self) -> bool:
        """Whether this rank follows another's rounds."""
        return self._ranks is not None and not self._ranks.leads

    def restored_steps(self, deadline_s: float) -> int:
        """Waits until the leader's restore round has run here; warm-up steps. Raises Refusal on timeout."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self._rank is not None and self._rank.restored:
                return self._rank.warmup.steps
            time.sleep(0.02)
        raise Refusal(
            "TIMEOUT",
            f"no restore round of the leader came in {deadline_s:g} s: call Restore on rank 0 too",
            "unavailable",
        )

    def own_device(self) -> torch.device | None:
        """Where this rank computes; None without a trainer group, and while its memory is released."""
        return self._ranks.device if self._ranks is not None and not self.suspended else None

    def _lends_nothing(self) -> str:
        """Why this rank lends no copy of a version."""
        if self._rank is None or self._rank.lends_versions:
            return ""
        return "a step needs the GPU memory that copies of versions would take"

    def suspend(self, *, keep: bool = False) -> tuple[int, Memory]:
        """Releases the device between rounds; bytes released, and what was measured on it then.

        `keep`: its memory stays as it is; a later call without it releases that too.
        """
        released = 0
        loaded = self._loaded
        self._kept = keep and loaded
        self.suspended = True  # First: a follower's vote says no from now on.
        self.copies.drop()
        if loaded and self._rank is not None and self._rounds is not None and self._rank.loaded:
            with self._rounds.between:
                if not keep:
                    released = self._rank.suspend()
                    self._rounds.memory_released = True
        return released, self.device.memory(self._ranks.device if self._ranks is not None else None)

    @property
    def _loaded(self) -> bool:
        """Whether its memory was not released."""
        return self._kept or not self.suspended

    def wake(self) -> None:
        """Takes the device again."""
        if self.suspended and self._rank is not None and self._rounds is not None and self._rank.loaded:
            with self._rounds.between:
                self._rank.wake()
        self.suspended = self._kept = False

    def _assemble(self) -> None:
        """Makes a rank once both a run and a trainer group are there."""
        if self._config is None or self._ranks is None or self._rank is not None:
            return
        self._rank = rank = Rank(
            self._config, self._ranks, self.device, self._directory, self._reduced, self._store().bases
        )
        if self._config.weights.publish == "ranks":
            rank.own_part = RankPart(self._store(), self._run, self._ranks.rank, self._ranks.world_size)
        self._rounds = rounds = Rounds(
            rank, holds_lease=lambda: not self.suspended and self._holds_lease(), deadlines=self._deadlines
        )
        if self._ranks.leads and self._session is not None:
            self._session.enter(rounds)
        elif self._ranks.leads:
            self._session = Session(self._run, self._directory, rounds, self._store())
        else:
            self._end_session()
            self._follower = threading.Thread(target=_follow, args=(rounds,), name="follower", daemon=True)
            self._follower.start()

    def _disband(self) -> None:
        """Leaves the trainer group. A follower's thread ends when the leader has left too; `join` waits for it."""
        if self._ranks is None:
            return
        if self._ranks.leads:
            self._dismiss(self._ranks)
        if self._rank is not None and self._rank.own_part is not None:
            self._rank.own_part.close()
        self._ranks = self._rank = self._rounds = None
        if self._session is not None and not self._session.carried_number:
            self._end_session()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None

    def _await_follower(self) -> None:
        if self._follower is None:
            return
        self._follower.join(FOLLOWER_STOP_S)
        if self._follower.is_alive():
            raise Refusal(
                "BUSY",
                f"the leader of generation {self._last_generation} still leads: call LeaveTrainerGroup on rank 0",
                "unavailable",
            )
        self._follower = None

    def _dismiss(self, ranks: TrainerGroup) -> None:
        in_order = True
        if self._rounds is not None and ranks.world_size > 1:
            try:
                self._rounds.leave()
            except Refusal as lost:
                in_order = False
                _log.warning("followers are gone", extra={"reason": lost.message})
        ranks.leave(in_order=in_order)


def _follow(rounds: Rounds) -> None:
    ranks, in_order = rounds.rank.ranks, False
    try:
        rounds.follow()
        in_order = True
    except RoundLost as error:
        _log.error("trainer group lost", extra={"generation": ranks.generation, "reason": str(error)})
    finally:
        # Also when a round failed here: a closed connection is what tells the others, who wait for us.
        ranks.leave(in_order=in_order)
