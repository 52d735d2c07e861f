"""The Helm chart, rendered by Helm itself: Kubernetes' schemas take it, and services read every variable of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache

import jsonschema
import pytest
import yaml
from harness.processes import ROOT
from headrace_coordinator.__main__ import parse as parse_coordinator
from headrace_servicekit.instance_config import InstanceConfig, parse_instance_config
from headrace_servicekit.lease.devices import instance_count
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

CHART = ROOT / "deploy" / "helm" / "headrace"
VALUES = {"1-gpu": 2, "8-gpu": 8, "32-gpu": 32}
"""GPUs that the pods of a file of values ask for; of the first one, two places on one GPU that is shared."""
OPTIONS = {
    "everything": (
        "--set=simulator.replicas=2,storage.files.existingClaim=mine,storage.cache.hostPath=/var/cache/headrace",
        "--set=storage.weights.hostPath=/dev/shm/headrace",
        "--set=metrics.monitors=true,metrics.rules=true,otlp.endpoint=http://collector:4317",
        "--set=autoscaling.rollout.by=hpa,autoscaling.reward.by=keda",
        "--set=rollout.priorityClassName=low,rollout.env.HEADRACE_DRAIN_GRACE_S=5",
        '--set-json=networkPolicy.monitoring=[{"namespaceSelector":{"matchLabels":{"name":"monitoring"}}}]',
        '--set-json=networkPolicy.egress.reward=[{"ports":[{"port":443}]}]',
    ),
    "own redis and secret": (
        "--set=redis.enabled=false,redis.url=redis://store.example:6379/0,secret.existing=mine",
        "--set=networkPolicy.enabled=false,models.tiny=false",
    ),
    "scaler": ("--set=scaler.enabled=true",),
    "own user": ("--set=usersCode.ownUser=true,simulator.replicas=1",),
}
USERS_CODE = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_PTRACE"]
"""What deploy/as_service.sh keeps for a service that gives users' code another user id."""
INSTANCES = ("rollout", "trainer", "reward", "simulator")
CRDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of operators: Kubernetes has no schema of them."""


def helm(tools, *arguments):
    command = [tools / "helm", "template", "post", CHART, "--namespace", "training", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def render(tools):
    """`render("8-gpu", option, …)`: the objects that Helm makes of a file of values and options."""

    @cache
    def rendered(values="", *arguments):
        file = ("--values", CHART / f"values-{values}.yaml") if values else ()
        done = helm(tools, *file, *arguments)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


@pytest.fixture(params=["", *VALUES, *OPTIONS])
def objects(request, render):
    if request.param in OPTIONS:
        return render("", *OPTIONS[request.param])
    return render(request.param)


@pytest.mark.parametrize("version", ["v1.30.0", "v1.37.0"])
def test_kubernetes_schemas_take_every_object(objects, tools, version):
    folder = tools / "schemas" / version

    def retrieve(uri):
        text = (folder / uri.rpartition("/")[2]).read_text(encoding="utf-8")
        return Resource.from_contents(json.loads(text), default_specification=DRAFT7)

    registry = Registry(retrieve=retrieve)
    seen = set()
    for each in objects:
        group, _, revision = each["apiVersion"].rpartition("/")
        if each["kind"] in CRDS:
            continue
        name = "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], revision)))
        schema = json.loads((folder / f"{name}.json").read_text())
        jsonschema.Draft7Validator(schema, registry=registry).validate(each)
        seen.add(each["kind"])
    assert {"Deployment", "StatefulSet", "Service", "PersistentVolumeClaim"} <= seen


def workloads(objects):
    """Component → pod template, of Deployments, StatefulSets and Jobs."""
    found = {}
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            labels = each["spec"]["template"]["metadata"]["labels"]
            found[labels["app.kubernetes.io/component"]] = each["spec"]["template"]
            chosen = each["spec"].get("selector", {}).get("matchLabels", {})
            assert chosen.items() <= labels.items(), (
                f"{each['metadata']['name']} does not choose its own pods"
            )
    return found


def variables(template):
    """Name → value of a pod's only container; what the API server fills in gets a value of its form."""
    filled = {"metadata.name": "post-trainer-0", "status.podIP": "10.1.2.3"}
    (container,) = template["spec"]["containers"]
    return {
        item["name"]: item["value"] if "value" in item else filled[item["valueFrom"]["fieldRef"]["fieldPath"]]
        for item in container.get("env", [])
    }


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
            "0.0.0.0:7000",
            "10.1.2.3",
        )
        assert (config.name, config.host, config.metrics_port) == ("post-trainer-0", "post-trainer-0", 9100)
        ports = {port["containerPort"] for port in pods[kind]["spec"]["containers"][0]["ports"]}
        count = instance_count(given["HEADRACE_COUNT"])
        assert ports == {*range(7000, 7000 + count), *range(9100, 9100 + count)}


