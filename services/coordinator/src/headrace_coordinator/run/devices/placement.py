"""Hands the run's devices from its trainers to its rollouts and back, as its placement says.

`disaggregated` holds both sides at once and streams; `collocated` takes turns on the same devices inside a step;
`hybrid` streams too, and once the step's answers are complete the trainers have all devices; `auto` is one of these, as
the run's plan says. A side that is `resident` stays loaded while it has no devices, and computes nothing then.
A run that shares holds the devices of one side at a time, so that it never waits for another run while it holds what
that one waits for.

Inside a step `Lending` lends them: rollouts' to helpers, trainers' to decoders, and the rollouts' to other runs. When
that is of use is for the step to decide. What a rollout has not finished when its lease ends goes on elsewhere: its
stream ends with the partial answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headrace_coordinator.domain.devices.leases import DECODE, HELP, is_gpu
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.staffing import Staffing
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

Worker = TypeVar("Worker", bound=WorkerClient)


class Placement:
    """Hands devices to the side that needs them: between two steps, and inside of one."""

    def __init__(self, leases: WorkerLeases, staffing: Staffing) -> None:
        self.workers = leases.workers
        self._leases = leases
        self._staffing = staffing

    @property
    def hybrid(self) -> bool:
        """Whether the trainers take the rollouts' devices once a step's answers are complete."""
        return self.workers.section.mode == "hybrid"

    @property
    def streams(self) -> bool:
        """Whether groups are learned from while others are generated."""
        return not self.workers.in_turns and self.workers.section.pipelined

    @property
    def resident(self) -> bool:
        """Whether a side that has no devices for a while stays loaded."""
        return self.workers.section.resident and not self.workers.section.share

    async def change(self) -> None:
        """Between two steps, once another plan is adopted: rollouts and trainers release what they hold.

        The trainers then take their devices where both sides hold some; the rollouts take theirs later.
        """
        async with self._leases.lock:
            await self.release_rollouts()
            await self.release_trainers()
            self._leases.joined = False
            self._leases.assign()
            if not self.workers.in_turns:
                await self.lease_trainers()

    async def hand_devices_to_trainers(self, *, complete: bool = False) -> None:
        """The trainer group holds its devices, awake. `complete`: the step's answers are.

        A stream of groups to the trainer that is cut by this goes on under the next lease.
        """
        async with self._leases.lock:
            if complete and self.hybrid and not self._leases.joined:
                await self.release_rollouts(keep=self.resident)
                await self._leases.release(self.workers.trainers, keep=self.resident)
                self._leases.joined = True
            await self.lease_trainers()

    async def hand_devices_to_rollouts(self, published: Published) -> None:
        """The rollouts hold their devices with `published` installed and verified."""
        async with self._leases.lock:
            await self.lease_rollouts(published)

    async def add_rollout(self, published: Published, *, in_flight: bool = False) -> None:
        """A replacement for lost rollouts, inside a step; trainers that had to make room take their devices again.

        Rollouts that are behind `published` install it, too; `in_flight`: while they make answers.
        """
        async with self._leases.lock:
            await self._staffing.staff_rollouts(1)
            self._leases.assign()
            await self.lease_rollouts(published, in_flight=in_flight)
            if not self.workers.in_turns:
                await self.lease_trainers()

    # --- parts of a change; the caller holds the leases' lock

    async def lease_trainers(self) -> None:
        """The trainers take their devices and wake; decoders on them, and in turns the rollouts, release theirs."""
        workers = self.workers
        if workers.in_turns:
            await self.release_rollouts(keep=self.resident)
        if held := [decoder for decoder in workers.decoders if decoder.lease_epoch]:
            await self._leases.release_unloaded(held)
        await self._leases.take(workers.trainers, "learn")
        with self._leases.moving():
            await gather_all(*(trainer.wake() for trainer in workers.trainers if not trainer.awake))

    async def lease_rollouts(self, published: Published, *, in_flight: bool = False) -> None:
        """The rollouts take their devices and load `published`; in turns, the trainers release theirs."""
        if self.workers.in_turns:
            await self.release_trainers(keep=self.resident)
        joined = self._leases.joined
        if joined:
            await self._leases.release(self.workers.trainers, keep=self.resident)
            self._leases.joined = False
        await self._leases.take(self.workers.rollouts, "generate")
        for beside in (self._leases.simulators, self._leases.scorers):
            await beside.acquire()  # One that is lost over it is replaced before it is asked.
        await self._leases.load(self.workers.rollouts, published, in_flight=in_flight)
        if joined:
            await self.lease_trainers()

    async def release_rollouts(self, *, keep: bool = False) -> None:
        """Rollouts, simulators, and scorers on devices that a trainer is to have release what they hold.

        `keep`: what is loaded stays.
        """
        workers = self.workers
        learning = {device for trainer in workers.trainers for device in trainer.devices}
        for rollout in _loaded(workers.rollouts) if not keep else ():
            try:
                with self._leases.moving():
                    await rollout.suspend()
            except (InstanceDown, CallRefused):
                if workers.fleet.alive(rollout.incarnation):
                    raise
        await self._leases.release(
            [rollout for rollout in workers.rollouts if rollout.lease_epoch], keep=keep
        )
        await self._leases.simulators.release()
        await self._leases.scorers.release(learning)  # On devices of their own they stay loaded.

    async def release_trainers(self, *, keep: bool = False) -> None:
        """The trainers release what they hold; `keep`: what is loaded stays."""
        trainers = self.workers.trainers
        if not keep:
            with self._leases.moving():
                await gather_all(*(trainer.suspend() for trainer in _loaded(trainers)))
        await self._leases.release([trainer for trainer in trainers if trainer.lease_epoch], keep=keep)


def _loaded(workers: Sequence[Worker]) -> list[Worker]:
    """Those with something on their devices: they hold them, or stayed loaded without."""
    return [worker for worker in workers if worker.lease_epoch or worker.kept]


Seats = list[tuple[RolloutClient, tuple[str, ...]]]
"""Decoders with the devices that they are to have."""


def rank_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """What a trainer computes on of a rollout's devices: one GPU, or all CPU slots."""
    return devices[:1] if is_gpu(devices[0]) else devices


