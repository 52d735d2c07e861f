"""Fleets on Ray with one raylet: the quick twin of test_ray_fleets. The services are those that start in a second."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from harness.processes import clean_environment, words_of
from harness.ray_cluster import ray_cluster
from harness.ray_fleets import RayFleet
from harness.waiting import wait_for

FEW = ("--rollout", "0", "--trainer", "0", "--simulator", "0")
TWO = ("--nodes", "2", "--cpus", "1", "--pack")


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(2, num_gpus=1) as made:
        yield made


@pytest.fixture
def fleet(cluster, tmp_path):
    made = RayFleet(cluster, tmp_path)
    yield made
    made.headrace("down")
    made.assert_gone(60)


def named_actors(cluster):
    """Names of the living actors, as Ray's dashboard lists them."""
    code = "import ray, json; ray.init(logging_level='ERROR'); print(json.dumps(ray.util.list_named_actors(True)))"
    environment = clean_environment(RAY_ADDRESS=cluster.address)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    return [each["name"] for each in json.loads(done.stdout.splitlines()[-1])]


def test_a_fleet_on_ray_is_named_joins_again_and_ends_with_its_driver(fleet, cluster):
    told = fleet.up(*TWO, *FEW)
    assert [each["name"] for each in told["instances"]] == ["reward-0"]
    assert fleet.nodes() == {"head": "up", "node-1": "up"}
    names = " | ".join(sorted(named_actors(cluster)))
    assert "head: coordinator, reward-0" in names and "node-1: no services yet" in names
    assert fleet.json("instances")["instances"][0]["devices"][0].endswith("cpu:0")
    (join,) = [each for each in fleet.processes() if "join" in words_of(each)]
    assert words_of(join)[words_of(join).index("--devices") + 1] == "cpu:1", (
        "two nodes of a machine share a core"
    )

    actor = join.parent()
    if os.geteuid() == 0:
        assert join.nice() == actor.parent().nice() < actor.nice(), "Ray's workers give way to everything"
    actor.send_signal(signal.SIGKILL)
    wait_for(lambda: not join.is_running(), "the end of what the actor had started", 60)
    wait_for(
        lambda: [each for each in fleet.processes() if "join" in words_of(each) and each.pid != join.pid],
        "node-1 to join again",
        60,
    )
    fleet.wait_for_nodes(head="up", node_1="up")

    os.kill(told["launcher_pid"], signal.SIGKILL)
    fleet.assert_gone(30)


def refusal(fleet, *words, **environment):
    """What a command that is refused says, in its one sentence."""
    done = fleet.headrace("up", "--on", *words, "--json", timeout_s=90, **environment)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return json.loads(done.stdout)["error"]["message"]


def test_what_a_cluster_does_not_have_is_refused_at_once(fleet, cluster):
    many = refusal(fleet, "ray", "--nodes", "3")
    assert "--nodes: 3 with 1 CPU each" in many and "the Ray cluster has room for 1" in many
    gpus = refusal(fleet, "ray", "--gpus", "8")
    assert "8 GPUs" in gpus and "1 GPU, 2 CPUs" in gpus and "--wait" in gpus
    unseen = refusal(fleet, "ray", "--gpus", "1", *FEW)
    assert unseen.startswith("--gpus: Ray gave 1 GPU of") and "Headrace sees 0 there" in unseen
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = refusal(fleet, f"ray://127.0.0.1:{closed.getsockname()[1]}")
    assert "no Ray cluster answers at ray://127.0.0.1" in nobody and "ray start --head" in nobody
    assert "no cluster that is known here" in refusal(fleet, "rey")
    assert "--nodes: is of a fleet on a cluster" in fleet.headrace("up", "--nodes", "2").stderr
    assert "--devices: is of one host" in refusal(fleet, "ray", "--devices", "cpu:0")


def test_a_cluster_with_another_ray_is_refused_with_both_releases(fleet, cluster):
    from ray._common.usage import usage_constants
    from ray._private import ray_constants
    from ray._raylet import GcsClient

    client = GcsClient(address=cluster.address)
    key, space = usage_constants.CLUSTER_METADATA_KEY, ray_constants.KV_NAMESPACE_CLUSTER
    true = client.internal_kv_get(key, namespace=space)
    assert true
    client.internal_kv_put(
        key, json.dumps({**json.loads(true), "ray_version": "2.9.1"}).encode(), True, namespace=space
    )
    try:
        told = refusal(fleet, "ray")
    finally:
        client.internal_kv_put(key, true, True, namespace=space)
    assert "the cluster runs Ray 2.9.1" in told and "this process Ray 2.60" in told
