"""A simulated trainer's place in a trainer group, and the version that it holds there. Knows no steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_servicekit.rpc.digests import digest_bytes

from headrace_simulation.fleet.disk import Weights
from headrace_simulation.fleet.instances import Instance

TrainerGroups = dict[tuple[int, str], dict[int, "GroupedTrainer"]]
"""The trainers of each group, by generation and rendezvous, then by rank."""


@dataclass
class GroupedTrainer(Instance):
    """A trainer in a trainer group: joins it, leads rounds, and carries a version from one group to the next."""

    directory: str = ""
    generation: int = 0
    phase: int = trainer.STEP_PHASE_UNSPECIFIED
    version: common.PolicyVersion = field(default_factory=common.PolicyVersion)
    weights: Weights = ()
    made: dict[tuple[str, int], Weights] = field(default_factory=dict)
    """Weights of every version that it had, for the judge: nothing else is left of a closed run."""
    attempt: tuple[int, int] = (0, 0)
    groups: dict[int, list[tuple[int, int, int, str]]] = field(default_factory=dict)
    carried: tuple[common.PolicyVersion, Weights] | None = None
    """The version that it keeps between two trainer groups."""
    helps: bool = False
    """Whether it is a helper: it has a base to learn from, and makes no versions."""
    trainer_groups: TrainerGroups = field(default_factory=dict)
    on_meeting: Callable[[int, int], None] = lambda _rank, _world_size: None
    """Called with its rank and their number when it comes to a meeting of several."""
    joined: tuple[int, int, int, str] | None = None
    suspended: bool = False

    def _refuse(self, reason: str, message: str) -> CallRefused:
        return CallRefused(self.incarnation, reason, message)

    async def JoinTrainerGroup(
        self, request: trainer.JoinTrainerGroupRequest
    ) -> trainer.JoinTrainerGroupResponse:
        self.fence(request.header, lease=False)
        # A group of one rank has port 0, whatever its host: it meets no other rank.
        where = f"{request.header.run} {request.rendezvous}"
        key = (request.generation, request.rank, request.world_size, where)
        if self.joined == key and self.generation:
            return trainer.JoinTrainerGroupResponse(generation=self.generation)
        if self.joined and request.generation <= self.joined[0]:
            raise self._refuse("CONFLICT", f"generation {request.generation} is not above {self.joined[0]}")
        self._disband()
        self.phase, self.version, self.groups = trainer.STEP_PHASE_UNSPECIFIED, common.PolicyVersion(), {}
        self.joined, self.helps = key, False
        self.carried = None if request.rank else self.carried
        met = self.trainer_groups.setdefault((request.generation, where), {})
        met[request.rank] = self
        self.on_meeting(request.rank, request.world_size)
        patience = request.timeout.ToNanoseconds() / 1e9 or 60.0
        while len(self._trainer_group()) < request.world_size:
            await asyncio.sleep(0.1)
            patience -= 0.1
            if patience < 0 or self.joined != key:
                raise self._refuse("RENDEZVOUS_TIMEOUT", f"{len(met)} of {request.world_size} ranks came")
        self.generation = request.generation
        return trainer.JoinTrainerGroupResponse(generation=self.generation)

    async def LeaveTrainerGroup(
        self, request: trainer.LeaveTrainerGroupRequest
    ) -> trainer.LeaveTrainerGroupResponse:
        self.fence(request.header, lease=False)
        if not self.generation:
            return trainer.LeaveTrainerGroupResponse()
        if request.carry:
            self._lead()
            if self.phase != trainer.STEP_PHASE_IDLE or self.helps:
                raise self._refuse("CONFLICT", f"nothing is carried out of phase {self.phase}")
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
            self._lead()
            self.carried = self.version, self.weights
            self.phase, self.version, self.weights = (
                trainer.STEP_PHASE_UNSPECIFIED,
                common.PolicyVersion(),
                (),
            )
        self._disband()
        return trainer.LeaveTrainerGroupResponse()

    async def _take_up(self, number: int) -> trainer.RestoreResponse:
        if self.carried is None and self.phase == trainer.STEP_PHASE_IDLE and self.version.number == number:
            return trainer.RestoreResponse(version=self.version, layout=self._layout)
        if self.carried is None or self.carried[0].number != number:
            raise self._refuse("NOT_CARRIED", f"version {number} is not carried")
        await asyncio.sleep(0.5 * self.pace)
        self._lead(governed=True)
        if self.carried is not None:
            (self.version, self.weights), self.carried = self.carried, None
            self.phase, self.groups, self.attempt = trainer.STEP_PHASE_IDLE, {}, (0, 0)
        return trainer.RestoreResponse(version=self.version, layout=self._layout)

    @property
    def _layout(self) -> str:
        return f"shard_ranks: {self.joined[2] if self.joined else 1}"

    def _hold(self, weights: Weights, number: int, parent: int, ordinal: int) -> None:
        self.weights = self.made[self.directory, number] = weights
        digest = digest_bytes(repr(weights).encode())
        self.version = common.PolicyVersion(number=number, parent=parent, ordinal=ordinal, digest=digest)
        self.phase = trainer.STEP_PHASE_IDLE

    def _trainer_group(self) -> list[GroupedTrainer]:
        """The trainers that are in its trainer group now."""
        if self.joined is None:
            return []
        met = self.trainer_groups.get((self.joined[0], self.joined[3]), {})
        return [m for m in met.values() if m.alive and m.joined is not None and m.joined[0] == self.joined[0]]

    def _whole(self) -> bool:
        return self.joined is not None and len(self._trainer_group()) == self.joined[2]

    def _disband(self) -> None:
        """Leaves the trainer group; when the leader leaves, the others are in none."""
        if self.joined is not None and self.joined[1] == 0:
            for each in self._trainer_group():
                each.generation = 0
        self.generation = 0

    def _lead(self, *, governed: bool = False) -> None:
        """A round of the whole trainer group: refused by a follower, and by a leader that has lost a rank.

        A governed one begins only where every rank has its lease and its memory.
        """
        if not self.joined or not self.generation:
            raise self._refuse("NOT_OPEN", "the trainer is in no trainer group: call JoinTrainerGroup first")
        if self.joined[1]:
            raise self._refuse("NOT_LEADER", f"rank {self.joined[1]} follows")
        trainer_group = self._trainer_group()
        if len(trainer_group) < self.joined[2] or any(m.generation != self.generation for m in trainer_group):
            self.generation, self.phase = 0, trainer.STEP_PHASE_UNSPECIFIED
            raise self._refuse(
                "TRAINER_GROUP_LOST", "a rank is gone; form the trainer group anew and restore a checkpoint"
            )

        if governed and (lapsed := [m.joined for m in trainer_group if m.suspended or not m.live_leases()]):
            raise self._refuse("LEASE_QUIESCED", f"the lease of {lapsed} was not renewed in time")

    def _awake(self) -> None:
        if self.suspended:
            raise self._refuse("SUSPENDED", "the trainer is suspended: call Wake first")

    def revoked(self) -> None:
        """Releases its memory until the next grant."""
        self.suspended = True

    def rested(self) -> None:
        """Does nothing until the next grant."""
        self.suspended = True

    def granted(self) -> None:
        """Work may go on."""
        self.suspended = False
