"""Frozen weights that runs of one base share on a host: the same pages, the same bits, planned once."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import torch
from headrace.common.v1 import weights_pb2, weights_pb2_grpc
from headrace_modelkit.presets.tiny import write_tiny, write_tiny_moe
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.memory.capacity import HostMemory
from headrace_servicekit.rpc.errors import reason_of
from headrace_servicekit.weights import bases as bases_module
from headrace_servicekit.weights.bases import Bases
from headrace_servicekit.weights.versions import base_name
from headrace_trainer import memory
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.backends.fsdp import state as state_module
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import COPY, GIB, Room, Rooms, check_room, check_rooms

LORA = {"rank": 4, "alpha": 8}
ROOMY = Rooms(Room("host memory", 2**50, 2**50), None)
OTHER = """
import sys
from pathlib import Path
from headrace_servicekit.weights.bases import Bases
base = Bases(Path(sys.argv[1])).take(sys.argv[2], (), None)
print(sum(base.body) and base.path.stat().st_ino, flush=True)
sys.stdin.readline()
"""
"""Maps a base that is there, and reads every page of it."""


@pytest.fixture
def build(trainer_group, make_config):
    """Builds a backend with adapters whose base lies below a root, or is its own."""

    def make(root: Path | None, *, trainer=(), **sections):
        config = TrainerConfig.model_validate(
            make_config(trainer={"lora": LORA, **dict(trainer)}, **sections)
        )
        backend = build_backend(config, build_algorithm(config.algorithm), trainer_group)
        if root is not None:
            root.mkdir(exist_ok=True)
            backend.bases = Bases(root)
        backend.load_initial()
        return backend

    return make


def bases_below(root: Path) -> list[Path]:
    gc.collect()
    Bases(root).reap()
    return sorted(root.glob("base-*/"))


def mapped(backend) -> dict[str, int]:
    """Of this process's mappings of the base: bytes that are resident, shared with others, and its own."""
    inode, found, ours = backend.base.path.stat().st_ino, dict[str, int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)", line):
            ours = int(head[1]) == inode
        elif ours and (figure := re.match(r"(\w+): +(\d+) kB", line)):
            found[figure[1]] = found.get(figure[1], 0) + 1024 * int(figure[2])
    return found


@pytest.mark.parametrize(
    ("sections", "moe"),
    [
        ({"model": {"dtype": "float32"}}, False),
        ({"model": {"dtype": "bfloat16"}}, False),
        ({"model": {"dtype": "bfloat16"}, "deterministic": True}, False),
        ({"model": {"dtype": "float32"}}, True),
    ],
    ids=["fp32", "bf16", "merged forward", "experts in pieces"],
)
def test_a_run_that_shares_its_base_has_the_bits_of_one_that_does_not(
    build, accumulate, sequences, tmp_path, sections, moe
):
    if moe:
        write_tiny_moe(tmp_path / "moe")
        sections = {"model": {**sections["model"], "path": str(tmp_path / "moe")}}
    subjects = [
        build(None, **sections),
        build(tmp_path / "shm", **sections),
        build(tmp_path / "shm", **sections),
    ]
    assert subjects[0].base is None and bases_below(tmp_path / "shm") == [subjects[1].base.path.parent]
    frozen = [own for own in subjects[1]._sharded.buffers.values() if isinstance(own, torch.nn.Parameter)]
    private = sum(own.nbytes for own in frozen if own.data_ptr() not in shared_addresses(subjects[1]))
    assert frozen and private == 0, "no frozen weight takes memory of its own"
    found = []
    for backend in subjects:
        trained = []
        for step in range(2):
            accumulate(backend, [sequences(step + 1)], 512)
            if not sections.get("deterministic"):
                trained.append(backend.reduced_gradient(7.0))
                accumulate(backend, [sequences(step + 1)], 512)
                assert backend.commit(7.0, 3e-2).finite
            else:
                trained.append(backend.reduced_gradient(7.0))
        found.append(
            [*trained, dict(backend.weights(published=True)), dict(backend.base_weights(published=True))]
        )
    for other in found[1:]:
        for own, same in zip(found[0], other, strict=True):
            assert own.keys() == same.keys()
            assert all(torch.equal(tensor, same[name]) for name, tensor in own.items())


def shared_addresses(backend) -> set[int]:
    start = torch.frombuffer(backend.base.body, dtype=torch.uint8).data_ptr()
    return set(range(start, start + len(backend.base.body)))


