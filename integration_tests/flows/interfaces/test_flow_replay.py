"""A step of a real fleet's run as a file, made again in one service alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import ROOT, clean_environment

AHEAD = 15
"""Steps between the question and the step that is recorded: it must not have begun."""


def replay(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """`headrace replay … --json`: its exit code and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", "replay", *map(str, arguments), "--json"],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_recorded_step_comes_out_the_same_in_each_service_alone(fleet, spec_of, tmp_path):
    run = fleet.submit(spec_of(steps=1000, checkpoint__interval_steps=40))
    step = fleet.reach(run, 1).step + AHEAD
    file = tmp_path / "step.recording"
    found = fleet.json("record", run.id, "--step", str(step), "--with-checkpoint", "--to", file)
    assert found["file"] == str(file) and found["checkpoint"]
    fleet.client.cancel(run.id)

    code, shown = replay(file, "--show")
    assert code == 0 and (shown["step"], shown["reason"], shown["incomplete"]) == (step, "asked for", "")
    assert {"Learn", "CommitStep", "Score", "Generate", "InstallPolicy"} <= {
        call["method"] for call in shown["calls"]
    }
    for service in ("trainer", "reward", "rollout"):
        code, said = replay(file, "--service", service)
        assert (code, said["same"], said["recorded_hash"]) == (0, True, said["replayed_hash"]), said
        assert said["values"] > 10


@pytest.mark.nightly
def test_a_step_that_gave_nan_is_kept_and_gives_nan_again(fleet, spec_of, tmp_path):
    spec = spec_of(steps=6, optimizer__lr=1.0e30, recording={"keep": "failed"}, checkpoint__interval_steps=0)
    run = fleet.client.wait(fleet.submit(spec).id, 120)
    print(run.state, run.reason, fleet.client.recordings(run.id))
    kept = fleet.client.recordings(run.id).recordings
    assert kept and all(each.incomplete == "" for each in kept)
    first = min(kept, key=lambda each: each.kept_at)
    file = tmp_path / "nan.recording"
    fleet.client.download_recording(run.id, first.name, file)
    code, said = replay(file)
    print(first, said)
    assert (code, said["same"]) == (0, True), said
