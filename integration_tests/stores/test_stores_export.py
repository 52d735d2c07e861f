"""Exports to a hub and to a store: what comes there, the card, and what is said where it cannot."""

from __future__ import annotations

import json

import pytest
import yaml
from harness.hub import Hub
from harness.processes import run_python
from headrace_cli.commands.publishing import card, check, publish
from headrace_cli.errors import CommandError
from headrace_servicekit.stores.files import local

TOLD = {"step": 4, "version": 5, "digest": "d" * 32, "checkpoint": "lineage-1/step-4"}
SPEC = {
    "seed": 7,
    "steps": 6,
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "algorithm": {"name": "grpo", "group_size": 4, "prompts_per_step": 8},
    "optimizer": {"lr": 1e-6},
    "data": {"source": "huggingface", "options": {"dataset": "openai/gsm8k"}},
    "reward": {"scorers": [{"name": "math"}]},
}
PROGRAM = "import sys,pathlib; from headrace_cli.commands.publishing import *; check(sys.argv[2]); \
print(publish(pathlib.Path(sys.argv[1]), sys.argv[2], 'run-1, step 4'))"


@pytest.fixture
def hub():
    with Hub("token-of-the-tests") as made:
        yield made


@pytest.fixture
def model(tmp_path):
    """An exported model with its card."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    text = card("run-1", SPEC, TOLD, {"Score (heldout)": 0.5}, {"set_digest": "c" * 32, "number": 5})
    (folder / "README.md").write_text(text)
    return folder


def published(hub, folder, token):
    """Output of a process that publishes to the hub: huggingface_hub reads its variables as it is imported."""
    variables = {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    return run_python("-c", PROGRAM, folder, "hf://org/tiny", **variables)


def test_a_hub_gets_the_model_and_its_card(hub, model):
    assert f"{hub.address}/org/tiny" in published(hub, model, hub.token)
    found = hub.files["org/tiny"]
    assert found == {each.name: each.read_bytes() for each in model.iterdir() if each.is_file()}
    assert hub.messages == ["run-1, step 4"]
    _, front, text = found["README.md"].decode().split("---\n", 2)
    head = yaml.safe_load(front)
    assert head["base_model"] == "Qwen/Qwen3-0.6B" and head["datasets"] == ["openai/gsm8k"]
    assert {"headrace", "grpo"} <= {*head["tags"]}
    for said in ("4 of 6", "c" * 32, "d" * 32, "| Seed | 7 |", "| Score (heldout) | 0.5 |"):
        assert said in text


def test_a_hub_that_refuses_the_token_is_told(hub, model):
    with pytest.raises(AssertionError, match="give HF_TOKEN the right to write there"):
        published(hub, model, "another")
    assert hub.files == {}


def test_a_store_gets_the_model(proxy, bucket, model):
    check(f"{bucket}/models/tiny")
    assert publish(model, f"{bucket}/models/tiny", "") == f"{bucket}/models/tiny"
    fetched = local(f"{bucket}/models/tiny")
    assert {each.name: each.read_bytes() for each in fetched.iterdir()} == {
        each.name: each.read_bytes() for each in model.iterdir()
    }


@pytest.mark.parametrize(
    ("to", "said"),
    {"hf://tiny": "write hf://ORG/NAME", "s3://no-such-bucket/m": "there is no such bucket; create"}.items(),
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_read(proxy, to, said):
    with pytest.raises(CommandError, match="--to") as told:
        check(to)
    assert said in str(told.value)


@pytest.mark.nightly  # quick: those above; test_trainer_export reads checkpoints
def test_the_command_exports_a_checkpoint_of_a_run_to_a_hub(proxy, bucket, own_fleet, spec_of, hub):
    with own_fleet() as fleet:
        run = fleet.succeed(fleet.submit(spec_of()))
        variables = {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": hub.token,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        done = fleet.headrace("run", "export", run.id, "--to", "hf://org/small", "--json", **variables)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        [newest] = [
            each for each in fleet.client.certificates(run.id) if each.version.ordinal == told["step"]
        ]
        text = hub.files["org/small"]["README.md"].decode()
        assert newest.set_digest in text and run.id in text and newest.version.digest in text
        assert "Mean reward of the last step" in text
        done = fleet.headrace("run", "export", run.id, "--to", f"{bucket}/small")
        assert done.returncode == 0, done.stderr
        assert (local(f"{bucket}/small") / "model.safetensors").is_file()
