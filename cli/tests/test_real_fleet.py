"""The launcher with the real services: runs outlive down and up, processes do not outlive SIGKILL.

Every night only: for every change, the integration tests of flows and faults show the same on their own fleets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["steps=2", "trainer.warmup.steps=1", "data.heldout=8", "algorithm.prompts_per_step=2"]


@pytest.fixture
def real_fleet(fleet):
    fleet.environment = dict(os.environ)
    return fleet


def overrides(model: Path) -> list[str]:
    return [word for item in (*SMALL, f"model.path={model}") for word in ("--set", item)]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_runs_outlive_the_fleet_and_processes_do_not(real_fleet, tmp_path):
    model = tmp_path / "tiny"
    subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
    first = real_fleet.up()
    # 10 s on two cores of its own; the machine that runs the tests may be shared.
    assert first["ready_s"] < 60 and len(first["instances"]) == 4

    spec = str(EXAMPLES / "tiny.yaml")
    watched = real_fleet.run("run", "submit", spec, "--watch", "--json", *overrides(model))
    assert watched.returncode == 0, watched.stderr
    run = json.loads(watched.stdout.splitlines()[-1])
    assert (run["state"], run["step"], run["counts"]["trained"]) == ("SUCCEEDED", 2, 32)
    assert (
        len(json.loads(real_fleet.run("run", "certificates", run["id"], "--json").stdout)["certificates"])
        == 2
    )

    unknown = real_fleet.run("run", "submit", spec, "--set", "algorithm.grup_size=4")
    assert unknown.returncode == 2
    assert "algorithm.grup_size: unknown key; did you mean group_size?" in unknown.stderr

    assert real_fleet.run("down").returncode == 0
    assert real_fleet.processes() == []
    second = real_fleet.up()
    kept = json.loads(real_fleet.run("run", "get", run["id"], "--json").stdout)
    assert (kept["state"], kept["policy"]) == ("SUCCEEDED", run["policy"])

    os.kill(second["launcher_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while real_fleet.processes():
        assert time.monotonic() < deadline, real_fleet.processes()
        time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_notebook_runs_as_it_is_written(real_fleet, tmp_path, monkeypatch):
    """Its cells, one after the other in one namespace, as Jupyter runs them."""
    real_fleet.up()
    model = real_fleet.data_dir / "models" / "tiny"
    subprocess.run([sys.executable, "-m", "headrace_modelkit.presets.tiny", str(model)], check=True)
    monkeypatch.setenv("HEADRACE_DATA_DIR", str(real_fleet.data_dir))
    monkeypatch.setenv("HEADRACE_URL", json.loads(real_fleet.run("status", "--json").stdout)["url"])
    monkeypatch.setenv("HEADRACE_TOKEN", (real_fleet.data_dir / "http-token").read_text())
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(EXAMPLES.parent)
    names: dict[str, object] = {}
    for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert [run.state for run in names["ended"]] == ["SUCCEEDED", "SUCCEEDED"]
    assert len(names["steps"]) == 20 and len(names["answers"])
