"""Checkpoints survive kill -9 in the write, torn directories, a full disk, and an older holder that writes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_parts import snapshot
from headrace_servicekit import failpoints
from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.parts import all_files
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.state import LEDGER, MANIFEST, STATE, Damaged, read_state
from headrace_trainer.checkpoints.tree import Origin
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.step import Version
from safetensors.torch import load_file


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    found = CheckpointDirectory(tmp_path)
    assert found.new_lineage(Origin(), 1, "store") == 1
    return found


def names(directory: CheckpointDirectory) -> list[str]:
    return [saved.name for saved in directory.live()]


def test_a_checkpoint_holds_what_was_given(directory):
    written = directory.write(1, snapshot(3))
    saved = directory.open("lineage-1/step-3")
    assert saved == written and saved.version == Version(4, 3, 3, "digest-3")
    assert (directory.ledger(saved.name), saved.store_id, saved.optimizer_steps) == (
        b"\x00ledger",
        "store",
        3,
    )
    assert saved.size == sum(file.stat().st_size for file in saved.path.iterdir())
    reader = StateReader.of_checkpoint(saved.path, saved.files, saved.optimizer_steps)
    assert torch.equal(reader.weight("a"), torch.full((300, 7), 3.0))
    assert reader.weight("b").shape == (0, 4)
    assert torch.equal(reader.moment("exp_avg", "a"), torch.ones(300, 7) * 3)
    assert set(load_file(saved.path / "weights.safetensors")) == {"a", "b"}
    with pytest.raises(Refusal, match="no tensor 'c'"):
        reader.weight("c")


def flip(path: Path, at: int = -1) -> None:
    """Another byte in the middle, or `at` a place."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at < 0 else at] ^= 1
    path.write_bytes(data)


