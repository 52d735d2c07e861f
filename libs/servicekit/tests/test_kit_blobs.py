"""Blobs: taken from the tmpfs or by gRPC, verified, kept until released."""

from pathlib import Path

import grpc
import pytest
from headrace.common.v1 import blobs_pb2, blobs_pb2_grpc, common_pb2
from headrace_servicekit.memory.blobs import CHUNK_BYTES, BlobReader, BlobServicer, BlobStore, BlobWriter
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights.store import WeightStore

TOKEN = "secret"
BODY = bytes(range(256)) * 10_000  # three chunks, the last one short


@pytest.fixture
def kept(tmp_path):
    weights = WeightStore(tmp_path / "shm", "producer")
    yield BlobStore(weights.directory)
    weights.close()


@pytest.fixture
async def reader(tmp_path):
    """`reader("shm")` shares the producer's tmpfs, another name is another host."""
    made = []

    def make(root, token=TOKEN):
        made.append(BlobReader(tmp_path / root, token))
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.fixture
async def served(kept):
    server = GrpcServer("127.0.0.1:0", token=TOKEN)
    add = blobs_pb2_grpc.add_BlobServiceServicer_to_server
    server.add_service(add, BlobServicer(kept), "headrace.common.v1.BlobService")
    kept.address = await server.start()
    yield kept
    await server.drain(0)


@pytest.mark.parametrize("root", ["shm", "elsewhere"])
@pytest.mark.parametrize("body", [BODY, b"", BODY[:CHUNK_BYTES]])
async def test_a_body_is_the_same_on_the_host_and_beyond(served, reader, root, body):
    reference = served.put(memoryview(body))
    assert reference.size_bytes == len(body)
    assert await reader(root).read(reference) == body


async def test_the_file_needs_no_server(kept, reader):
    assert await reader("shm").read(kept.put(BODY)) == BODY


def file_of(kept, reference):
    with kept.open(reference) as file:
        return Path(file.name)


def inode(kept, reference):
    return file_of(kept, reference).stat().st_ino


async def reason_of_reading(reader, reference):
    with pytest.raises(ServiceError) as refused:
        await reader.read(reference)
    return refused.value.reason


@pytest.mark.parametrize("root", ["shm", "elsewhere"])
@pytest.mark.parametrize("field", [{"digest": "0" * 32}, {"size_bytes": 5}, {"size_bytes": len(BODY) + 1}])
async def test_other_bytes_than_promised_are_refused(served, reader, root, field):
    reference = served.put(BODY)
    for name, value in field.items():
        setattr(reference, name, value)
    assert await reason_of_reading(reader(root), reference) == "DIGEST_MISMATCH"


async def test_a_changed_file_is_refused(kept, reader):
    reference = kept.put(BODY)
    path = file_of(kept, reference)
    path.chmod(0o600)
    path.write_bytes(BODY[:-1] + b"x")
    assert await reason_of_reading(reader("shm"), reference) == "DIGEST_MISMATCH"


@pytest.mark.parametrize("root", ["shm", "elsewhere"])
async def test_a_released_blob_is_gone(served, reader, root):
    reference, other = served.put(BODY), served.put(b"other")
    served.release(reference)
    served.release(reference)
    assert len(served) == 1
    assert await reason_of_reading(reader(root), reference) == "BLOB_GONE"
    assert await reader(root).read(other) == b"other"


async def test_another_incarnations_blob_is_not_served(served, reader):
    reference = served.put(BODY)
    reference.incarnation = "successor"
    assert await reason_of_reading(reader("elsewhere"), reference) == "BLOB_GONE"


async def test_without_file_and_address_it_is_gone(kept, reader):
    assert await reason_of_reading(reader("elsewhere"), kept.put(BODY)) == "BLOB_GONE"


@pytest.mark.parametrize("field", [{"blob_id": "../nonce"}, {"incarnation": ".."}, {"blob_id": ""}])
async def test_a_reference_cannot_leave_the_directory(kept, reader, field):
    reference = kept.put(BODY)
    for name, value in field.items():
        setattr(reference, name, value)
    assert await reason_of_reading(reader("shm"), reference) == "INVALID"


@pytest.mark.parametrize("offset", [len(BODY) + 1, 2**63, 2**64 - 1])
async def test_an_offset_beyond_the_blob_is_refused(served, offset):
    request = blobs_pb2.FetchBlobRequest(blob=served.put(BODY), offset_bytes=offset)
    async with dial(served.address, token=TOKEN) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await blobs_pb2_grpc.BlobServiceStub(channel).FetchBlob(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("offset_bytes: ")


async def test_the_token_is_needed(served, reader):
    assert await reason_of_reading(reader("elsewhere", token=None), served.put(BODY)) == "BLOB_GONE"


async def test_a_released_file_is_written_again_and_spares_are_bounded(kept, reader, monkeypatch):
    first = kept.put(b"first")
    file = inode(kept, first)
    kept.release(first)
    second = kept.put(b"other")
    assert inode(kept, second) == file
    assert await reader("shm").read(second) == b"other"
    assert await reason_of_reading(reader("shm"), first) == "BLOB_GONE"
    monkeypatch.setattr("headrace_servicekit.memory.blobs.SPARE_BYTES", 8)
    for reference in [kept.put(b"third"), second]:
        kept.release(reference)
    assert len(list(file_of(kept, kept.put(b"longer")).parent.iterdir())) == 2


def test_equal_sizes_never_share_a_file(kept):
    references = [kept.put(bytes([index]) * 100) for index in range(9)]
    for reference in references[::2]:
        kept.release(reference)
    references = references[1::2] + [kept.put(bytes([50 + index]) * 100) for index in range(9)]
    assert len({inode(kept, reference) for reference in references}) == len(references)


async def test_what_has_no_room_beside_the_weights_is_held_in_memory(served, reader, monkeypatch):
    monkeypatch.setattr("headrace_servicekit.memory.blobs.HELD_SHARE", 0.0)
    held = served.hold(BODY)
    assert not list(file_of(served, served.put(b"a file")).parent.glob(held.blob_id))
    assert await reader("shm").read(held) == BODY
    served.release(held)
    assert await reason_of_reading(reader("shm"), held) == "BLOB_GONE"
    monkeypatch.undo()
    filed = served.hold(BODY)
    assert file_of(served, filed).read_bytes() == BODY


async def test_what_another_process_writes_into_the_folder_is_adopted(served, reader):
    writer = BlobWriter(served.folder, "pool-a")
    first = served.adopt(writer.put("0", memoryview(b"first")))
    assert await reader("shm").read(first) == b"first"
    assert await reader("elsewhere").read(first) == b"first", "its producer's address is in the reference"
    second = served.adopt(writer.put("0", memoryview(b"other")))
    assert await reader("shm").read(first) == b"first", "a name has two files, which are written in turn"
    writer.put("0", memoryview(b"third"))
    assert await reason_of_reading(reader("shm"), first) == "DIGEST_MISMATCH"
    served.release(second)
    assert await reason_of_reading(reader("elsewhere"), second) == "BLOB_GONE"
    assert len([*served.folder.iterdir()]) == 2, "the files stay with their writer"
    other = served.adopt(BlobWriter(served.folder, "pool-b").put("0", memoryview(b"longer than these")))
    served.forget("pool-a")
    assert [path.name for path in served.folder.iterdir()] == [other.blob_id] and len(served) == 1
    with pytest.raises(ServiceError, match="names no file"):
        served.adopt(common_pb2.BlobRef(blob_id="../weights"))
