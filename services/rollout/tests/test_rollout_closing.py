"""A run that is closed while it generates, is suspended or is being opened: nothing of it stays."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.runs.opening import open_run
from rollout_calls import HEADER, refused


@pytest.mark.parametrize("half_close", [True, False])
async def test_close_ends_streams_with_their_partial_outputs(rollout, assignments, half_close, caplog):
    call = await rollout.generate(assignments, half_close=half_close, max_new_tokens=100).start()
    await call.read_until(lambda it: it.chunks)
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER), timeout=30)
    if half_close:
        await call.read_all()  # nothing is missing: the stream ends as it would have
    else:
        assert await refused(call.read_all(), "RUN_CLOSED") is grpc.StatusCode.ABORTED
    ended = {(p.sample.prompt_ordinal, p.sample.sample_index) for p in call.partials} | set(call.finished())
    assert len(ended) == 12 and call.partials, "every sample comes back, whole or partial"
    assert not [record for record in caplog.records if record.exc_info]
    await rollout.reopen()
    again = await rollout.generate(assignments).start()
    assert len(await again.read_all()) == 12


async def test_close_while_suspended_and_without_a_lease_gives_everything_back(rollout, assignments):
    await (await rollout.generate(assignments).start()).read_all()
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
    rollout.instance.fence.release(1)
    engine = weakref.ref(rollout.engine)
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    gc.collect()
    assert engine() is None, "nothing of the run stays in memory"
    await refused(rollout.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER)), "NOT_OPEN")


async def test_close_while_the_run_is_being_opened(new_rollout, tiny_directory, monkeypatch):
    rollout, go_on = await new_rollout(), threading.Event()

    def slow_open(*parts):
        assert go_on.wait(60)
        return open_run(*parts)

    monkeypatch.setattr("headrace_rollout.service.open_run", slow_open)
    opening = asyncio.ensure_future(rollout.open(tiny_directory))
    while not rollout.instance.open_runs.names():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    closing = rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER), timeout=60)
    while rollout.instance.open_runs.reports()[0].phase != common_pb2.OPEN_PHASE_CLOSING:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    go_on.set()
    await closing
    await refused(opening, "OPENING_STALE")
    assert rollout.instance.open_runs.names() == [] and rollout.servicer._run is None
    await rollout.open(tiny_directory)
