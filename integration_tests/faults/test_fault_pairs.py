"""Each pair of services is cut, slowed and reset under load: the run goes on, and no slot is trained twice.

Each service lives in a network namespace of its own, as on a host, and reaches the others through a switch that breaks
what it is told to. Coordinator and store share one. Its quick twin is test_fault_wires.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest
from harness.hosts import Cable, Host, at, can_make_hosts, hosts, options, ready, submit
from harness.specs import small_spec

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
]
CUT_S, RESETS_S = 30.0, 10.0
KINDS = {
    "coordinator": {},
    "trainer": {"trainer": 1},
    "one": {"rollout": 1},
    "two": {"rollout": 1},
    "reward": {"reward": 1},
}
PAIRS = (
    ("coordinator", "trainer"),
    ("coordinator", "one"),
    ("coordinator", "reward"),
    ("trainer", "one"),
    ("one", "two"),
)
"""Those that speak: orders, sessions, weights from the trainer, weights from rollout to rollout."""


@pytest.fixture
def fleet(tmp_path, tiny_model) -> Iterator[tuple[dict[str, Host], str]]:
    """The hosts by name, and a run among them that has made steps."""
    with hosts(tmp_path, *KINDS, cable=Cable(1000.0, 1.0), own_cores=True) as found:
        by_name = {host.name: host for host in found}
        head = by_name["coordinator"]
        by_name["trainer"].sees(head.data_dir)
        head.json("up", "--listen", head.address, "--devices", "cpu:0", *options({}))
        for number, (name, counts) in enumerate(KINDS.items()):
            if not counts:
                continue
            host = by_name[name]
            shutil.copy(head.data_dir / "token", host.data_dir / "head-token")
            words = (
                "--name",
                name,
                "--token-file",
                str(host.data_dir / "head-token"),
                "--devices",
                f"cpu:{number % 2}",
            )
            host.json("join", head.address, *words, *options(counts))
        ready(head, "trainer-0.trainer", "rollout-0.one", "rollout-0.two", "reward-0.reward")
        spec = small_spec(
            tiny_model,
            steps=100_000,
            placement={"mode": "disaggregated"},
            evaluation={"every": 0},
            limits={"recoveries": 100},
            checkpoint={"interval_steps": 20},
        )
        run = submit(head, tmp_path, spec)
        at(head, run, 3)
        yield by_name, run
        head.tell("mend")
        head.json("run", "cancel", run)


def goes_on(head: Host, run: str) -> None:
    """Two more steps, and no slot twice."""
    before = head.json("run", "get", run)
    assert at(head, run, before["step"] + 2, 240.0)["counts"]["duplicates"] == 0


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=map("-".join, PAIRS))
def test_a_run_outlives_each_fault_between_two_services(fleet, a, b):
    by_name, run = fleet
    head, one, other = by_name["coordinator"], by_name[a], by_name[b]
    for ways in (((one, other),), ((other, one),), ((one, other), (other, one))):
        for sender, receiver in ways:
            sender.tell("cut", receiver)
        time.sleep(CUT_S)
        head.tell("mend")
        goes_on(head, run)
    one.tell("delay", other, 200)
    other.tell("delay", one, 200)
    goes_on(head, run)
    head.tell("mend")
    until = time.monotonic() + RESETS_S
    while time.monotonic() < until:
        one.tell("reset", other)
        time.sleep(0.2)
        head.tell("mend")
        time.sleep(0.8)
    goes_on(head, run)
