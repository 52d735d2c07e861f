"""Which devices generate and learn, and the handing over between them.

`disaggregated` holds both sides at once and streams; `collocated` takes turns on the same devices inside a step;
`hybrid` streams too, and once the step's answers are complete the trainer has all devices; `auto` is one of these, as
the run's plan says. A side that is `resident` stays loaded while it has no devices, and computes nothing then.
A run that shares holds the devices of one side at a time, so that it never waits for another run with something that
this one waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import TypeVar

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import DECODE, HELD, HELP, REPLY, SIMULATE, LeaseRequest
from headrace_coordinator.domain.devices.places import device_order, devices_seen, hosts_of, named_devices
from headrace_coordinator.domain.devices.plans import section_of
from headrace_coordinator.domain.intervals import Interval
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.repliers import Repliers
from headrace_coordinator.run.devices.seating import by_machine, default_devices, seat
from headrace_coordinator.run.simulators.leases import SimulatorLeases
from headrace_coordinator.run.workers.clients import Published, WorkerClient
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

Member = TypeVar("Member", bound=WorkerClient)


class Placement:
    """Hands devices to the stage that needs them."""

    def __init__(self, workers: WorkerGroup, plan: ev.PlanAdopted | None = None) -> None:
        self.workers = workers
        self.section = section_of(workers.spec.placement, plan)
        """What holds now; never `auto`."""
        self.waited: Callable[[Interval, Sequence[str]], None] = lambda interval, devices: None
        """Is told of each time in the line for devices that other runs share."""
        self.moved_s = 0.0
        """Seconds in which memory was released or taken, in all."""
        self._moving = asyncio.Lock()
        self._joined = False
        """The trainer has the rollouts' devices too, until they generate again."""
        self.simulators = SimulatorLeases(workers, lambda: self.section, self._moving)
        self.repliers = Repliers(
            workers, self._moving, lambda members: self._take(members, REPLY), self._load
        )

    @property
    def joins(self) -> bool:
        """Whether the trainer takes the rollouts' devices once a step's answers are complete."""
        return self.section.mode == "hybrid"

    @property
    def in_turns(self) -> bool:
        """Whether generating and learning take turns: on the same devices, or as other runs share their devices."""
        return self.section.mode == "collocated" or self.section.share

    @property
    def streams(self) -> bool:
        """Whether groups are learned from while others are generated."""
        return not self.in_turns and self.section.pipelined

    @property
    def resident(self) -> bool:
        """Whether a side that has no devices for a while stays loaded."""
        return self.section.resident and not self.section.share

    def plan(self, plan: ev.PlanAdopted) -> None:
        """What holds from the next time on that devices are assigned."""
        self.section = section_of(self.workers.spec.placement, plan)

    async def change(self, plan: ev.PlanAdopted) -> None:
        """Between two steps: everybody gives its devices back, and the new plan holds. Rollouts take theirs later."""
        async with self._moving:
            await self._stand_down_rollouts()
            await self._stand_down_trainers()
            self._joined = False
            self.plan(plan)
            self.assign()
            if not self.in_turns:
                await self._learn()

    def assign(self) -> None:
        """Decides every member's devices; raises `seating.PlacementError`."""
        spec, grant = self.workers.spec, self.workers.grant
        rollouts = [member for member in self.workers.rollouts if member.incarnation in grant.rollouts]
        trainers = [member for member in self.workers.trainers if member.incarnation in grant.trainers]
        devices_of = default_devices(self.section, grant.devices, rollouts, trainers, joined=self._joined)
        for kind, members, wanted in (
            ("rollout", rollouts, spec.rollout.instances),
            ("trainer", trainers, self.workers.ranks),
        ):
            groups = by_machine(members, (*rollouts, *trainers))
            for machine, group in groups.items():
                side = self._leave_simulators_theirs(kind, devices_of[kind, machine], group)
                # A lost member keeps its seat where there are devices for it, so that the others need not move.
                seats = max(len(group), min(ceil(wanted / len(groups)), len(side)))
                seat(group, side, seats, f"placement.{kind}")
        if self.section.reply:
            self._assign_repliers()

    def _assign_repliers(self) -> None:
        members = [m for m in self.workers.repliers if m.incarnation in self.workers.grant.repliers]
        wanted = self.workers.spec.reply.instances if self.workers.spec.reply else 0
        hosts, groups = hosts_of(self.workers.fleet.event_log.state.instances.values()), by_machine(members)
        for group in groups.values():
            seen = devices_seen(member.instance for member in group) & {*self.workers.grant.devices}
            side = named_devices(self.section.reply, sorted(seen, key=device_order), hosts)
            seats = max(len(group), min(ceil(wanted / len(groups)), len(side)))
            seat(group, side, seats, "placement.reply")

    def _leave_simulators_theirs(
        self, kind: str, devices: Sequence[str], members: Sequence[WorkerClient]
    ) -> list[str]:
        """A side's devices on a machine beside its simulators'; joined, the trainers have those too."""
        theirs = self.simulators.devices()
        if kind == "rollout":
            return [device for device in devices if device not in theirs]
        more = theirs & devices_seen(member.instance for member in members) if self._joined else set()
        return [*devices, *sorted(more - {*devices}, key=device_order)]

    async def hand_devices_to_trainers(self, *, complete: bool = False) -> None:
        """The trainer group holds its devices, awake. `complete`: the step's answers are.

        A stream of groups to the trainer that is cut by this goes on under the next lease.
        """
        async with self._moving:
            if complete and self.joins and not self._joined:
                await self._stand_down_rollouts(keep=self.resident)
                await self._let_go(self.workers.trainers, keep=self.resident)
                self._joined = True
            await self._learn()

    async def hand_devices_to_rollouts(self, published: Published) -> None:
        """The rollouts hold their devices with `published` installed and verified."""
        async with self._moving:
            await self._generate(published)

    async def add_rollout(self, published: Published) -> None:
        """A replacement for lost rollouts, inside a step; trainers that had to make room take their devices again."""
        async with self._moving:
            await self.workers.staff_rollouts(1)
            self.assign()
            await self._generate(published)
            if not self.in_turns:
                await self._learn()

    async def give_way(self) -> None:
        """Inside a step: the rollouts give their devices to another run, with notice.

        What they had not finished waits until they have devices again: `add_rollout` takes them.
        """
        async with self._moving:
            await self._give_way([member for member in self.workers.rollouts if member.lease_epoch])

    async def lend(self, member: RolloutClient, helper: TrainerClient) -> None:
        """Inside a step: a rollout gives its devices back with notice, and a helper takes them.

        What the rollout had not finished goes on elsewhere: its stream ends with the partial answers.
        """
        async with self._moving:
            devices = member.devices
            await self._let_go([member])
            helper.devices = devices
            request = LeaseRequest(helper.incarnation, self.workers.run, HELP, devices, helper.instance.host)
            manager = self.workers.fleet.lease_manager
            [helper.lease_epoch] = await manager.acquire([request], self.workers.fleet_timeout)

    def seats_for(self, decoders: Sequence[RolloutClient]) -> list[tuple[RolloutClient, tuple[str, ...]]]:
        """The trainer group's devices by rank, each with a rollout that sees them, as far as there are any."""
        left, seats = list(decoders), []
        for trainer in self.workers.trainers:
            found = next((m for m in left if set(trainer.devices) <= set(m.instance.devices)), None)
            if found is not None and trainer.devices:
                left.remove(found)
                seats.append((found, trainer.devices))
        return seats

    async def borrow(
        self, seats: Sequence[tuple[RolloutClient, tuple[str, ...]]], published: Published
    ) -> None:
        """Inside a step: the trainer group releases its devices, and rollouts decode on them until it takes them again.

        Whoever hands the trainers their devices takes these back, with notice: what the rollouts have not finished
        goes on elsewhere.
        """
        async with self._moving:
            await self._stand_down_trainers()
            run, requests = self.workers.run, []
            for member, devices in seats:
                member.devices = devices
                requests.append(LeaseRequest(member.incarnation, run, DECODE, devices, member.instance.host))
            epochs = await self.workers.fleet.lease_manager.acquire(requests, self.workers.fleet_timeout)
            for (member, _), epoch in zip(seats, epochs, strict=True):
                member.lease_epoch = epoch
            await self._load([member for member, _ in seats], published)

    @property
    def lent(self) -> bool:
        """Whether the trainer group is without its devices, side by side."""
        borrowed = any(member.lease_epoch for member in self.workers.decoders)
        return not self.in_turns and (borrowed or not all(m.awake for m in self.workers.trainers))

    async def take_back(self, helper: TrainerClient) -> None:
        """A helper gives its devices back."""
        if helper.lease_epoch:
            await self._let_go([helper])

    async def _learn(self) -> None:
        if self.in_turns:
            await self._stand_down_rollouts(keep=self.resident)
        if held := [member for member in self.workers.decoders if member.lease_epoch]:
            await self._give_way(held)
        await self._take(self.workers.trainers, "learn")
        with self._moves():
            await gather_all(*(member.wake() for member in self.workers.trainers if not member.awake))

    async def _generate(self, published: Published) -> None:
        if self.in_turns:
            await self._stand_down_trainers(keep=self.resident)
        apart = self._joined
        if apart:
            await self._let_go(self.workers.trainers, keep=self.resident)
            self._joined = False
        await self._take(self.workers.rollouts, "generate")
        await self.simulators.take()
        await self._load(self.workers.rollouts, published)
        if apart:
            await self._learn()

    async def _load(self, members: Sequence[RolloutClient], published: Published) -> None:
        """Members that hold their devices can generate with a version."""
        behind = [m for m in members if not m.awake or m.installed != published.version.number]
        with self._moves():
            await gather_all(*(member.make_room() for member in behind))
        await gather_all(*(member.install(published) for member in behind))
        with self._moves():
            await gather_all(*(member.go_on() for member in behind))

    async def _stand_down_rollouts(self, *, keep: bool = False) -> None:
        learning = {device for member in self.workers.trainers for device in member.devices}
        leaving = [*self.workers.rollouts, *self.repliers.beside(learning)]
        for member in self._loaded(leaving) if not keep else ():
            try:
                with self._moves():
                    await member.suspend()
            except (InstanceDown, CallRefused):
                if self.workers.fleet.alive(member.incarnation):
                    raise
        await self._let_go([member for member in leaving if member.lease_epoch], keep=keep)
        await self.simulators.let_go()

    async def _stand_down_trainers(self, *, keep: bool = False) -> None:
        if not keep:
            with self._moves():
                await gather_all(*(member.suspend() for member in self._loaded(self.workers.trainers)))
        await self._let_go([member for member in self.workers.trainers if member.lease_epoch], keep=keep)

    def _loaded(self, members: Sequence[Member]) -> list[Member]:
        """Those with something on their devices: they hold them, or stayed loaded without."""
        return [member for member in members if member.lease_epoch or member.kept]

    @contextmanager
    def _moves(self) -> Iterator[None]:
        """Counts the body's seconds among those in which memory moves."""
        clock = self.workers.fleet.event_log.monotonic
        began = clock()
        try:
            yield
        finally:
            self.moved_s += clock() - began

    def _strays(self, members: Sequence[WorkerClient], stage: str) -> list[int]:
        """Leases of this run whose holder has no business on these devices now: it was cut off, or sits elsewhere."""
        helpers = self.workers.helpers if stage == "generate" else self.workers.decoders
        apart = [member for member in self.workers.members if member not in helpers]
        in_turns = self.in_turns and stage != REPLY
        welcome = {m.incarnation: m.devices for m in (members if in_turns else apart)}
        welcome |= {m.incarnation: m.devices for m in self.workers.repliers}
        leases = self.workers.fleet.event_log.state.table.leases.values()
        return [
            lease.epoch
            for lease in leases
            if lease.run == self.workers.run
            and lease.stage != SIMULATE
            and welcome.get(lease.incarnation) != tuple(lease.devices)
        ]

    async def _let_go(self, members: Sequence[WorkerClient], *, keep: bool = False) -> None:
        epochs = [member.lease_epoch for member in members]
        await self.workers.fleet.lease_manager.release(self.workers.run, epochs, keep=keep)
        for member in members:
            member.lease_epoch, member.kept = 0, keep

    async def _give_way(self, held: Sequence[WorkerClient]) -> None:
        await self._let_go(held)
        for member in held:
            member.lost_lease()

    async def _take(self, members: Sequence[WorkerClient], stage: str) -> None:
        self.assign()  # The grant may have changed inside the step: an instance was lost, a device is in doubt.
        with_devices = [member for member in members if member.devices]
        requests = [
            LeaseRequest(m.incarnation, self.workers.run, stage, m.devices, m.instance.host)
            for m in with_devices
        ]
        strays = self._strays(members, stage)
        await self.workers.fleet.lease_manager.release(self.workers.run, strays)
        for member in self.workers.members:
            if member.lease_epoch in strays:
                member.lease_epoch, member.installed = 0, 0
        epochs = await self._acquire(requests, with_devices)
        for member, epoch in zip(with_devices, epochs, strict=True):
            member.lease_epoch, member.kept = epoch, False

    async def _acquire(self, requests: Sequence[LeaseRequest], members: Sequence[WorkerClient]) -> list[int]:
        """Leases for members; a run that shares may wait for another one, which it must not keep from its own."""
        fleet, timeout = self.workers.fleet, self.workers.fleet_timeout
        if not self.section.share:
            return await fleet.lease_manager.acquire(requests, timeout)
        live = fleet.event_log.state.table.leases
        if any((lease := live.get(m.lease_epoch)) is None or lease.state != HELD for m in members):
            await self._give_way([member for member in members if member.lease_epoch])

        def waited(began: float) -> None:
            devices = [device for request in requests for device in request.devices]
            self.waited((began, fleet.event_log.monotonic()), devices)

        patience = self.workers.spec.limits.step_timeout_s
        return await fleet.lease_manager.acquire(requests, timeout, patience, waited)
