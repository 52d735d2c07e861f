"""The instances of a run: who they are, what the run may use, and which of them can be used now.

Knows no step. `staffing` and the simulators' pools fill its lists.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from headrace_schema.sections.generating import engine_hosts
from headrace_schema.spec import RunSpec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import REVOKING, is_gpu
from headrace_coordinator.domain.devices.placement import Placement, placement_of
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.workers.clients import RewardClient, SimulatorClient
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

log = logging.getLogger(__name__)
LEASE_ENDED = ("EPOCH_STALE", "SUSPENDED")
"""Refusals of a command whose lease was revoked: after the revoke, and while it is obeyed."""
LEASE_RETRY_S = 0.2
"""After so long a worker whose lease was not renewed in time is asked again."""


class WorkerGroup:
    """The run's clients of its instances, by what they do for it."""

    def __init__(self, fleet: Fleet, run: str, spec: RunSpec) -> None:
        self.fleet = fleet
        self.run = run
        self.spec = spec
        self.rollouts: list[RolloutClient] = []
        self.trainers: list[TrainerClient] = []
        self.helpers: list[TrainerClient] = []
        """Trainers beside the group, which learn on the rollouts' devices inside a step."""
        self.decoders: list[RolloutClient] = []
        """Rollouts without devices of their own, which decode on the trainer group's while it has nothing to learn."""
        self.rewards: list[RewardClient] = []
        self.simulators: list[SimulatorClient] = []
        self._placement: tuple[ev.PlanAdopted | None, bool, Placement] | None = None

    @property
    def leader(self) -> TrainerClient:
        """Rank 0, the only one that accepts steps; raises `InstanceDown` while there is none."""
        if not self.trainers:
            raise InstanceDown("trainer", "the trainer group is not formed")
        return self.trainers[0]

    @property
    def everyone(self) -> list[WorkerClient]:
        """All of them."""
        return [
            *self.producers,
            *self.trainers,
            *self.helpers,
            *self.rewards,
            *self.simulators,
        ]

    @property
    def producers(self) -> list[RolloutClient]:
        """Every rollout that may have made answers of the open step."""
        return [*self.rollouts, *self.decoders]

    @property
    def decoding(self) -> list[RolloutClient]:
        """The run's rollouts that take work: of an engine of several hosts the one that leads."""
        return [rollout for rollout in self.rollouts if not rollout.rank]

    @property
    def learning_devices(self) -> list[str]:
        """Devices of the trainer group."""
        return [device for trainer in self.trainers for device in trainer.devices]

    @property
    def engine_hosts(self) -> int:
        """Hosts that each engine spans."""
        return engine_hosts(self.spec.rollout.engine_options)

    @property
    def state(self) -> RunState:
        """The run's durable state."""
        return self.fleet.event_log.state.runs[self.run]

    @property
    def grant(self) -> Grant:
        """What the run may use now."""
        return self.state.grant or Grant()

    @property
    def ranks(self) -> int:
        """How many the trainer group has."""
        return self.state.ranks

    @property
    def placement(self) -> Placement:
        """How the run uses its devices now."""
        plan, gpus = self.state.plan, any(map(is_gpu, self.grant.devices))
        if self._placement is None or self._placement[:2] != (plan, gpus):
            ahead = self.spec.algorithm.max_staleness > 0
            self._placement = plan, gpus, placement_of(self.spec.placement, plan, ahead=ahead, gpus=gpus)
        return self._placement[2]

    @property
    def fleet_timeout(self) -> float:
        """Longest wait for a lease."""
        return self.spec.limits.instance_timeout_s

    def alive(self, incarnations: Sequence[str]) -> list[InstanceState]:
        """Those of the incarnations that live."""
        known = self.fleet.event_log.state.instances
        return [known[who] for who in incarnations if self.fleet.alive(who)]

    def usable(self, worker: WorkerClient) -> bool:
        """Whether a worker lives, is awake, and keeps its lease; one whose lease is over must wake again."""
        lease = self.fleet.event_log.state.table.leases.get(worker.lease_epoch)
        if worker.lease_epoch and (lease is None or lease.state == REVOKING):
            worker.lost_lease()
        return worker.awake and not worker.kept and self.fleet.alive(worker.incarnation)

    def may_help(self, worker: WorkerClient) -> bool:
        """Whether a helper or decoder lives and is still granted: another run may have been granted it."""
        return self.fleet.alive(worker.incarnation) and worker.incarnation in self.grant.helpers

    def lease_ended(self, worker: WorkerClient, refused: CallRefused, epoch: int | None = None) -> bool:
        """Whether a command was refused, and did nothing, because the worker's lease was revoked.

        `epoch`: the lease that the command was given under, where the worker may hold another one by now.
        """
        lease = self.fleet.event_log.state.table.leases.get(worker.lease_epoch if epoch is None else epoch)
        return refused.reason in LEASE_ENDED and (lease is None or lease.state == REVOKING)

    async def wait_for_renewal(self, worker: WorkerClient) -> None:
        """Waits a little for the next heartbeat of a worker whose lease was not renewed in time."""
        with self.fleet.waits.named(self.run, f"the lease of {worker.instance.instance} to be renewed"):
            await asyncio.sleep(LEASE_RETRY_S)

    def note(self, text: str, plain: bool = False) -> None:
        """Tells the run's user; as of trouble, unless it is `plain`."""
        text = self.fleet.readable(text)
        log.info("run %s: %s", self.run, text)
        event_log = self.fleet.event_log
        event_log.post(ev.Noted(run=self.run, text=text, plain=plain))

    def adopt_leases(self) -> None:
        """After a fault or a restart: what each worker holds is what the lease table says."""
        for worker in self.everyone:
            mine = [
                lease
                for lease in self.fleet.event_log.state.table.of(worker.incarnation)
                if lease.run == self.run
            ]
            worker.lease_epoch = mine[0].epoch if mine else 0
            worker.devices = tuple(mine[0].devices) if mine else worker.devices

    def reopen(self, incarnation: str) -> None:
        """An instance says that the run is not open there: it is opened anew when the run is staffed next."""
        for worker in self.everyone:
            if worker.incarnation == incarnation:
                worker.opened = False
