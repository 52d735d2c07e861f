"""The disk for checkpoints is full: the run says so in a sentence and goes on; with room again it saves again."""

from __future__ import annotations

import os
import subprocess

import pytest
from harness.ledger import audit
from harness.specs import BATCH

FULL, ROOMY = "512k", "64m"


@pytest.fixture
def small_disk(tmp_path):
    """Where a fleet keeps its runs, as a disk of its own that can be made larger."""
    runs = tmp_path / "data" / "runs"
    runs.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={FULL}", "headrace-test", str(runs)]
    done = subprocess.run(mounting, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {done.stderr.strip()} (uid {os.getuid()})")

    def enlarge():
        subprocess.run(["mount", "-o", f"remount,size={ROOMY}", str(runs)], check=True, timeout=30)

    yield enlarge
    subprocess.run(["umount", "-l", str(runs)], check=True, timeout=30)


@pytest.mark.nightly  # quick: test_full_disk.py, and the seeds with a full disk
def test_a_full_disk_costs_checkpoints_and_nothing_else(small_disk, own_fleet, spec_of):
    with own_fleet() as fleet:
        run = fleet.succeed(fleet.submit(spec_of(steps=3)))
        assert len(audit(fleet, run).trained) == 3 * BATCH
        failures = [event.data["reason"] for event in fleet.events(run) if event.type == "checkpoint_failed"]
        assert failures and "No space left" in failures[0], failures
        assert not fleet.client.checkpoints(run.id)
        shown = fleet.headrace("run", "logs", run.id)
        assert "No space left" in shown.stdout and "Traceback" not in shown.stdout
        small_disk()
        again = fleet.succeed(fleet.submit(spec_of(steps=2)))
        assert [checkpoint.version.ordinal for checkpoint in fleet.client.checkpoints(again.id)] == [2, 1]
        assert not [event for event in fleet.events(again) if event.type == "checkpoint_failed"]
