"""The scaler between a coordinator and an orchestrator: a real stream. Kubernetes: integration_tests/deploy."""

import pytest
from headrace.coordinator.v1 import fleet_pb2
from headrace_servicekit.process.supervisor_link import SupervisorLink
from headrace_servicekit.scaling.__main__ import Scaler, main, numbers_of


class Cluster:
    """An orchestrator that does as it is told."""

    kinds = ("rollout", "trainer")

    def __init__(self):
        self.there, self.scaled, self.is_blind = set(), {}, False

    def scale(self, kind, containers):
        self.scaled[kind] = containers
        return ""

    def hosts(self):
        if self.is_blind:
            raise OSError("pods is forbidden")
        return set(self.there)


@pytest.fixture
def cluster():
    return Cluster()


async def test_hosts_that_were_seen_and_are_gone_are_told_until_they_are_back(
    cluster, servers, new_fleet, until
):
    scaler = Scaler(cluster, {})
    cluster.there = {"post-rollout-a", "post-rollout-b"}
    assert await scaler.look() == []
    cluster.there = {"post-rollout-c"}
    assert await scaler.look() == ["post-rollout-a", "post-rollout-b"]
    cluster.is_blind = True
    assert await scaler.look() == [], "who cannot see says nothing"
    cluster.is_blind, cluster.there = False, {"post-rollout-a"}
    gone = await scaler.look()
    assert gone == ["post-rollout-b", "post-rollout-c"]
    fleet = new_fleet()
    _, address = await servers(fleet)
    link = SupervisorLink("kubernetes", address, None, scaler)
    link.start()
    await until(lambda: not link.away, "the stream")
    link.report_gone(gone)

    def told():
        return [
            list(each.hosts_gone.hosts)
            for each in fleet.supervised
            if each.WhichOneof("event") == "hosts_gone"
        ]

    assert await until(told, "the report") == [gone]
    await link.stop()


async def test_the_coordinators_number_of_instances_becomes_a_number_of_pods(
    cluster, servers, new_fleet, until
):
    fleet = new_fleet()
    _, address = await servers(fleet)
    link = SupervisorLink("kubernetes", address, None, Scaler(cluster, {"trainer": 4}))
    link.start()
    asked = {"a": ("TRAINER", 8), "b": ("TRAINER", 6), "c": ("ROLLOUT", 3), "d": ("REWARD", 1)}
    for request, (kind, count) in asked.items():
        number = getattr(fleet_pb2, f"SERVICE_KIND_{kind}")
        scale = fleet_pb2.Scale(request_id=request, kind=number, count=count)
        fleet.supervisor_commands.put_nowait(fleet_pb2.SuperviseResponse(scale=scale))

    def answers():
        told = [each.scale_result for each in fleet.supervised if each.WhichOneof("event") == "scale_result"]
        return {each.request_id: each.error for each in told} if len(told) == len(asked) else None

    found = await until(answers, "four answers")
    await link.stop()
    assert found["a"] == found["c"] == ""
    assert "ask for a multiple of 4" in found["b"]
    assert "reward cannot be scaled here" in found["d"]
    assert cluster.scaled == {"trainer": 2, "rollout": 3}
    (table,) = [each.processes for each in fleet.supervised if each.WhichOneof("event") == "processes"][:1]
    assert len(table.scalable_kinds) == 2 and not table.processes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--targets", "rollout=pods/x"], "write deployments/NAME or statefulsets/NAME"),
        (["--token-file", "/nowhere"], "token file /nowhere"),
        (["--targets", "rollout=deployments/x"], "name the namespace of the fleet's pods"),
        (["--namespace", "training"], "run in a pod with a service account, or set KUBECONFIG"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    assert main(["kubernetes", *arguments]) == 2
    assert words in capsys.readouterr().err
    with pytest.raises(ValueError, match="write KIND=NUMBER"):
        numbers_of("trainer=all")
    assert numbers_of("trainer=4,rollout=1") == {"trainer": 4, "rollout": 1}
