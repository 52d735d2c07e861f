"""Finished bodies stay with their producer until the ledger has them."""

from __future__ import annotations

import asyncio

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout.runs.opened import Retention
from headrace_rollout.streams.base import Serving
from headrace_rollout.streams.generation import Generation
from rollout_calls import HEADER, refused


def test_retention_keeps_the_latest_attempt():
    retention = Retention(1000)
    for attempt in (1, 3, 2):
        retention.add(common_pb2.Trajectory(attempt=attempt, completion_text="x" * attempt))
    (item,) = retention.items()
    assert item.attempt == 3 and retention.size_bytes == item.size_bytes
    retention.release([item.sample])
    assert not retention.items() and retention.size_bytes == 0


async def test_retention_lasts_until_released(rollout, assignments):
    trajectories = await (await rollout.generate(assignments).start()).read_all()
    await (await rollout.generate(assignments[:1], evaluation=True, seed=99).start()).read_all()
    inventory = await rollout.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER))
    assert len(inventory.items) == 12
    for item in inventory.items:
        kept = trajectories[item.sample.prompt_ordinal, item.sample.sample_index]
        assert (item.body_digest, item.attempt, item.size_bytes) == (kept.body_digest, 1, kept.ByteSize())
    keys = [item.sample for item in inventory.items]
    wanted = [keys[0], keys[5], common_pb2.SlotKey(prompt_ordinal=99)]
    fetch = rollout.stub.FetchTrajectories(
        rollout_pb2.FetchTrajectoriesRequest(header=HEADER, samples=wanted)
    )
    fetched = [trajectory async for response in fetch for trajectory in response.trajectories]
    assert fetched == [trajectories[key.prompt_ordinal, key.sample_index] for key in wanted[:2]]
    for _ in range(2):
        await rollout.stub.ReleaseTrajectories(
            rollout_pb2.ReleaseTrajectoriesRequest(header=HEADER, samples=keys[:11])
        )
    inventory = await rollout.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER))
    assert [item.sample for item in inventory.items] == keys[11:]


async def test_a_caller_that_goes_away_leaves_no_work_and_loses_no_body(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=110).start()
    await call.read_until(lambda call: len(call.finished()) >= 1)
    call.call.cancel()
    again = await (await rollout.generate(assignments[:1], evaluation=True).start()).read_all()
    assert len(again) == 3
    paused = await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    assert paused.partial_count == 0, "nothing runs for a caller that is gone"
    inventory = await rollout.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER))
    assert len(call.finished()) <= len(inventory.items) < 12


async def test_full_retention_takes_no_more_work_until_released(rollout, assignments, monkeypatch):
    monkeypatch.setattr("headrace_rollout.runs.opened.RETENTION_BYTES", 500)
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    await rollout.reopen()
    trajectories = await (await rollout.generate(assignments).start()).read_all()
    call = await rollout.generate(assignments).start()
    code = await refused(call.read_all(), "RETENTION_FULL", "12 trajectories", "ReleaseTrajectories")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await (await rollout.generate(assignments, evaluation=True).start()).read_all()
    keys = [trajectory.sample for trajectory in trajectories.values()]
    await rollout.stub.ReleaseTrajectories(
        rollout_pb2.ReleaseTrajectoriesRequest(header=HEADER, samples=keys)
    )
    assert len(await (await rollout.generate(assignments).start()).read_all()) == 12


async def test_assignments_beyond_the_bound_wait_at_the_caller(rollout, assignments, monkeypatch):
    monkeypatch.setattr("headrace_rollout.sessions.drivers.base.WAITING_SAMPLES", 4)
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    await rollout.reopen(max_concurrency=1)
    call = await rollout.generate([], half_close=False, chunk_tokens=1).start()
    for assignment in assignments:
        await call.assign([assignment])
    await call.call.done_writing()
    most = 0

    def look(call):
        nonlocal most
        most = max(most, rollout.engine.waiting_samples)
        return False

    await call.read_until(look)
    assert len(call.finished()) == 12 and 4 < most <= 4 + 3


async def test_what_finished_unsent_when_a_caller_left_is_kept(rollout, assignments):
    run = rollout.servicer._run
    opening = rollout_pb2.GenerateOpen(header=HEADER, policy_number=1, max_new_tokens=8, chunk_tokens=1)

    async def requests():
        yield rollout_pb2.GenerateRequest(assign=rollout_pb2.AssignGroups(groups=assignments))

    generation = Generation(
        run,
        opening,
        Serving(
            "me", rollout.instance.fence, lambda: None, rollout.servicer._caches, rollout.servicer._endpoint
        ),
    )
    responses = generation.responses(requests())
    await anext(responses)
    async with asyncio.timeout(30):
        while run.engine.figures.samples < 12:  # noqa: ASYNC110  # counted in a thread
            await asyncio.sleep(0.01)
    await responses.aclose()
    assert len(run.retention) == 12
