"""The leases of a run's workers: which devices each is to have, and how they take and release them.

When they change hands is decided in `handover`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from headrace.common.v1 import common_pb2 as common

from headrace_coordinator.domain.devices.leases import GENERATE, HELD, SCORE, SIMULATE, LeaseRequest
from headrace_coordinator.domain.intervals import Interval
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.assignment import assign_devices
from headrace_coordinator.run.devices.beside import ScorerLeases, SimulatorLeases
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

CHAIN = 16
"""Most hosts of one chain; the trainer feeds all chains."""
PEERS = 2
"""Instances of a host that are asked, one after the other."""


class WorkerLeases:
    """What the workers of one run hold."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        self.simulators = SimulatorLeases(workers, self.acquire)
        self.scorers = ScorerLeases(workers, self.acquire)
        self.lock = asyncio.Lock()
        """Held while devices change hands."""
        self.joined = False
        """The trainers have the rollouts' devices too, until those generate again: a hybrid placement."""
        self.moved_s = 0.0
        """Seconds in which memory was released or taken, in all."""
        self.waited: Callable[[Interval, Sequence[str]], None] = lambda interval, devices: None
        """Is told of each time in the line for devices that other runs share."""
        self._manager = workers.fleet.lease_manager

    def assign(self) -> None:
        """Decides every worker's devices; raises `PlacementError`."""
        placement, beside = self.workers.placement, self.scorers.devices()
        if placement.section.joint is None:
            beside |= self.simulators.devices()
        assign_devices(self.workers, beside, joined=self.joined or placement.spans)

    def in_the_way(self) -> list[TrainerClient]:
        """In turns: trainers on devices that rollouts, simulators or scorers are to have; all of a run that shares."""
        wanted = {device for rollout in self.workers.rollouts for device in rollout.devices}
        wanted |= self.simulators.devices() | self.scorers.devices()
        shares = self.workers.placement.section.share
        return [each for each in self.workers.trainers if shares or wanted & {*each.devices}]

    async def take(self, workers: Sequence[WorkerClient], stage: str) -> None:
        """Assigns devices anew, and leases theirs to `workers`; misplaced leases of the run are released first."""
        self.assign()  # The grant may have changed inside the step: an instance was lost, a device is in doubt.
        with_devices = [worker for worker in workers if worker.devices]
        misplaced = self._misplaced_leases(workers, stage)
        await self._manager.release(self.workers.run, misplaced)
        for worker in self.workers.everyone:
            if worker.lease_epoch in misplaced:
                worker.lease_epoch, worker.installed = 0, 0
        await self._acquire_shared(with_devices, stage)

    async def acquire(
        self,
        workers: Sequence[WorkerClient],
        stage: str,
        patience: float | None = None,
        waited: Callable[[float], None] = lambda began: None,
    ) -> None:
        """Leases their assigned devices to `workers`: all or none. Parameters as of `LeaseManager.acquire`."""
        run, timeout = self.workers.run, self.workers.fleet_timeout
        joint = self.workers.placement.section.joint
        parts = {GENERATE: joint.rollout, SIMULATE: joint.simulator} if joint else {}
        requests = [
            LeaseRequest(
                w.incarnation,
                run,
                stage,
                w.devices,
                w.instance.host,
                w.instance.boot_id,
                parts.get(stage, 1.0),
            )
            for w in workers
        ]
        epochs = await self._manager.acquire(requests, timeout, patience, waited)
        for worker, epoch in zip(workers, epochs, strict=True):
            worker.lease_epoch, worker.kept = epoch, False

    async def _acquire_shared(self, workers: Sequence[WorkerClient], stage: str) -> None:
        """Leases for workers; a run that shares may wait for another one, which it must not keep from its own."""
        fleet = self.workers.fleet
        if not self.workers.placement.section.share:
            return await self.acquire(workers, stage)
        live = fleet.event_log.state.table.leases
        if any((lease := live.get(w.lease_epoch)) is None or lease.state != HELD for w in workers):
            await self.release_unloaded([worker for worker in workers if worker.lease_epoch])

        def waited(began: float) -> None:
            devices = [device for worker in workers for device in worker.devices]
            self.waited((began, fleet.event_log.monotonic()), devices)

        await self.acquire(workers, stage, self.workers.spec.limits.step_timeout_s, waited)

    async def release(self, workers: Sequence[WorkerClient], *, keep: bool = False) -> None:
        """Ends the leases of `workers`, with notice; `keep`: what they have loaded may stay."""
        epochs = [worker.lease_epoch for worker in workers]
        await self._manager.release(self.workers.run, epochs, keep=keep)
        for worker in workers:
            worker.lease_epoch, worker.kept = 0, keep

    async def release_unloaded(self, workers: Sequence[WorkerClient]) -> None:
        """Ends the leases of workers that were not suspended: they wake again before they compute."""
        await self.release(workers)
        for worker in workers:
            worker.lost_lease()

    def _misplaced_leases(self, workers: Sequence[WorkerClient], stage: str) -> list[int]:
        """Epochs of the run's leases whose holder was lost, or was assigned other devices since."""
        group = self.workers
        passing = group.helpers if stage == GENERATE else group.decoders
        staying = [each for each in group.everyone if each not in passing]
        if group.placement.turns:
            waiting = self.in_the_way() if stage == GENERATE else group.trainers
            staying = [*workers, *(each for each in group.trainers if each not in waiting)]
        assigned = {worker.incarnation: worker.devices for worker in staying}
        return [
            lease.epoch
            for lease in group.fleet.event_log.state.table.leases.values()
            if lease.run == group.run
            and lease.stage not in (SIMULATE, SCORE)
            and assigned.get(lease.incarnation) != tuple(lease.devices)
        ]

    async def load(
        self, rollouts: Sequence[RolloutClient], published: Published, *, in_flight: bool = False
    ) -> None:
        """Rollouts that hold their devices can generate with a version; `in_flight`: those that do go on with it."""
        behind = [r for r in rollouts if not r.awake or r.installed != published.version.number]
        with self.moving():
            await gather_all(*(rollout.wake_weights() for rollout in behind))
        sources = self._sources(rollouts, behind, published)
        installs = [
            self._install(rollout, published, sources.get(rollout.incarnation, []), in_flight)
            for rollout in behind
        ]
        # One that fails beside answers is mended there: the others are not to stop theirs for it.
        for fault in await asyncio.gather(*installs, return_exceptions=in_flight) if in_flight else ():
            if isinstance(fault, BaseException):
                raise fault
        await gather_all(*(() if in_flight else installs))
        with self.moving():
            await gather_all(*(rollout.wake_cache() for rollout in behind))

    async def prefetch(self, rollouts: Sequence[RolloutClient], published: Published) -> None:
        """Rollouts receive a version while they make answers with the one before; what fails is only noted."""
        working = [each for each in rollouts if each.awake and each.installed != published.version.number]
        if published.files is not None or not working:
            return
        sources, number = self._sources(rollouts, working, published), published.version.number

        async def bring(rollout: RolloutClient) -> None:
            who = rollout.instance.instance
            try:
                found = await rollout.prefetch(published, sources.get(rollout.incarnation, []))
            except (CallRefused, InstanceDown) as fault:
                self.workers.note(f"{who} did not take version {number} beforehand: {fault}")
            else:
                self._note_other_ways(who, number, found)

        await gather_all(*map(bring, working))

    async def _install(
        self,
        rollout: RolloutClient,
        published: Published,
        sources: Sequence[common.WeightSource],
        in_flight: bool,
    ) -> None:
        version, who = published.version.number, rollout.instance.instance
        self._note_other_ways(who, version, await rollout.install(published, sources, in_flight=in_flight))

    def _note_other_ways(self, who: str, number: int, failed: Sequence[str]) -> None:
        for text in failed:
            self.workers.note(f"{who} took version {number} in another way: {text}")

    def _sources(
        self, rollouts: Sequence[RolloutClient], behind: Sequence[RolloutClient], published: Published
    ) -> dict[str, list[common.WeightSource]]:
        """Whom each of those that are behind asks for a version; see `sources_of`."""
        origin = self.workers.fleet.event_log.state.instances.get(published.source.incarnation)
        if published.files is not None or origin is None:
            return {}
        holders = [each.instance for each in rollouts if each not in behind]
        return sources_of([each.instance for each in behind], holders, published.source, origin.host)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Counts the seconds of the body as `moved_s`."""
        clock = self.workers.fleet.event_log.monotonic
        began = clock()
        try:
            yield
        finally:
            self.moved_s += clock() - began


def sources_of(
    receivers: Sequence[InstanceState],
    holders: Sequence[InstanceState],
    origin: common.WeightSource,
    origin_host: str,
) -> dict[str, list[common.WeightSource]]:
    """By incarnation of a receiver, whom it asks, best first; the last one is the trainer's own store, `origin`.

    Each host gets a version once, from a host that has it or receives it. Hosts form chains, and bytes are passed on as
    they arrive: a chain of n hosts takes as long as one, and n - 1 times the delay of a piece; a host that fed two
    others at once would take twice as long.

    It says how many hosts are told with it.

    `holders` have the version already. Receivers on the trainer's host map its memory, and ask nobody else.
    """
    hosts: dict[str, list[InstanceState]] = {}
    for receiver in sorted(receivers, key=lambda each: (each.host, each.instance)):
        hosts.setdefault(receiver.host, []).append(receiver)
    here = hosts.pop(origin_host, [])
    told = common.WeightSource()
    told.CopyFrom(origin)
    told.receivers = max(1, len(hosts) + bool(here and origin.parts))  # Of parts nobody maps the whole.
    away = [holder for holder in holders if holder.host != origin_host]
    found = {receiver.incarnation: [told] for receiver in here}
    names = list(hosts)
    for place, name in enumerate(names):
        peers: list[common.WeightSource] = []
        if place % CHAIN:
            peers = [_peer(each, relay=True) for each in hosts[names[place - 1]][:PEERS]]
        elif away:
            peers = [_peer(away[place // CHAIN % len(away)], relay=False)]
        found |= {receiver.incarnation: [*peers, told] for receiver in hosts[name]}
    return found


def _peer(instance: InstanceState, *, relay: bool) -> common.WeightSource:
    return common.WeightSource(
        address=instance.address,
        incarnation=instance.incarnation,
        transports=[common.WEIGHT_TRANSPORT_GRPC],
        relay=relay,
    )
