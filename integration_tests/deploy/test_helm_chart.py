"""The Helm chart, rendered by Helm itself: Kubernetes' schemas take it, and services read every variable of it."""

from __future__ import annotations

import os
import re

import pytest
from harness.chart import VERSIONS, certificate_secrets, checker, schema_name, variables, workloads
from harness.processes import ROOT
from headrace_coordinator.__main__ import parse as parse_coordinator
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config
from headrace_servicekit.lease.devices import instance_count

VALUES = {"1-gpu": 2, "8-gpu": 8, "32-gpu": 32}
"""GPUs that the pods of a file of values ask for; of the first one, two places on one GPU that is shared."""
OPTIONS = {
    "everything": (
        "--set=simulator.replicas=2,storage.files.existingClaim=mine,storage.cache.hostPath=/var/cache/headrace",
        "--set=storage.weights.hostPath=/dev/shm/headrace,podSecurity=privileged,cpuLimits=true",
        "--set=metrics.monitors=true,metrics.rules=true,otlp.endpoint=http://collector:4317",
        "--set=autoscaling.rollout.by=hpa,autoscaling.reward.by=keda,autoscaling.trainer.by=keda",
        "--set=pod.priorityClassName=low,rollout.env.HEADRACE_DRAIN_GRACE_S=5,tls.existing=mine",
        "--set=ingress.enabled=true,ingress.host=api.example,ingress.className=nginx,ingress.tlsSecret=mine",
        "--set=httpRoute.enabled=true,httpRoute.hostnames[0]=api.example,httpRoute.parentRefs[0].name=gate",
        "--set=serviceAccount.create=true,serviceAccount.name=fleet,serviceAccount.annotations.cloud=role",
        '--set-json=networkPolicy.monitoring=[{"namespaceSelector":{"matchLabels":{"name":"monitoring"}}}]',
        '--set-json=networkPolicy.egress.reward=[{"ports":[{"port":443}]}]',
        '--set-json=pod.initContainers=[{"name":"first","image":"busybox","command":["true"]}]',
        '--set-json=pod.topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]',
        '--set-json=pod.extraEnv=[{"name":"HF_TOKEN","valueFrom":{"secretKeyRef":{"name":"mine","key":"hub"}}}]',
        '--set-json=pod.envFrom=[{"configMapRef":{"name":"mine"}}]',
        '--set-json=pod.extraVolumes=[{"name":"more","emptyDir":{}}]',
        '--set-json=pod.extraVolumeMounts=[{"name":"more","mountPath":"/more"}]',
        '--set-json=pod.tolerations=[{"key":"gpu","operator":"Exists"}]',
    ),
    "own redis and secret": (
        "--set=redis.enabled=false,redis.url=redis://store.example:6379/0,secret.existing=mine",
        "--set=networkPolicy.enabled=false,models.tiny=false",
    ),
    "scaler": ("--set=scaler.enabled=true",),
    "own user": ("--set=usersCode.ownUser=true,simulator.replicas=1,podSecurity=privileged",),
    "rdma": (
        "--set=trainer.rdma.resource=rdma/hca,trainer.hostNetwork=true,rollout.rdma.resource=rdma/hca",
        "--set=podSecurity=privileged,networkPolicy.nodes[0]=10.0.0.0/16,kueue.queue=team,kueue.priorityClass=low",
    ),
}
USERS_CODE = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_PTRACE"]
"""What deploy/as_service.sh keeps for a service that gives users' code another user id."""
RDMA = ["IPC_LOCK", "SETGID", "SETUID"]
FLEET = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": "post"}
PORTS = {"rollout": 7000, "trainer": 7100, "reward": 7200, "simulator": 7300}
INSTANCES = ("rollout", "trainer", "reward", "simulator")
CRDS = {
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "TriggerAuthentication",
    "HTTPRoute",
    "Certificate",
    "Issuer",
}
"""Kinds of operators: Kubernetes has no schema of them."""


