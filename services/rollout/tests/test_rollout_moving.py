"""Caches of samples that move, as an instance keeps and takes them."""

import asyncio
from types import SimpleNamespace

import pytest
from headrace.common.v1 import common_pb2
from headrace_rollout import moving
from headrace_rollout.engines.samples import CachedContext
from headrace_rollout.moving import MovedCaches
from headrace_servicekit.memory.blobs import BlobReader


@pytest.fixture
async def caches(tmp_path):
    directory = tmp_path / "incarnation"
    directory.mkdir()
    found = MovedCaches(directory, None)
    yield found
    await found.close()


def state_of(cache):
    return common_pb2.ResumeState(token_ids=[1, 2], cache=cache)


async def test_what_is_kept_can_be_taken_until_its_time_is_over(caches, monkeypatch):
    monkeypatch.setattr(moving, "KEPT_S", 0.05)
    given = CachedContext("a form", 2, b"keys and values")
    kept = caches.keep(given)
    assert await caches.take(state_of(kept)) == given
    async with asyncio.timeout(10):
        while len(caches.blobs):  # noqa: ASYNC110  # a timer of the loop ends it
            await asyncio.sleep(0.01)
    assert await caches.take(state_of(kept)) is None


async def test_caches_leave_room_for_the_weights(caches, monkeypatch):
    """A quarter of what is free at first, for all of them together."""
    monkeypatch.setattr(
        moving.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 - caches._kept_bytes)
    )
    kept = [caches.keep(CachedContext("a form", 1, bytes(100))) for _ in range(4)]
    assert [each is not None for each in kept] == [True, True, False, False]


async def test_an_instance_that_does_not_answer_is_asked_once(caches, monkeypatch):
    asked = []

    async def silence(reader, reference):
        asked.append(reference.blob_id)
        await asyncio.sleep(60)

    monkeypatch.setattr(BlobReader, "read", silence)
    monkeypatch.setattr(moving, "TAKE_S", 0.05)
    for blob in "123":
        reference = common_pb2.BlobRef(incarnation="gone", blob_id=blob)
        cache = common_pb2.CachedContext(blob=reference)
        assert await caches.take(state_of(cache)) is None
    assert asked == ["1"]
