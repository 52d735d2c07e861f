"""A state is saved in parts and read in parts: to the last bit, whatever the number of ranks, with and without a disk
that they share; what one rank writes is waited for, and a rank that cannot write fails the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_modelkit.tensor_files import TensorFiles, TornTensor
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.addresses import free_port
from headrace_trainer.checkpoints.files import write_safetensors
from headrace_trainer.checkpoints.parts import PartWriter, StateCopy, collect_reports, part_files
from rank_processes import RankProcess, end

RANKS = [(1, False, False), (2, False, False), (4, False, True), (2, True, True), (1, False, False)]
"""Ranks of each stage, whether the followers see no disk, and whether they save in place."""


@pytest.fixture
def walk(tmp_path, make_config):
    def run(**sections):
        (tmp_path / "runs").mkdir()
        job = {
            "runs": str(tmp_path / "runs"),
            "result": str(tmp_path / "result"),
            "ports": [free_port() for _ in RANKS],
            "config": make_config(**sections),
            "stages": [dict(zip(("ranks", "apart", "in_place"), stage, strict=True)) for stage in RANKS],
        }
        (tmp_path / "job").write_text(json.dumps(job))
        children = [
            RankProcess("state_ranks.py", str(tmp_path / "job"), str(rank))
            for rank in range(max(ranks for ranks, *_ in RANKS))
        ]
        try:
            assert [child.wait(240) for child in children] == [0] * len(children)
        finally:
            end(children)
        return json.loads((tmp_path / "result").read_text())

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param({}, id="whole"),
        pytest.param({"lora": {"rank": 4}}, id="adapters", marks=pytest.mark.nightly),
        pytest.param(
            {"lora": {"rank": 4, "quantization": "nf4"}}, id="codes below them", marks=pytest.mark.nightly
        ),
    ],
)
def test_one_rank_two_four_two_apart_and_one_hold_the_same_bits(walk, trainer):
    found = walk(trainer=trainer)
    assert found["moved"] and found["other"] == []
    for (ranks, *_), files in zip(RANKS, found["files"], strict=True):
        assert files == sorted(name for rank in range(ranks) for name in part_files(rank, ranks))


def test_boxes_of_several_files_are_one_tensor_and_a_gap_is_told(tmp_path):
    whole = torch.arange(70.0).view(10, 7)
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    write_safetensors(first, {"a": whole[:4]}, {"a": ((10, 7), (0, 0))})
    corners = {"a": whole[4:, :3].contiguous(), "a@1": whole[4:, 3:].contiguous()}
    write_safetensors(second, corners, {"a": ((10, 7), (4, 0)), "a@1": ((10, 7), (4, 3))})
    files = TensorFiles([first, second])
    assert list(files.names()) == ["a"] and files.shape("a") == (10, 7)
    assert files.read("a").equal(whole)
    assert files.read("a", ((3, 6), (2, 5))).equal(whole[3:6, 2:5])
    assert files.read("a", ((5, 5), (0, 7))).shape == (0, 7)
    with pytest.raises(TornTensor, match="a: the files hold 28 of its 70 elements"):
        TensorFiles([first])


def copy_of(step: float) -> StateCopy:
    return StateCopy({"a": torch.full((3,), step)}, {"exp_avg/a": torch.zeros(3)}, 1)


def test_the_leader_waits_for_the_parts_of_all(tmp_path):
    writer, late = PartWriter(), PartWriter()
    writer.start(tmp_path, copy_of(1.0), 1, 3, durable=True)
    timer = threading.Timer(0.3, late.start, (tmp_path, copy_of(2.0), 2, 3), {"durable": False})
    timer.start()
    found = collect_reports(tmp_path, 3, lambda: False)
    assert set(found) == {name for part in (1, 2) for name in part_files(part, 3)}
    assert {path.name for path in tmp_path.iterdir()} == set(found), "reports are gone"
    for name, facts in found.items():
        assert (tmp_path / name).stat().st_size == facts["size"]


def test_a_report_that_gets_its_name_while_the_leader_looks_is_no_loss(tmp_path, monkeypatch):
    (tmp_path / ".part-00001.json").touch()
    scan = os.scandir

    def found(directory):
        entries = list(scan(directory))
        for entry in entries:
            if entry.name.startswith(".part"):
                os.rename(entry.path, tmp_path / "part-00001.json")
        return entries

    monkeypatch.setattr(os, "scandir", found)
    (tmp_path / ".part-00001.json").write_text('{"files": {"a": {"size": 1}}}')
    assert collect_reports(tmp_path, 2, lambda: False) == {"a": {"size": 1}}


def test_a_rank_that_cannot_write_or_stops_fails_the_checkpoint(tmp_path):
    writer = PartWriter()
    (tmp_path / part_files(1, 2)[0]).touch()  # stands in the way
    writer.start(tmp_path, copy_of(1.0), 1, 2, durable=True)
    with pytest.raises(OSError, match=r"rank 1: .*File exists"):
        collect_reports(tmp_path, 2, lambda: False)
    with pytest.raises(OSError, match=r"rank 2 has written nothing for 0\.1 s"):
        writer.wait()
        (tmp_path / "part-00001.json").write_text('{"files": {}}')
        collect_reports(tmp_path, 3, lambda: False, stalled_s=0.1)
    with pytest.raises(OSError, match="the run was closed"):
        collect_reports(tmp_path, 2, lambda: True)


def test_a_model_file_that_is_missing_or_cut_is_named_before_anything_is_loaded(
    make_backend, tiny_directory, tmp_path
):
    model = load_model(ModelSection(path=str(tiny_directory), dtype="float32"))
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    shutil.copy(tiny_directory / "tokenizer.json", tmp_path / "model")
    backend = make_backend(model={"path": str(tmp_path / "model"), "dtype": "float32"})
    backend.check_files(initial=True)
    first, second = sorted((tmp_path / "model").glob("model-*"))[:2]
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(Exception, match=rf"^model\.path: .*{second.name}"):
        backend.check_files(initial=True)
    first.unlink()
    with pytest.raises(Exception, match=rf"^model\.path: .*{first.name}.* is missing"):
        backend.check_files(initial=True)


async def test_a_damaged_model_leaves_the_held_version_as_it_is(
    client, make_config, tiny_directory, tmp_path
):
    shutil.copytree(tiny_directory, tmp_path / "model")
    version = (await client.open(make_config(model={"path": str(tmp_path / "model")}))).version
    weights = tmp_path / "model" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(Exception, match=r"model\.safetensors"):
        await client.restore("", 9)
    assert (await client.state()).version == version