def test_the_coordinator_starts_with_the_variables_that_its_pod_gives(objects, monkeypatch):
    pod = workloads(objects)["coordinator"]
    for name, value in variables(pod).items():
        monkeypatch.setenv(name, value)
    found = parse_coordinator([])
    assert (found.listen, found.http, str(found.data_dir)) == ("0.0.0.0:8471", "0.0.0.0:8470", "/data")
    assert found.redis.startswith("redis://") and found.lease_ttl == 30 and found.heartbeat == 5


def test_no_variable_of_ours_is_one_that_nobody_reads(objects):
    sources = "".join(
        file.read_text(encoding="utf-8")
        for folder in (ROOT / "libs/servicekit/src", ROOT / "services/coordinator/src")
        for file in folder.rglob("*.py")
    )
    read = {f"HEADRACE_{name.upper()}" for name in InstanceConfig.model_fields}
    read |= set(re.findall(r"HEADRACE_[A-Z_]+[A-Z]", sources))
    for kind, pod in workloads(objects).items():
        unread = {name for name in variables(pod) if name.startswith("HEADRACE_")} - read
        assert not unread, f"{kind}: nobody reads {unread}"


def test_what_pods_name_is_there(objects):
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    outside = {("Secret", "mine"), ("PersistentVolumeClaim", "mine")}
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
        assert container["securityContext"] == held
        assert spec["automountServiceAccountToken"] is (kind == "scaler")
        assert spec["enableServiceLinks"] is False, "Kubernetes' own variables begin with HEADRACE_ too"
        keys = {item["key"] for v in spec["volumes"] if "secret" in v for item in v["secret"]["items"]}
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
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: each["spec"]
        for each in objects
        if each["kind"] == "NetworkPolicy"
    }
    assert policies.keys() == components
    (store,) = policies["redis"]["ingress"]
    chosen = store["from"][0]["podSelector"]["matchLabels"]
    assert chosen["app.kubernetes.io/component"] == "coordinator"
    assert policies["models"]["ingress"] == []
    assert all({"port": 53, "protocol": "UDP"} in each["egress"][0]["ports"] for each in policies.values())
    assert len(policies["rollout"]["egress"]) == 2, "names, and the fleet: no way out"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.replica=2", "replica"),
        ("trainr.replicas=2", "trainr"),
        ("rollout.gpus=-1", "/rollout/gpus"),
        ("rollout.gpus=one", "/rollout/gpus"),
        ("rollout.weights=4gigs", "/rollout/weights"),
        ("logLevel=loud", "/logLevel"),
        ("otlp.endpoint=collector:4317", "/otlp/endpoint"),
        ("redis.enabled=false", "redis.url: name your Redis"),
        ("trainer.instancesPerPod=devices", "needs trainer.gpus"),
        ("scaler.enabled=true,autoscaling.rollout.by=hpa", "would both set the number of pods"),
        ("autoscaling.rollout.by=keda,autoscaling.rollout.min=9", "min is above max"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(tools, option, words):
    done = helm(tools, "--set", option)
    assert done.returncode != 0 and words in done.stderr, done.stderr


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


def test_memory_of_pods_follows_the_models_size(render):
    """Of 7B in bfloat16: two versions of 14.2 GiB, and of trainers what lies on the host beside them."""

    def sizes(*arguments, values="8-gpu"):
        found = {}
        for each in render(values, *arguments):
            kind = each.get("metadata", {}).get("labels", {}).get("app.kubernetes.io/component")
            if each["kind"] not in ("Deployment", "StatefulSet") or kind not in ("rollout", "trainer"):
                continue
            pod = each["spec"]["template"]["spec"]
            volume = next(one for one in pod["volumes"] if one["name"] == "weights")
            (container,) = pod["containers"]
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"] or values == ""
            found[kind] = (volume.get("emptyDir", {}).get("sizeLimit"), resources["limits"]["memory"], volume)
        return found

    small, large = sizes(), sizes("--set-json=modelGiB=61.5")
    assert {kind: each[:2] for kind, each in small.items()} == {
        "rollout": ("33Gi", "65Gi"),
        "trainer": ("33Gi", "290Gi"),
    }
    assert large["trainer"][:2] == ("136Gi", "1090Gi") and large["rollout"][:2] == ("136Gi", "168Gi")
    assert sizes(values="32-gpu")["trainer"][1] == "614Gi", "two pods have half each of what is divided"
    assert sizes("--set=trainer.weights=5Gi", values="")["trainer"][:2] == ("5Gi", "12Gi")
    shared = sizes("--set=storage.weights.hostPath=/dev/shm/headrace")
    paths = {each[2]["hostPath"]["path"] for each in shared.values()}
    assert paths == {"/dev/shm/headrace"}, "pods of one node have one folder"
