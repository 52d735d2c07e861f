"""The instances of a run that reply to its policy, on devices of their own: `placement.reply`.

They hold these while the rollouts hold theirs, and longer where no trainer learns there. Without that key there are
none: each rollout replies itself.
"""

from __future__ import annotations

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.openings import RolloutConfig

from headrace_coordinator.domain.devices.leases import REPLY
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.opening import drop_lost, open_rollouts, wait_for_instances
from headrace_coordinator.run.workers.rollout_client import RolloutClient

FROZEN = 1
"""Version number of a model that does not learn, at the instances that reply with it."""


class Repliers:
    """Who replies, and with what."""

    def __init__(self, leases: WorkerLeases) -> None:
        self._workers = leases.workers
        self._leases = leases

    @property
    def used(self) -> bool:
        """Whether replies are made on devices of their own."""
        return bool(self._workers.spec.placement.reply)

    @property
    def devices(self) -> list[str]:
        """Devices that they reply on."""
        return sorted({device for replier in self._workers.repliers for device in replier.devices})

    async def open(self, fewest: int = 1) -> None:
        """At least `fewest` granted repliers have the run open, and all others that are alive."""
        if not self.used:
            return
        workers, reply = self._workers, self._workers.spec.reply
        drop_lost(workers)
        await wait_for_instances(
            workers,
            lambda: len(workers.alive(workers.grant.repliers)) >= fewest,
            f"{fewest} ready rollout instance(s) to reply",
        )
        try:
            config = RolloutConfig.of_replier(workers.spec).model_dump_json()
            await open_rollouts(workers, workers.repliers, workers.grant.repliers, lambda: config)
        except CallRefused as refused:
            if reply is None or not reply.path:
                raise
            words = refused.message.replace("model.path", "reply.path")
            raise CallRefused(refused.incarnation, refused.reason, words, refused.key) from refused

    async def staff(self, base: Published) -> None:
        """Before a stream of samples: at least one replies, on its devices; waits for a replacement.

        Raises Unstaffed where there is none for too long.
        """
        while True:
            async with self._leases.lock:
                if not self.used or await self._ready(base):
                    return

    def openings(self) -> list[rollout.Replier]:
        """What a stream of samples is told of those that can reply now."""
        messages = []
        for replier in self._workers.repliers:
            if self._workers.usable(replier):
                message = rollout.Replier(
                    address=replier.instance.address,
                    header=replier.header(),
                    policy_number=replier.installed,
                    max_context_tokens=replier.max_context_tokens,
                )
                message.timeout.FromMilliseconds(int(self._workers.spec.limits.step_timeout_s * 1000))
                messages.append(message)
        return messages

    async def recover(self, worker: RolloutClient) -> bool:
        """Whether a rollout said that repliers answer no more; waits a little for their end to be noticed."""
        lost, worker.lost_repliers = worker.lost_repliers, []
        by_address = {each.instance.address: each for each in self._workers.repliers}
        for each in lost:
            replier = by_address.get(each.address)
            who = replier.instance.instance if replier else each.address
            if replier is not None:
                await self._workers.fleet.fate(replier.incarnation)
            self._workers.note(f"{who} replies to {worker.instance.instance} no more: {each.reason}")
        return bool(lost)

    async def _ready(self, base: Published) -> bool:
        """Opens, places and loads those that are granted; False when one was lost over it."""
        workers = self._workers
        try:
            await self.open()
            for replier in workers.repliers:
                workers.usable(replier)  # One whose lease is over has nothing on its devices any more.
            await self._leases.take(workers.repliers, REPLY)
            await self._leases.load(workers.repliers, self._version(base))
        except InstanceDown as down:
            ours = down.incarnation in {replier.incarnation for replier in workers.repliers}
            if await workers.fleet.fate(down.incarnation) and ours:
                raise
            return False
        except CallRefused as refused:
            if not await self._renews_lease(refused):
                raise
            return False
        return True

    async def _renews_lease(self, refused: CallRefused) -> bool:
        """Whether a refusal is of a lease that has to be renewed or taken anew, and no more."""
        workers = self._workers
        replier = next((each for each in workers.repliers if each.incarnation == refused.incarnation), None)
        if replier is None:
            return False
        if refused.reason == "LEASE_QUIESCED":
            await workers.wait_for_renewal(replier)
        elif workers.lease_ended(replier, refused):
            replier.lost_lease()
        else:
            return False
        return True

    def _version(self, base: Published) -> Published:
        """What they reply with: the model of `reply.path`, which each reads itself, or the policy's version."""
        reply = self._workers.spec.reply
        if reply is None or not reply.path:
            return base
        version = common.PolicyVersion(number=FROZEN)
        return Published(version, common.WeightManifest(), common.WeightSource(), rollout.PolicyFiles())
