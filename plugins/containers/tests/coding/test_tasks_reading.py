"""Folders in Harbor's form: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace_containers.provider import Limits, Network
from headrace_containers.tasks import harbor
from headrace_containers.tasks.harbor import NOT_RUN, PASSED_OVER, TaskToml
from headrace_containers.tasks.proving import Proof, read_proofs, unproven, write_proofs
from headrace_containers.tasks.reading import NoTasks, TaskSet
from headrace_containers.tasks.scripts import HarborTests
from headrace_containers.tasks.task import RESTORED, BadTask
from pydantic import BaseModel

RECORDED = Path(__file__).with_name("recorded") / "harbor_task_toml.json"
OFF = {"environment.network_mode"}
"""Where our default is another one: no network."""


@pytest.fixture
def folder(making, tmp_path):
    making.make(tmp_path, only=("words",))
    return tmp_path / "words"


def config(folder, text):
    (folder / "task.toml").write_text(text)
    return harbor.read_task(folder)


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        inner = [
            each
            for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(each, type)
        ]
        parts = [each for each in inner if issubclass(each, BaseModel)]
        if parts and name != "artifacts":
            yield from keys_of(parts[0], f"{above}{name}.")
        else:
            yield above + name, field.get_default(call_default_factory=True)


def test_each_key_of_harbor_is_read_or_refused_or_passed_over_by_name():
    """The recorded keys are those of the models of harbor 0.25.0."""
    recorded = json.loads(RECORDED.read_text())["defaults"]
    ours = dict(keys_of(TaskToml))
    for key, default in recorded.items():
        near = key.removeprefix("verifier.") if key.startswith("verifier.environment.") else key
        over = any(near == each or near.startswith(f"{each}.") for each in (*NOT_RUN, *PASSED_OVER))
        assert over or key in ours, f"{key} is neither read nor named"
        if key in ours and near not in OFF and default is not None:
            assert ours[key] == default, key
    assert set(ours) <= set(recorded), set(ours) - set(recorded)


def test_a_task_is_read_as_its_author_wrote_it(folder):
    text = """
        [agent]
        timeout_sec = 12
        user = "1234:1234"
        [verifier]
        timeout_sec = 34
        network_mode = "allowlist"
        allowed_hosts = ["pypi.org"]
        [environment]
        cpus = 2
        memory = "2G"
        storage_mb = 77
        workdir = "/elsewhere"
        env = {A = "1", B = "${NOT_THERE:-two}"}
        [solution]
        env = {C = "3"}
        [environment.healthcheck]
        command = "true"
        retries = 1
    """
    task = config(folder, f'artifacts = ["/data/made"]\n{text}')
    assert task.spec.limits == Limits(cpus=2, memory_mib=2048, disk_mib=77)
    assert (task.spec.workdir, task.spec.owned, task.spec.user) == (
        "/elsewhere",
        ("/elsewhere",),
        "1234:1234",
    )
    assert task.spec.env == {"A": "1", "B": "two"} and task.spec.network == Network()
    assert (task.agent_s, task.carried, task.shared) == (12.0, ("/data/made",), False)
    assert task.judged_in.network == Network(allow=("pypi.org",)) and task.judged_in.user == "root"
    assert task.health is not None and task.health.within_s == 35.0
    assert task.instruction.startswith("The repository in /app has a fault")
    tests = task.tests
    assert isinstance(tests, HarborTests) and (tests.user, tests.timeout_s) == ("root", 34.0)


def test_a_task_says_what_stays_as_the_image_has_it(folder):
    task = config(folder, '[metadata]\ncarried = ["pyproject.toml"]\nrestored = ["tests/**"]')
    assert {*RESTORED} - {*task.restored} == {"pyproject.toml"} and {*task.restored} - {*RESTORED} == {
        "tests/**"
    }


def test_a_canary_is_not_read_and_a_changed_file_is_another_task(folder):
    before = harbor.read_task(folder)
    (folder / "instruction.md").write_text("<!-- canary GUID 1 -->\n# canary 2\n\nDo it.\n")
    after = harbor.read_task(folder)
    assert after.instruction == "Do it.\n" and after.digest != before.digest
    (folder / "tests" / "check.py").chmod(0o755)
    assert harbor.read_task(folder).digest != after.digest


def test_the_working_directory_is_the_dockerfiles_last():
    assert harbor._workdir("FROM a\nWORKDIR /x\nFROM b\nWORKDIR /app\n WORKDIR src\n") == "/app/src"
    assert harbor._workdir("FROM a\nWORKDIR $HOME\n") == "" == harbor._workdir("FROM a\n")


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("tests/test.sh", "there is no tests/test.sh, which judges it; write one that makes a reward file"),
        ("instruction.md", "there is no instruction.md; say there what is to be done"),
        (
            "environment/Dockerfile",
            "there is no environment/Dockerfile; write one, or name environment.docker_image",
        ),
        ("task.toml", "there is no task.toml"),
    ],
)
def test_what_a_task_lacks_is_named(folder, missing, words):
    (folder / missing).unlink()
    with pytest.raises(BadTask, match=words) as caught:
        harbor.read_task(folder)
    assert caught.value.task == "words"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[steps]]\nname = 'a'", "steps: it has several steps, which are not run here; leave the task out"),
        ("[environment]\ngpus = 1", "environment.gpus: it asks for GPUs"),
        ("[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers"),
        ("[environment]\nos = 'windows'", "environment.os is windows"),
        ("[environment]\ncpus = 'many'", "environment.cpus"),
        ("[environment]\nallowed_hosts = ['a.org']", "environment.allowed_hosts is of an allowlist alone"),
        (
            "[environment]\nenv = {A = '${NOT_THERE}'}",
            "environment.env.A is .*; name NOT_THERE in environment.env",
        ),
        (
            "[verifier.environment]\ncpus = 1",
            "no tests/Dockerfile; write one, or name verifier.environment.docker_image",
        ),
        ("artifacts = ['data/../made']", "artifacts: 'data/../made' is no absolute path"),
        ("[metadata]\nrestored = 'tests'", "metadata.restored is no list of names"),
        ("[metadata]\ncarried = ['a.py']", "metadata.carried: a.py is carried in any case"),
        ("[environment", "task.toml is no TOML"),
    ],
)
def test_what_is_not_run_here_is_named(folder, text, words):
    with pytest.raises(BadTask, match=words):
        config(folder, text)


def test_a_link_out_of_a_task_and_several_containers_are_refused(folder):
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}")
    with pytest.raises(BadTask, match="has several containers; leave the task out"):
        harbor.read_task(folder)
    (folder / "environment" / "docker-compose.yaml").unlink()
    (folder / "tests" / "secret").symlink_to("/etc/hostname")
    with pytest.raises(BadTask, match="is a link"):
        harbor.read_task(folder)


def test_a_path_without_tasks_is_named(tmp_path):
    with pytest.raises(NoTasks, match=r"there is no .*give a folder of tasks in Harbor's form"):
        TaskSet.at(tmp_path / "nowhere")
    with pytest.raises(NoTasks, match="has no folder in it"):
        TaskSet.at(tmp_path)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (None, "nothing has shown that its tests can tell"),
        (Proof("other", 0.0, 1.0), "it has changed since it was proven"),
        (Proof("", 1.0, 1.0), "its tests give 1 to an agent that does nothing"),
        (Proof("", 0.5, None), "its tests give 0.5 to an agent that does nothing"),
        (Proof("", 0.0, None), "it has no solution"),
        (
            Proof("", 0.0, 0.0, "cannot import words"),
            "its tests give 0 to its own solution: cannot import words",
        ),
        (Proof("", 0.2, 1.0), ""),
    ],
)
def test_a_proof_says_whether_tests_can_tell(folder, proof, words):
    task = harbor.read_task(folder)
    if proof is not None:
        digest = proof.digest or task.digest
        write_proofs(folder.parent, {task.name: Proof(digest, proof.nothing, proof.oracle, proof.said)})
    found = unproven(task, read_proofs(folder.parent))
    assert (found is None) == (not words) and words in (found or ("",))[0]


def test_the_examples_tasks_are_toml_that_harbor_reads(folder):
    """No key of ours that harbor has not."""
    given = tomllib.loads((folder / "task.toml").read_text())
    recorded = json.loads(RECORDED.read_text())["defaults"]
    assert {
        f"{section}.{key}" for section in ("agent", "verifier", "environment") for key in given[section]
    } <= set(recorded)
