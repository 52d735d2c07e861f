"""The instances of a run: claimed, opened, and replaced when they are lost."""

from __future__ import annotations

from typing import Any

from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.spec import RunSpec

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet import Fleet
from headrace_coordinator.ports import InstanceDown
from headrace_coordinator.run.members import Member, RewardMember, RolloutMember, TrainerMember
from headrace_coordinator.run.watched_port import WatchedPort


class Crew:
    """Members by kind; `staff` brings them up to what the spec asks for."""

    def __init__(self, fleet: Fleet, run: str, spec: RunSpec, directory: str) -> None:
        self.fleet = fleet
        self.run = run
        self.spec = spec
        self.rollouts: list[RolloutMember] = []
        self.trainers: list[TrainerMember] = []
        self.rewards: list[RewardMember] = []
        self.warmup_examples: list[dict[str, Any]] = []
        self._directory = directory

    @property
    def leader(self) -> TrainerMember:
        """Rank 0, the only one that accepts steps; raises `InstanceDown` while there is none."""
        if not self.trainers:
            raise InstanceDown("trainer", "the gang is not formed")
        return self.trainers[0]

    @property
    def members(self) -> list[Member]:
        """Everybody."""
        return [*self.rollouts, *self.trainers, *self.rewards]

    def adopt_leases(self) -> None:
        """After a fault or a restart: what each member holds is what the lease table says."""
        for member in self.members:
            mine = [
                lease
                for lease in self.fleet.kernel.state.table.of(member.incarnation)
                if lease.run == self.run
            ]
            member.lease_epoch = mine[0].epoch if mine else 0
            member.devices = tuple(mine[0].devices) if mine else member.devices

    def _drop_lost(self) -> None:
        alive = self.fleet.alive
        self.rollouts = [m for m in self.rollouts if alive(m.incarnation)]
        self.rewards = [m for m in self.rewards if alive(m.incarnation)]

    async def staff(self) -> bool:
        """Replaces lost members; waits for each kind with the run's deadline. True when the gang is new."""
        self._drop_lost()
        alive = self.fleet.alive
        if not all(alive(m.incarnation) for m in self.trainers):
            self.trainers = []
        timeout = self.fleet_timeout
        for kind, count in (("trainer", self.spec.trainer.ranks), ("reward", 1)):
            await self.fleet.claim(self.run, kind, count, timeout)
        new_gang = not self.trainers
        if new_gang:
            states = await self.fleet.claim(self.run, "trainer", self.spec.trainer.ranks, timeout)
            self.trainers = [self._trainer(state, rank) for rank, state in enumerate(states)]
            for trainer in self.trainers:
                await trainer.open_run(self._trainer_config(), self._directory)
            self.adopt_leases()
        await self.staff_rewards()
        # A run that has begun goes on with what is left of them: somebody may have scaled down.
        begun = bool(self.fleet.kernel.state.runs[self.run].lineage.head)
        await self.staff_rollouts(1 if begun else self.spec.rollout.instances)
        return new_gang

    @property
    def fleet_timeout(self) -> float:
        """Longest wait for an instance or a lease."""
        return self.spec.limits.instance_timeout_s

    async def staff_rollouts(self, count: int) -> None:
        """At least `count` live rollouts, and any further ones that are free, up to the spec's number."""
        self._drop_lost()
        known = {member.incarnation for member in self.rollouts}
        most = self.spec.rollout.instances
        states = await self.fleet.claim(self.run, "rollout", count, self.fleet_timeout, most)
        for state in states:
            if state.incarnation not in known:
                member = RolloutMember(self.run, state, self._port(state), self._epoch)
                await member.open_run(RolloutConfig.of(self.spec).model_dump_json())
                self.rollouts.append(member)
                self.adopt_leases()

    async def staff_rewards(self) -> None:
        """Every free reward instance; at least one."""
        self._drop_lost()
        known = {member.incarnation for member in self.rewards}
        await self.fleet.claim(self.run, "reward", 1, self.fleet_timeout)
        for state in self.fleet.ready("reward"):
            if (
                state.incarnation not in known
                and self.fleet.busy.get(state.incarnation, self.run) == self.run
            ):
                member = RewardMember(self.run, state, self._port(state), self._epoch)
                await member.open_run(self.spec.reward.model_dump_json())
                self.fleet.busy[state.incarnation] = self.run
                self.rewards.append(member)

    @property
    def _epoch(self) -> int:
        return self.fleet.kernel.state.epoch

    def _port(self, state: InstanceState) -> WatchedPort:
        return WatchedPort(self.fleet.port(state.incarnation), self.fleet.waits, self.run, state.instance)

    def _trainer(self, state: InstanceState, rank: int) -> TrainerMember:
        return TrainerMember(self.run, state, self._port(state), self._epoch, rank=rank)

    def _trainer_config(self) -> str:
        return TrainerConfig.of(self.spec, warmup_examples=self.warmup_examples).model_dump_json()
