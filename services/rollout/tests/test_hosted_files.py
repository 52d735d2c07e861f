"""How an engine's workers take a version from a file: each byte once up to a GPU, and all ranks or none."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from headrace_modelkit import pinned
from headrace_modelkit.pinned import Rooms
from headrace_rollout.engines.hosted import files
from headrace_rollout.engines.hosted.backend import rows_of
from headrace_rollout.engines.hosted.files import agreed, read_tensors, taken, uploaded, windows_of
from model_weights import weights_of_tensors
from torch import multiprocessing

CPU = torch.device("cpu")


def version(seed=1):
    """Tensors of odd sizes, so that some lie at odd places."""
    made = torch.Generator().manual_seed(seed)
    shapes = {"a": (33, 7), "b": (5,), "c": (3, 1), "d": (400, 9), "e": (0,), "f": (64, 64)}
    types = {"a": torch.bfloat16, "c": torch.uint8}
    return {
        name: torch.randn(shape, generator=made).mul(9).abs().to(types.get(name, torch.float32))
        for name, shape in shapes.items()
    }


def body_and_rows(tensors):
    weights = weights_of_tensors(tensors)
    return weights.body, rows_of(weights.entries)


def same(found, tensors):
    assert [name for name, _ in found] == list(tensors)
    return all(torch.equal(value, tensors[name]) for name, value in found)


@pytest.mark.parametrize("window", [1, 600, 1 << 20])
def test_a_device_gets_the_bytes_window_by_window(monkeypatch, window):
    monkeypatch.setattr(files, "WINDOW_BYTES", window)
    tensors = version()
    body, rows = body_and_rows(tensors)
    assert same(list(uploaded(body, rows, CPU, None)), tensors)
    for each in windows_of(rows):
        assert len(each) == 1 or sum(row[4] for row in each) <= window
    assert [row for each in windows_of(rows) for row in each] == rows


def test_rooms_move_what_is_larger_than_they_are_both_ways(monkeypatch):
    monkeypatch.setattr(pinned, "ROOM_BYTES", 1000)
    rooms, source = Rooms(CPU, threads=2, used=True), torch.arange(2345, dtype=torch.float32).view(5, 469)
    up = rooms.to_device(source)
    assert torch.equal(up, source) and up.data_ptr() != source.data_ptr()
    assert torch.equal(rooms.to_host(up), source)
    assert torch.equal(rooms.to_host(source.T), source.T), "of another order than memory's"
    assert [len(room) for room in rooms._rooms] == [1000, 1000]


def test_a_file_that_is_too_short_is_refused_before_anything_is_taken(tmp_path):
    body, rows = body_and_rows(version())
    (tmp_path / "body").write_bytes(body[:-1])
    with pytest.raises(ValueError, match="tensor f lies behind"):
        read_tensors(str(tmp_path / "body"), rows, None)


def test_two_ranks_upload_half_each_and_wait_for_none_that_fails(tmp_path):
    multiprocessing.spawn(one_rank, (str(tmp_path),), nprocs=2)
    assert sorted(each.name for each in tmp_path.glob("passed-*")) == ["passed-0", "passed-1"]


def all_gather(own, dim):
    whole = own.new_empty(2 * len(own))
    dist.all_gather_into_tensor(whole, own)
    return whole


def one_rank(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=2)
    world = dist.group.WORLD
    ranks = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=world, all_gather=all_gather)
    files.WINDOW_BYTES = 5000
    tensors = version()
    body, rows = body_and_rows(tensors)
    moved, upload = [], Rooms.upload

    def counting(rooms, source, target):
        moved.append(len(source))
        upload(rooms, source, target)

    Rooms.upload = counting
    assert same(list(uploaded(body, rows, CPU, ranks)), tensors)
    assert sum(moved) <= len(body) / 2 + 16 * len(list(windows_of(rows)))

    def breaks(found):
        next(found)
        if rank == 0:
            raise RuntimeError("this worker's loader broke")
        return list(found)

    try:
        rest = taken(breaks, uploaded(body, rows, CPU, ranks))
        assert rank == 1 and len(rest) == len(tensors) - 1
    except RuntimeError as error:
        assert rank == 0 and "loader broke" in str(error)

    def opens():
        if rank == 0:
            raise FileNotFoundError("its host lacks the file")
        return "opened"

    expected = FileNotFoundError if rank == 0 else ValueError
    with pytest.raises(expected, match="its host lacks the file" if rank == 0 else "1 other workers"):
        agreed(opens, ranks)
    Path(directory, f"passed-{os.environ.get('RANK', rank)}").touch()
