"""Opens a run at its granted instances, and waits for those that are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from headrace_coordinator.domain.devices.places import engine_groups
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.run.workers.clients import WatchedInstanceClient
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.run.workers.rollout_client import RolloutClient
from headrace_coordinator.waits import WaitTimeout

REPLACEMENT_S = 20.0
"""A run that lacks an instance for longer releases everything and queues: two runs never wait for each other."""
BUSY_S = 60.0
"""How long an instance may take to close another run before it is killed."""
Worker = TypeVar("Worker", bound=WorkerClient)


class Unstaffed(Exception):
    """The run lacks an instance; the message says which."""


async def wait_for_instances(workers: WorkerGroup, ready: Callable[[], bool], what: str) -> None:
    """Waits until the run's instances are `ready`; raises `Unstaffed` after REPLACEMENT_S."""
    if ready():
        return
    with workers.fleet.waits.named(workers.run, what):
        try:
            await workers.fleet.event_log.wait_until(ready, REPLACEMENT_S, what)
        except WaitTimeout as timeout:
            raise Unstaffed(what) from timeout


def client_of(workers: WorkerGroup, kind: type[Worker], instance: InstanceState, **fields: Any) -> Worker:
    """The run's client of an instance, of a kind of client."""
    fleet = workers.fleet
    watched = WatchedInstanceClient(
        fleet.client(instance.incarnation), fleet.waits, workers.run, instance.instance, instance.kind
    )
    return kind(workers.run, instance, watched, fleet.event_log.state.epoch, **fields)


async def open_run(workers: WorkerGroup, worker: Worker, call: Callable[[Worker], Awaitable[None]]) -> None:
    """Opens the run at an instance by `call`; waits while the instance still closes another run."""
    fleet, run = workers.fleet, workers.run
    worker.open_id = fleet.open_id_of(worker.incarnation, run)
    clock = asyncio.get_running_loop()
    deadline = clock.time() + BUSY_S
    while True:
        try:
            await call(worker)
            worker.opened = True
            return
        except CallRefused as refused:
            if refused.reason in ("OPENING_STALE", "CONFLICT"):
                worker.open_id = fleet.next_open_id()  # A higher id replaces what is open there.
            elif refused.reason != "BUSY":
                raise
            if clock.time() > deadline:
                fleet.kill(worker.incarnation, f"it cannot open {run}: {refused.message}")
                raise InstanceDown(worker.incarnation, refused.message) from refused
        with fleet.waits.named(run, f"{worker.instance.instance} to close another run"):
            await asyncio.sleep(0.5)


async def open_rollouts(
    workers: WorkerGroup, rollouts: list[RolloutClient], granted: Sequence[str], config: Callable[[], str]
) -> None:
    """Opens the run at those of the granted rollouts that live and are not among `rollouts` yet, and adds them.

    An engine of several hosts whose members have changed is opened anew at all of them.
    """
    engines: dict[str, list[str]] = {}
    for each in rollouts:
        engines.setdefault(each.leader or each.incarnation, []).append(each.incarnation)
    groups = engine_groups(workers.alive(granted), workers.engine_hosts, engines.values())
    places = {each.incarnation: (group[0], rank) for group in groups for rank, each in enumerate(group)}
    rollouts[:] = [each for each in rollouts if _has_place(each, places)]
    known = {rollout.incarnation for rollout in rollouts}
    for instance in (each for group in groups for each in group):
        if instance.incarnation not in known:
            leader, rank = places[instance.incarnation]
            rollout, text = client_of(workers, RolloutClient, instance, rank=rank), config()
            spans = workers.engine_hosts > 1
            address, rollout.leader = (leader.address, leader.incarnation) if spans else (None, "")
            await open_run(workers, rollout, lambda one, text=text, to=address: one.open_run(text, to))  # type: ignore[misc]
            rollouts.append(rollout)
            workers.adopt_leases()


def _has_place(rollout: RolloutClient, places: Mapping[str, tuple[InstanceState, int]]) -> bool:
    """Whether it is open in the place that it has in its engine now."""
    place = places.get(rollout.incarnation)
    if place is None:
        return False
    leader, rank = place
    return rank == rollout.rank and rollout.leader in ("", leader.incarnation)


def drop_lost(workers: WorkerGroup) -> None:
    """Removes rollouts and reward instances that are gone, have lost the run or are granted no more."""
    alive, grant = workers.fleet.alive, workers.grant
    rollouts = [each for each in workers.rollouts if each.opened and alive(each.incarnation)]
    workers.rollouts[:] = [each for each in rollouts if each.incarnation in grant.rollouts]
    workers.rewards[:] = [r for r in workers.rewards if r.opened and alive(r.incarnation)]
