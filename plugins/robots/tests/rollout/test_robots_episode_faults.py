"""What goes wrong while episodes run: environments, simulators, leases, pauses, and callers that leave."""

from __future__ import annotations

import asyncio
import json
import signal

import numpy as np
import pytest
from episode_rig import WALKER, episode_of, new_policy, open_robot, run_episodes, starts
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.memory.segments import reap_dead_stores
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.episodes import IMAGE, STATE, decode_episode, references
from headrace_servicekit.rpc.errors import ServiceError
from rollout_calls import HEADER, RUN, refused
from simulator_rig import SimulatorProcess, open_pool

TASK = "robots.py:make_env"


@pytest.fixture
def new_walker(new_rollout, publish):
    """Instances with an open run of the walking robot and version 1 of its policy."""
    published = None

    async def start(name="rollout-0", *, policy=WALKER, **options):
        nonlocal published
        published = published or publish(new_policy(policy), 1)
        shm = {"shm_dir": options.pop("shm_dir")} if "shm_dir" in options else {}
        rollout = await new_rollout(name, **shm)
        await open_robot(rollout, policy, **{"tasks": [TASK], **options})
        await rollout.install(published)
        return rollout

    return start


async def walks(address, *, ends_at=6, **fields):
    """A pool of the walking robot; each environment in a process of its own."""
    options = {"ends_at": ends_at, **fields.pop("options", {})}
    fields = {"count": 3, "processes": 3, "max_episode_steps": 0, **fields}
    return await open_pool(address, TASK, options=options, **fields)


def begin(prompts, samples=1, **fields):
    return starts(prompts, samples, task=TASK, **fields)


async def test_a_lost_environment_costs_its_own_episode_alone(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address)
    prompts = [1, 666, 2, 3, 4, 5]
    trajectories = await (await run_episodes(rollout, [pool], begin(prompts))).read_all()
    lost = trajectories.pop((666, 0))
    assert lost.finish_reason == common_pb2.FINISH_REASON_ERROR and not lost.branches[0].segments
    assert "environment" in json.loads(lost.completion_text)["error"]
    assert len(trajectories) == 5
    for trajectory in trajectories.values():
        episode = episode_of(trajectory)
        assert trajectory.finish_reason == common_pb2.FINISH_REASON_TERMINATED and episode.terminated
        np.testing.assert_array_equal(episode.rewards_TC[:, 0], range(1, 7))
        assert not episode.final_observation
    again = await (await run_episodes(rollout, [pool], begin(prompts[2:]))).read_all()
    assert len(again) == 4, "the new process serves the next episodes"


@pytest.mark.parametrize(("says", "success"), [(True, True), (False, None)])
async def test_what_nobody_reports_is_no_failure(new_walker, simulator_address, says, success):
    rollout = await new_walker()
    pool = await walks(simulator_address, options={"says": says})
    (walked,) = (await (await run_episodes(rollout, [pool], begin([1]))).read_all()).values()
    assert json.loads(walked.completion_text)["success"] is success


async def test_an_observation_that_is_not_finite_costs_its_own_episode_alone(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address)
    trajectories = await (await run_episodes(rollout, [pool], begin([1, 667, 2, 668, 3]))).read_all()
    for seed, value in ((667, "nan"), (668, "-inf")):
        lost = trajectories.pop((seed, 0))
        assert lost.finish_reason == common_pb2.FINISH_REASON_ERROR and not lost.branches[0].segments
        error = json.loads(lost.completion_text)["error"]
        assert f"observation 'place' holds {value} at element 1" in error and "environment" in error
    assert {each.finish_reason for each in trajectories.values()} == {common_pb2.FINISH_REASON_TERMINATED}
    assert len(trajectories) == 3


