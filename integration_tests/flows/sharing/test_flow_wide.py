"""Fleets of two rollouts and two trainers on two cores: runs side by side, and devices that move inside a step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest
from harness.fleet import Fleet
from harness.gate import Gate
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

STEPS, GROUPS, SAMPLES = 4, 12, 4
"""Of the run with a helper; two steps are measured before anything moves."""
FLAGS = ("--simulator", "0", "--rollout", "2", "--trainer", "2")
SLOW = "rollout.round=delay:0.02;trainer.micro=delay:0.15"
"""Times that do not depend on how busy the machine is: a decode round, and a micro-batch of about one group."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The fleet that these tests share."""
    with Fleet(tmp_path_factory.mktemp("wide") / "data", *FLAGS, HEADRACE_FAILPOINTS=SLOW) as made:
        yield made


@pytest.mark.nightly  # quick: the reward instance below serves two runs; test_places has their devices
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


@pytest.mark.nightly  # quick: test_many_runs has two runs beside each other
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


@pytest.mark.nightly  # quick: test_regroup.py, test_trainer_regroup.py
def test_a_run_takes_a_second_rank_and_gives_it_back_between_steps(wide, spec_of, gate):
    """Without a checkpoint: what a group has lost, the run would have to make again."""
    wide.ready("trainer-0", "trainer-1")
    gate.hold_after(BATCH + 3)
    run = wide.submit(spec_of(name="regroup", steps=5, reward=gate.reward, checkpoint={"enabled": False}))
    gate.wait_until_held()  # in its second step
    refused = wide.headrace("run", "set", run.id, "trainer.ranks=3")
    assert refused.returncode and "use one of: 1, 2, 4" in " ".join(refused.stderr.split())
    changed = wide.json("run", "set", run.id, "trainer.ranks=2")
    assert (changed["ranks"], changed["wanted_ranks"]) == (1, 2)
    assert "1 rank, 2 wanted" in wide.headrace("run", "get", run.id).stdout
    gate.hold_after(2 * BATCH)
    gate.wait_until_held()  # in its fourth: the third one had two ranks
    assert wide.client.set(run.id, {"trainer.ranks": 1}).ranks == 2
    gate.open()
    ended = wide.succeed(run)
    found = audit(wide, ended)
    assert len(found.trained) == 5 * BATCH and not found.dropped and ended.recoveries == 0
    assert all(certificate.max_staleness == 0 for certificate in found.live)
    events = wide.events(run)
    assert [event.data["ranks"] for event in events if event.type == "trainers_changed"] == [2, 1]
    assert [len(event.data["trainers"]) for event in events if event.type == "trainer_group_formed"] == [
        1,
        2,
        1,
    ]
    assert sum(event.type == "version_restored" for event in events) == 1, "the initial model alone"


SHARED = {"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"], "share": True}


@pytest.mark.nightly  # test_sharing has it in virtual time, with kills
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


def run_elastic(
    fleet: Fleet, spec_of: Any, rollouts: int = 2, **sections: Any
) -> tuple[list[dict[str, list[int]]], list[str]]:
    """A run whose answers end anywhere, a few of them late; what helpers gave to each step, and the run's notes.

    Two rollouts, an owner and a helper, on two cores unless `sections` say otherwise.
    """
    fleet.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    spec = spec_of(
        steps=STEPS,
        sampling__max_new_tokens=200,
        algorithm={"prompts_per_step": GROUPS, "group_size": SAMPLES},
        rollout__instances=rollouts,
        trainer={"helpers": 1, "micro_batch_tokens": 96, "warmup": {"steps": 0}},
        reward={"scorers": [{"name": "length", "options": {"target": 1, "limit": 200}}]},
        checkpoint={"enabled": False},
        **sections,
    )
    run = fleet.succeed(fleet.submit(spec))
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and run.recoveries == 0
    notes = [event.data["text"] for event in fleet.events(run) if event.type == "noted"]
    return [item.helped for item in found.live], notes


