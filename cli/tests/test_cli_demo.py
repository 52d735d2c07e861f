"""`headrace demo`: what it shows, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from headrace.client import Client
from headrace_cli.commands.demo import cancel_leftovers
from rich.console import Console


@pytest.fixture
def demo_dir(tmp_path):
    """A data directory with a model that need not be made."""
    for preset in ("tiny", "smollm2"):
        model = tmp_path / "demo" / "models" / preset
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").touch()
    return tmp_path / "demo"


def test_demo_ends_with_one_json_line(headrace, coordinator, scripted_run, demo_dir):
    scripted_run(steps=4, step_s=0.2)
    options = ("--seed", "3", "--steps", "4", "--data-dir", str(demo_dir), "--json")
    result = headrace("demo", "--preset", "smollm2", *options)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    figures = json.loads(line)
    expected = {
        "run": "r-1", "state": "SUCCEEDED", "eval_before": 0.35, "eval_after": 0.75, "baseline_prefill": 0.62,
        "steps": 4, "trained": 128, "dropped": 0, "duplicates": 0, "max_staleness": 0, "warmup_steps": 0,
        "exact_before": 0.175, "exact_after": 0.375, "export_path": "/data/runs/r-1/export",
    }  # fmt: skip
    assert {key: figures[key] for key in expected} == expected
    assert figures["stage_s"]["learn"] == pytest.approx(4 * 6.9) and figures["wall_s"] > 0
    assert figures["protocol_share"] == pytest.approx(0.08 / 9.4, abs=1e-3)
    spec = coordinator.requests("POST /v1/runs")[0].body
    wanted = (3, 4, str(demo_dir / "models" / "smollm2"))
    assert (spec["seed"], spec["steps"], spec["model"]["path"]) == wanted


def test_demo_says_what_was_learned(headrace, scripted_run, demo_dir):
    scripted_run(steps=4, step_s=0.1)
    result = headrace("demo", "--preset", "smollm2", "--data-dir", str(demo_dir))
    for words in (
        "held-out score 0.350 → 0.750 over 80 answers",
        "exact match    0.175 → 0.375",
        "0.620: the untrained model with its answer begun for it",
        "Much of what it learns is to answer at all",
        "0 trained twice",
        "3 + 5 =",
        "/data/runs/r-1/export",
    ):
        assert words in result.stdout


def test_demo_distrusts_counts_that_certificates_deny(headrace, scripted_run, demo_dir):
    scripted_run(steps=2, step_s=0.1).trained_shown = 1
    result = headrace("demo", "--data-dir", str(demo_dir), "--json")
    assert result.returncode == 1
    assert "the certificates say" in result.stderr


def test_failed_demo_is_exit_1(headrace, scripted_run, demo_dir):
    scripted_run(steps=2, step_s=0.1, final="FAILED")
    result = headrace("demo", "--data-dir", str(demo_dir), "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout.splitlines()[0])["state"] == "FAILED"


def test_interrupted_demo_cancels_its_run(coordinator, scripted_run, demo_dir, tmp_path):
    scripted_run(steps=1000, step_s=0.2)
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_cli", "demo", "--data-dir", str(demo_dir)],
        env={**os.environ, "HEADRACE_URL": coordinator.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and f"on the fleet at {coordinator.url}" in process.stdout.readline()
    assert "RUNNING" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert coordinator.requests("POST /v1/runs/r-1:cancel")


def test_demo_ends_what_a_killed_demo_left(coordinator, capsys):
    runs = [{"id": "r-2", "state": "RECOVERING"}, {"id": "r-1", "state": "SUCCEEDED"}]
    coordinator.routes["GET /v1/runs"] = (200, {"runs": runs})
    coordinator.routes["POST /v1/runs/r-2:cancel"] = (200, {"id": "r-2", "state": "CANCELLED"})
    with Client(coordinator.url) as client:
        cancel_leftovers(client, Console())
    assert "cancelling run r-2" in capsys.readouterr().out
    assert len(coordinator.requests("POST /v1/runs/r-2:cancel")) == 1
    assert not coordinator.requests("POST /v1/runs/r-1:cancel")


def test_demo_that_cannot_start_its_run_leaves_no_fleet(fleet, demo_dir, tmp_path):
    # The stand-in coordinator takes no runs.
    demo_dir.rename(fleet.data_dir)
    result = fleet.run("demo", "--port", str(fleet.port), "--json")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert fleet.processes() == []


def test_the_demo_takes_the_faster_placement():
    from headrace_cli.demo import placement

    assert placement("tiny", 2) == ["placement.mode=disaggregated"]
    assert placement("tiny", 1) == [] and placement("smollm2", 8) == [], "the spec's own: in turns"
