"""Frozen weights that processes of a host share: written once, there for as long as somebody maps them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights import bases as module
from headrace_servicekit.weights.bases import Bases
from headrace_servicekit.weights.store import WeightStore

LAYOUT = [("a", common_pb2.DATA_TYPE_UINT8, (4096,)), ("b", common_pb2.DATA_TYPE_UINT8, (3,))]
RUN = "runs/r/base"
TAKER = """
import sys
from pathlib import Path
from test_kit_bases import LAYOUT, filled
from headrace_servicekit.weights.bases import Bases
found = Bases(Path(sys.argv[1])).take("k", LAYOUT, filled(int(sys.argv[2])))
print(found.body[0], found.segment.handle and found.path.stat().st_ino, flush=True)
sys.stdin.readline()
"""


def filled(value: int, wrote: list[int] | None = None):
    def write(pending):
        for name, _, (size,) in LAYOUT:
            pending.buffer(name)[:] = bytes([value]) * size
        (wrote if wrote is not None else []).append(value)
        return {}

    return write


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def taker(tmp_path):
    """Starts processes that take the base and hold it until they are told to end, or are killed."""
    started = []

    def start(value: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", TAKER, str(tmp_path), str(value)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def test_the_first_writes_and_the_others_map_the_same_file(tmp_path, taker):
    told = [process.stdout.readline().split() for process in (taker(1), taker(2))]
    assert told[0] == told[1] and told[0][0] in ("1", "2"), "one wrote, and both have its pages"
    own = Bases(tmp_path).take("k", LAYOUT, filled(3))
    assert bytes(own.body[:1]) == told[0][0].encode().replace(b"1", b"\1").replace(b"2", b"\2")
    assert own.path.stat().st_ino == int(told[0][1]) and own.body.readonly
    assert names(tmp_path) == ["base-k"]


def test_it_goes_with_its_last_user_also_one_that_is_killed(tmp_path, taker):
    first, second = taker(1), taker(1)
    for process in (first, second):
        process.stdout.readline()
    first.kill()
    first.wait(10)
    Bases(tmp_path).reap()
    assert names(tmp_path) == ["base-k"], "the other one has it"
    second.kill()
    second.wait(10)
    store = WeightStore(tmp_path, "next")
    assert names(tmp_path) == ["next"]
    wrote: list[int] = []
    found = store.bases.take("k", LAYOUT, filled(4, wrote))
    assert wrote == [4] and found.body[0] == 4
    store.close()
    assert names(tmp_path) == [] and found.body[0] == 4, "what is mapped stays valid"


def test_a_run_that_ends_takes_its_base_along_and_another_one_keeps_it(tmp_path):
    one, other = WeightStore(tmp_path, "one"), WeightStore(tmp_path, "other")
    held = {}
    for store in (one, other):
        found = store.bases.take("k", LAYOUT, filled(1), mark="m")
        store.adopt(RUN, found.version, found.manifest, found.path, found.segment, found.body)
        held[store.incarnation] = found
    assert one.bases.has("m") and not one.bases.has("n") and not one.bases.has("")
    links = [store.get(RUN, 1).path.stat().st_ino for store in (one, other)]
    assert links[0] == links[1] == held["one"].path.stat().st_ino
    del found
    for store, left in ((one, True), (other, False)):
        held.pop(store.incarnation)
        store.keep(RUN, set())
        gc.collect()
        store.bases.reap()
        assert one.bases.has("m") is left
    one.close()
    other.close()


def test_another_key_is_another_base(tmp_path):
    bases = Bases(tmp_path)
    found = [bases.take(key, LAYOUT, filled(value)) for key, value in (("k", 1), ("l", 2))]
    assert [each.body[0] for each in found] == [1, 2] and found[0].version.digest != found[1].version.digest


def test_a_write_that_fails_leaves_nothing_and_the_next_one_may(tmp_path):
    def fails(pending):
        raise ValueError("the file changed")

    bases = Bases(tmp_path)
    with pytest.raises(ValueError, match="the file changed"):
        bases.take("k", LAYOUT, fails)
    gc.collect()
    bases.reap()
    assert names(tmp_path) == []
    assert bases.take("k", LAYOUT, filled(1)).body[0] == 1


def test_who_waits_for_another_writer_gets_its_base_or_is_told_whom(tmp_path):
    begun, go = threading.Event(), threading.Event()
    wrote: list[int] = []

    def slow(pending):
        begun.set()
        assert go.wait(30)
        return filled(1, wrote)(pending)

    found = []
    thread = threading.Thread(target=lambda: found.append(Bases(tmp_path).take("k", LAYOUT, slow)))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(ServiceError, match=r"base-k: another process has not written this base within 0 s"):
        Bases(tmp_path).take("k", LAYOUT, filled(2, wrote), wait_s=0)
    WeightStore(tmp_path, "janitor").close()  # leaves what is being written
    go.set()
    own = Bases(tmp_path).take("k", LAYOUT, filled(2, wrote))
    thread.join(30)
    assert wrote == [1] and own.body[0] == 1 and len(found) == 1


def test_a_base_that_the_tmpfs_cannot_hold_is_a_sentence(tmp_path, monkeypatch):
    def full(path, size):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "make_segment", full)
    with pytest.raises(ServiceError) as caught:
        Bases(tmp_path).take("k", LAYOUT, filled(1))
    assert caught.value.reason == "NO_SPACE" and "4099 bytes" in caught.value.message
    assert "--shm-dir" in caught.value.message and names(tmp_path) == []
