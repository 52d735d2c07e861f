"""Helpers inside a step, on an imaginary fleet: what they contribute, and that a lost one costs nothing."""

from __future__ import annotations

import asyncio
import math

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.run.step.loans import Helping, Loan
from headrace_coordinator.run.step.tail import Tail
from headrace_planner.elastic.policy import Move, Role
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.moves import move_eagerly
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World

STEPS = 7
MODES = ("collocated", "disaggregated")


def eager(state, now):
    """All but one give their devices back as soon as one has nothing more to begin."""
    leaving = state.rollouts[1:] if now - state.moved_at > state.terms.costs.min_hold_s else ()
    return tuple(Move(rollout.name, Role.HELP) for rollout in leaving)


@pytest.fixture
def live(monkeypatch):
    """Runs a calm world of one run with helpers; `hear(world, method, request)` hears every call."""

    def run(
        helpers=1,
        rollouts=2,
        policy=eager,
        hear=lambda world, method, request: None,
        seed=3,
        mode="collocated",
        **sections,
    ):
        monkeypatch.setattr(Loan, "policy", staticmethod(policy))
        monkeypatch.setattr(Helping, "until", staticmethod(lambda state: math.inf))
        world = World(seed, faults=False)
        spec = world.spec.model_dump(mode="json")
        spec |= {"deterministic": False, "steps": STEPS, "placement": {"mode": mode}}
        spec["rollout"]["instances"], spec["trainer"] = rollouts, {"ranks": 1, "helpers": helpers}
        spec["algorithm"] = {"group_size": 4, "prompts_per_step": 6}
        spec["data"]["curriculum"] = None
        for name, section in sections.items():
            spec[name] |= section
        world.spec = type(world.spec).model_validate(spec)
        world.counts = {"rollout": rollouts, "trainer": 1 + helpers, "reward": 1}
        monkeypatch.setattr(world, "heard", lambda method, request: hear(world, method, request))
        outcome = run_virtual(world.live())
        steps = [event.certificate for _, event in world.history if isinstance(event, ev.StepCommitted)]
        return outcome, steps, world

    return run


def helped(certificates):
    return [prompt for c in certificates for prompts in c.helped.values() for prompt in prompts]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("helpers", "rollouts"), [(1, 2), (2, 3)])
def test_groups_that_a_helper_learned_are_trained_once(live, helpers, rollouts, mode):
    outcome, steps, _ = live(helpers, rollouts, mode=mode, trainer={"micro_batch_tokens": 16})
    assert outcome.states and set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0
    assert len(helped(steps)) >= 3
    for certificate in steps:
        trained = {prompt for prompt, *_ in certificate.trained}
        assert certificate.max_staleness == 0
        assert {p for ps in certificate.helped.values() for p in ps} <= set(range(10**6)) and trained


def grant_of(world):
    return world.states()[0].grant


def last_kill(world, who):
    """Kills the helper, an owner or a rollout of the run, now."""
    grant = grant_of(world)
    victim = {"helper": grant.helpers, "owner": grant.trainers, "rollout": grant.rollouts}[who][-1]
    world.spawn(world.kill(victim))


def test_owners_with_devices_of_their_own_learn_beside_a_helper(live):
    """Both learn in the same steps, and the device comes back to the rollout that lent it."""
    outcome, steps, world = live(mode="disaggregated", trainer={"micro_batch_tokens": 16})
    assert set(outcome.states.values()) == {"SUCCEEDED"}
    both = [c for c in steps if c.helped and len({p for p, *_ in c.trained} - set(helped([c])))]
    assert both, "the trainer group learned too"
    leases = [event for event in world.store.log if isinstance(event, ev.LeaseGranted)]
    helps = [lease for lease in leases if lease.stage == "help"]
    generates = {device for lease in leases if lease.stage == "generate" for device in lease.devices}
    learns = {device for lease in leases if lease.stage == "learn" for device in lease.devices}
    assert helps and all(set(lease.devices) <= generates - learns for lease in helps)


