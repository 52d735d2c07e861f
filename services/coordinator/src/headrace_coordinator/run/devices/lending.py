"""Lends devices inside a step: rollouts' to helpers, trainers' to decoders, and the rollouts' to other runs.

When that is of use is for the step to decide. What a rollout has not finished when its lease ends goes on elsewhere:
its stream ends with the partial answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_coordinator.domain.devices.leases import DECODE, HELP, is_gpu
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.devices.placement import Placement
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

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
