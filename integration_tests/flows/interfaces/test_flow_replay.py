"""A step of a real fleet's run as a file, made again in one service alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import ROOT, clean_environment

AHEAD = 8
"""Steps between the question and the step that is recorded: it must not have begun."""


NAN_GRPO = """
from headrace_servicekit.registry import Plugin
from headrace_trainer.algorithms._policy_gradient import ClippedPolicyGradient
from headrace_trainer.algorithms.plugins import PpoOptions


class NanGrpo(ClippedPolicyGradient[PpoOptions]):
    def advantages(self, outcomes):
        centred_B = outcomes.rewards_B - outcomes.rewards_B.mean()
        if int(outcomes.mask_BT.sum()) % 4 == 0:
            centred_B = centred_B / (centred_B - centred_B)
        return centred_B[:, None] * outcomes.mask_BT


NAN_GRPO = Plugin(NanGrpo, PpoOptions, "divides by nothing now and then")
"""


def replay(*arguments: str | Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """`headrace replay … --json`: its exit code and what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace_cli", "replay", *map(str, arguments), "--json"],
        env=clean_environment(**environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_recorded_step_comes_out_the_same_in_each_service_alone(fleet, spec_of, tmp_path):
    # Otherwise an answer's log-probs are rounded by who is decoded beside it, and that is a matter of time.
    run = fleet.submit(spec_of(steps=1000, checkpoint__interval_steps=6, deterministic=True))
    step = fleet.reach(run, 1).step + AHEAD
    fleet.client.record(run.id, step)
    file = tmp_path / "step.recording"
    try:
        found = fleet.json("record", run.id, "--step", str(step), "--with-checkpoint", "--to", file)
    finally:
        fleet.client.cancel(run.id)
    assert found["file"] == str(file) and found["checkpoint"]

    code, shown = replay(file, "--show")
    assert code == 0 and (shown["step"], shown["reason"], shown["incomplete"]) == (step, "asked for", "")
    assert {"Learn", "CommitStep", "Score", "Generate", "InstallPolicy"} <= {
        call["method"] for call in shown["calls"]
    }
    for service in ("trainer", "reward", "rollout"):
        code, said = replay(file, "--service", service)
        assert (code, said["same"], said["recorded_hash"]) == (0, True, said["replayed_hash"]), said[
            "differences"
        ]
        assert said["values"] > 10


def test_a_run_that_fails_leaves_the_step_that_it_failed_in(fleet, spec_of):
    spec = spec_of(limits__max_mismatch_kl=1e-30, recording={"keep": "failed"})
    run = fleet.client.wait(fleet.submit(spec).id, 120)
    assert run.state == "FAILED" and "max_mismatch_kl" in run.reason
    [kept] = fleet.json("record", run.id)["recordings"]
    assert kept["step"] == 1 and "max_mismatch_kl" in kept["reason"]
    file = fleet.data_dir / "runs" / run.id / "recordings" / kept["name"]
    code, shown = replay(file, "--show")
    assert code == 0 and {"Restore", "CommitStep"} <= {call["method"] for call in shown["calls"]}
    assert not (file.parent / ".segments").exists(), "what was kept to make it is gone with the run"


@pytest.mark.nightly
def test_a_step_that_gave_nan_is_kept_and_gives_nan_again(own_fleet, spec_of, tmp_path):
    plugin = nan_algorithm(tmp_path / "plugin")
    spec = spec_of(
        steps=12, algorithm__name="nan-grpo", recording={"keep": "failed"}, checkpoint__interval_steps=5
    )
    file = tmp_path / "nan.recording"
    with own_fleet(PYTHONPATH=plugin) as fleet:
        run = fleet.submit(spec)
        fleet.client.wait(run.id, 120)
        kept = fleet.client.recordings(run.id).recordings
        assert kept and all("NONFINITE" in each.reason and not each.incomplete for each in kept)
        fleet.json("record", run.id, "--step", str(kept[0].step), "--with-checkpoint", "--to", file)
    code, said = replay(file, PYTHONPATH=plugin)
    assert (code, said["same"]) == (0, True), said
    code, said = replay(file)
    assert code == 1 and "nan-grpo" in said["error"]["message"], "this machine lacks the algorithm"


@pytest.mark.nightly
def test_two_ranks_are_two_processes_and_come_out_the_same(own_fleet, spec_of, tmp_path):
    file = tmp_path / "ranks.recording"
    with own_fleet("--trainer", "2") as fleet:
        fleet.ready("trainer-0", "trainer-1")
        run = fleet.submit(spec_of(steps=1000, trainer__ranks=2, recording={"keep": "all"}))
        step = fleet.reach(run, 3).step
        fleet.client.cancel(run.id)
        fleet.json("record", run.id, "--step", str(step), "--with-checkpoint", "--to", file)
    code, said = replay(file)
    assert (code, said["same"]) == (0, True), said["differences"][:3]


def nan_algorithm(folder: Path) -> str:
    """An algorithm of somebody's own, whose advantages are not finite for one group in four; as a PYTHONPATH."""
    (folder / "nan_grpo-1.dist-info").mkdir(parents=True)
    (folder / "nan_grpo-1.dist-info" / "METADATA").write_text("Name: nan-grpo\nVersion: 1\n")
    (folder / "nan_grpo-1.dist-info" / "entry_points.txt").write_text(
        "[headrace.algorithms]\nnan-grpo = nan_grpo:NAN_GRPO\n"
    )
    (folder / "nan_grpo.py").write_text(NAN_GRPO)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