def test_the_only_rollout_helps_owners_that_learn_on_when_all_is_decoded(live, monkeypatch):
    """The next step's answers are made on the same device again."""
    learn = Trainer._learn

    async def slowly(self, request, revoked):
        async for outcome in learn(self, request, revoked):
            await asyncio.sleep(2.0)
            yield outcome

    monkeypatch.setattr(Trainer, "_learn", slowly)
    settings = {"mode": "disaggregated", "trainer": {"micro_batch_tokens": 1}}
    outcome, steps, world = live(rollouts=1, policy=move_eagerly, **settings)
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0
    both = [c for c in steps if c.helped and len({p for p, *_ in c.trained} - set(helped([c])))]
    assert len(both) > 2
    granted = [event for event in world.store.log if isinstance(event, ev.LeaseGranted)]
    stages = [lease.stage for lease in granted if lease.stage != "learn"]
    assert stages.count("help") >= len(both) and "generate" in stages[stages.index("help") :]


def test_a_full_relay_does_not_wait_for_groups_that_a_helper_has(live):
    """What a helper learns is kept until the trainer group has its gradient: nobody waits for it to be taken."""
    outcome, steps, _ = live(
        mode="disaggregated", trainer={"micro_batch_tokens": 16}, limits={"in_flight_bytes": 200}
    )
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0 and helped(steps)


def test_how_long_decoding_took_beside_a_helper_is_compared_with_what_was_expected(live, monkeypatch):
    told = []
    monkeypatch.setattr(Tail, "tailed", lambda tail, seconds, expected_s: told.append((seconds, expected_s)))
    _, steps, _ = live(trainer={"micro_batch_tokens": 16})
    assert len(told) >= sum(bool(certificate.helped) for certificate in steps) > 1
    assert all(expected_s > 0 for _, expected_s in told) and all(0 < seconds < 60 for seconds, _ in told)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", ["helper", "owner", "rollout", "coordinator"])
@pytest.mark.parametrize("method", ["Help", "TakeContribution", "AddContribution", "CommitStep"])
def test_whoever_is_lost_at_any_point_of_the_help_the_run_trains_every_slot_once(live, who, method, mode):
    """The world judges the ledger, the versions and what is in the weights."""
    killed = []

    def hear(world, called, request):
        if called == method and helped_before(world) and len(killed) < 2:
            killed.append(method)
            if who == "coordinator":
                world.spawn(world.kill_coordinator(0.5))
            else:
                last_kill(world, who)

    def helped_before(world):
        return method in ("Help", "TakeContribution", "AddContribution") or bool(grant_of(world).helpers)

    outcome, steps, _ = live(hear=hear, mode=mode, trainer={"micro_batch_tokens": 16})
    assert killed and set(outcome.states.values()) == {"SUCCEEDED"}
    assert len(steps) >= STEPS - 1
    if who == "helper":
        assert outcome.recoveries == 0, "a helper is no reason to begin a step again"


@pytest.mark.parametrize(("nth", "mode"), [(nth, MODES[nth % 2]) for nth in range(1, 13)])
def test_a_helper_killed_after_any_of_its_calls_costs_its_groups_alone(live, nth, mode):
    """The n-th message to a helper is its last one."""
    told = []

    def hear(world, called, request):
        if called in ("Help", "BeginStep", "TakeContribution") and world.states() and grant_of(world).helpers:
            told.append(called)
            if len(told) == nth:
                last_kill(world, "helper")

    outcome, steps, _ = live(hear=hear, mode=mode, trainer={"micro_batch_tokens": 16})
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0 and len(steps) == STEPS


def test_a_helper_goes_to_a_run_that_waits_and_comes_back(monkeypatch):
    """A trainer that only helps is what nobody waits for: the second run starts with it."""
    monkeypatch.setattr(Loan, "policy", staticmethod(eager))
    monkeypatch.setattr(Helping, "until", staticmethod(lambda state: math.inf))
    world = World(4, faults=False, count=2)
    for index, spec in enumerate(world.specs):
        fields = spec.model_dump(mode="json")
        fields |= {"deterministic": False, "steps": STEPS, "placement": {"mode": "collocated"}}
        fields["rollout"]["instances"], fields["trainer"] = 2, {"ranks": 1, "helpers": 1}
        fields["algorithm"] = {"group_size": 2, "prompts_per_step": 6}
        fields["data"]["curriculum"] = None
        world.specs[index] = type(spec).model_validate(fields)
    world.counts = {"rollout": 4, "trainer": 2, "reward": 1}
    outcome = run_virtual(world.live())
    assert set(outcome.states.values()) == {"SUCCEEDED"} and len(outcome.states) == 2
    admitted = [event for event in world.store.log if isinstance(event, ev.RunAdmitted)]
    assert any(event.helpers for event in admitted)
