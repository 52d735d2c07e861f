"""Opens the run at the instances that it was granted, and at their replacements. Knows no lease and no device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.sections.scoring import short_names
from headrace_schema.spec import RunSpec
from headrace_servicekit.causes import cause_first

from headrace_coordinator.domain.devices.demand import demand_of
from headrace_coordinator.domain.devices.places import engine_groups
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import SCORER_AWAY, CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.fleet.online import endpoint_key
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.modality import Modality
from headrace_coordinator.run.step.scoring.streams import ScoreStreams
from headrace_coordinator.run.workers.clients import RewardClient
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.opening import (
    client_of,
    drop_lost,
    open_rollouts,
    open_run,
    wait_for_instances,
)
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.run.workers.trainer_client import TrainerClient

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a scorer that could not be asked is tried again; each pause is twice the one before."""
Helper = TypeVar("Helper", bound=WorkerClient)


class Staffing:
    """Keeps the run open at its instances. `score_streams`: the streams to its reward instances."""

    def __init__(self, workers: WorkerGroup, modality: Modality, leases: WorkerLeases) -> None:
        self.workers = workers
        self._leases = leases
        self.score_streams = ScoreStreams()
        self._fleet = workers.fleet
        self._modality = modality

    async def staff(self) -> None:
        """Every worker is alive and has the run open; raises `Unstaffed` when one is missing for too long."""
        if not self.workers.spec.generates:
            return await self.staff_trainers()
        if not self.workers.spec.is_scored:
            await gather_all(self.staff_trainers(), self.staff_rollouts())
            return None
        # Instances of different kinds open the run side by side: each loads libraries or starts processes for seconds.
        await gather_all(self._modality.open_environments(), self.staff_rewards())
        demand = demand_of(self.workers.state)
        await gather_all(
            self.staff_trainers(),
            self.staff_rollouts(demand.fewest_rollouts),
        )

    async def staff_rollouts(self, fewest: int = 1) -> None:
        """At least `fewest` granted rollouts have the run open, and all others that are alive."""
        workers = self.workers
        drop_lost(workers)
        hosts = workers.engine_hosts

        def ready() -> bool:
            groups = engine_groups(workers.alive(workers.grant.rollouts), hosts)
            return len(groups) * hosts >= fewest and bool(groups)

        await wait_for_instances(workers, ready, f"{max(fewest, hosts)} ready rollout instance(s)")
        await self._modality.open_environments()
        await open_rollouts(workers, workers.rollouts, workers.grant.rollouts, self._rollout_config)
        self._modality.rollouts_opened()

    async def staff_rewards(self) -> None:
        """Every ready reward instance has the run open; at least one. They serve many runs at once.

        Where `placement.reward` names devices, those that have some. One that dies meanwhile is no fault of the run: it
        is replaced. Raises `Unstaffed` where none comes, and CallRefused where the run's own scorers end every one.
        """
        workers = self.workers
        while True:
            drop_lost(workers)
            self.check_scorers_deaths()
            await wait_for_instances(workers, lambda: bool(self._ready_rewards()), "1 ready reward instance")
            known = {scorer.incarnation for scorer in workers.rewards}
            ready = self._ready_rewards()
            seats = self._leases.scorers.seats(ready, keep=True)
            for instance in ready:
                if instance.incarnation not in known and instance.incarnation in seats:
                    await self._open_rewards(instance)
            for scorer in workers.rewards:
                scorer.devices = seats.get(scorer.incarnation, scorer.devices)
            if workers.rewards:
                return
            if not seats:
                lacking = f"a reward instance that has {', '.join(self._leases.scorers.names)}"
                await wait_for_instances(
                    workers,
                    lambda: bool(self._leases.scorers.seats(self._ready_rewards(), keep=True)),
                    lacking,
                )

    async def lease_scorers(self) -> None:
        """Within a step: every reward instance of the run holds its devices, where it has some."""
        if self._leases.scorers.names:
            async with self._leases.lock:
                await self._leases.scorers.acquire()

    async def _open_rewards(self, instance: InstanceState) -> None:
        """Opens the run there. A scorer that cannot be asked now is waited for, `limits.step_timeout_s` at most."""
        workers, fleet = self.workers, self._fleet
        section, leased = workers.spec.reward, bool(self._leases.scorers.names)
        limit_s, pause_s, began = (
            workers.spec.limits.step_timeout_s,
            FIRST_PAUSE_S,
            fleet.event_log.monotonic(),
        )
        while fleet.alive(instance.incarnation):
            try:
                scorer = client_of(workers, RewardClient, instance)
                async with fleet.deaths.opening(workers.run, instance):
                    with fleet.waits.named(workers.run, f"{instance.instance} to load the scorers"):
                        await open_run(
                            workers,
                            scorer,
                            lambda scorer: scorer.open_run(section, leased=leased),
                        )
            except InstanceDown:
                if await fleet.fate(instance.incarnation):
                    raise
                return
            except CallRefused as refused:
                if refused.reason != SCORER_AWAY:
                    raise
                away_s = fleet.event_log.monotonic() - began
                if away_s + pause_s > limit_s:
                    what = f"the scorer was asked for {away_s:.0f} s"
                    why = cause_first(refused.cause, what, f"{refused.key}, limits.step_timeout_s")
                    raise CallRefused(refused.incarnation, "INVALID", why, refused.key) from refused
                if pause_s == FIRST_PAUSE_S:
                    workers.note(cause_first(f"a scorer: {refused.cause}", "it is waited for", refused.key))
                with fleet.waits.named(workers.run, f"a scorer: {refused.cause}"):
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                workers.rewards.append(scorer)
                return

    def check_scorers_deaths(self) -> None:
        """Raises CallRefused where reward instances die of the run's scorers, whose names it says."""
        if why := self._fleet.deaths.fatal(self.workers.run, "reward"):
            section = self.workers.spec.reward
            found = short_names(each.name for entries in section.sets().values() for each in entries)
            names = ", ".join(sorted(found.values()))
            why = cause_first(why, f"its scorers are {names}", "reward.scorers")
            raise CallRefused("reward", "INVALID", why)

    def _ready_rewards(self) -> list[InstanceState]:
        return [instance for instance in self._fleet.ready("reward") if not instance.draining]

    async def staff_trainers(self) -> None:
        """All granted trainers have the run open; raises `Unstaffed`."""
        workers, ranks = self.workers, self.workers.ranks
        await wait_for_instances(
            workers,
            lambda: len(workers.alive(workers.grant.trainers)) == ranks,
            f"{ranks} ready trainer instance(s)",
        )
        opened = [trainer.incarnation for trainer in workers.trainers if trainer.opened]
        if opened == workers.grant.trainers:
            return  # No trainer was lost. With a replacement, all open the run and form a new group.
        workers.trainers = [
            client_of(workers, TrainerClient, instance, rank=rank)
            for rank, instance in enumerate(workers.alive(workers.grant.trainers))
        ]
        config = self._trainer_config()
        for trainer in workers.trainers:
            await open_run(workers, trainer, lambda each: each.open_run(config, workers.state.directory))
        workers.adopt_leases()

    async def staff_helpers(self) -> None:
        """The granted trainers that help and can be opened: a run does without the others."""
        config, directory = self._trainer_config(), self.workers.state.directory
        self.workers.helpers = await self._open_what_can_be(
            "trainer", self.workers.helpers, TrainerClient, lambda helper: helper.open_run(config, directory)
        )

    async def staff_decoders(self) -> None:
        """The granted rollouts without devices that can be opened: a run does without the others."""
        config = self._rollout_config()
        self.workers.decoders = await self._open_what_can_be(
            "rollout", self.workers.decoders, RolloutClient, lambda decoder: decoder.open_run(config)
        )

    async def _open_what_can_be(
        self, kind: str, known: list[Helper], client: type[Helper], call: Callable[[Helper], Awaitable[None]]
    ) -> list[Helper]:
        """Those of `known` that may still help, and the newly granted ones of a kind, opened by `call`."""
        workers = self.workers
        found = [helper for helper in known if helper.opened and workers.may_help(helper)]
        opened = {helper.incarnation for helper in found}
        for instance in workers.alive(workers.grant.helpers):
            if instance.kind != kind or instance.incarnation in opened:
                continue
            helper = client_of(workers, client, instance)
            try:
                await open_run(workers, helper, call)
            except (InstanceDown, CallRefused):
                continue  # Its process is replaced, or tried again with the next step.
            found.append(helper)
        return found

    async def join_helper(self, helper: TrainerClient) -> None:
        """Makes a helper a trainer group of itself alone, on the devices that it holds then."""
        if not helper.joined:
            name = f"helper-{helper.incarnation}"  # Nobody is met there.
            workers = self.workers
            await helper.join(workers.state.trainer_group_generation, 1, name, workers.fleet_timeout)
            helper.joined = True

    @property
    def _fitted(self) -> RunSpec:
        """The spec with what its environment said of the policy."""
        spec, fitted = self.workers.spec, self.workers.state.fitted
        if fitted is None or spec.environment is None:
            return spec
        model = spec.model.model_copy(update={"policy": fitted.policy})
        reads = {"state": fitted.state, "cameras": fitted.cameras}
        return spec.model_copy(
            update={"model": model, "environment": spec.environment.model_copy(update=reads)}
        )

    def _rollout_config(self) -> str:
        replays = self.workers.spec.algorithm.options.get("routing_replay") is True
        config = RolloutConfig.of(
            self._fitted,
            prompt=self.workers.spec.data.prompt,
            routed_experts=replays,
            longest_prompt=self._fitted.data.prompt.longest,
            images=self._modality.images,
            raw_texts="tokens" in self._fitted.reward.give,
            group_size=self._fitted.algorithm.group_size,
            endpoint_key=endpoint_key(self.workers.state.directory) if self.workers.spec.is_online else "",
            agent_rewards=any(
                scorer.name == "episode" for found in self._fitted.reward.sets().values() for scorer in found
            ),
        )
        return config.model_dump_json()

    def _trainer_config(self) -> str:
        more: dict[str, Any] = {
            "warmup_examples": self._modality.warmup_examples,
            "instruction": self.workers.spec.data.prompt.template,
            "sees": self._modality.sees,
            "files": self._modality.images,
        }
        return TrainerConfig.of(self._fitted, **more).model_dump_json()
