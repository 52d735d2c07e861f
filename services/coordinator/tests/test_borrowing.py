"""Rollouts without devices, on an imaginary fleet: they decode on the trainer's until it has work, and cost nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.loans import Helping, Loan
from headrace_coordinator.run.step.tail import Tail
from headrace_planner.elastic.policy import Move, Role, plan_elastic
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.moves import help_always, move_eagerly
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World

STEPS = 6


def never_back(state, now):
    """Only the end of the answers, or of the rollouts, gives the devices back."""
    return tuple(Move(rollout.name, Role.DECODE) for rollout in state.idle_owners)


def never_at_all(state, now):
    return ()


@pytest.fixture
def live(monkeypatch):
    """Runs a calm world of one run with rollouts that borrow; `hear(world, method, request)` hears every call."""

    def run(ranks=1, rollouts=1, policy=move_eagerly, hear=lambda world, method, request: None, **sections):
        monkeypatch.setattr(Loan, "policy", staticmethod(policy))
        world = World(3, faults=False)
        spec = world.spec.model_dump(mode="json")
        spec |= {"deterministic": False, "steps": STEPS, "placement": {"mode": "disaggregated"}}
        spec["rollout"] = {"instances": rollouts, "helpers": ranks}
        spec["trainer"] = {"ranks": ranks, "helpers": 0}
        spec["algorithm"] = {"group_size": 4, "prompts_per_step": 6}
        spec["data"]["curriculum"] = None
        for name, section in sections.items():
            spec[name] |= section
        world.spec = type(world.spec).model_validate(spec)
        world.counts = {
            "rollout": rollouts + ranks,
            "trainer": ranks + spec["trainer"]["helpers"],
            "reward": 1,
        }
        monkeypatch.setattr(world, "heard", lambda method, request: hear(world, method, request))
        outcome = run_virtual(world.live())
        steps = [event.certificate for _, event in world.history if isinstance(event, ev.StepCommitted)]
        return outcome, steps, world

    return run


def leases(world, stage):
    return [e for e in world.store.log if isinstance(e, ev.LeaseGranted) and e.stage == stage]


def devices(found):
    return {device for lease in found for device in lease.devices}


@pytest.mark.parametrize(("ranks", "rollouts"), [(1, 1), (2, 2)])
def test_the_trainers_devices_decode_at_each_steps_begin_and_every_slot_is_trained_once(
    live, monkeypatch, ranks, rollouts
):
    prefixes, told, moved = [], [], Tail.moved
    make = Rollout._make

    async def spied(self, opening, group, sample, done):
        prefixes.append((self.incarnation, len(sample.resume.token_ids)))
        assert sample.resume.HasField("cache") == bool(sample.resume.token_ids)
        await make(self, opening, group, sample, done)

    def heard(self, *, cached):
        told.append(cached)
        moved(self, cached=cached)

    monkeypatch.setattr(Rollout, "_make", spied)
    monkeypatch.setattr(Tail, "moved", heard)
    outcome, steps, world = live(ranks, rollouts)
    assert told and all(told), "the policy is told that nothing is computed again"
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0 and len(steps) == STEPS
    borrowed, learns = leases(world, "decode"), leases(world, "learn")
    assert len(borrowed) == ranks * (STEPS - Tail.fewest_steps), "each step after those that are measured"
    assert devices(borrowed) == devices(learns) and not devices(borrowed) & devices(leases(world, "generate"))
    decoders = {lease.incarnation for lease in borrowed}
    assert any(who in decoders for who, _ in prefixes)
    assert any(prefix and who not in decoders for who, prefix in prefixes), (
        "unfinished answers go on elsewhere"
    )
    for certificate in steps:
        assert certificate.max_staleness == 0
        assert len(certificate.trained) == len(
            {(prompt, sample) for prompt, sample, *_ in certificate.trained}
        )


def test_without_a_pace_the_first_group_that_is_ready_brings_the_devices_back(live, monkeypatch):
    monkeypatch.setattr(Tail, "terms", lambda self, *a, **k: None)
    outcome, _, world = live(policy=never_back)
    assert set(outcome.states.values()) == {"SUCCEEDED"} and leases(world, "decode")
    log = world.store.log
    for lease in leases(world, "decode"):
        after = log[log.index(lease) :]
        back = next(
            i for i, e in enumerate(after) if isinstance(e, ev.LeaseRevoking) and e.epoch == lease.epoch
        )
        assert any(isinstance(e, ev.GroupsSettled) for e in after[:back])
        still = [e for e in after[back:] if isinstance(e, ev.GroupsSettled | ev.StepCommitted)]
        assert isinstance(still[0], ev.GroupsSettled), "others were still decoding"


def test_the_real_policy_borrows_where_decoding_takes_long(live):
    """As it does where many answers share a rollout; the imaginary ones take no longer side by side."""

    def slow(state, now):
        terms = replace(state.terms, generate=replace(state.terms.generate, fixed_s=0.0, item_s=10.0))
        return plan_elastic(replace(state, terms=terms), now)

    outcome, _, world = live(policy=slow)
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0
    assert len(leases(world, "decode")) == STEPS - Tail.fewest_steps


def test_nothing_is_borrowed_where_the_policy_sees_no_gain(live):
    outcome, _, world = live(policy=never_at_all)
    assert set(outcome.states.values()) == {"SUCCEEDED"} and not leases(world, "decode")


@pytest.mark.parametrize(
    "sections", [{"placement": {"flow": "sequential"}}, {"limits": {"in_flight_bytes": 200}}]
)
def test_the_end_of_the_answers_brings_the_devices_back(live, sections):
    """Also where the trainer waits for all of them, and where no answer finds room on its way to it."""
    outcome, _, world = live(policy=never_back, **sections)
    assert (
        set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0 and leases(world, "decode")
    )


def test_devices_move_at_a_steps_begin_and_in_its_tail(live, monkeypatch):
    monkeypatch.setattr(Helping, "until", staticmethod(help_always))
    outcome, steps, world = live(rollouts=2, trainer={"helpers": 1, "micro_batch_tokens": 16})
    assert set(outcome.states.values()) == {"SUCCEEDED"} and outcome.recoveries == 0
    assert leases(world, "decode") and leases(world, "help") and any(c.helped for c in steps)


@pytest.mark.parametrize("who", ["decoder", "owner", "rollout", "coordinator"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
def test_whoever_is_lost_while_the_trainers_devices_decode_the_run_trains_every_slot_once(live, who, nth):
    """The n-th call to a decoder is the last of whoever is killed; the world judges ledger, versions and weights."""
    told = []

    def hear(world, method, request):
        grant = world.states()[0].grant if world.states() else None
        if method not in ("Wake", "InstallPolicy", "Resume", "Generate") or not (grant and grant.helpers):
            return
        borrowed = [lease.epoch for lease in leases(world, "decode")]
        if request.header.lease_epoch not in borrowed:
            return
        told.append(method)
        if len(told) != nth:
            return
        if who == "coordinator":
            world.spawn(world.kill_coordinator(0.5))
        else:
            victims = {"decoder": grant.helpers, "owner": grant.trainers, "rollout": grant.rollouts}
            world.spawn(world.kill(victims[who][-1]))

    outcome, steps, _ = live(hear=hear)
    assert len(told) >= nth and set(outcome.states.values()) == {"SUCCEEDED"}
    if who == "decoder":
        assert outcome.recoveries == 0 and len(steps) == STEPS, "a decoder is no reason to begin a step again"


def test_a_lost_decoder_is_told_to_the_runs_user(live, monkeypatch):
    notes = []
    note = RunContext.note
    monkeypatch.setattr(
        RunContext, "note", lambda self, text, **more: (notes.append(text), note(self, text, **more))
    )

    def hear(world, method, request):
        if method == "Wake" and request.header.lease_epoch in {e.epoch for e in leases(world, "decode")}:
            world.spawn(world.kill(world.states()[0].grant.helpers[0])) if len(notes) < 9 else None

    live(hear=hear)
    assert any("no longer decodes on the trainer group's devices" in text for text in notes)
