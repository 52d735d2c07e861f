"""The RayJob of deploy/ray: KubeRay's schema takes it, Kubernetes' takes its pods, and there is its command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml
from harness.processes import ROOT
from headrace_cli.main import app
from headrace_schema.spec import RunSpec
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

SCHEMA = json.loads((Path(__file__).parent / "recorded_rayjob.json").read_text())["schema"]


@pytest.fixture
def objects():
    found = yaml.safe_load_all((ROOT / "deploy" / "ray" / "rayjob.yaml").read_text())
    return {each["kind"]: each for each in found}


def groups(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_kuberays_schema_takes_the_job_and_refuses_a_key_that_it_does_not_know(objects):
    jsonschema.Draft7Validator(SCHEMA).validate(objects["RayJob"])
    objects["RayJob"]["spec"]["rayClusterSpec"]["workerGroups"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroups"):
        jsonschema.Draft7Validator(SCHEMA).validate(objects["RayJob"])


@pytest.mark.parametrize("version", ["v1.30.0", "v1.37.0"])
def test_kubernetes_schemas_take_its_pods(objects, tools, version):
    folder = tools / "schemas" / version

    def retrieve(uri):
        text = (folder / uri.rpartition("/")[2]).read_text(encoding="utf-8")
        return Resource.from_contents(json.loads(text), default_specification=DRAFT7)

    schema = json.loads((folder / "podtemplatespec-v1.json").read_text())
    for group in groups(objects["RayJob"]):
        jsonschema.Draft7Validator(schema, registry=Registry(retrieve=retrieve)).validate(group["template"])


def test_its_command_its_ray_and_its_spec_are_those_that_there_are(objects):
    job = objects["RayJob"]["spec"]
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["headrace", "ray", "run"]
    command = typer.main.get_command(app).commands["ray"].commands["run"]
    taken = command.make_context("run", words[3:]).params
    (worker,) = job["rayClusterSpec"]["workerGroupSpecs"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (taken["nodes"], str(taken["gpus"])) == (worker["maxReplicas"], limits["nvidia.com/gpu"])
    pinned = next(
        line for line in (ROOT / "constraints/base.txt").read_text().splitlines() if line.startswith("ray==")
    )
    release = job["rayClusterSpec"]["rayVersion"]
    assert pinned == f"ray=={release}"
    assert f"rayproject/ray:{release}-" in (ROOT / "docs/clusters.md").read_text()
    (spec,) = objects["ConfigMap"]["data"].items()
    assert spec[0] == Path(taken["spec"]).name
    assert RunSpec.model_validate(yaml.safe_load(spec[1])).trainer.ranks == taken["trainer"]
