"""Checkpoints survive kill -9 in the write, torn directories, a full disk, and an older holder that writes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from headrace_servicekit import failpoints
from headrace_trainer.checkpoints import CheckpointDirectory, CheckpointReader, Snapshot
from headrace_trainer.errors import Refusal
from headrace_trainer.step import Version
from safetensors.torch import load_file


def snapshot(step: int, *, number: int | None = None) -> Snapshot:
    weights = {"a": torch.full((300, 7), float(step)), "b": torch.zeros(0, 4, dtype=torch.bfloat16)}
    optimizer = {"exp_avg/a": torch.ones(300, 7) * step, "random_state": torch.get_rng_state()}
    version = Version(number or step + 1, step, step, f"digest-{step}")
    lineage = {version.number: version.ordinal}
    return Snapshot(version, weights, optimizer, step, lineage, "store", b"\x00ledger", b"manifest")


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    found = CheckpointDirectory(tmp_path)
    assert found.new_lineage("", 1, "store") == 1
    return found


def names(directory: CheckpointDirectory) -> list[str]:
    return [saved.name for saved in directory.live()]


def test_a_checkpoint_holds_what_was_given(directory):
    written = directory.write(1, snapshot(3))
    saved = directory.open("lineage-1/step-3")
    assert saved == written and saved.version == Version(4, 3, 3, "digest-3")
    assert (saved.ledger(), saved.store_id, saved.optimizer_steps) == (b"\x00ledger", "store", 3)
    assert saved.size == sum(file.stat().st_size for file in saved.path.iterdir())
    reader = CheckpointReader(saved)
    assert torch.equal(reader.weight("a"), torch.full((300, 7), 3.0))
    assert reader.weight("b").shape == (0, 4)
    assert torch.equal(reader.moment("exp_avg", "a"), torch.ones(300, 7) * 3)
    assert set(load_file(saved.path / "weights.safetensors")) == {"a", "b"}
    with pytest.raises(Refusal, match="no tensor 'c'"):
        reader.weight("c")


def test_torn_checkpoints_are_ignored_and_damaged_ones_refused(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    root = directory.root / "lineage-1"
    (root / "step-3" / "state.json").unlink()
    with (root / "step-2" / "weights.safetensors").open("r+b") as file:
        file.truncate(100)
    (root / "step-9").mkdir()
    assert names(directory) == ["lineage-1/step-1"]
    with (root / "step-1" / "weights.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff")
    with pytest.raises(Refusal) as caught:
        directory.open("lineage-1/step-1")
    assert caught.value.reason == "CHECKPOINT_DAMAGED"


def test_restore_follows_the_newest_lineage(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    assert directory.new_lineage("lineage-1/step-2", 50, "store") == 2
    assert names(directory) == ["lineage-1/step-2", "lineage-1/step-1"]
    directory.write(2, snapshot(3, number=51))
    directory.write(1, snapshot(4))
    assert names(directory) == ["lineage-2/step-3", "lineage-1/step-2", "lineage-1/step-1"]
    with pytest.raises(Refusal) as caught:
        directory.open("lineage-1/step-4")
    assert caught.value.reason == "NOT_FOUND"


def test_a_lineage_is_claimed_once_and_a_torn_claim_is_skipped(directory):
    directory.write(1, snapshot(1))
    (directory.root / "lineage-2.json").write_bytes(b"")
    assert names(directory) == ["lineage-1/step-1"]
    assert directory.new_lineage("lineage-1/step-1", 9, "store") == 3
    claim = json.loads((directory.root / "lineage-3.json").read_text())
    assert claim == {"base_checkpoint": "lineage-1/step-1", "reserved_numbers": [9], "store_id": "store"}


def test_prune_keeps_the_newest_and_only_the_live_holder_may(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    directory.new_lineage("lineage-1/step-2", 50, "store")
    directory.prune(1, 1)
    assert len(list((directory.root / "lineage-1").iterdir())) == 3
    directory.write(2, snapshot(3, number=51))
    directory.prune(2, 2)
    assert names(directory) == ["lineage-2/step-3", "lineage-1/step-2"]
    assert not (directory.root / "lineage-1" / "step-3").exists()


CRASH = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_trainer_checkpoints import snapshot
from headrace_trainer.checkpoints import CheckpointDirectory
directory = CheckpointDirectory(Path(sys.argv[1]))
lineage = directory.new_lineage("", 1, "store")
directory.write(lineage, snapshot(1))
print("first", flush=True)
directory.write(lineage, snapshot(2))
print("second", flush=True)
"""


@pytest.mark.parametrize(
    "rule", ["trainer.checkpoint.write=kill@6", "trainer.checkpoint.before_rename=kill@2"]
)
def test_kill_in_the_write_leaves_the_one_before(tmp_path, rule):
    child = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path), str(Path(__file__).parent)],
        env={**os.environ, "HEADRACE_FAILPOINTS": rule, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL and child.stdout == "first\n"
    directory = CheckpointDirectory(tmp_path)
    assert names(directory) == ["lineage-1/step-1"]
    assert len(list((directory.root / "lineage-1").glob(".step-2.*.partial"))) == 1
    directory.open("lineage-1/step-1")
    lineage = directory.new_lineage("lineage-1/step-1", 9, "store")
    directory.write(lineage, snapshot(2, number=9))
    directory.prune(lineage, 2)
    assert names(directory) == ["lineage-2/step-2", "lineage-1/step-1"]
    assert not list((directory.root / "lineage-1").glob("*.partial"))


def test_a_failed_write_leaves_nothing_behind(directory):
    failpoints.arm("trainer.checkpoint.write=error@2")
    try:
        with pytest.raises(Exception, match="failpoint"):
            directory.write(1, snapshot(1))
    finally:
        failpoints.arm("")
    assert names(directory) == []
    assert list((directory.root / "lineage-1").iterdir()) == []
