"""Several runs on one fleet: side by side on disjoint instances, in turns on shared ones."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from harness.fleet import Fleet
from harness.gate import Gate
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

STEPS = 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Two rollouts and two trainers on two cores."""
    with Fleet(
        tmp_path_factory.mktemp("wide") / "data", "--simulator", "0", "--rollout", "2", "--trainer", "2"
    ) as made:
        yield made


def weights_hash(run) -> str:
    """Digest of the exported weights."""
    return hashlib.sha256((Path(run.export_path) / "model.safetensors").read_bytes()).hexdigest()


def test_two_runs_work_side_by_side_on_one_core_each(wide, spec_of, tmp_path):
    wide.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    gates = [Gate(tmp_path / name) for name in ("one", "two")]
    for gate in gates:
        gate.hold_after(3)
    first, second = (wide.submit(spec_of(name="beside", steps=8, reward=gate.reward)) for gate in gates)
    for gate in gates:
        gate.wait_until_held()  # Both are in their first step, whichever took longer to get there.
    for gate in gates:
        gate.open()
    seen: dict[str, set[str]] = {first.id: set(), second.id: set()}

    def both_hold() -> bool:
        leases = wide.client.leases().leases
        held = [device for lease in leases for device in lease.devices]
        assert len(held) == len(set(held)), f"a core is leased twice: {leases}"
        for lease in leases:
            seen[lease.run] |= set(lease.devices)
        return {lease.run for lease in leases} == {first.id, second.id}

    wait_for(both_hold, "both runs to hold a lease", 120)
    ended = [wide.succeed(run) for run in (first, second)]
    assert all(len(devices) == 1 for devices in seen.values())
    assert ended[0].started_at < ended[1].finished_at and ended[1].started_at < ended[0].finished_at
    for run in ended:
        assert len(audit(wide, run).trained) == 8 * BATCH and run.recoveries == 0


SHARED = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"], "share": True}


@pytest.mark.nightly  # test_core_sharing has it in virtual time, with kills
def test_two_runs_share_two_cores_stage_by_stage(wide, spec_of):
    wide.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    runs = [wide.submit(spec_of(name="shared", steps=8, seed=seed, placement=SHARED)) for seed in (1, 2)]
    ended = [wide.succeed(run) for run in runs]
    for run in ended:
        found = audit(wide, run)
        assert len(found.trained) == 8 * BATCH and not found.dropped and run.recoveries == 0
        assert all(certificate.max_staleness == 0 for certificate in found.live)
    assert ended[0].started_at < ended[1].finished_at and ended[1].started_at < ended[0].finished_at
    holds = []
    for run in ended:
        url = f"{wide.url}/v1/runs/{run.id}/timeline"
        for hold in httpx.get(url, params={"steps": 200}, headers=wide.headers, trust_env=False).json()[
            "holds"
        ]:
            holds += [(device, hold["start"], hold["end"], run.id) for device in hold["devices"]]
    assert len({device for device, *_ in holds}) == 2
    passed = 0
    for (device, _, end, run), (following, start, _, other) in pairwise(sorted(holds)):
        if device == following:
            assert end <= start, f"{device} is held twice"
            passed += run != other
    assert passed >= 8, f"the runs take turns on a core stage by stage: {holds}"


@pytest.mark.nightly
def test_while_one_run_waits_for_its_rewards_another_has_its_cores(wide, spec_of, gate):
    gate.hold_after(3)
    shared = {"mode": "collocated", "share": True}
    waits = wide.submit(spec_of(name="waits", steps=2, reward=gate.reward, placement=shared))
    gate.wait_until_held()
    other = wide.succeed(wide.submit(spec_of(name="other", steps=3, placement=shared)))
    assert other.step == 3 and wide.client.get(waits.id).step == 0
    gate.open()
    ended = wide.succeed(waits)
    assert len(audit(wide, ended).trained) == 2 * BATCH and ended.recoveries == 0


def test_two_runs_take_turns_on_one_trainer(fleet, spec_of):
    def submit(name):
        return fleet.submit(spec_of(name=name, steps=STEPS, scheduling__quantum_s=0.5))

    first, second = submit("one"), submit("two")
    ended = [fleet.succeed(run) for run in (first, second)]
    admitted = sorted(
        (event.time, event.run)
        for run in ended
        for event in fleet.events(run)
        if event.type == "run_admitted"
    )
    turns = sum(a != b for (_, a), (_, b) in pairwise(admitted))
    assert turns >= 2, f"they alternate: {admitted}"
    for run in ended:
        found = audit(fleet, run)
        assert len(found.trained) == STEPS * BATCH and not found.dropped
        assert run.recoveries == 0, "being admitted again is no recovery"


def test_a_higher_priority_comes_first(fleet, spec_of, gate):
    gate.hold_after(3)
    holder = fleet.submit(spec_of(name="holder", steps=1, reward=gate.reward))
    gate.wait_until_held()
    low = fleet.submit(spec_of(name="low", steps=1))
    high = fleet.submit(spec_of(name="high", steps=1, scheduling__priority=5))
    assert wait_for(
        lambda: fleet.client.get(high.id).place == 1 and fleet.client.get(low.id).place == 2,
        "the queue's order",
        10,
    )
    gate.open()
    ended = {name: fleet.succeed(run) for name, run in (("holder", holder), ("low", low), ("high", high))}
    assert ended["high"].started_at < ended["low"].started_at


def test_a_deterministic_run_that_alternates_ends_with_the_weights_that_it_has_alone(fleet, spec_of):
    def spec(name, **more):
        return spec_of(name=name, steps=STEPS, deterministic=True, export=True, **more)

    alone = fleet.succeed(fleet.submit(spec("alone")))
    runs = [
        fleet.submit(spec("alternating", scheduling__quantum_s=0.3)),
        fleet.submit(spec_of(name="other", steps=STEPS, seed=11, scheduling__quantum_s=0.3)),
    ]
    both = [fleet.succeed(run) for run in runs]
    admissions = [event for event in fleet.events(both[0]) if event.type == "run_admitted"]
    assert len(admissions) > 1, "it never yielded"
    assert weights_hash(both[0]) == weights_hash(alone)


def test_the_reward_instance_serves_both_runs_at_once(wide, spec_of, tmp_path):
    gates = [Gate(tmp_path / name) for name in ("a", "b")]
    for gate in gates:
        gate.hold_after(3)
    runs = [wide.submit(spec_of(name="shared", steps=1, reward=gate.reward)) for gate in gates]
    for gate in gates:
        gate.wait_until_held()  # Both have answers in the one reward process now.
    for gate in gates:
        gate.open()
    for run in runs:
        assert wide.succeed(run).step == 1