def test_torn_checkpoints_are_set_aside_with_the_reason(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    root = directory.root / "lineage-1"
    (root / "step-3" / "state.json").unlink()
    with (root / "step-2" / "weights.safetensors").open("r+b") as file:
        file.truncate(100)
    (root / "step-9").mkdir()
    assert names(directory) == ["lineage-1/step-1"]
    found = {report.name: report for report in directory.asides.take_reports()}
    assert set(found) == {f"lineage-1/step-{step}" for step in (2, 3, 9)}
    torn = found["lineage-1/step-2"]
    assert torn.set_aside_as == "lineage-1/step-2.damaged-1"
    assert torn.reason == "weights.safetensors: expected 8552 bytes, found 100"
    assert torn.reason in (root / "step-2.damaged-1.reason.txt").read_text()
    assert (root / "step-2.damaged-1" / "weights.safetensors").stat().st_size == 100
    assert not directory.asides.take_reports()


@pytest.mark.parametrize("file", [STATE, *all_files(1), LEDGER, MANIFEST])
def test_one_flipped_byte_anywhere_is_found_when_it_is_opened(directory, file):
    for step in (1, 2):
        directory.write(1, snapshot(step))
    flip(directory.root / "lineage-1" / "step-2" / file)
    with pytest.raises(Refusal, match=f"lineage-1/step-2: {file}.*lineage-1/step-2.damaged-1") as caught:
        directory.open("lineage-1/step-2")
    assert caught.value.reason == "CHECKPOINT_DAMAGED" and caught.value.kind == "precondition"
    assert names(directory) == ["lineage-1/step-1"]
    assert directory.open("lineage-1/step-1")
    assert [report.set_aside_as for report in directory.asides.take_reports()] == [
        "lineage-1/step-2.damaged-1"
    ]


def test_every_byte_of_the_state_counts(directory):
    state = directory.write(1, snapshot(1)).path / STATE
    good = state.read_bytes()
    for at in range(len(good)):
        flip(state, at)
        with pytest.raises(Damaged):
            read_state(state)
        state.write_bytes(good)
    assert read_state(state)


@pytest.mark.parametrize(
    "key", ["format", "version", "lineage", "optimizer_steps", "files", "base", "digest"]
)
def test_a_state_without_a_field_is_set_aside(directory, key):
    for step in (1, 2):
        directory.write(1, snapshot(step))
    state = directory.root / "lineage-1" / "step-2" / STATE
    body = json.loads(state.read_text())
    del body[key]
    state.write_text(json.dumps(body))
    assert names(directory) == ["lineage-1/step-1"]
    [report] = directory.asides.take_reports()
    assert report.name == "lineage-1/step-2" and key in report.reason


def test_what_was_set_aside_is_kept_numbered_and_never_pruned(directory):
    for _ in range(2):
        directory.write(1, snapshot(1))
        flip(directory.root / "lineage-1" / "step-1" / STATE)
        assert names(directory) == []
    for step in (2, 3, 4):
        directory.write(1, snapshot(step))
    directory.prune(1, 1)
    assert names(directory) == ["lineage-1/step-4"]
    root = directory.root / "lineage-1"
    assert {path.name for path in root.glob("step-1*")} == {
        *("step-1.damaged-1", "step-1.damaged-1.reason.txt"),
        *("step-1.damaged-2", "step-1.damaged-2.reason.txt"),
    }


def test_damaged_checkpoints_do_not_count_as_kept(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    flip(directory.root / "lineage-1" / "step-3" / STATE)
    directory.prune(1, 1)
    assert names(directory) == ["lineage-1/step-2"]
    assert [report.name for report in directory.asides.take_reports()] == ["lineage-1/step-3"]


def test_one_that_cannot_be_renamed_is_left_and_not_listed_again(directory, monkeypatch):
    for step in (1, 2):
        directory.write(1, snapshot(step))
    flip(directory.root / "lineage-1" / "step-2" / "weights.safetensors")

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "rename", read_only)
    with pytest.raises(Refusal, match="left in its place"):
        directory.open("lineage-1/step-2")
    assert names(directory) == ["lineage-1/step-1"]
    [report] = directory.asides.take_reports()
    assert report.set_aside_as == "" and "Read-only file system" in report.reason


def test_the_same_version_is_written_once_and_a_damaged_one_again(directory):
    first = directory.write(1, snapshot(1))
    inode = (first.path / STATE).stat().st_ino
    assert directory.write(1, snapshot(1)) == first
    assert (first.path / STATE).stat().st_ino == inode
    flip(first.path / STATE)
    assert directory.write(1, snapshot(1)) == first
    assert directory.open(first.name)
    assert (directory.root / "lineage-1" / "step-1.damaged-1").is_dir()


def test_a_damaged_claim_loses_no_checkpoint(directory):
    for step in (1, 2):
        directory.write(1, snapshot(step))
    assert directory.new_lineage(Origin("lineage-1/step-1"), 50, "store") == 2
    directory.write(2, replace(snapshot(2, number=51), origin=Origin("lineage-1/step-1")))
    flip(directory.root / "lineage-2.json")
    assert names(directory) == ["lineage-2/step-2", "lineage-1/step-1"]
    assert directory.new_lineage(Origin("lineage-2/step-2"), 60, "store") == 3
    assert names(directory) == ["lineage-2/step-2", "lineage-1/step-1"]


def test_a_directory_that_is_gone_lists_nothing(directory):
    directory.write(1, snapshot(1))
    directory.root.rename(directory.root.with_name("elsewhere"))
    assert names(directory) == [] and not directory.asides.take_reports()
    assert directory.write(1, snapshot(2)).name == "lineage-1/step-2"
    assert names(directory) == ["lineage-1/step-2"]


def test_restore_follows_the_newest_lineage(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    assert directory.new_lineage(Origin("lineage-1/step-2"), 50, "store") == 2
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
    assert directory.new_lineage(Origin("lineage-1/step-1"), 9, "store") == 3
    claim = json.loads((directory.root / "lineage-3.json").read_text())
    assert claim.pop("digest")
    assert claim == {
        "base_checkpoint": "lineage-1/step-1",
        "base_run": "",
        "reserved_numbers": [9],
        "store_id": "store",
    }


def test_prune_keeps_the_newest_and_only_the_live_holder_may(directory):
    for step in (1, 2, 3):
        directory.write(1, snapshot(step))
    directory.new_lineage(Origin("lineage-1/step-2"), 50, "store")
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
from checkpoint_parts import snapshot
from headrace_trainer.checkpoints.tree import Origin
from headrace_trainer.checkpoints.directory import CheckpointDirectory
directory = CheckpointDirectory(Path(sys.argv[1]))
lineage = directory.new_lineage(Origin(), 1, "store")
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
    lineage = directory.new_lineage(Origin("lineage-1/step-1"), 9, "store")
    directory.write(lineage, snapshot(2, number=9))
    directory.prune(lineage, 2)
    assert names(directory) == ["lineage-2/step-2", "lineage-1/step-1"]
    directory.sweep()
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


def test_a_listing_during_a_pruning_sees_all_of_a_checkpoint_or_nothing(directory, monkeypatch):
    for step in (1, 2):
        directory.write(1, snapshot(step))
    remove, seen = shutil.rmtree, []

    def slowly(path, **options):
        (path / STATE).unlink()
        seen.append((names(directory), directory.asides.take_reports()))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    directory.prune(1, 1)
    assert seen == [(["lineage-1/step-2"], [])]
    assert [path.name for path in (directory.root / "lineage-1").iterdir()] == ["step-2"]


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/lineage-1"])
def test_a_checkpoint_is_neither_written_nor_read_through_a_link(tmp_path, part):
    run = tmp_path / "runs" / "r"
    directory = CheckpointDirectory(run)
    assert directory.new_lineage(Origin(), 1, "s") == 1
    directory.write(1, snapshot(1))
    outside = tmp_path / "outside"
    (run / part).rename(outside)
    (run / part).symlink_to(outside)
    kept = sorted(outside.rglob("*"))
    with pytest.raises(OSError, match="symbolic link"):
        directory.write(1, snapshot(2))
    if part != "checkpoints/lineage-1":  # The next one is another folder.
        with pytest.raises(OSError, match="symbolic link"):
            directory.new_lineage(Origin(), 1, "s")
    assert sorted(outside.rglob("*")) == kept
    if part:
        assert names(directory) == []
