"""The pod scaler against an API server that allows what the chart's Role allows, and takes what the schemas take."""

from __future__ import annotations

import pytest
from harness.chart import VERSIONS, checker, variables, workloads
from harness.kubernetes_api import KubernetesApi
from headrace_servicekit.scaling.__main__ import Scaler, numbers_of, orchestrator_of, parse


@pytest.fixture(params=VERSIONS)
def api(request, tools, render, tmp_path, monkeypatch):
    """The cluster of the 8-GPU values, with its pods, as the account of the scaler's pod."""
    objects = render("8-gpu", "--set=scaler.enabled=true")
    (role,) = [each for each in objects if each["kind"] == "Role"]
    made = KubernetesApi("training", role["rules"], checker(tools, request.param))
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet"):
            made.replicas[f"{each['kind'].lower()}s/{each['metadata']['name']}"] = each["spec"]["replicas"]
    pods = workloads(objects)
    for name, value in variables(pods["scaler"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(made.write_kubeconfig(tmp_path / "config")))
    made.labels = {kind: pod["metadata"]["labels"] for kind, pod in pods.items()}
    yield made
    made.close()


@pytest.fixture
def scaler(api):
    """What the variables of the scaler's pod make."""
    arguments = parse(["kubernetes"])
    return Scaler(orchestrator_of(arguments), numbers_of(arguments.instances))


async def test_numbers_of_instances_become_numbers_of_pods(api, scaler):
    assert set(scaler.scalable_kinds) == {"rollout", "reward", "simulator", "trainer"}
    for count in (6, 3, 0):
        assert await scaler.scale("rollout", count) == ""
        assert api.replicas["deployments/post-rollout"] == count
    assert await scaler.scale("trainer", 8) == "", "the values give four ranks a pod"
    assert api.replicas["statefulsets/post-trainer"] == 2
    assert "ask for a multiple of 4" in await scaler.scale("trainer", 6)
    assert api.replicas["deployments/post-coordinator"] == 1


async def test_pods_of_this_fleet_that_are_gone_are_told(api, scaler):
    labels = api.labels["rollout"]
    others = {**labels, "app.kubernetes.io/instance": "another"}
    first, second = api.pod("post-rollout-a", labels), api.pod("post-rollout-b", labels, "Pending")
    stranger = api.pod("another-rollout-a", others)
    api.pods = [first, second, stranger]
    assert await scaler.look() == []
    api.pods = [api.pod("post-rollout-a", labels, "Failed")]
    assert await scaler.look() == ["post-rollout-a", "post-rollout-b"], "one that has ended runs no process"
    api.rules = [rule for rule in api.rules if "pods" not in rule["resources"]]
    assert await scaler.look() == [], "who cannot see says nothing"


async def test_a_refusal_says_whose_it_is_and_what_is_missing(api, scaler, tmp_path):
    api.most = 4
    assert "Kubernetes refuses (422): spec.replicas: exceeded quota: gpus" in await scaler.scale("rollout", 9)
    rules, api.rules = api.rules, []
    assert "its Role needs `patch` on the subresource scale" in await scaler.scale("rollout", 2)
    api.rules = rules
    del api.replicas["deployments/post-reward"]
    assert 'Kubernetes refuses (404): deployments "post-reward" not found' in await scaler.scale("reward", 2)
    api.write_kubeconfig(tmp_path / "config", token="of-yesterday")
    again = Scaler(orchestrator_of(parse(["kubernetes"])), {})
    assert "Kubernetes refuses (401): Unauthorized" in await again.scale("rollout", 2)
    api.close()
    assert "Kubernetes' API cannot be asked" in await scaler.scale("rollout", 2)


async def test_the_role_allows_nothing_else(api):
    """What a scaler that was taken over could ask for."""
    asked = (
        ("PATCH", "/apis/apps/v1/namespaces/training/deployments/post-coordinator/scale"),
        ("PATCH", "/apis/apps/v1/namespaces/training/deployments/post-rollout"),
        ("PATCH", "/apis/apps/v1/namespaces/other/deployments/post-rollout/scale"),
        ("GET", "/api/v1/namespaces/training/secrets/post-secrets"),
        ("GET", "/api/v1/namespaces/training/pods/post-trainer-0"),
    )
    for method, url in asked:
        code, status = api.answer(method, url, "application/merge-patch+json", {"spec": {"replicas": 0}})
        assert code == 403 and "is forbidden" in status["message"], url
