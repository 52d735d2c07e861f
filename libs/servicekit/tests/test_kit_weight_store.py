"""A store of weights: what is published is sealed, kept while it is wanted, and gone with its process."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.digests import digest_bytes, manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.receiving import receive_base, ways_of
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import BASE_NUMBER, base_name
from weight_parts import LAYOUT, RUN, publish


def test_a_published_version_names_every_tensor_and_cannot_be_changed(stores):
    store = stores("a")
    version, manifest = publish(store, number=4, parent=3, ordinal=2)
    assert (version.number, version.parent, version.ordinal) == (4, 3, 2)
    assert version.digest == manifest.digest
    stored = store.get(RUN, 4)
    assert [e.name for e in manifest.entries] == ["embed", "head", "bias"]
    assert [e.offset_bytes for e in manifest.entries] == [0, 602000, 602000 + 2802800]
    for entry in manifest.entries:
        part = stored.body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        assert digest_bytes(part) == entry.digest
    assert stored.body.readonly and len(stored.body) == manifest.size_bytes
    with pytest.raises(ServiceError, match="CONFLICT"):
        store.begin(RUN, 4, LAYOUT)


def test_equal_bytes_have_equal_digests_whoever_publishes_them(stores):
    assert publish(stores("a"), seed=5)[0].digest == publish(stores("b"), seed=5)[0].digest
    assert publish(stores("c"), seed=6)[0].digest != publish(stores("d"), seed=7)[0].digest


def test_a_writable_array_alive_at_the_seal_is_refused(stores):
    pending = stores("a").begin(RUN, 1, LAYOUT)
    array = np.frombuffer(pending.buffer("head"), np.float32)
    with pytest.raises(ServiceError, match="BUFFER_IN_USE"):
        pending.seal(0, 0)
    del array
    assert pending.seal(0, 0)[0].number == 1


@pytest.mark.parametrize(
    ("layout", "told"), [([LAYOUT[2], LAYOUT[2]], "names a tensor twice"), ([], "without a single byte")]
)
def test_a_layout_that_is_none_is_refused(stores, layout, told):
    with pytest.raises(ServiceError, match=told):
        stores("a").begin(RUN, 1, layout)


def test_keep_touches_one_run_only(stores):
    store = stores("a")
    publish(store)
    store.keep("runs/other", set())
    assert store.find(RUN, 1)


HOLDER = """
import sys, time
from pathlib import Path
from headrace_servicekit.weights.receiving import receive_base, ways_of
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import BASE_NUMBER, base_name
store = WeightStore(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
time.sleep(60)
"""


def test_the_next_store_reaps_the_directories_of_the_dead_and_only_those(tmp_path):
    root = tmp_path / "shm"
    holders = {
        name: subprocess.Popen([sys.executable, "-c", HOLDER, str(root), name], stdout=subprocess.PIPE)
        for name in ("dies", "lives")
    }
    for holder in holders.values():
        assert holder.stdout.readline() == b"ready\n"
    holders["dies"].send_signal(signal.SIGKILL)
    holders["dies"].wait(10)
    store = WeightStore(root, "new")
    assert sorted(path.name for path in root.iterdir()) == ["lives", "new"]
    store.close()
    assert [path.name for path in root.iterdir()] == ["lives"]
    holders["lives"].kill()
    holders["lives"].wait(10)


def test_an_incarnation_that_lives_cannot_be_taken(stores):
    stores("a")
    with pytest.raises(ServiceError, match="incarnation id a"):
        stores("a")


def test_a_full_tmpfs_is_a_sentence(tmp_path):
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]).returncode
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        store = WeightStore(tmp_path / "shm", "a")
        with pytest.raises(ServiceError) as caught:
            store.begin(RUN, 1, LAYOUT)
        assert (caught.value.code.name, caught.value.reason) == ("RESOURCE_EXHAUSTED", "NO_SPACE")
        assert str(tmp_path) in caught.value.message and "--shm-dir" in caught.value.message
        assert [path.name for path in store.directory.iterdir()] == ["nonce"]
        store.close()
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


async def test_the_base_of_adapters_is_taken_once_and_one_of_another_digest_again(stores, serve_store):
    producer, receiver, empty = stores("a"), stores("b", root="other"), stores("c")
    for store in (producer, empty):
        await serve_store(store)
    name = base_name(RUN)
    version, manifest = publish(producer, BASE_NUMBER, run=name)
    wanted = common_pb2.AdapterBase(digest=version.digest, scales={"": 2.0})
    sources = [common_pb2.WeightSource(address=each.address, incarnation="x") for each in (empty, producer)]

    async def take(store, base=wanted, sources=sources, ways=("grpc",)):
        return await receive_base(store, RUN, base, sources, token=None, ways=ways_of(ways))

    publish(receiver, BASE_NUMBER, seed=1, run=name)
    first = await take(receiver)
    assert (first.bytes_moved, first.fallbacks) == (manifest.size_bytes, [])
    assert bytes(first.stored.body) == bytes(producer.get(name, BASE_NUMBER).body)
    assert (await take(receiver, sources=[])).bytes_moved == 0
    mapped = await take(stores("d"), ways=("delta", "shm"))
    assert mapped.bytes_moved == 0 and mapped.stored.body == first.stored.body
    other = common_pb2.AdapterBase(digest="another", scales={"": 2.0})
    with pytest.raises(ServiceError, match=f"base another.*has the base {version.digest}") as refused:
        await take(receiver, other)
    assert refused.value.reason == "BASE_NOT_HELD"


def test_the_digest_of_adapters_is_of_their_base_and_scale_too(stores):
    _, manifest = publish(stores("a"))
    bases = [
        common_pb2.AdapterBase(digest=digest, scales={"": scale})
        for digest in ("x", "y")
        for scale in (1.0, 2.0)
    ]
    assert len({manifest_digest(manifest.entries, base) for base in (*bases, None)}) == 5
