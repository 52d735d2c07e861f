"""The instances of a run that reply to its policy, on devices of their own: `placement.reply`.

They hold them while the rollouts hold theirs, and longer where no trainer learns there. Without the key there are none:
each rollout replies itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import RolloutClient

FROZEN = 1
"""Version number of a model that does not learn, at the instances that reply with it."""


class Repliers:
    """Who replies, with what. `moving` is held while devices change hands; `take` and `load` are the placement's."""

    def __init__(
        self,
        workers: WorkerGroup,
        moving: asyncio.Lock,
        take: Callable[[Sequence[RolloutClient]], Awaitable[None]],
        load: Callable[[Sequence[RolloutClient], Published], Awaitable[None]],
    ) -> None:
        self._workers = workers
        self._moving = moving
        self._take = take
        self._load = load

    @property
    def used(self) -> bool:
        """Whether replies are made on devices of their own."""
        return bool(self._workers.spec.placement.reply)

    @property
    def members(self) -> list[RolloutClient]:
        """Those that have the run open."""
        return self._workers.repliers

    @property
    def devices(self) -> list[str]:
        """Those that they reply on."""
        return sorted({device for member in self.members for device in member.devices})

    def beside(self, devices: set[str]) -> list[RolloutClient]:
        """Those whose devices are among these."""
        return [member for member in self.members if devices & {*member.devices}]

    async def staff(self, base: Published) -> None:
        """Before a stream of samples: at least one replies, on its devices; waits for a replacement.

        Raises Unstaffed where there is none for too long.
        """
        while self.used:
            async with self._moving:
                if await self._ready(base):
                    return

    def openings(self) -> list[rollout.Replier]:
        """What a stream of samples is told of those that can reply now."""
        messages = []
        for member in self.members:
            if self._workers.usable(member):
                message = rollout.Replier(
                    address=member.instance.address,
                    header=member.header(),
                    policy_number=member.installed,
                    max_context_tokens=member.max_context_tokens,
                )
                message.timeout.FromMilliseconds(int(self._workers.spec.limits.step_timeout_s * 1000))
                messages.append(message)
        return messages

    async def lost(self, member: RolloutClient) -> list[str]:
        """What a rollout said of those that reply to it no more; waits a little for their end to be noticed."""
        said, member.lost_repliers = member.lost_repliers, []
        names = {each.instance.address: each for each in self.members}
        words = []
        for lost in said:
            replier = names.get(lost.address)
            who = replier.instance.instance if replier else lost.address
            words.append(f"{who} replies to {member.instance.instance} no more: {lost.reason}")
            if replier is not None:
                await self._workers.fleet.fate(replier.incarnation)
        return words

    async def _ready(self, base: Published) -> bool:
        """Opens, places and loads those that are granted; False when one was lost over it."""
        workers = self._workers
        try:
            await workers.staff_repliers()
            for member in self.members:
                workers.usable(member)  # One whose lease is over has nothing on its devices any more.
            await self._take(self.members)
            await self._load(self.members, self._version(base))
        except InstanceDown as down:
            ours = down.incarnation in {member.incarnation for member in self.members}
            if await workers.fleet.fate(down.incarnation) and ours:
                raise
            return False
        except CallRefused as refused:
            if not await self._goes_on(refused):
                raise
            return False
        return True

    async def _goes_on(self, refused: CallRefused) -> bool:
        """Whether a refusal is of a lease that has to be renewed or taken anew, and no more."""
        member = next((each for each in self.members if each.incarnation == refused.incarnation), None)
        if member is None:
            return False
        if refused.reason == "LEASE_QUIESCED":
            await self._workers.renewal(member)
        elif self._workers.lease_ended(member, refused):
            member.lost_lease()
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
