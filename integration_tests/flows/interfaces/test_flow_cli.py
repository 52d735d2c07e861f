"""Every command of the CLI that shows something prints JSON that says what the run did."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from harness.processes import run_python
from harness.specs import BATCH

OWN_SCORER = '''
def score(prompt, completion, reference, metadata):
    """The share of characters that are digits."""
    return sum(character.isdigit() for character in completion) / max(len(completion), 1)
'''
LOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer("482=", return_tensors="pt")
made = model.generate(input_ids=inputs["input_ids"], max_new_tokens=4, do_sample=False)
print(made.shape[1] - inputs["input_ids"].shape[1])
"""


@pytest.fixture(scope="module")
def submitted(fleet, spec_of, tmp_path_factory):
    """A run with a user's own scorer, submitted from a file and watched; (run id, its output)."""
    folder = tmp_path_factory.mktemp("spec")
    (folder / "mine.py").write_text(OWN_SCORER)
    # Relative to the spec's file, as a user writes it.
    spec = spec_of(name="mine", export=True, reward={"scorers": [{"name": "mine.py:score"}]})
    (folder / "run.yaml").write_text(yaml.safe_dump(spec))
    done = fleet.headrace("run", "submit", folder / "run.yaml", "--set", "steps=2", "--watch", timeout_s=400)
    assert done.returncode == 0, done.stdout + done.stderr
    run = fleet.client.list()[0]
    assert run.id in done.stdout and "SUCCEEDED" in done.stdout
    return run


def test_a_users_own_scorer_is_the_reward(fleet, submitted):
    found = fleet.json("run", "trajectories", submitted.id, "--limit", "100")["trajectories"]
    assert len(found) == 2 * BATCH
    for item in found:
        digits = sum(character.isdigit() for character in item["completion"])
        assert item["reward"] == pytest.approx(digits / max(len(item["completion"]), 1))
        assert len(item["parts"]) == 1 and next(iter(item["parts"])).endswith("mine.py:score")
    assert len({item["reward"] for item in found}) > 1
    first = fleet.json("run", "trajectories", submitted.id, "--step", "1", "--limit", "3")["trajectories"]
    assert [item["step"] for item in first] == [1, 1, 1]


def test_lists_and_single_runs(fleet, submitted):
    listed = fleet.json("run", "list")["runs"]
    assert [item["state"] for item in listed if item["id"] == submitted.id] == ["SUCCEEDED"]
    shown = fleet.json("run", "get", submitted.id)
    assert (shown["step"], shown["steps"], shown["counts"]["trained"]) == (2, 2, 2 * BATCH)
    certificates = fleet.json("run", "certificates", submitted.id)["certificates"]
    assert [item["version"]["ordinal"] for item in certificates] == [1, 2]


def test_logs_are_events_one_a_line(fleet, submitted):
    done = fleet.headrace("run", "logs", submitted.id, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ids = [event["id"] for event in events]
    assert ids == sorted(set(ids)) and events[-1]["data"]["state"] == "SUCCEEDED"
    later = fleet.headrace("run", "logs", submitted.id, "--json", "--after", str(ids[-3]))
    assert [json.loads(line)["id"] for line in later.stdout.splitlines()] == ids[-2:]
    assert "SUCCEEDED" in fleet.headrace("run", "logs", submitted.id).stdout


def test_the_fleet_is_shown(fleet, submitted):
    instances = {item["name"]: item for item in fleet.json("instances")["instances"]}
    assert set(instances) == {"rollout-0", "trainer-0", "reward-0"}
    assert all(item["state"] == "READY" for item in instances.values())
    leases = fleet.json("leases")
    assert len(leases["devices"]) == 2 and leases["leases"] == []
    status = fleet.json("status")
    assert {"instances", "devices", "leases", "runs"} <= status.keys()


@pytest.mark.parametrize("command", ["list", "get", "trajectories", "certificates", "logs"])
def test_without_json_it_is_for_people(fleet, submitted, command):
    run = () if command == "list" else (submitted.id,)
    done = fleet.headrace("run", command, *run)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) > 2


def test_the_export_is_a_hugging_face_directory(fleet, submitted):
    path = fleet.json("run", "get", submitted.id)["export_path"]
    assert 1 <= int(run_python("-c", LOAD, path)) <= 4


def test_a_checkpoint_is_exported_by_the_command(fleet, submitted, tmp_path):
    written = fleet.json("run", "export", submitted.id, "--at", "2", "--to", str(tmp_path / "out"))
    place = {"run": submitted.id, "step": 2, "directory": str(tmp_path / "out")}
    digest = submitted.policy.digest
    assert written == {
        **place,
        "version": 3,
        "digest": digest,
        "checkpoint": "lineage-1/step-2",
        "weights": "float32",
    }
    own = Path(fleet.json("run", "get", submitted.id)["export_path"])
    for file in own.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    again = fleet.headrace("run", "export", submitted.id, "--to", str(tmp_path / "out"))
    assert again.returncode == 2 and "is not empty; name a new directory" in again.stderr


def test_files_of_a_run_tell_the_same(fleet, submitted):
    directory = fleet.data_dir / "runs" / submitted.id
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rewards = {line["step"]: line["reward_mean"] for line in lines if "reward_mean" in line}
    shown = {step.step: step.reward_mean for step in fleet.client.metrics(submitted.id)}
    assert {step: rewards[step] for step in shown} == pytest.approx(shown)
    assert list(directory.rglob("events.out.tfevents.*"))


def test_a_reader_that_goes_away_does_no_harm(fleet, submitted):
    command = [*fleet.command("run", "logs", submitted.id), "--json"]
    logs = subprocess.Popen(
        command, env=fleet.variables("run", {}), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    logs.stdout.readline()
    logs.stdout.close()
    assert b"Traceback" not in logs.stderr.read()
    logs.wait(60)
    assert fleet.json("status")["url"] == fleet.url