@pytest.mark.nightly  # quick: test_helpers has it in virtual time, with kills
def test_a_helper_contributes_the_gradient_of_whole_groups(wide, spec_of):
    helped, notes = run_elastic(wide, spec_of)
    assert helped[:2] == [{}, {}] and any(helped[2:]), notes
    for step, groups in enumerate(helped):
        own = range(step * GROUPS, (step + 1) * GROUPS)
        prompts = [prompt for each in groups.values() for prompt in each]
        assert set(prompts) <= set(own) and len(set(prompts)) == len(prompts)


@pytest.mark.nightly  # test_helpers has it in virtual time, with kills
def test_a_helper_learns_beside_an_owner_with_a_device_of_its_own(tmp_path, spec_of):
    """A core has two names here, for a third device: the owner's learning is slow, and a rollout's core helps."""
    devices = ("--devices", "cpu:0,cpu:1,cpu:00")
    slow = "rollout.round=delay:0.02;trainer.micro=delay:0.5"
    apart = {"mode": "disaggregated", "rollout": ["cpu:0", "cpu:00"], "trainer": ["cpu:1"]}
    with Fleet(tmp_path / "data", *FLAGS, *devices, HEADRACE_FAILPOINTS=slow) as fleet:
        helped, notes = run_elastic(fleet, spec_of, placement=apart)
    assert any(helped[2:]), notes


@pytest.mark.nightly  # test_helpers has it in virtual time; the helper beside it contributes here
def test_the_only_rollout_s_core_helps_once_all_is_decoded(tmp_path, spec_of):
    slow = "trainer.micro=delay:0.5"
    with Fleet(tmp_path / "data", *FLAGS, HEADRACE_FAILPOINTS=slow) as fleet:
        helped, notes = run_elastic(
            fleet,
            spec_of,
            rollouts=1,
            placement={"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]},
        )
    assert helped[:2] == [{}, {}] and any(helped[2:]), notes


@pytest.mark.nightly  # test_helpers kills helpers at every call, in virtual time
def test_the_owners_learn_what_a_killed_helper_had(tmp_path, spec_of):
    """Each helper dies as it tells of its gradient, which is the last that it does."""
    script = f"{SLOW};trainer.contribution.before_reply=kill"
    with Fleet(tmp_path / "data", *FLAGS, HEADRACE_FAILPOINTS=script) as fleet:
        helped, notes = run_elastic(fleet, spec_of)
    assert helped == [{}] * STEPS
    assert any("gives nothing to step" in note for note in notes), notes


@pytest.mark.nightly  # test_borrowing has it in virtual time, with kills
def test_the_trainers_core_decodes_until_the_trainer_has_work(wide, spec_of):
    """Few answers fit a rollout at once, so that a second one halves the time until the last; learning takes little."""
    wide.ready("rollout-0", "rollout-1", "trainer-0", "trainer-1")
    spec = spec_of(
        steps=STEPS,
        sampling__max_new_tokens=200,
        algorithm={"prompts_per_step": GROUPS, "group_size": SAMPLES},
        placement={"mode": "disaggregated", "rollout": ["cpu:0"], "trainer": ["cpu:1"]},
        rollout={"instances": 1, "helpers": 1, "max_concurrency": 4},
        trainer={"micro_batch_tokens": 1024, "warmup": {"steps": 0}},
        reward={"scorers": [{"name": "length", "options": {"target": 1, "limit": 200}}]},
        checkpoint={"enabled": False},
    )
    run = wide.succeed(wide.submit(spec))
    found = audit(wide, run)
    assert len(found.trained) == STEPS * GROUPS * SAMPLES and run.recoveries == 0
    assert all(certificate.max_staleness == 0 for certificate in found.live)
    url = f"{wide.url}/v1/runs/{run.id}/timeline"
    holds = httpx.get(url, params={"steps": 200}, headers=wide.headers, trust_env=False).json()["holds"]
    decodes = [hold for hold in holds if hold["stage"] == "decode"]
    notes = [event.data["text"] for event in wide.events(run) if event.type == "noted"]
    assert decodes and {device for hold in decodes for device in hold["devices"]} == {
        device for hold in holds if hold["stage"] == "learn" for device in hold["devices"]
    }, (holds, notes)
