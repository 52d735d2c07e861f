"""Hands the run's devices from its trainers to its rollouts and back, and lends them inside a step.

Who has devices when is said by `domain.devices.placement`: sides that take turns, or sides with devices of their own.
Where the trainer group `joins`, it takes the rollouts' too once a step's answers are complete: a rank on CPU slots gets
more of them, and on GPUs the ranks that are there wake. In turns only those give way whose devices are needed.

A loan is devices that change hands inside a step, with notice: a rollout's go to a helper, the trainer group's to
decoders, the rollouts' to another run. The step decides when one is of use. What a rollout has not finished when its
lease ends goes on elsewhere: its stream ends with the partial answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from headrace_coordinator.domain.devices.leases import DECODE, is_gpu
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.staffing import Staffing
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

Worker = TypeVar("Worker", bound=WorkerClient)
Seats = Sequence[tuple[Worker, tuple[str, ...]]]
"""Who borrows, and the devices that each is to have."""


class DeviceHandover:
    """Hands devices to those that need them: between two steps, and inside of one."""

    def __init__(self, leases: WorkerLeases, staffing: Staffing) -> None:
        self.workers = leases.workers
        self._leases = leases
        self._staffing = staffing

    async def change(self) -> None:
        """Between two steps, once another plan is adopted: rollouts and trainers release what they hold.

        The trainers then take their devices where both sides hold some; the rollouts take theirs later.
        """
        async with self._leases.lock:
            await self._release_rollouts()
            await self._release_trainers(self.workers.trainers)
            self._leases.joined = False
            self._leases.assign()
            if not self.workers.placement.turns:
                await self._lease_trainers()

    async def hand_devices_to_trainers(self, *, complete: bool = False) -> None:
        """The trainer group holds its devices, awake. `complete`: the step's answers are.

        A stream of groups to the trainer that is cut by this goes on under the next lease.
        """
        async with self._leases.lock:
            placement = self.workers.placement
            if complete and placement.joins and not placement.turns and not self._leases.joined:
                await self._release_rollouts(keep=placement.resident)
                await self._leases.release(self.workers.trainers, keep=placement.resident)
                self._leases.joined = True
            await self._lease_trainers()

    async def hand_devices_to_rollouts(self, published: Published) -> None:
        """The rollouts hold their devices with `published` installed and verified."""
        async with self._leases.lock:
            await self._lease_rollouts(published)

    async def add_rollout(self, published: Published, *, in_flight: bool = False) -> None:
        """A replacement for lost rollouts, inside a step; trainers that had to make room take their devices again.

        Rollouts that are behind `published` install it, too; `in_flight`: while they make answers.
        """
        async with self._leases.lock:
            await self._staffing.staff_rollouts(1)
            self._leases.assign()
            await self._lease_rollouts(published, in_flight=in_flight)
            if not self.workers.placement.turns:
                await self._lease_trainers()

    # --- loans

    async def lend(
        self, lenders: Sequence[WorkerClient], seats: Seats[TrainerClient] = (), stage: str = ""
    ) -> None:
        """Rollouts release their devices, with notice; helpers take them, or, without any, another run does.

        The rollouts take theirs again by `hand_devices_to_rollouts` or `add_rollout`.
        """
        async with self._leases.lock:
            await self._leases.release_unloaded([lender for lender in lenders if lender.lease_epoch])
            await self._seat(seats, stage)

    async def lend_trainers(self, seats: Seats[RolloutClient], published: Published) -> None:
        """The trainer group releases its devices, and decoders generate on them with `published`.

        `hand_devices_to_trainers` ends their leases, with notice.
        """
        async with self._leases.lock:
            await self._release_trainers(self.workers.trainers)
            await self._seat(seats, DECODE)
            await self._leases.load([decoder for decoder, _ in seats], published)

    async def _seat(self, seats: Seats[Worker], stage: str) -> None:
        for borrower, devices in seats:
            borrower.devices = devices
        await self._leases.acquire([borrower for borrower, _ in seats], stage)

    async def give_back(self, borrower: WorkerClient) -> None:
        """A loan is over: the borrower releases its devices."""
        if borrower.lease_epoch:
            await self._leases.release([borrower])

    def decoder_seats(self, decoders: Sequence[RolloutClient]) -> Seats[RolloutClient]:
        """The trainer group's devices by rank, each with a decoder that sees them, as far as there are any."""
        left, seats = list(decoders), []
        for trainer in self.workers.trainers:
            found = next((d for d in left if set(trainer.devices) <= set(d.instance.devices)), None)
            if found is not None and trainer.devices:
                left.remove(found)
                seats.append((found, trainer.devices))
        return seats

    @property
    def trainers_lack_devices(self) -> bool:
        """Whether, side by side, the trainer group is without its devices."""
        decodes = any(decoder.lease_epoch for decoder in self.workers.decoders)
        return not self.workers.placement.turns and (
            decodes or not all(trainer.awake for trainer in self.workers.trainers)
        )

    # --- parts of a change; the caller holds the leases' lock

    async def _lease_trainers(self) -> None:
        """The trainers take their devices and wake; decoders on them, and in turns the rollouts, release theirs."""
        workers = self.workers
        if workers.placement.turns:
            await self._release_rollouts(keep=workers.placement.resident)
        if held := [decoder for decoder in workers.decoders if decoder.lease_epoch]:
            await self._leases.release_unloaded(held)
        await self._leases.take(workers.trainers, "learn")
        with self._leases.moving():
            await gather_all(*(trainer.wake() for trainer in workers.trainers if not trainer.awake))

    async def _lease_rollouts(self, published: Published, *, in_flight: bool = False) -> None:
        """The rollouts take their devices and load `published`; in turns, trainers on these release theirs."""
        placement, joined = self.workers.placement, self._leases.joined
        if placement.turns:
            await self._release_trainers(self._leases.in_the_way(), keep=placement.resident)
        if joined:
            await self._leases.release(self.workers.trainers, keep=placement.resident)
            self._leases.joined = False
        await self._leases.take(self.workers.rollouts, "generate")
        for beside in (self._leases.simulators, self._leases.scorers):
            await beside.acquire()  # One that is lost over it is replaced before it is asked.
        await self._leases.load(self.workers.rollouts, published, in_flight=in_flight)
        if joined:
            await self._lease_trainers()

    async def _release_rollouts(self, *, keep: bool = False) -> None:
        """Rollouts, simulators, and scorers on devices that a trainer is to have release what they hold.

        `keep`: what is loaded stays.
        """
        workers = self.workers
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
        await self._leases.scorers.release(
            workers.learning_devices
        )  # On devices of their own they stay loaded.

    async def _release_trainers(self, trainers: Sequence[TrainerClient], *, keep: bool = False) -> None:
        """These trainers release what they hold; `keep`: what is loaded stays."""
        if not keep:
            with self._leases.moving():
                await gather_all(*(trainer.suspend() for trainer in _loaded(trainers)))
        await self._leases.release([trainer for trainer in trainers if trainer.lease_epoch], keep=keep)


def _loaded(workers: Sequence[Worker]) -> list[Worker]:
    """Those with something on their devices: they hold them, or stayed loaded without."""
    return [worker for worker in workers if worker.lease_epoch or worker.kept]


def rank_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """What a trainer computes on of a rollout's devices: one GPU, or all CPU slots."""
    return devices[:1] if is_gpu(devices[0]) else devices
