"""Which instances the nodes of a job have; addresses and ports of its head."""

import socket

import pytest
from headrace_cli.errors import CommandError
from headrace_clusters.slurm.addresses import free_ports, own_address
from headrace_clusters.slurm.layout import lay_out
from headrace_clusters.slurm.programs import seconds
from headrace_clusters.slurm.script import JobOptions
from headrace_schema.spec import RunSpec


def spec(ranks=1, instances=1, mode="auto", size=1):
    return RunSpec.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": "copy_digits"},
            "algorithm": {"prompts_per_step": 96},
            "reward": {"scorers": [{"name": "exact"}]},
            "trainer": {"ranks": ranks},
            "rollout": {
                "instances": instances,
                "engine_options": {"tensor_parallel_size": size} if size > 1 else {},
            },
            "placement": {"mode": mode},
        }
    )


@pytest.mark.parametrize(
    ("run", "nodes", "gpus", "trainers", "rollouts"),
    [
        (spec(), 1, 0, [1], [1]),
        (spec(2, 3), 2, 0, [2, 0], [2, 2]),
        (spec(), 1, 1, [1], [1]),
        (spec(8, 32), 4, 8, [8, 0, 0, 0], [8, 8, 8, 8]),
        (spec(12, 6), 3, 6, [6, 6, 0], [6, 6, 6]),
        (spec(4, 12, "disaggregated"), 2, 8, [4, 0], [4, 8]),
        (spec(8, 8, "disaggregated"), 2, 8, [8, 0], [0, 8]),
        (spec(8, 2, size=4), 1, 8, [8], [2]),
    ],
)
def test_nodes_hold_what_the_run_takes_with_any_number_of_gpus(run, nodes, gpus, trainers, rollouts):
    found = lay_out(run, JobOptions(), nodes, gpus)
    assert (found.trainers, found.rollouts) == (trainers, rollouts)


def test_numbers_that_are_named_stand():
    found = lay_out(spec(2), JobOptions(rollout=3, trainer=1, trainer_nodes=2), 3, 8)
    assert (found.trainers, found.rollouts) == ([1, 1, 0], [3, 3, 3])
    assert found.counts(0, 2) == {"rollout": 3, "trainer": 1, "reward": 1, "simulator": 2}
    assert found.counts(2, 2) == {"rollout": 3, "trainer": 0, "reward": 0, "simulator": 0}


KNOWN = {"172.17.0.1": "docker0", "10.0.0.5": "eth0", "fd00::5": "eth0", "fd00:1b::5": "ib0"}


@pytest.mark.parametrize(
    ("interface", "told", "address"),
    [
        ("", "10.0.0.5", "10.0.0.5"),
        ("", "fd00::5", "fd00::5"),
        ("", "no-such-host.invalid", "172.17.0.1"),
        ("eth0", "", "10.0.0.5"),
        ("ib0", "10.0.0.5", "fd00:1b::5"),
    ],
)
def test_the_head_listens_where_slurm_reaches_its_node_or_at_a_named_interface(interface, told, address):
    assert own_address(interface, told, KNOWN) == address


def test_an_interface_without_an_address_is_told_of_with_those_that_have_one():
    with pytest.raises(
        CommandError, match=r"--interface: 'ib1' of this node has no address; name one of: docker0, eth0"
    ):
        own_address("ib1", "", KNOWN)
    with pytest.raises(CommandError, match="has no address that other nodes reach"):
        own_address("", "", {})


def test_jobs_side_by_side_have_ports_of_their_own():
    first, second = (free_ports("127.0.0.1", job, 0) for job in (4100, 4101))
    assert second >= first + 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        assert free_ports("127.0.0.1", 4100, 0) != first
    assert free_ports("127.0.0.1", 4100, 8470) == 8470


def test_times_are_read_as_slurm_writes_them():
    read = [
        seconds(text) for text in ("90", "10:30", "12:00:00", "2-0", "1-12:30", "1-00:00:01", "UNLIMITED")
    ]
    assert read == [5400, 630, 43200, 172800, 131400, 86401, float("inf")]
    for text in ("", "1:2:3:4", "soon"):
        with pytest.raises(ValueError):
            seconds(text)
