"""Runs that share devices: who is next, who gives way, and whole runs on an imaginary fleet that share two devices."""

from __future__ import annotations

import asyncio
import random
from itertools import groupby

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices import sharing
from headrace_coordinator.domain.devices.leases import LeaseRequest
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.devices.sharing import (
    PATIENCE_S,
    TURN_S,
    Waiter,
    ahead_of,
    next_for,
    releases_to,
)
from headrace_coordinator.domain.state import InstanceState, State
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.run.step.timer import WAIT_LEASE, StepTimer
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.specs import random_spec
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World, run_world

# --- who is next


def waiter(number, run, devices="0", since=0.0, priority=0):
    return Waiter(number, run, frozenset(devices), since, priority)


@pytest.mark.parametrize(
    ("line", "now", "first"),
    [
        ([waiter(1, "a"), waiter(2, "b")], 1.0, "a"),
        ([waiter(1, "a"), waiter(2, "b", priority=1)], 1.0, "b"),
        ([waiter(1, "a"), waiter(2, "b", since=5.0, priority=9)], PATIENCE_S, "a"),
        ([waiter(1, "me"), waiter(2, "b")], 1.0, "b"),
        ([waiter(1, "a", devices="12"), waiter(2, "b", devices="01")], 1.0, "b"),
    ],
)
def test_the_line_goes_by_patience_then_priority_then_order(line, now, first):
    assert next_for(line, {"0"}, "me", now).run == first


def test_nobody_is_ahead_who_came_later_or_wants_other_devices_or_is_the_same_run():
    mine = waiter(2, "me")
    line = [waiter(1, "other", devices="1"), mine, waiter(3, "late"), waiter(0, "me")]
    assert ahead_of(line, mine, 1.0) is None
    assert ahead_of([*line, waiter(1, "early", devices="01")], mine, 1.0).run == "early"


@pytest.mark.parametrize(
    ("priority", "held_s", "made", "idle", "gives"),
    [
        (0, 0.0, False, True, True),
        (0, TURN_S - 1, True, False, False),
        (0, TURN_S, True, False, True),
        (0, 10 * TURN_S, False, False, False),
        (1, 0.0, True, False, True),
        (1, 0.0, False, False, False),
    ],
)
def test_a_run_releases_devices_when_it_idles_or_has_made_something_and_its_turn_is_over(
    priority, held_s, made, idle, gives
):
    assert releases_to(waiter(1, "b", priority=priority), 0, held_s, made=made, idle=idle) is gives


# --- grants


def state_of(shares, cores=2, rollouts=2, trainers=2):
    """A host, and runs a, b, … in that order; `shares` says which of them share."""
    state = State()
    for kind, count in (("rollout", rollouts), ("trainer", trainers), ("reward", 1)):
        for number in range(count):
            devices = [] if kind == "reward" else [f"h/cpu:{core}" for core in range(cores)]
            name = f"{kind}-{number}"
            state.instances[name] = InstanceState(name, name, kind, "h", "", devices, {})
    for at, (run, share) in enumerate(zip("abcd", shares, strict=False)):
        spec = random_spec(random.Random(0), 0).model_dump(mode="json")
        spec["rollout"]["instances"] = spec["trainer"]["ranks"] = 1
        spec["trainer"]["helpers"] = 0
        spec["placement"] = {"mode": "disaggregated", "share": share, "rollout": [], "trainer": []}
        spec["scheduling"] = {"priority": 0, "weight": 1.0, "quantum_s": 60.0}
        state.apply(ev.RunSubmitted(at=float(at), run=run, spec=spec, directory=f"/{run}"))
    return state


def admitted(state):
    while (plan := plan_admission(state, 10.0)).grants:
        state.apply(plan.grants[0])
        if state.runs[plan.grants[0].run].state == "QUEUED":
            moved = ev.RunStateChanged(at=10.0, run=plan.grants[0].run, state="PLANNING", reason="")
            state.apply(moved)
    return {run.id: run.grant for run in state.runs.values() if run.grant is not None}, plan


def test_runs_that_share_are_granted_the_same_devices_and_instances_of_their_own():
    grants, _ = admitted(state_of([True, True]))
    assert grants["a"].devices == grants["b"].devices == ["h/cpu:0", "h/cpu:1"]
    assert not set(grants["a"].instances) & set(grants["b"].instances)


@pytest.mark.parametrize("shares", [[True, False], [False, True], [False, False]])
def test_both_runs_must_say_so(shares):
    grants, plan = admitted(state_of(shares))
    assert list(grants) == ["a"] and "held by a" in plan.waiting["b"]