class Lending:
    """What one run lends inside its steps."""

    def __init__(self, leases: WorkerLeases, placement: Placement) -> None:
        self._leases = leases
        self._workers = leases.workers
        self._placement = placement

    async def lend_to_helper(self, rollout: RolloutClient, helper: TrainerClient) -> None:
        """A rollout releases its devices, with notice, and a helper takes them."""
        async with self._leases.lock:
            devices = rollout.devices
            await self._leases.release([rollout])
            helper.devices = rank_devices(devices)
            await self._leases.acquire([helper], HELP)

    async def release_helper(self, helper: TrainerClient) -> None:
        """A helper releases its devices."""
        if helper.lease_epoch:
            await self._leases.release([helper])

    def decoder_seats(self, decoders: Sequence[RolloutClient]) -> Seats:
        """The trainer group's devices by rank, each with a decoder that sees them, as far as there are any."""
        left, seats = list(decoders), []
        for trainer in self._workers.trainers:
            found = next((d for d in left if set(trainer.devices) <= set(d.instance.devices)), None)
            if found is not None and trainer.devices:
                left.remove(found)
                seats.append((found, trainer.devices))
        return seats

    async def lend_to_decoders(self, seats: Seats, published: Published) -> None:
        """The trainer group releases its devices, and decoders generate on them until it takes them again.

        Whoever hands the trainers their devices ends the decoders' leases, with notice.
        """
        async with self._leases.lock:
            await self._placement.release_trainers()
            for decoder, devices in seats:
                decoder.devices = devices
            decoders = [decoder for decoder, _ in seats]
            await self._leases.acquire(decoders, DECODE)
            await self._leases.load(decoders, published)

    @property
    def trainers_lack_devices(self) -> bool:
        """Whether, side by side, the trainer group is without its devices."""
        decodes = any(decoder.lease_epoch for decoder in self._workers.decoders)
        return not self._workers.in_turns and (
            decodes or not all(trainer.awake for trainer in self._workers.trainers)
        )

    async def release_to_other_run(self) -> None:
        """The rollouts release their devices, with notice, to another run that shares them.

        What they had not finished waits until they have devices again: `Placement.add_rollout` takes them.
        """
        async with self._leases.lock:
            held = [rollout for rollout in self._workers.rollouts if rollout.lease_epoch]
            await self._leases.release_unloaded(held)