def test_two_processes_have_the_same_pages_and_they_go_with_both(build, accumulate, sequences, tmp_path):
    root = tmp_path / "shm"
    backend = build(root)
    accumulate(backend, [sequences(1)], 512)  # reads every page
    alone = mapped(backend)
    key = backend.base.path.parent.name.removeprefix("base-")
    command = [sys.executable, "-c", OTHER, str(root), key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert int(other.stdout.readline()) == backend.base.path.stat().st_ino
            both = mapped(backend)
        finally:
            other.kill()
    size = len(backend.base.body)
    assert alone["Rss"] == both["Rss"] >= size
    assert alone["Pss"] >= size > 1.5 * both["Pss"], "the pages that both have read count half"
    assert both["Shared_Clean"] + both["Shared_Dirty"] > 0 and both["Anonymous"] == 0
    assert len(bases_below(root)) == 1, "the other one was killed"
    del backend
    assert bases_below(root) == []


def test_other_types_and_changed_files_have_bases_of_their_own_and_all_weights_none(
    build, make_config, tmp_path
):
    root, model = tmp_path / "shm", tmp_path / "model"
    write_tiny(model)
    sections = {"model": {"path": str(model)}}
    first = build(root, **sections)
    wide = {name: tensor.clone() for name, tensor in first.base_weights()}
    narrow = build(root, model={"path": str(model), "dtype": "bfloat16"})
    assert narrow.base.path != first.base.path and len(bases_below(root)) == 2
    write_tiny(model, seed=5)
    second = build(root, **sections)
    assert second.base.path != first.base.path and len(bases_below(root)) == 3
    changed = dict(second.base_weights())
    assert any(not torch.equal(tensor, changed[name]) for name, tensor in wide.items())
    assert all(torch.equal(tensor, wide[name]) for name, tensor in first.base_weights()), "it keeps its own"
    coded = build(root, trainer={"lora": {**LORA, "quantization": "int8"}})
    every = build(root, trainer={"lora": None})
    assert coded.base is every.base is None and len(bases_below(root)) == 3


def test_files_that_change_while_they_are_read_are_told(build, monkeypatch, tmp_path):
    model, plain = tmp_path / "model", state_module.weights_digest
    write_tiny(model)

    def digest_then_change(source, empty):
        found = plain(source, empty)
        written = bytearray((model / "model.safetensors").read_bytes())
        written[-4:] = b"\0\0\0\1"
        (model / "model.safetensors").write_bytes(written)
        return found

    monkeypatch.setattr(state_module, "weights_digest", digest_then_change)
    with pytest.raises(Exception, match=r"model.path: the files at .* changed while they were read"):
        build(tmp_path / "shm", model={"path": str(model)})
    monkeypatch.undo()
    assert bases_below(tmp_path / "shm") == []
    build(tmp_path / "shm", model={"path": str(model)})


def test_the_plan_counts_frozen_weights_once_and_the_next_tenant_is_refused_by_name(build, tmp_path):
    alone = build(None).memory_plan(ROOMY).host
    first = build(tmp_path / "shm")
    second = build(tmp_path / "shm")
    base = alone["frozen weights"]
    assert base == alone["published base"] > 0
    plan = second.memory_plan(ROOMY).host
    assert plan["frozen weights"] == 0 and "published base" not in plan and plan[COPY] == alone[COPY]
    assert sum(plan.values()) == sum(alone.values()) - 2 * base
    room = Rooms(Room("host memory", sum(plan.values()), 2**50), None)
    check_rooms(second.memory_plan(room), room)
    del first, second
    assert bases_below(tmp_path / "shm") == []
    late = build(None)
    late.bases = Bases(tmp_path / "shm")
    with pytest.raises(Refusal) as caught:
        check_rooms(late.memory_plan(room), room)
    assert caught.value.reason == "MEMORY_SHORT" and caught.value.message.startswith(
        "trainer.ranks: a rank needs"
    )
    assert (
        "frozen weights 0.00" in caught.value.message and "fewer runs at a time there" in caught.value.message
    )
    with pytest.raises(
        Refusal, match="fewer runs at a time there, each of which has frozen weights of its own"
    ):
        check_room({"frozen weights": 3 * GIB}, Room("GPU memory", 2 * GIB, 8 * GIB))


async def test_the_service_publishes_the_shared_file_and_the_last_run_takes_it_along(
    client, make_config, monkeypatch
):
    root = client.instance.config.shm_dir
    config = make_config(trainer={"lora": LORA})
    first = (await client.open(config)).version
    [base] = root.glob("base-*/")
    await client.publish(first.number)
    stub = weights_pb2_grpc.WeightServiceStub(client.channel)
    described = await stub.GetManifest(weights_pb2.GetManifestRequest(run=base_name(client.run), number=1))
    published = Path(described.source.shm_path).stat()  # noqa: ASYNC240
    assert published.st_ino == (base / "base.weights").stat().st_ino, "rollouts map the trainer's own pages"
    assert (await client.restore("", first.number + 1)).version.digest == first.digest
    needs = sum(TrainerPlan.of(client).values())
    monkeypatch.setattr(memory, "resident_bytes", lambda: 0)
    monkeypatch.setattr(memory, "host_memory", lambda: HostMemory(2 * GIB, needs))
    await client.restore("", first.number + 2)
    await client.close_run()
    assert list(root.glob("base-*")) == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(config)
    assert reason_of(caught.value) == "MEMORY_SHORT" and "frozen weights" in caught.value.details()


class TrainerPlan:
    @staticmethod
    def of(client) -> dict[str, int]:
        config = TrainerConfig.model_validate(client._make_config(trainer={"lora": LORA}))
        group = type("Group", (), {"world_size": 1, "device": torch.device("cpu"), "rank": 0})()
        backend = build_backend(config, build_algorithm(config.algorithm), group)
        backend.bases = Bases(client.instance.config.shm_dir)
        return dict(backend.memory_plan(ROOMY).host)


async def test_a_base_that_shared_memory_cannot_hold_is_refused_by_name(client, make_config, monkeypatch):
    def full(path, size):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(bases_module, "make_segment", full)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.open(make_config(trainer={"lora": LORA}))
    assert reason_of(caught.value) == "NO_SPACE" and "--shm-dir (HEADRACE_SHM_DIR)" in caught.value.details()
    monkeypatch.undo()
    assert (await client.restore("", 1)).version.number == 1