def test_a_run_that_shares_takes_what_is_free_first():
    grants, _ = admitted(state_of([True, True], cores=4))
    assert grants["a"].devices == grants["b"].devices, "cores: each has all of them"
    state = state_of([True, True])
    for found in state.instances.values():
        found.devices = [f"h/gpu:{index}" for index in range(4)] if found.devices else []
    grants, _ = admitted(state)
    assert not set(grants["a"].devices) & set(grants["b"].devices)


def test_a_run_that_does_not_share_waits_for_all_that_have_its_devices():
    state = state_of([True, True, False], rollouts=3, trainers=3)
    admitted(state)
    plan = plan_admission(state, 10.0 + 61.0)
    assert set(plan.yields) == {"a", "b"} and "held by a, b" in plan.waiting["c"]


# --- leases


class Bench:
    """A fleet with a rollout for each run on one device; holders obey at once."""

    def __init__(self, runs):
        self.time = 0.0
        self.event_log = EventLog(MemoryStore(), lambda: self.time, lambda: self.time)
        self.fleet = Fleet(self.event_log, lambda *_: None, FleetSettings())
        self.manager = self.fleet.lease_manager
        self.runs = runs

    async def open(self):
        await self.event_log.open("test", None)
        self._task = asyncio.ensure_future(self.event_log.run())
        for run in self.runs:
            self.event_log.state.instances[run] = InstanceState(run, run, "rollout", "h", "", ["d"], {})
            self.fleet.attach(run, lambda command, body, run=run: self._obey(run, command, body))
        return self

    def _obey(self, run, command, body):
        loop = asyncio.get_running_loop()
        if command == "grant":
            loop.call_soon(self.manager.held, run, body.epoch, "")
        elif command == "revoke":
            loop.call_soon(self.manager.released, run, body[0])

    async def acquire(self, run):
        [epoch] = await self.manager.acquire([LeaseRequest(run, run, "generate", ("d",))], 30.0)
        return epoch

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_no_run_passes_another_that_waits():
    """`a` wants the device again as soon as it has given it back, and its turn comes after everybody else's."""
    bench = await Bench("abc").open()
    turns = []

    async def work(run):
        for _ in range(5):
            epoch = await bench.acquire(run)
            turns.append(run)
            await asyncio.sleep(0)
            await bench.manager.release(run, [epoch])

    await asyncio.wait_for(asyncio.gather(*map(work, "abc")), 30)
    assert turns == list("abc") * 5
    await bench.close()


async def test_whoever_leaves_the_line_is_waited_for_no_more():
    bench = await Bench("abc").open()
    epoch = await bench.acquire("a")
    second = asyncio.ensure_future(bench.acquire("b"))
    await asyncio.sleep(0)
    assert bench.manager.next_for(["d"], "a").run == "b" and bench.manager.next_for(["d"], "b") is None
    third = asyncio.ensure_future(bench.acquire("c"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await bench.manager.release("a", [epoch])
    await asyncio.wait_for(third, 30)
    assert bench.event_log.state.table.holders_of("d")[0].run == "c" and not bench.manager.next_for(
        ["d"], "c"
    )
    await bench.close()


def test_time_in_the_line_is_no_time_of_the_stage_that_it_interrupts():
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    with timer.stage("switch", ["d"]):
        now[0] = 10.0
        timer.waited((1.0, 8.0), ["d"])
    assert timer.stages() == {"switch": 3.0, WAIT_LEASE: 7.0, "protocol": 0.0}
    assert [(stage, start, stop) for stage, _, start, stop in timer.spans()] == [
        ("switch", 0.0, 1.0),
        (WAIT_LEASE, 1.0, 8.0),
        ("switch", 8.0, 10.0),
    ]


# --- whole runs

STEPS = 6
APART = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]}
TOGETHER = {"mode": "collocated", "rollout": ["cpu:0"], "trainer": ["cpu:0"]}
PLAIN = {
    "rollout": {"instances": 1},
    "trainer": {"ranks": 1, "helpers": 0},
    "algorithm": {"group_size": 2, "prompts_per_step": 12, "options": {}},
    "evaluation": {"every": 0},
    "checkpoint": {"enabled": True, "interval_steps": 100},
    "scheduling": {"priority": 0, "weight": 1.0, "quantum_s": 1000.0},
    "limits": {"recoveries": 50},
}


