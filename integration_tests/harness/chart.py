"""The Helm chart, rendered by Helm itself, and Kubernetes' own schemas of what it renders."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from harness.processes import ROOT

CHART = ROOT / "deploy" / "helm" / "headrace"
VERSIONS = ("v1.30.0", "v1.37.0")
CLUSTER = ("--api-versions", "v1/Secret")
"""As when Helm speaks to a cluster; without it the chart makes no secrets."""


def helm(tools: Path, *arguments: str | Path, cluster: bool = True) -> subprocess.CompletedProcess[str]:
    """`helm template post … arguments`."""
    command = [tools / "helm", "template", "post", CHART, "--namespace", "training", *arguments]
    command += CLUSTER if cluster else ()
    return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def objects_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What Helm has rendered; fails with its message where it has refused."""
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def checker(tools: Path, version: str) -> Callable[[str, dict[str, Any]], None]:
    """`check("deployment-apps-v1", object)`: raises ValueError for what Kubernetes of this version does not take."""
    folder = tools / "schemas" / version

    def retrieve(uri: str) -> Resource[Any]:
        text = (folder / uri.rpartition("/")[2]).read_text(encoding="utf-8")
        return Resource.from_contents(json.loads(text), default_specification=DRAFT7)

    registry: Registry[Any] = Registry(retrieve=retrieve)  # type: ignore[call-arg]

    def check(name: str, given: dict[str, Any]) -> None:
        schema = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        try:
            jsonschema.Draft7Validator(schema, registry=registry).validate(given)
        except jsonschema.ValidationError as error:
            raise ValueError(f"{error.json_path}: {error.message}") from error

    return check


def certificate_secrets(objects: list[dict[str, Any]]) -> set[str]:
    """Names of the secrets that cert-manager makes of these objects."""
    return {each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"}


def schema_name(each: dict[str, Any]) -> str:
    """The name of the schema of an object, such as deployment-apps-v1."""
    group, _, revision = each["apiVersion"].rpartition("/")
    return "-".join(filter(None, (each["kind"].lower(), group.partition(".")[0], revision)))


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
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


FILLED = {"metadata.name": "post-trainer-0", "status.podIP": "10.1.2.3", "metadata.namespace": "training"}
"""What the API server fills in, in its form."""


def variables(template: dict[str, Any]) -> dict[str, str]:
    """Name → value of a pod's only container, but those from secrets."""
    (container,) = template["spec"]["containers"]
    found = {}
    for item in container.get("env", []):
        if "value" in item:
            found[item["name"]] = item["value"]
        elif "fieldRef" in item["valueFrom"]:
            found[item["name"]] = FILLED[item["valueFrom"]["fieldRef"]["fieldPath"]]
    return found
