"""What a fleet on Ray asks of a cluster and of each of its nodes. Needs no Ray."""

from __future__ import annotations

import pytest
from headrace_cli.commands.starting import ClusterOptions, FleetOptions, NodeOptions, start_on_cluster
from headrace_cli.errors import CommandError
from headrace_clusters.ray.connecting import cluster_address
from headrace_clusters.ray.jobs import words_of
from headrace_clusters.ray.node import put
from headrace_clusters.ray.plan import RayPlan, choose_slots, require_capacity, require_gpus, sized

HEAD = {"address": "10.0.0.1", "port": 8472, "fingerprint": ""}


def node(alive=True, **resources):
    return {"Alive": alive, "NodeManagerAddress": "10.0.0.9", "Resources": resources}


def plan(**fields):
    return RayPlan(**{"address": "auto", "data_dir": "/d", "node_dir": "/n", **fields})


def test_a_plan_reads_back_what_it_wrote():
    made = plan(nodes=3, gpus=8, words=["--engine", "vllm"])
    assert RayPlan.from_json(made.to_json()) == made


def test_a_node_gets_what_so_many_nodes_have_each():
    nodes = [node(CPU=4.0), node(CPU=96.0, GPU=8.0), node(CPU=64.0, GPU=4.0), node(False, CPU=1.0, GPU=16.0)]
    assert (sized(plan(nodes=2), nodes).gpus, sized(plan(nodes=2), nodes).cpus) == (4, 4)
    assert (sized(plan(nodes=3), nodes).gpus, sized(plan(nodes=3), nodes).cpus) == (0, 4)
    assert sized(plan(nodes=2, gpus=2, cpus=9), nodes).cpus == 9


def test_too_little_is_refused_with_what_the_cluster_has():
    nodes = [node(CPU=96.0, GPU=8.0), node(CPU=96.0, GPU=4.0)]
    require_capacity(plan(nodes=2, gpus=4, cpus=4), nodes)
    require_capacity(plan(nodes=3, gpus=4, cpus=4, pack=True), nodes)
    with pytest.raises(
        CommandError, match=r"--nodes: 3 with 4 GPUs, 4 CPUs each are asked for, .* room for 2"
    ) as few:
        require_capacity(plan(nodes=3, gpus=4, cpus=4), nodes)
    assert "10.0.0.9: 8 GPUs, 96 CPUs" in few.value.message and few.value.exit_code == 2
    with pytest.raises(CommandError, match="Ray gave 8 GPUs of h, and Headrace sees 2 there"):
        require_gpus({"gpus_given": 8, "gpus_seen": 2, "host": "h"}, 8)


def test_nodes_of_one_machine_share_no_slot_and_may_outnumber_its_cores():
    about = {"cores": [4, 5], "machine_cores": 8}
    assert choose_slots(about, 1, {4}) == ["cpu:5"]
    assert choose_slots(about, 2, {4, 5}) == ["cpu:12", "cpu:13"]
    assert choose_slots(about, 3, set()) == ["cpu:4", "cpu:5", "cpu:12"]


def test_each_node_runs_its_part_and_trainers_are_on_the_first_ones():
    made = plan(trainer_nodes=2, counts={"rollout": 2, "trainer": 1, "reward": 1, "simulator": 0})
    assert made.services_of(0) == "coordinator, rollout-0, rollout-1, trainer-0, reward-0"
    assert made.instances_of(1) == ["rollout-0.node-1", "rollout-1.node-1", "trainer-0.node-1"]
    assert made.instances_of(2) == ["rollout-0.node-2", "rollout-1.node-2"]
    assert made.words_of(0, [], "10.0.0.1", 8472, None)[0] == "up"
    words = made.words_of(2, ["cpu:3"], "10.0.0.3", 0, HEAD)
    assert words[:2] == ["join", "10.0.0.1:8472"] and words[words.index("--name") + 1] == "node-2"
    assert words[words.index("--devices") + 1] == "cpu:3" and "--fingerprint" not in words
    pinned = made.words_of(1, [], "fd00::2", 0, HEAD | {"address": "fd00::1", "fingerprint": "3f"})
    assert pinned[1] == "[fd00::1]:8472" and pinned[pinned.index("--fingerprint") + 1] == "3f"


def test_a_job_has_the_options_that_were_given_and_none_of_the_shell():
    options = FleetOptions(data_dir="/here", rollout=2, scale=["reward=2", "simulator=3"], as_json=True)
    words = words_of(options, NodeOptions(nodes=4, pack=True))
    assert words == [
        "--rollout",
        "2",
        "--scale",
        "reward=2",
        "--scale",
        "simulator=3",
        "--nodes",
        "4",
        "--pack",
    ]


def test_addresses_of_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cluster_address("") == "auto"
    assert cluster_address("head") == "ray://head:10001"
    assert cluster_address("[fd00::1]:7000") == "ray://[fd00::1]:7000"
    with pytest.raises(CommandError, match="--on: 'head:x' is no address"):
        cluster_address("head:x")


def test_secrets_are_files_of_this_user_alone(tmp_path):
    put(tmp_path / "below" / "token", "one")
    put(tmp_path / "below" / "token", "two")
    assert (tmp_path / "below" / "token").read_text() == "two"
    assert (tmp_path / "below" / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        ({"nodes": 2}, {}, "--nodes: is of a fleet on a cluster"),
        ({"on": "rey"}, {}, "--on: 'rey' is no cluster that is known here; write one of: ray"),
        ({"on": "ray"}, {"devices": "gpu:0"}, "--devices: is of one host"),
    ],
)
def test_options_of_up_that_do_not_fit_a_cluster_are_named(cluster, options, said):
    with pytest.raises(CommandError, match=said):
        start_on_cluster(ClusterOptions(**cluster), FleetOptions(**options))
    assert not start_on_cluster(ClusterOptions(), FleetOptions())
