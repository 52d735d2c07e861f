"""Files that hold one version after another: never while anybody, in any process, uses the one before."""

import subprocess
import sys
from pathlib import Path

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.memory.segments import MAPPED_FILES, MappedSegments, make_segment
from headrace_servicekit.weights.receiving import receive_weights
from headrace_servicekit.weights.store import WeightStore

RUN = "runs/r"
SIZE = 8192


def publish(store, number=1, seed=0):
    pending = store.begin(RUN, number, [("w", common_pb2.DATA_TYPE_UINT8, (SIZE,))])
    pending.buffer("w")[:] = bytes([seed]) * SIZE
    return pending.seal(0, 0)


@pytest.fixture
def segment(tmp_path):
    made = make_segment(tmp_path / "file", SIZE)
    made.write()[:4] = b"mine"
    made.written()
    return made


def test_a_reader_keeps_the_writer_away_until_its_last_view_is_gone(segment, tmp_path):
    mapped = MappedSegments()
    body = mapped.open(tmp_path / "file", SIZE).lend()
    part = body[:4]
    del body
    assert part == b"mine" and part.readonly
    assert not segment.take()
    del part
    assert segment.take()


def test_two_readers_are_two(segment, tmp_path):
    mapped = MappedSegments()
    one, other = (mapped.open(tmp_path / "file", SIZE).lend() for _ in range(2))
    del one
    assert not segment.take()
    del other
    assert segment.take()


def test_nobody_reads_what_is_being_written(segment, tmp_path):
    assert segment.take()
    mapped = MappedSegments()
    with pytest.raises(BlockingIOError):
        mapped.open(tmp_path / "file", SIZE).lend()
    segment.written()
    assert mapped.open(tmp_path / "file", SIZE).lend()[:4] == b"mine"


def test_the_writers_own_readers_count_too(segment):
    body = segment.lend()
    assert not segment.take()
    del body
    assert segment.take()


READER = """
import sys
from pathlib import Path
from headrace.common.v1 import common_pb2
from headrace_servicekit.memory.segments import MappedSegments
body = MappedSegments().open(Path(sys.argv[1]), int(sys.argv[2])).lend()
print("holds", flush=True)
sys.stdin.readline()
"""


def test_a_reader_that_dies_releases_its_segment(segment, tmp_path):
    command = [sys.executable, "-c", READER, str(tmp_path / "file"), str(SIZE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b"holds\n"
        assert not segment.take()
        reader.kill()
        reader.wait(10)
    assert segment.take()


def test_a_file_of_another_size_is_refused(segment, tmp_path):
    with pytest.raises(ValueError, match="not 1"):
        MappedSegments().open(tmp_path / "file", 1)


def test_mappings_that_nobody_uses_are_bounded_and_deleted_files_are_released(tmp_path):
    mapped = MappedSegments()
    held = []
    for index in range(3 * MAPPED_FILES):
        path = tmp_path / str(index)
        make_segment(path, SIZE).written()
        body = mapped.open(path, SIZE).lend()
        if index < 2:
            held.append(body)
        del body
    assert len(mapped._mapped) == MAPPED_FILES
    for path in tmp_path.iterdir():
        path.unlink()
    make_segment(tmp_path / "last", SIZE).written()
    mapped.open(tmp_path / "last", SIZE)
    assert len(mapped._mapped) == len(held) + 1


@pytest.fixture
def pair(tmp_path):
    stores = [WeightStore(tmp_path / "shm", name) for name in ("trainer", "rollout")]
    yield stores
    for store in stores:
        store.close()


async def take(store, source, number):
    stored = source.get(RUN, number)
    sources = [source.source(RUN, number)]
    return await receive_weights(store, RUN, stored.version, stored.manifest, sources, token=None)


async def test_versions_take_turns_in_three_files(pair):
    trainer, rollout = pair
    inodes = set()
    for number in range(1, 9):
        publish(trainer, number=number, seed=number)
        trainer.keep(RUN, {number - 1, number})
        received = await take(rollout, trainer, number)
        assert bytes(received.body) == bytes(trainer.get(RUN, number).body)
        rollout.keep(RUN, {number})
        inodes.add(trainer.get(RUN, number).path.stat().st_ino)
    assert len(inodes) == 3
    assert len(list(trainer.directory.glob("*.weights"))) == 2


async def test_a_slow_engine_costs_a_file_and_keeps_its_weights(pair):
    trainer, rollout = pair
    publish(trainer, number=1, seed=1)
    body = (await take(rollout, trainer, 1)).body
    before = bytes(body)
    rollout.keep(RUN, set())
    for number in range(2, 8):
        publish(trainer, number=number, seed=number)
        trainer.keep(RUN, {number})
    assert bytes(body) == before


async def test_a_path_of_before_offers_no_later_version(pair):
    trainer, rollout = pair
    publish(trainer, number=1, seed=1)
    old = trainer.get(RUN, 1)
    offer = trainer.source(RUN, 1)
    version, manifest = old.version, old.manifest
    del old
    trainer.keep(RUN, {9})
    publish(trainer, number=2, seed=2)
    with pytest.raises(Exception, match="No such file"):
        await receive_weights(rollout, RUN, version, manifest, [offer], token=None)


def test_a_closed_run_leaves_no_spare_file(pair):
    trainer, _ = pair
    publish(trainer, number=1)
    trainer.keep(RUN, {2})
    assert any(path.name.startswith("spare") for path in trainer.directory.iterdir())
    trainer.keep(RUN, set())
    assert [path.name for path in trainer.directory.iterdir()] == ["nonce"]


async def test_what_others_hold_leaves_with_its_last_user(pair):
    trainer, rollout = pair
    publish(trainer)
    received = await take(rollout, trainer, 1)
    rollout.release(RUN)
    assert rollout.find(RUN, 1) is None and bytes(received.body) == bytes(trainer.get(RUN, 1).body)
    name = trainer.get(RUN, 1).path.name

    def mappings():
        return Path("/proc/self/maps").read_text().count(name)

    assert mappings() == 2
    del received
    assert mappings() == 1


@pytest.mark.parametrize("pattern", ["*.weights", "spare-*"])
def test_a_file_that_somebody_removed_is_made_anew(pair, pattern):
    trainer, _ = pair
    publish(trainer, number=1, seed=1)
    if pattern.startswith("spare"):
        trainer.keep(RUN, {9})
    for path in trainer.directory.glob(pattern):
        path.unlink()
    trainer.keep(RUN, {9})
    publish(trainer, number=2, seed=2)
    assert trainer.get(RUN, 2).path.exists() and trainer.get(RUN, 2).body[:1] == b"\x02"
