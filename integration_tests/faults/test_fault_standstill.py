"""Processes that stand still (SIGSTOP), epochs out of nowhere and old copies of the store, on real fleets.

Leases live for six seconds here, so that a standstill of ten is a long one.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest
from harness.fleet import Fleet
from harness.ledger import audit
from harness.processes import words_of
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc

TTL_S, BEAT_S, STANDSTILL_S = 6.0, 1.0, 10.0
WORKERS = ("rollout-0", "trainer-0", "reward-0")
PROCESSES = (*WORKERS, "coordinator", "store")
STEPS = 5


@pytest.fixture(scope="module")
def quick(tmp_path_factory, shared_fleet):
    """A fleet whose leases are short, with no other one beside it."""
    shared_fleet.close()
    times = {"HEADRACE_LEASE_TTL_S": str(TTL_S), "HEADRACE_HEARTBEAT_S": str(BEAT_S)}
    with Fleet(tmp_path_factory.mktemp("quick") / "data", "--simulator", "0", **times) as fleet:
        yield fleet


def stand_still(fleet: Fleet, instance: str, seconds: float) -> None:
    fleet.kill(instance, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        fleet.kill(instance, signal.SIGCONT)


def healthz(fleet: Fleet) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{fleet.url}/healthz", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.nightly  # below, in the middle of work
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_coordinator_that_stood_still_kills_nobody_and_rewinds_nothing(quick, spec_of, gate, mode):
    quick.ready(*WORKERS)
    before = {name: quick.pid_of(name) for name in PROCESSES}
    gate.hold_after(2 * BATCH + 3)
    run = quick.submit(spec_of(steps=STEPS, reward=gate.reward, placement__mode=mode))
    gate.wait_until_held()
    quick.reach(run, 2)
    stand_still(quick, "coordinator", STANDSTILL_S)
    time.sleep(2.0)
    gate.open()
    found = audit(quick, quick.succeed(run))
    assert {name: quick.pid_of(name) for name in PROCESSES} == before
    assert len(found.trained) == STEPS * BATCH and found.rewinds == 0 and not found.abandoned


@pytest.mark.nightly  # quick: test_standstill.py, and the seeds in which clocks stand still
def test_a_coordinator_that_stands_still_in_the_middle_of_work_kills_nobody_and_rewinds_nothing(
    quick, spec_of
):
    quick.ready(*WORKERS)
    before = {name: quick.pid_of(name) for name in PROCESSES}
    steps = 20
    run = quick.submit(spec_of(steps=steps, placement__mode="disaggregated"))
    quick.reach(run, 2)
    stand_still(quick, "coordinator", STANDSTILL_S)
    found = audit(quick, quick.succeed(run))
    assert {name: quick.pid_of(name) for name in PROCESSES} == before
    assert len(found.trained) == steps * BATCH and found.rewinds == 0 and not found.abandoned


@pytest.mark.parametrize("instance", ["trainer-0", pytest.param("rollout-0", marks=pytest.mark.nightly)])
def test_a_stopped_worker_is_shown_as_silent_before_it_is_killed(quick, spec_of, gate, instance):
    quick.ready(*WORKERS)
    gate.hold_after(2 * BATCH + 3)
    run = quick.submit(spec_of(steps=STEPS, reward=gate.reward))
    gate.wait_until_held()
    stopped = quick.kill(instance, signal.SIGSTOP)

    def shown():
        view = next((item for item in quick.client.instances() if item.name == instance), None)
        waiting = quick.client.get(run.id).waiting_for
        named = [text for text in waiting if text.startswith(f"{instance} has been silent for ")]
        return view and view.state == "SILENT" and named

    (sentence,) = wait_for(shown, f"{instance} to be shown as silent", TTL_S)
    assert sentence.endswith(f"it is killed at {TTL_S:.0f} s")
    assert psutil.pid_exists(stopped), "it is shown before it is killed"
    quick.replaced(instance, stopped)
    gate.open()
    assert len(audit(quick, quick.succeed(run)).trained) == STEPS * BATCH


def register(fleet: Fleet, incarnation: str, epoch: int, store_id: str) -> fleet_pb2.RegisterResponse:
    """A Register call that claims to have seen an epoch."""
    words = words_of(fleet.process("coordinator"))
    token = (fleet.data_dir / "token").read_text().strip()
    request = fleet_pb2.RegisterRequest(
        instance="stranger",
        incarnation=incarnation,
        kind=fleet_pb2.SERVICE_KIND_REWARD,
        address="127.0.0.1:1",
        host="elsewhere",
        coordinator_epoch=epoch,
        store_id=store_id,
    )
    with grpc.insecure_channel(words[words.index("--listen") + 1]) as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        return stub.Register(request, timeout=30, metadata=[("authorization", f"Bearer {token}")])


def test_a_register_call_with_a_high_epoch_ends_no_coordinator(quick, spec_of, gate):
    quick.ready(*WORKERS)
    coordinator = quick.pid_of("coordinator")
    store_id = (quick.data_dir / "store_id").read_text().split()[0]
    gate.hold_after(2 * BATCH + 3)
    run = quick.submit(spec_of(steps=STEPS, reward=gate.reward))
    gate.wait_until_held()
    for epoch, store in ((1000, "f" * 32), (1000, ""), (1 << 62, store_id), (-1, store_id)):
        with pytest.raises(grpc.RpcError) as refused:
            register(quick, "foreign", epoch, store)
        assert "stranger" in refused.value.details() or "coordinator_epoch" in refused.value.details()
    assert register(quick, "ours", 1000, store_id).coordinator_epoch == 1001
    gate.open()
    found = audit(quick, quick.succeed(run))
    assert found.rewinds == 0 and len(found.trained) == STEPS * BATCH
    assert quick.pid_of("coordinator") == coordinator
    assert healthz(quick)[1]["coordinator_epoch"] == 1001


def test_health_says_that_the_store_stands_still_and_that_a_task_ended(quick):
    wait_for(lambda: healthz(quick)[0] == 200, "health")
    _, health = healthz(quick)
    assert health["store_writable"] and set(health["tasks"]) >= {"event_log", "claim", "sweep", "schedule"}
    quick.kill("store", signal.SIGSTOP)
    try:
        _, health = wait_for(lambda: (found := healthz(quick))[0] == 503 and found, "a bad health", 60)
        assert "the store (Redis)" in health["reason"] and not health["store_writable"]
    finally:
        quick.kill("store", signal.SIGCONT)
    wait_for(lambda: healthz(quick)[0] == 200, "health again")


@pytest.mark.nightly  # test_store_trouble serves older copies on a real store, without a fleet
def test_an_older_copy_of_the_store_serves_and_its_run_goes_on(quick, spec_of, gate, tmp_path):
    quick.ready(*WORKERS)
    gate.hold_after(2 * BATCH + 3)
    # A checkpoint's ledger repeats the steps since the oldest one that is kept.
    run = quick.submit(spec_of(steps=8, reward=gate.reward, checkpoint__keep=10))
    gate.wait_until_held()
    quick.reach(run, 2)
    quick.down()
    copy_store(quick, tmp_path / "copy")
    quick.up()
    gate.open()
    quick.reach(run, 5)
    quick.down()
    seen = marks(quick)
    shutil.rmtree(quick.data_dir / "redis")
    shutil.copytree(tmp_path / "copy", quick.data_dir / "redis")
    quick.up()
    ended = quick.succeed(run)
    assert len(audit(quick, ended).trained) == 8 * BATCH
    assert "older copy" in quick.log("coordinator")
    assert healthz(quick)[1]["coordinator_epoch"] > seen[0] and marks(quick)[1] >= seen[1]


def copy_store(fleet: Fleet, target: Path) -> None:
    shutil.copytree(
        fleet.data_dir / "redis", target, ignore=lambda _, names: [n for n in names if ".sock" in n]
    )


def marks(fleet: Fleet) -> tuple[int, int]:
    """Highest epoch and event number that the data directory has seen."""
    _, epoch, sequence = (fleet.data_dir / "store_id").read_text().split()
    return int(epoch), int(sequence)