async def test_chunks_are_cut_where_an_episode_ends(new_walker, simulator_address):
    rollout = await new_walker(policy={**WALKER, "chunk_length": 4})
    pool = await walks(simulator_address)
    (trajectory,) = (await (await run_episodes(rollout, [pool], begin([1]))).read_all()).values()
    episode = episode_of(trajectory)
    assert episode.valid_TC.tolist() == [[True] * 4, [True, True, False, False]]
    assert episode.rewards_TC.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    moved = episode.executed_TCA[episode.valid_TC].sum(0)
    place, start = episode.observation[STATE][1, :2], episode.observation[STATE][0, :2]
    np.testing.assert_allclose(place - start, episode.executed_TCA[0].sum(0), rtol=1e-5)
    assert moved.shape == (2,) and json.loads(trajectory.completion_text)["steps"] == 6


@pytest.mark.parametrize("said_by", ["stop_on_success", "until_success"])
async def test_an_episode_may_end_with_its_first_success(new_walker, simulator_address, said_by):
    of_run, of_stream = ({said_by: True}, {}) if said_by == "stop_on_success" else ({}, {said_by: True})
    rollout = await new_walker(policy={**WALKER, "chunk_length": 4}, **of_run)
    pool = await walks(simulator_address, options={"goal": 3})
    call = await run_episodes(rollout, [pool], begin([1]), **of_stream)
    (trajectory,) = (await call.read_all()).values()
    episode = episode_of(trajectory)
    assert episode.terminated and episode.valid_TC.tolist() == [[True] * 3 + [False]]
    assert episode.successes_TC.tolist() == [[False, False, True, False]]
    assert json.loads(trajectory.completion_text) == {"return": 6.0, "success": True, "steps": 3}


@pytest.mark.parametrize("same_host", [True, False])
async def test_images_by_reference_are_those_of_their_steps(
    new_walker, simulator_process, tmp_path, same_host
):
    cnn = {**WALKER, "kind": "cnn", "cameras": ["eye"], "height": 40, "width": 40, "features": 8}
    shm_dir = simulator_process.shm_dir if same_host else tmp_path / "other"
    rollout = await new_walker(policy=cnn, cameras={"eye": "front"}, shm_dir=shm_dir)
    pool = await walks(simulator_process.address, options={"image": 40}, blob_bytes=1000)
    trajectories = await (await run_episodes(rollout, [pool], begin(range(4), 2))).read_all()
    assert len(trajectories) == 8
    for trajectory in trajectories.values():
        images = episode_of(trajectory).observation[IMAGE + "eye"]
        assert images.shape == (6, 40, 40, 3)
        assert all((image == step).all() for step, image in enumerate(images))


async def test_large_episodes_leave_by_reference_and_go_with_their_retention(
    new_walker, simulator_process, monkeypatch
):
    """Nothing that was seen passes through the coordinator: so an episode may have any length."""
    monkeypatch.setattr("headrace_robots.rollout.stream.MAX_TRAJECTORY_BYTES", 30_000)
    cnn = {**WALKER, "kind": "cnn", "cameras": ["eye"], "height": 150, "width": 150, "features": 8}
    shm_dir = simulator_process.shm_dir
    rollout = await new_walker(policy=cnn, cameras={"eye": "front"}, shm_dir=shm_dir)
    pool = await walks(simulator_process.address, options={"image": 150})
    judged = await (await run_episodes(rollout, [pool], begin([9]), evaluation=True)).read_all()
    (seen,) = [episode_of(trajectory).observation for trajectory in judged.values()]
    assert STATE in seen and IMAGE + "eye" not in seen, "what does not travel is left out of an evaluation"

    trajectories = await (await run_episodes(rollout, [pool], begin(range(2)))).read_all()
    reader = BlobReader(shm_dir, None)
    held = {}
    for trajectory in trajectories.values():
        (segment,) = trajectory.branches[0].segments
        assert trajectory.ByteSize() < 30_000 and trajectory.body_digest == trajectory_digest(trajectory)
        held |= {tensor.blob.digest: tensor.blob for tensor in references(segment.actions)}
        bodies = {digest: await reader.read(blob) for digest, blob in held.items()}
        images = decode_episode(segment.actions, bodies=bodies).observation[IMAGE + "eye"]
        assert all((image == step).all() for step, image in enumerate(images)) and len(images) == 6
    listed = await rollout.stub.ListInventory(rollout_pb2.ListInventoryRequest(header=HEADER))
    assert all(item.size_bytes > 6 * 150 * 150 * 3 for item in listed.items) and len(listed.items) == 2
    request = rollout_pb2.ReleaseTrajectoriesRequest(
        header=HEADER, samples=[trajectory.sample for trajectory in trajectories.values()]
    )
    await rollout.stub.ReleaseTrajectories(request)
    for blob in held.values():
        with pytest.raises(ServiceError, match="not kept here"):
            await reader.read(blob)


