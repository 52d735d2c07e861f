"""The instances of a run: opened as the run's grant says, and replaced when the grant replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.problems import Impossible
from headrace_schema.spec import RunSpec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.demand import demand_of
from headrace_coordinator.domain.devices.leases import REVOKING
from headrace_coordinator.domain.runs import Grant, RunState
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.simulators.pools import Pools
from headrace_coordinator.run.simulators.spaces import fit
from headrace_coordinator.run.simulators.written import read_written
from headrace_coordinator.run.step.scoring.streams import ScoreStreams
from headrace_coordinator.run.workers.clients import RewardClient, WorkerClient
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient
from headrace_coordinator.run.workers.watched_client import WatchedInstanceClient
from headrace_coordinator.waits import WaitTimeout

LEASE_ENDED = ("EPOCH_STALE", "SUSPENDED")
"""Refusals of a command whose lease was revoked: after the revoke, and while it is obeyed."""
LEASE_RETRY_S = 0.2
"""After so long a member whose lease was not renewed in time is asked again."""
REPLACEMENT_S = 20.0
"""A run that lacks an instance for longer releases everything and queues: two runs never wait for each other."""
BUSY_S = 60.0
"""How long an instance may take to close another run before it is killed."""


Helper = TypeVar("Helper", bound=WorkerClient)


class Unstaffed(Exception):
    """The run lacks an instance; the message says which."""


class WorkerGroup:
    """The run's clients of its instances, by kind."""

    def __init__(self, fleet: Fleet, run: str, spec: RunSpec, directory: str) -> None:
        self.fleet = fleet
        self.run = run
        self.spec = spec
        self.rollouts: list[RolloutClient] = []
        self.trainers: list[TrainerClient] = []
        self.helpers: list[TrainerClient] = []
        self.decoders: list[RolloutClient] = []
        """Rollouts without devices of their own, which decode on the trainer group's while it has nothing to learn."""
        self.repliers: list[RolloutClient] = []
        """Rollout instances that make no answers, but reply to them."""
        self.rewards: list[RewardClient] = []
        self.pools = Pools(fleet, run, spec.environment, self._client_of) if spec.environment else None
        self.score_streams = ScoreStreams()
        self.warmup_examples: list[dict[str, Any]] = []
        self._directory = directory

    @property
    def leader(self) -> TrainerClient:
        """Rank 0, the only one that accepts steps; raises `InstanceDown` while there is none."""
        if not self.trainers:
            raise InstanceDown("trainer", "the trainer group is not formed")
        return self.trainers[0]

    @property
    def members(self) -> list[WorkerClient]:
        """Everybody."""
        simulators = self.pools.clients if self.pools else []
        return [
            *self.producers,
            *self.trainers,
            *self.helpers,
            *self.rewards,
            *simulators,
            *self.repliers,
        ]

    @property
    def producers(self) -> list[RolloutClient]:
        """Every rollout that may have made answers of the open step."""
        return [*self.rollouts, *self.decoders]

    @property
    def grant(self) -> Grant:
        """What the run may use now."""
        return self._state.grant or Grant()

    @property
    def ranks(self) -> int:
        """How many the trainer group has."""
        return self._state.ranks

    @property
    def fleet_timeout(self) -> float:
        """Longest wait for a lease."""
        return self.spec.limits.instance_timeout_s

    @property
    def _state(self) -> RunState:
        return self.fleet.event_log.state.runs[self.run]

    async def renewal(self, member: WorkerClient) -> None:
        """Waits a little for the next heartbeat of a member whose lease was not renewed in time."""
        with self.fleet.waits.named(self.run, f"the lease of {member.instance.instance} to be renewed"):
            await asyncio.sleep(LEASE_RETRY_S)

    def lease_ended(self, member: WorkerClient, refused: CallRefused, epoch: int | None = None) -> bool:
        """Whether a command was refused, and did nothing, because the member's lease was revoked.

        `epoch`: the lease that the command was given under, where the member may hold another one by now.
        """
        lease = self.fleet.event_log.state.table.leases.get(member.lease_epoch if epoch is None else epoch)
        return refused.reason in LEASE_ENDED and (lease is None or lease.state == REVOKING)

    def usable(self, member: WorkerClient) -> bool:
        """A member that lives, is awake and whose lease nobody takes back; one whose lease is over must wake again."""
        lease = self.fleet.event_log.state.table.leases.get(member.lease_epoch)
        if member.lease_epoch and (lease is None or lease.state == REVOKING):
            member.lost_lease()
        return member.awake and not member.kept and self.fleet.alive(member.incarnation)

    def adopt_leases(self) -> None:
        """After a fault or a restart: what each member holds is what the lease table says."""
        for member in self.members:
            mine = [
                lease
                for lease in self.fleet.event_log.state.table.of(member.incarnation)
                if lease.run == self.run
            ]
            member.lease_epoch = mine[0].epoch if mine else 0
            member.devices = tuple(mine[0].devices) if mine else member.devices

    async def staff(self) -> None:
        """Every member is alive and has the run open; raises `Unstaffed` when one is missing for too long."""
        # What waits for nobody else goes on side by side: each loads its libraries or starts processes for seconds.
        await gather_all(self.staff_simulators(), self.staff_rewards())
        demand = demand_of(self._state)
        await gather_all(
            self.staff_trainers(),
            self.staff_repliers(demand.fewest_repliers),
            self.staff_rollouts(demand.fewest_rollouts),
        )

    async def staff_rollouts(self, fewest: int = 1) -> None:
        """At least `fewest` granted rollouts have the run open, and all others that are alive."""
        self._drop_lost()
        await self._until(
            lambda: len(self._alive(self.grant.rollouts)) >= fewest, f"{fewest} ready rollout instance(s)"
        )
        await self.staff_simulators()
        await self._join(self.rollouts, self.grant.rollouts, lambda: self._rollout_config)
        self._count_environments()

    async def staff_repliers(self, fewest: int = 1) -> None:
        """The same of the instances that reply on devices of their own, where the run has any."""
        if not self.spec.placement.reply:
            return
        self._drop_lost()
        await self._until(
            lambda: len(self._alive(self.grant.repliers)) >= fewest,
            f"{fewest} ready rollout instance(s) to reply",
        )
        try:
            config = RolloutConfig.of_replier(self.spec).model_dump_json()
            await self._join(self.repliers, self.grant.repliers, lambda: config)
        except CallRefused as refused:
            if self.spec.reply is None or not self.spec.reply.path:
                raise
            words = refused.message.replace("model.path", "reply.path")
            raise CallRefused(refused.incarnation, refused.reason, words, refused.key) from refused

    async def _join(
        self, members: list[RolloutClient], granted: Sequence[str], config: Callable[[], str]
    ) -> None:
        """Adds those of the granted rollouts that live and are no members yet."""
        known = {member.incarnation for member in members}
        for state in self._alive(granted):
            if state.incarnation not in known:
                member = RolloutClient(self.run, state, self._client_of(state), self._epoch)
                text = config()
                await self._open(member, lambda member=member, text=text: member.open_run(text))  # type: ignore[misc]
                members.append(member)
                self.adopt_leases()

    async def staff_simulators(self, only: RolloutClient | None = None) -> None:
        """Of an embodied run, every granted rollout has environments; while rollouts act, `only` one's may change.

        The first time also says, by an event, what the policy reads and does.
        """
        if self.pools is None:
            return
        backend = self.pools.ready
        await self._until(lambda: bool(backend()), f"1 ready simulator with {self._backend}")
        rollouts = [state.incarnation for state in self._alive(self.grant.rollouts)]
        await self.pools.staff(rollouts, rollouts if only is None else [only.incarnation])
        self._count_environments()
        if self._state.fitted is None and self.pools.described:
            await self._fit(self.pools)

    async def lost_pools(self, member: RolloutClient) -> bool:
        """Whether a stream ended because simulators were lost; their environments are made anew before the next."""
        lost, member.lost_pools = member.lost_pools, []
        if lost and self.pools is not None:
            await self.pools.lost(member.incarnation, lost)
        return bool(lost)

    async def _fit(self, pools: Pools) -> None:
        assert self.spec.environment is not None
        try:
            written = None if self.spec.model.policy is not None else read_written(self.spec.model.path)
            found = fit(self.spec.model.policy, self.spec.environment, pools.described, written)
        except Impossible as impossible:
            raise CallRefused("simulator", "INVALID", str(impossible)) from impossible
        now = self.fleet.event_log.now()
        fitted = ev.PolicyFitted(
            at=now, run=self.run, policy=found.policy, state=found.state, cameras=found.cameras
        )
        await self.fleet.event_log.commit(fitted)

    @property
    def _backend(self) -> str:
        return self.spec.environment.backend if self.spec.environment else ""

    @property
    def _fitted(self) -> RunSpec:
        """The spec with what its environment said of the policy."""
        fitted, environment = self._state.fitted, self.spec.environment
        if fitted is None or environment is None:
            return self.spec
        model = self.spec.model.model_copy(update={"policy": fitted.policy})
        reads = {"state": fitted.state, "cameras": fitted.cameras}
        return self.spec.model_copy(
            update={"model": model, "environment": environment.model_copy(update=reads)}
        )

    def _count_environments(self) -> None:
        if self.pools is not None:
            for member in self.rollouts:
                member.max_concurrency = max(1, self.pools.count(member.incarnation))

    async def staff_rewards(self) -> None:
        """Every ready reward instance has the run open; at least one. They serve many runs at once."""
        self._drop_lost()
        await self._until(lambda: bool(self._reward_states()), "1 ready reward instance")
        known = {member.incarnation for member in self.rewards}
        for state in self._reward_states():
            if state.incarnation not in known:
                member = RewardClient(self.run, state, self._client_of(state), self._epoch)
                with self.fleet.waits.named(self.run, f"{state.instance} to load the scorers"):
                    await self._open(member, lambda member=member: member.open_run(self.spec.reward))  # type: ignore[misc]
                self.rewards.append(member)

    async def staff_trainers(self) -> None:
        """All granted trainers have the run open; raises `Unstaffed`."""
        ranks = self.ranks
        await self._until(
            lambda: len(self._alive(self.grant.trainers)) == ranks, f"{ranks} ready trainer instance(s)"
        )
        opened = [member.incarnation for member in self.trainers if member.opened]
        if opened == self.grant.trainers:
            return  # A group that has lost nobody; one with a replacement opens everywhere and forms anew.
        self.trainers = [
            TrainerClient(self.run, state, self._client_of(state), self._epoch, rank=rank)
            for rank, state in enumerate(self._alive(self.grant.trainers))
        ]
        config = self._trainer_config()
        for trainer in self.trainers:
            await self._open(trainer, lambda trainer=trainer: trainer.open_run(config, self._directory))  # type: ignore[misc]
        self.adopt_leases()

    async def staff_helpers(self) -> None:
        """The granted trainers that help and can be opened: a run does without the others."""
        config = self._trainer_config()
        self.helpers = await self._beyond(
            "trainer", self.helpers, TrainerClient, lambda member: member.open_run(config, self._directory)
        )

    async def staff_decoders(self) -> None:
        """The granted rollouts without devices that can be opened: a run does without the others."""
        config = self._rollout_config
        self.decoders = await self._beyond(
            "rollout", self.decoders, RolloutClient, lambda member: member.open_run(config)
        )

    async def _beyond(
        self, kind: str, known: list[Helper], client: type[Helper], call: Callable[[Helper], Awaitable[None]]
    ) -> list[Helper]:
        """Those of `known` that may still help, and the newly granted ones of a kind, opened by `call`."""
        found = [member for member in known if member.opened and self.may_help(member)]
        opened = {member.incarnation for member in found}
        for state in self._alive(self.grant.helpers):
            if state.kind != kind or state.incarnation in opened:
                continue
            helper = client(self.run, state, self._client_of(state), self._epoch)
            try:
                await self._open(helper, lambda helper=helper: call(helper))  # type: ignore[misc]
            except (InstanceDown, CallRefused):
                continue  # Its process is replaced, or tried again with the next step.
            found.append(helper)
        return found

    async def join_helper(self, helper: TrainerClient) -> None:
        """A helper is a trainer group of itself alone, on the devices that it holds then."""
        if not helper.joined:
            name = f"helper-{helper.incarnation}"  # Nobody is met there.
            await helper.join(self._state.trainer_group_generation, 1, name, self.fleet_timeout)
            helper.joined = True

    def may_help(self, member: WorkerClient) -> bool:
        """A helper that lives and is still granted: what nobody waits for may be granted to another run."""
        return self.fleet.alive(member.incarnation) and member.incarnation in self.grant.helpers

    def reopen(self, incarnation: str) -> None:
        """An instance says that the run is not open there: it is opened anew when the run is staffed next."""
        for member in self.members:
            if member.incarnation == incarnation:
                member.opened = False

    def _drop_lost(self) -> None:
        fleet, grant = self.fleet, self.grant
        for members, granted in ((self.rollouts, grant.rollouts), (self.repliers, grant.repliers)):
            members[:] = [
                m for m in members if m.opened and fleet.alive(m.incarnation) and m.incarnation in granted
            ]
        self.rewards = [m for m in self.rewards if m.opened and fleet.alive(m.incarnation)]

    def _reward_states(self) -> list[InstanceState]:
        return [state for state in self.fleet.ready("reward") if not state.draining]

    def _alive(self, incarnations: Sequence[str]) -> list[InstanceState]:
        known = self.fleet.event_log.state.instances
        return [known[who] for who in incarnations if self.fleet.alive(who)]

    async def _until(self, predicate: Callable[[], bool], what: str) -> None:
        """Waits for a replacement; raises `Unstaffed`."""
        if predicate():
            return
        with self.fleet.waits.named(self.run, what):
            try:
                await self.fleet.event_log.wait_until(predicate, REPLACEMENT_S, what)
            except WaitTimeout as timeout:
                raise Unstaffed(what) from timeout

    async def _open(self, member: WorkerClient, call: Callable[[], Awaitable[None]]) -> None:
        """Opens the run at an instance; waits while that still closes another run."""
        member.open_id = self.fleet.open_id_of(member.incarnation, self.run)
        clock = asyncio.get_running_loop()
        deadline = clock.time() + BUSY_S
        while True:
            try:
                await call()
                member.opened = True
                return
            except CallRefused as refused:
                if refused.reason in ("OPENING_STALE", "CONFLICT"):
                    member.open_id = self.fleet.next_open_id()  # A higher id replaces what is open there.
                elif refused.reason != "BUSY":
                    raise
                if clock.time() > deadline:
                    self.fleet.kill(member.incarnation, f"it cannot open {self.run}: {refused.message}")
                    raise InstanceDown(member.incarnation, refused.message) from refused
            with self.fleet.waits.named(self.run, f"{member.instance.instance} to close another run"):
                await asyncio.sleep(0.5)

    @property
    def _epoch(self) -> int:
        return self.fleet.event_log.state.epoch

    def _client_of(self, state: InstanceState) -> WatchedInstanceClient:
        return WatchedInstanceClient(
            self.fleet.client(state.incarnation), self.fleet.waits, self.run, state.instance
        )

    @property
    def _rollout_config(self) -> str:
        elsewhere = bool(self.spec.placement.reply)
        return RolloutConfig.of(self._fitted, replies_elsewhere=elsewhere).model_dump_json()

    def _trainer_config(self) -> str:
        more = {"warmup_examples": self.warmup_examples, "instruction": self.spec.data.prompt.template}
        return TrainerConfig.of(self._fitted, **more).model_dump_json()