@pytest.fixture(params=["", *VALUES, *OPTIONS])
def objects(request, render):
    if request.param in OPTIONS:
        return render("", *OPTIONS[request.param])
    return render(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_every_object(objects, tools, version):
    check, seen = checker(tools, version), set()
    for each in objects:
        if each["kind"] not in CRDS:
            check(schema_name(each), each)
            seen.add(each["kind"])
    assert {"Deployment", "StatefulSet", "Service", "PersistentVolumeClaim"} <= seen


def test_every_instance_starts_with_the_variables_that_its_pod_gives(objects, monkeypatch):
    pods = workloads(objects)
    assert {"coordinator", "rollout", "trainer", "reward"} <= pods.keys()
    for kind in INSTANCES:
        if kind not in pods:
            continue
        given = variables(pods[kind])
        with monkeypatch.context() as context:
            for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
                context.delenv(name)
            for name, value in given.items():
                context.setenv(name, value)
            config = parse_instance_config(kind, [])
        assert (config.coordinator, config.listen, config.advertise) == (
            "post-coordinator:8471",
            f"0.0.0.0:{PORTS[kind]}",
            "10.1.2.3",
        )
        metrics = PORTS[kind] + 50
        assert (config.name, config.host, config.metrics_port) == (
            "post-trainer-0",
            "post-trainer-0",
            metrics,
        )
        ports = {port["containerPort"] for port in pods[kind]["spec"]["containers"][0]["ports"]}
        count = instance_count(given["HEADRACE_COUNT"])
        assert ports == {*range(PORTS[kind], PORTS[kind] + count), *range(metrics, metrics + count)}


def test_the_coordinator_starts_with_the_variables_that_its_pod_gives(objects, monkeypatch):
    pod = workloads(objects)["coordinator"]
    for name, value in variables(pod).items():
        monkeypatch.setenv(name, value)
    found = parse_coordinator([])
    assert (found.listen, found.http, str(found.data_dir)) == ("0.0.0.0:8471", "0.0.0.0:8470", "/data")
    assert found.redis.startswith("redis://") and found.lease_ttl == 30 and found.heartbeat == 5
    assert found.sessions_grpc == ""


def test_sessions_speak_grpc_where_that_is_asked_for(render):
    objects = render("", "--set=coordinator.sessionsGrpc=true")
    pod = workloads(objects)["coordinator"]
    assert variables(pod)["HEADRACE_SESSIONS_GRPC"] == "0.0.0.0:8472"
    ports = [each for each in pod["spec"]["containers"][0]["ports"] if each["name"] == "sessions"]
    assert ports == [{"name": "sessions", "containerPort": 8472}]
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    service = found["Service", "post-coordinator"]["spec"]["ports"]
    assert {"name": "sessions", "port": 8472, "targetPort": "sessions"} in service
    policy = found["NetworkPolicy", "post-coordinator"]["spec"]["ingress"]
    assert [{"port": 8472} in each["ports"] for each in policy] == [False, True], (
        "for clients, not for the fleet"
    )


def test_no_variable_of_ours_is_one_that_nobody_reads(objects):
    sources = "".join(
        file.read_text(encoding="utf-8")
        for folder in (ROOT / "libs/servicekit/src", ROOT / "services/coordinator/src")
        for file in folder.rglob("*.py")
    )
    read = {f"HEADRACE_{name.upper()}" for name in InstanceConfig.model_fields}
    sources += (ROOT / "deploy/as_service.sh").read_text(encoding="utf-8")
    read |= set(re.findall(r"HEADRACE_[A-Z_]+[A-Z]", sources))
    for kind, pod in workloads(objects).items():
        unread = {name for name in variables(pod) if name.startswith("HEADRACE_")} - read
        assert not unread, f"{kind}: nobody reads {unread}"


def test_what_pods_name_is_there(objects):
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    outside = {("Secret", "mine"), ("PersistentVolumeClaim", "mine")}
    outside |= {("Secret", name) for name in certificate_secrets(objects)}
    outside |= {("Secret", f"mine-{kind}") for kind in workloads(objects)}
    for kind, pod in workloads(objects).items():
        spec, given = pod["spec"], variables(pod)
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = {
            mount["mountPath"]: volumes[mount["name"]]
            for mount in spec["containers"][0]["volumeMounts"]
            if mount["name"] in volumes
        }
        for volume in volumes.values():
            if "secret" in volume:
                assert ("Secret", volume["secret"]["secretName"]) in names | outside
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names | outside
        for name, value in given.items():
            if name.endswith("_FILE"):
                folder, _, file = value.rpartition("/")
                held = {item["path"] for item in mounts[folder]["secret"]["items"]}
                assert file in held, f"{kind}: {name} names a secret that the pod does not have"
            if name in ("HEADRACE_SHM_DIR", "HEADRACE_DATA_DIR"):
                assert value in mounts, f"{kind}: {name} is no volume"
        for address in (
            given.get("HEADRACE_COORDINATOR"),
            given.get("HEADRACE_REDIS_URL", "").removeprefix("redis://"),
        ):
            host = (address or "").partition(":")[0]
            assert not host.startswith("post-") or ("Service", host) in names


def test_pods_have_no_rights_and_see_only_their_own_secrets(objects, request):
    for kind, pod in workloads(objects).items():
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        held = {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        if request.node.callspec.params["objects"] == "own user" and kind in ("reward", "simulator"):
            held |= {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
            held["capabilities"] = {"drop": ["ALL"], "add": USERS_CODE}
        if request.node.callspec.params["objects"] == "rdma" and kind in ("rollout", "trainer"):
            held |= {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
            held["capabilities"] = {"drop": ["ALL"], "add": RDMA}
        assert container["securityContext"] == held
        assert spec["automountServiceAccountToken"] is (kind == "scaler")
        assert spec["enableServiceLinks"] is False, "Kubernetes' own variables begin with HEADRACE_ too"
        secrets = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "secrets"]
        keys = {item["key"] for secret in secrets for item in secret["items"]}
        allowed = {
            "coordinator": {"fleet-token", "http-token", "redis-password"},
            "redis": {"redis-password"},
        }
        assert keys <= allowed.get(kind, {"fleet-token"})


@pytest.mark.parametrize("values", VALUES)
def test_a_file_of_values_asks_for_its_gpus(render, values):
    found = 0
    for each in render(values):
        if each["kind"] in ("Deployment", "StatefulSet"):
            limits = each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
            gpus = sum(int(number) for name, number in limits.items() if name.startswith("nvidia.com/"))
            found += gpus * each["spec"].get("replicas", 0)
    assert found == VALUES[values]


def test_policies_choose_pods_and_nobody_but_the_coordinator_reaches_the_store(render):
    objects = render("8-gpu")
    components = {*workloads(objects), "simulator", "scaler"}
    policies = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == components | {"deny"}
    assert policies.pop("deny") == {
        "podSelector": {"matchLabels": FLEET},
        "policyTypes": ["Ingress", "Egress"],
    }, "what none of the others allows is denied"
    (store,) = policies["redis"]["ingress"]
    chosen = store["from"][0]["podSelector"]["matchLabels"]
    assert chosen["app.kubernetes.io/component"] == "coordinator"
    assert policies["models"]["ingress"] == []
    assert all({"port": 53, "protocol": "UDP"} in each["egress"][0]["ports"] for each in policies.values())
    assert len(policies["rollout"]["egress"]) == 2, "names, and the fleet: no way out"


def test_numbers_and_truth_values_of_env_are_texts_as_they_were_written(render, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text(
        "rollout: {env: {BIG: 100000000, SMALL: 0.5, NONE: 0, MINUS: -20261128, FLAG: true, OCTAL: '010'}}"
    )
    found = {
        item["name"]: item["value"]
        for each in render("", "--values", str(file))
        if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-rollout")
        for container in each["spec"]["template"]["spec"]["containers"]
        for item in container.get("env", [])
        if "value" in item
    }
    wanted = {
        "BIG": "100000000",
        "SMALL": "0.5",
        "NONE": "0",
        "MINUS": "-20261128",
        "FLAG": "true",
        "OCTAL": "010",
    }
    assert {name: found[name] for name in wanted} == wanted