@pytest.mark.parametrize("reachable", [True, False])
async def test_steps_go_over_the_socket_of_the_host_or_by_grpc(new_walker, simulator_process, reachable):
    rollout = await new_walker()
    pool = await walks(simulator_process.address)
    (path,) = simulator_process.shm_dir.glob("*/streams")
    aside = path if reachable else path.rename(path.with_name("aside"))
    try:
        trajectories = await (call := await run_episodes(rollout, [pool], begin(range(4)))).read_all()
    finally:
        aside.rename(path)
    assert len(trajectories) == 4
    # Two parts of the environments act by turns: a reset and six actions, of each episode.
    assert call.figures == {f"operations_by_{'socket' if reachable else 'grpc'}": 4 * 7}


async def test_a_killed_simulator_leaves_no_picture_behind(new_walker, tmp_path):
    cnn = {**WALKER, "kind": "cnn", "cameras": ["eye"], "height": 40, "width": 40, "features": 8}
    doomed = SimulatorProcess(tmp_path)
    rollout = await new_walker(policy=cnn, cameras={"eye": "front"}, shm_dir=doomed.shm_dir)
    pool = await walks(doomed.address, options={"image": 40}, blob_bytes=1000)
    await (await run_episodes(rollout, [pool], begin(range(3)))).read_all()
    assert list(doomed.shm_dir.glob("*/blobs/*"))
    doomed.kill()
    reap_dead_stores(doomed.shm_dir)  # as every instance does that starts on the host
    assert not list(doomed.shm_dir.glob("*/blobs/*"))


async def test_a_simulator_killed_inside_an_answer_costs_its_own_episodes_alone(
    new_walker, simulator_address, tmp_path
):
    rollout = await new_walker()
    doomed = SimulatorProcess(tmp_path, answers=10)
    try:
        pools = [await walks(simulator_address, ends_at=12), await walks(doomed.address, ends_at=12)]
        call = await run_episodes(rollout, pools, begin(range(12)), half_close=False)
        found = await call.read_all()
        assert doomed.ended() == -signal.SIGKILL, "it had written half of an answer"
    finally:
        doomed.kill()
    assert call.lost == [pools[1].pool]
    assert len(found) + len(call.partials) == 12 and len(call.partials) >= 3
    assert all(
        trajectory.finish_reason == common_pb2.FINISH_REASON_TERMINATED for trajectory in found.values()
    )
    rest = [partial.sample.prompt_ordinal for partial in call.partials]
    again = await run_episodes(rollout, pools[:1], begin(rest, attempt=2))
    assert {ordinal for ordinal, _ in await again.read_all()} == set(rest)
    at_once = await run_episodes(rollout, pools, begin([99]))
    await at_once.read_all()
    assert at_once.lost == [pools[1].pool]


async def test_a_revoked_lease_brings_partials_and_the_next_one_goes_on(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=1000, options={"step_s": 0.01})
    call = await run_episodes(rollout, [pool], begin(range(5)), half_close=False)
    await until(lambda: rollout.engine.figures.chunks > 5)
    await rollout.instance.on_revoke(1, 1.0)
    await call.read_all()
    assert call.revoked and sorted(partial.sample.prompt_ordinal for partial in call.partials) == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert not call.trajectories and rollout.engine.policy is None, "its memory is freed"


async def test_no_action_is_taken_under_a_lease_that_is_not_held(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=1000, options={"step_s": 0.01})
    call = await run_episodes(rollout, [pool], begin(range(3)))
    await until(lambda: rollout.engine.figures.chunks > 3)
    rollout.instance.fence.release(1)
    await call.read_all()
    assert len(call.partials) == 3


