"""Runs over three raylets: nodes die, are drained and come back, the driver is killed. Quick twin: test_ray_quick."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from harness.ledger import audit
from harness.ray_cluster import RayCluster, ray_cluster
from harness.ray_fleets import RayFleet
from harness.specs import small_spec
from harness.waiting import wait_for
from headrace_servicekit.rpc.addresses import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
START_S = 400.0
SERVICES = ("--rollout", "1", "--trainer", "1", "--reward", "1", "--simulator", "0", "--timeout", "300")


@pytest.fixture
def fleet_on(tmp_path):
    """Makes the fleet of a cluster, which is down at the end, with nothing left."""
    made: list[RayFleet] = []

    def make(cluster: RayCluster) -> RayFleet:
        made.append(RayFleet(cluster, tmp_path))
        return made[-1]

    yield make


def spec(model: Path, steps: int, rollouts: int) -> dict:
    more = {
        "placement": {"mode": "disaggregated"},
        "rollout__instances": rollouts,
        "evaluation": {"every": 0},
    }
    return small_spec(model, steps=steps, **more)


def at(fleet: RayFleet, run: str, step: int):
    """The run once it has committed a step."""

    def look():
        now = fleet.client.get(run)
        assert now.state != "FAILED", f"{now.reason}\n{fleet.logs()}"
        return now if now.step >= step else None

    return wait_for(look, f"step {step}", 240)


def succeeded(fleet: RayFleet, run: str):
    """The run once it has succeeded, with no slot trained twice."""
    ended = fleet.client.wait(run, 400)
    assert ended.state == "SUCCEEDED", f"{ended.state}: {ended.reason}\n{fleet.logs()}"
    found = audit(fleet, ended)
    assert len(found.trained) + len(found.dropped) == ended.counts.frontier
    return found


def test_a_run_over_three_nodes_outlives_one_and_the_fleet_ends_with_its_driver(fleet_on, tiny_model):
    with ray_cluster(2, 2, 2) as cluster:
        fleet = fleet_on(cluster)
        told = fleet.up("--nodes", "3", "--cpus", "2", *SERVICES)
        names = {each["name"] for each in told["instances"]}
        assert {"trainer-0", "rollout-0", "rollout-0.node-1", "rollout-0.node-2"} <= names
        run = fleet.client.submit(spec(tiny_model, 60, 3)).id
        at(fleet, run, 3)
        victim = next(number for number in (1, 2) if fleet.member_of(number) != "head")
        lost = fleet.member_of(victim)
        cluster.kill(victim)
        wait_for(lambda: fleet.nodes()[lost] == "lost", f"{lost} to be lost", 120)
        step = at(fleet, run, fleet.client.get(run).step + 3).step
        cluster.add(2)
        wait_for(lambda: fleet.nodes()[lost] == "up", f"{lost} to come back", 200)
        assert step < 60
        succeeded(fleet, run)

        os.kill(told["launcher_pid"], signal.SIGKILL)
        fleet.assert_gone(30)
        fleet.headrace("down")


def test_more_nodes_join_and_a_drained_one_leaves_in_order(fleet_on, tiny_model):
    with ray_cluster(2, 2) as cluster:
        fleet = fleet_on(cluster)
        fleet.up("--nodes", "2", "--cpus", "2", *SERVICES)
        fleet.json("ray", "nodes", "3")
        wait_for(lambda: "node-2" in fleet.nodes(), "node-2 to be asked for", 60)
        run = fleet.client.submit(spec(tiny_model, 40, 2)).id
        at(fleet, run, 2)
        cluster.add(2)
        fleet.wait_for_nodes(200, head="up", node_1="up", node_2="up")
        wait_for(
            lambda: any(each.name == "rollout-0.node-2" for each in fleet.client.instances()),
            "its rollout",
            60,
        )
        drain(cluster, 2)
        wait_for(lambda: fleet.nodes()["node-2"] == "lost", "node-2 to leave", 120)
        why = next(each["why"] for each in fleet.json("ray", "nodes")["nodes"] if each["node"] == "node-2")
        assert "Ray says that its node goes away" in why
        assert not any(each.name == "rollout-0.node-2" for each in fleet.client.instances())
        succeeded(fleet, run)
        assert fleet.headrace("down").returncode == 0
        fleet.assert_gone(30)


def drain(cluster: RayCluster, number: int) -> None:
    """The notice that a node is to be preempted in five minutes, as a cloud's agent gives it."""

    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int((time.time() + 300) * 1000)
    taken, why = GcsClient(address=cluster.address).drain_node(
        cluster.node_id(number), reason, "preempted", deadline
    )
    assert taken, why


def test_a_head_whose_node_dies_goes_on_elsewhere_with_files_that_all_nodes_see(fleet_on, tiny_model):
    with ray_cluster(0, 2, 2) as cluster:
        fleet = fleet_on(cluster)
        fleet.up("--nodes", "2", "--cpus", "2", *SERVICES)
        run = fleet.client.submit(spec(tiny_model, 40, 2)).id
        at(fleet, run, 5)
        victim = next(number for number in (1, 2) if fleet.member_of(number) == "head")
        cluster.kill(victim)
        cluster.add(2)
        succeeded(fleet, run)
        fleet.headrace("down")
        fleet.assert_gone(30)


def test_a_ray_job_makes_one_run_and_leaves_nothing(fleet_on, tiny_model, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(spec(tiny_model, 3, 1)))
    with ray_cluster(2, dashboard=True) as cluster:
        fleet = fleet_on(cluster)
        address = f"http://{cluster.cluster.webui_url}"
        words = ("--cpus", "2", "--node-dir", str(fleet.node_dir), *SERVICES)
        done = fleet.headrace(
            "ray", "submit", folder / "run.yaml", "--address", address, *words, timeout_s=500
        )
        assert done.returncode == 0, done.stdout + done.stderr + fleet.logs()
        assert "SUCCEEDED" in done.stdout
        fleet.assert_gone(30)
        (folder / "bad.yaml").write_text("steps: none\n")
        bad = fleet.headrace(
            "ray", "submit", folder / "bad.yaml", "--address", address, *words, timeout_s=500
        )
        assert bad.returncode == 1 and "steps" in bad.stdout, bad.stdout + bad.stderr
        fleet.assert_gone(30)


def test_ray_client_reaches_a_cluster_from_elsewhere(fleet_on):
    port = free_port()
    with ray_cluster(2, ray_client_server_port=port) as cluster:
        fleet = fleet_on(cluster)
        few = ("--rollout", "0", "--trainer", "0", "--simulator", "0")
        where = (
            f"ray://127.0.0.1:{port}",
            "--node-dir",
            str(fleet.node_dir),
            "--cpus",
            "1",
            "--tls",
            "--pack",
            "--nodes",
            "2",
        )
        told = fleet.json("up", "--on", *where, *few)
        assert told["url"].startswith("https:")
        assert [each["name"] for each in told["instances"]] == ["reward-0"]
        os.kill(told["launcher_pid"], signal.SIGKILL)
        fleet.assert_gone(60)
        fleet.json("up", "--on", *where, *few)
        assert fleet.nodes() == {"head": "up", "node-1": "up"}
        assert fleet.headrace("down").returncode == 0
        fleet.assert_gone(30)