class Scene(World):
    """Runs that come at once, on devices 0 and 1; `hear(world, method, request)` hears every call."""

    def __init__(self, placement, count=2, share=True, hear=lambda *_: None, sections=({}, {})):
        super().__init__(6, faults=False, count=count)
        self.hear = hear
        for index, spec in enumerate(self.specs):
            fields = spec.model_dump(mode="json")
            for name, section in (*PLAIN.items(), *sections[index].items()):
                fields[name] |= section
            fields["placement"] = {**placement, "share": share, "flow": "sequential"}
            fields["data"]["curriculum"] = None
            fields |= {"steps": STEPS, "deterministic": False}
            self.specs[index] = type(spec).model_validate(fields)
        self.counts = {"rollout": 2, "trainer": 2, "reward": 1}
        self.outcome = run_virtual(self.live())

    def heard(self, method, request):
        super().heard(method, request)
        self.hear(self, method, request)

    def log(self, kind):
        return [event for event in self.store.log if isinstance(event, kind)]

    @property
    def took(self):
        """Seconds from the first moment that a run is at work to the last step."""
        began = next(event.at for event in self.log(ev.RunStateChanged) if event.state == "RUNNING")
        return self.log(ev.StepCommitted)[-1].at - began

    @property
    def steps(self):
        """The runs whose steps were committed, in order."""
        return [event.run for event in self.log(ev.StepCommitted)]

    @property
    def healthy(self):
        """All ended well, and nothing was made again."""
        return set(self.outcome.states.values()) == {"SUCCEEDED"} and not self.outcome.recoveries


def longest_streak(names):
    """Most steps in a row that one run made while the other had some left."""
    until = min(len(names) - 1 - names[::-1].index(name) for name in set(names))
    return max(len(list(steps)) for _, steps in groupby(names[: until + 1]))


@pytest.fixture
def slow_rewards(monkeypatch):
    """Each batch of answers is scored after six seconds, which no device has a part in."""
    score = Reward.Score

    async def slowly(self, requests):
        async def later():
            async for request in requests:
                await asyncio.sleep(6.0)
                yield request

        async for response in score(self, later()):
            yield response

    monkeypatch.setattr(Reward, "Score", slowly)


def test_one_run_generates_while_the_other_learns():
    turns, both = Scene(APART, share=False), Scene(APART)
    assert turns.healthy and both.healthy
    assert both.outcome.passed > 2 * STEPS and not turns.outcome.passed
    assert both.took < 0.8 * turns.took
    assert longest_streak(both.steps) <= 2 < longest_streak(turns.steps)


def test_while_one_run_waits_for_its_rewards_the_other_has_the_device(slow_rewards):
    turns, both = Scene(TOGETHER, share=False), Scene(TOGETHER)
    assert turns.healthy and both.healthy and both.outcome.passed > 2 * STEPS
    assert both.took < 0.8 * turns.took
    assert longest_streak(both.steps) <= 2


def test_a_turn_ends_inside_generation_and_the_answers_go_on_from_their_prefix(monkeypatch):
    prefixes = []
    make = Rollout._make

    async def spied(self, opening, prompt, sample, done):
        prefixes.append(len(sample.resume.token_ids))
        await make(self, opening, prompt, sample, done)

    monkeypatch.setattr(sharing, "TURN_S", 0.5)
    monkeypatch.setattr(Rollout, "_make", spied)
    both = Scene(TOGETHER)
    assert both.healthy and any(prefixes)
    assert not [event for event in both.log(ev.Noted) if "made again" in event.text]


def test_a_run_of_lower_priority_goes_on_beside_one_of_higher():
    """It has what the other leaves idle, and after PATIENCE_S its turn."""
    high = {"scheduling": {"priority": 5}}
    both = Scene(APART, sections=(high, {}))
    assert both.healthy and longest_streak(both.steps) <= 4


@pytest.mark.parametrize("victim", ["rollout", "trainer", "coordinator"])
@pytest.mark.parametrize("method", ["InstallPolicy", "BeginStep", "CommitStep", "Suspend"])
def test_whoever_is_lost_the_other_run_goes_on_and_every_slot_is_trained_once(victim, method):
    """The world judges ledgers, versions, grants, leases and what is in the weights."""
    killed = []

    def hear(world, called, request):
        if called != method or len(killed) > 1 or len(world.log(ev.StepCommitted)) < 2 * len(killed) + 1:
            return
        killed.append(called)
        if victim == "coordinator":
            world.spawn(world.kill_coordinator(0.5))
        else:
            grants = [run.grant for run in world.states() if run.grant]
            chosen = [grant.rollouts if victim == "rollout" else grant.trainers for grant in grants]
            world.spawn(world.kill(chosen[len(killed) % len(chosen)][0]))

    both = Scene(APART, hear=hear)
    assert killed and set(both.outcome.states.values()) == {"SUCCEEDED"}


def test_guarantees_hold_where_runs_share():
    """Under every kind of fault, beyond the seeds of test_simulation: in these, devices do pass between runs."""
    assert all(run_world(seed).passed for seed in (81, 113))