async def test_pause_suspend_and_wake(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=40, options={"step_s": 0.02})
    expected = await (await run_episodes(rollout, [pool], begin(range(3)), evaluation=True)).read_all()
    call = await run_episodes(rollout, [pool], begin(range(3)), half_close=False)
    before = rollout.engine.figures.chunks
    await until(lambda: rollout.engine.figures.chunks > before + 10)
    await refused(rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER)), "NOT_PAUSED")
    paused = await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) == 3)
    assert paused.partial_count == 3
    await call.assign(begin([7]))
    await call.read_until(lambda call: len(call.partials) == 4)
    await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
    await rollout.stub.Wake(rollout_pb2.WakeRequest(header=HEADER, scope=rollout_pb2.WAKE_SCOPE_WEIGHTS))
    await rollout.install(rollout.last)
    await rollout.stub.Wake(rollout_pb2.WakeRequest(header=HEADER))
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    await call.assign(begin(range(3), attempt=2))
    await call.call.done_writing()
    found = await call.read_all()
    assert {key: episode_of(each).rewards_TC.tolist() for key, each in found.items()} == {
        key: episode_of(each).rewards_TC.tolist() for key, each in expected.items()
    }
    for key, trajectory in found.items():
        np.testing.assert_allclose(
            episode_of(trajectory).executed_TCA, episode_of(expected[key]).executed_TCA, atol=1e-5
        )


async def test_one_sample_is_aborted_and_its_environment_serves_the_next(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=30, count=1, options={"step_s": 0.02})
    call = await run_episodes(rollout, [pool], begin(range(2)))
    await until(lambda: rollout.engine.figures.chunks > 3)
    keys = [common_pb2.SlotKey(prompt_ordinal=0, sample_index=0)]
    answer = await rollout.stub.Abort(rollout_pb2.AbortRequest(header=HEADER, samples=keys))
    assert answer.aborted_count == 1
    found = await call.read_all()
    assert list(found) == [(1, 0)] and [partial.sample for partial in call.partials] == keys


async def test_a_new_version_waits_for_episodes_and_ends_old_streams(new_walker, publish, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=1000, options={"step_s": 0.01})
    call = await run_episodes(rollout, [pool], begin([1]), half_close=False)
    await until(lambda: rollout.engine.figures.chunks > 1)
    second = publish(new_policy(WALKER, seed=8), 2)
    await refused(rollout.install(second), "POLICY_MISMATCH", "pause first")
    await rollout.stub.Abort(rollout_pb2.AbortRequest(header=HEADER))
    await call.read_until(lambda call: call.partials)
    await rollout.install(second)
    await call.assign(begin([2]))
    await refused(call.read_all(), "POLICY_MISMATCH", "version 1")


async def test_a_caller_that_goes_away_and_a_closed_run_leave_no_work(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address, ends_at=1000, options={"step_s": 0.01})
    call = await run_episodes(rollout, [pool], begin(range(3)))
    await until(lambda: rollout.engine.figures.chunks > 3)
    call.call.cancel()
    await until(lambda: not rollout.servicer._run.streams)
    paused = await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    assert paused.partial_count == 0
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    call = await run_episodes(rollout, [pool], begin(range(3)), half_close=False)
    before = rollout.engine.figures.chunks
    await until(lambda: rollout.engine.figures.chunks > before)
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    await refused(call.read_all(), "RUN_CLOSED", RUN)
    assert len(call.partials) == 3
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not any(name.startswith(("read outcomes", "watch")) for name in names)


async def test_two_streams_share_a_pool(new_walker, simulator_address):
    rollout = await new_walker()
    pool = await walks(simulator_address)
    calls = [
        await run_episodes(rollout, [pool], begin(range(4))),
        await run_episodes(rollout, [pool], begin(range(10, 14)), evaluation=True),
    ]
    found = [await call.read_all() for call in calls]
    assert [len(each) for each in found] == [4, 4]
    assert {len(episode_of(each).valid_TC) for part in found for each in part.values()} == {6}


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # counted in a thread
            await asyncio.sleep(0.01)
