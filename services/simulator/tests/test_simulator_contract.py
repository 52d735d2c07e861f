"""What every backend keeps, asked of real environments over the real service.

BACKEND_UNDER_TEST (default gymnasium) names the backend: the others need an environment of their own, so
`make test-simulators SIM=metaworld` runs this file there.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile

import grpc
import numpy as np
import psutil
import pytest
from contract_cases import EXPERTS, PIXELS, TESTED, UNDER_TEST
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.tensors import NUMPY_TYPES, decode_tensor
from headrace_simulator.spaces import from_message

pytestmark = pytest.mark.timeout(600)
OK = simulator_pb2.OUTCOME_STATUS_OK
LOST = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
REFUSED = simulator_pb2.OUTCOME_STATUS_REFUSED
every = pytest.mark.parametrize(
    "case", TESTED, ids=lambda case: case.name + ("-together" if case.together else "")
)
several = pytest.mark.parametrize(
    "case",
    [case for case in TESTED if not case.alone],
    ids=lambda case: case.name + ("-together" if case.together else ""),
)
"""Of environments that can be in the middle of an episode at the same time."""
ours = pytest.mark.nightly if UNDER_TEST != "gymnasium" else lambda test: test
"""What the service does alike with each simulator: nightly with those that take seconds to make."""


@pytest.fixture
def reset_timeout_s() -> float:
    return 120.0


@pytest.fixture
def locally(request) -> bool:
    """Simulators are asked the way that runs ask, over the socket; gymnasium's first and third case by gRPC."""
    return UNDER_TEST != "gymnasium" or TESTED.index(request.node.callspec.params["case"]) % 2 == 1


async def opened(simulator, case, **fields):
    fields = {"options": case.options, "step_timeout_s": 60.0, "vectorized": case.together, **fields}
    if case.together and case.backend == "maniskill":
        fields["processes"] = fields.get("count", 1)  # its CPU simulation has one environment in a process
    return await simulator.open(case.name, backend=case.backend, **fields)


def actions(pool, number: int, seed: int = 0) -> list[np.ndarray]:
    """Random actions of the pool's action space."""
    space = from_message(pool.opened.action_space)
    random = np.random.default_rng(seed)
    if space.categories:
        return [(space.low + random.integers(space.counts)).astype(space.dtype) for _ in range(number)]
    return [random.uniform(space.low, space.high).astype(space.dtype) for _ in range(number)]


async def rollout(pool, environment: int, chosen, arrays) -> list[np.ndarray]:
    """All observations of the actions as flat vectors; an episode that ends is begun anew."""
    seen = []
    for action in chosen:
        outcome = await pool.act(action, environment)
        assert outcome.status == OK, outcome.detail
        seen.append(flat(arrays(outcome)))
        if outcome.terminated or outcome.truncated:
            await pool.reset(environment)
    return seen


def flat(observation: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(observation[name]).astype(np.float64) for name in sorted(observation)])


def check_spaces(pool, outcome) -> None:
    """Each tensor has the type, the shape and the bounds of its space."""
    spaces = {space.name: space for space in pool.opened.observation_spaces}
    assert set(spaces) == set(outcome.observation)
    for name, message in spaces.items():
        array = decode_tensor(outcome.observation[name], max_bytes=1 << 24)
        space = from_message(message)
        assert array.dtype == NUMPY_TYPES[message.data_type] and array.shape == space.shape, name
        assert np.isfinite(array).all(), name
        slack = 1e-6
        assert space.low is None or (array >= space.low - slack).all(), name
        assert space.high is None or (array <= space.high + slack).all(), name


@every
async def test_spaces_match_every_tensor(simulator, case):
    pool = await opened(simulator, case)
    check_spaces(pool, await pool.reset())
    for action in actions(pool, 5):
        outcome = await pool.act(action)
        check_spaces(pool, outcome)
        if outcome.terminated or outcome.truncated:
            check_spaces(pool, await pool.reset())


@every
async def test_a_seed_decides_an_episode_and_other_seeds_are_other_goals(simulator, case, arrays):
    pool = await opened(simulator, case, count=2)
    first, second = {}, {}
    for environment, found in enumerate((first, second)):
        for seed in (3, 4, 5, 3):
            begun = flat(arrays(await pool.reset(environment, seed=seed)))
            found.setdefault(seed, []).append(
                [begun, *await rollout(pool, environment, actions(pool, 4), arrays)]
            )
    for seed in (3, 4, 5):
        for episode in first[seed] + second[seed]:
            np.testing.assert_allclose(episode, first[seed][0], atol=1e-9)
    begins = [first[seed][0][0] for seed in (3, 4, 5)]
    assert not any(np.allclose(begins[i], begins[j], atol=1e-6) for i, j in ((0, 1), (0, 2), (1, 2)))


@ours
@every
async def test_environments_of_a_pool_begin_differently(simulator, case, arrays):
    pool = await opened(simulator, case, count=2, seed=20)
    begun = [flat(arrays(await pool.reset(i))) for i in range(2)]
    assert not np.allclose(*begun, atol=1e-6)
    again = flat(arrays(await pool.reset(0)))
    assert not np.allclose(again, begun[0], atol=1e-6), "an episode without a seed goes on with the stream"


@ours
@every
async def test_truncation_keeps_the_final_observation(simulator, case, arrays):
    chosen = None
    finals = []
    for auto_reset in (False, True):
        pool = await opened(simulator, case, max_episode_steps=4, auto_reset=auto_reset)
        chosen = actions(pool, 4)
        await pool.reset(seed=1)
        outcomes = [await pool.act(action) for action in chosen]
        assert [outcome.truncated for outcome in outcomes] == [False, False, False, True]
        last = outcomes[-1]
        assert not last.terminated
        finals.append(last.final_observation if auto_reset else last.observation)
        after = await pool.act(chosen[0])
        assert after.status == (OK if auto_reset else REFUSED)
        if auto_reset:
            check_spaces(pool, last)
            assert last.observation != last.final_observation
    assert set(finals[0]) == set(finals[1])
    for name, tensor in finals[0].items():
        one, other = (decode_tensor(each, max_bytes=1 << 24) for each in (tensor, finals[1][name]))
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), atol=1e-9)


@ours
@several
async def test_a_chunk_is_its_actions_one_by_one(simulator, case, arrays):
    pool, other = [await opened(simulator, case) for _ in range(2)]
    for each in (pool, other):
        await each.reset(seed=9)
    chosen = actions(pool, 3)
    singles = [await pool.act(action) for action in chosen]
    chunk = await other.act_chunk(np.stack(chosen))
    assert chunk.executed_length == 3 and chunk.status == OK
    rewards = decode_tensor(chunk.rewards, max_bytes=1 << 20)
    np.testing.assert_allclose(rewards, [each.reward for each in singles], atol=1e-9)
    np.testing.assert_allclose(flat(arrays(chunk)), flat(arrays(singles[-1])), atol=1e-9)


@every
async def test_a_variant_follows_from_the_seed_and_changes_the_episode(simulator, case, arrays):
    pools = [
        await opened(simulator, case, options={**case.options, **more})
        for more in ({}, {"variant": case.variant})
    ]
    chosen, episodes = actions(pools[0], 4), []
    for pool in (*pools, pools[1]):
        begun = flat(arrays(await pool.reset(seed=7)))
        episodes.append([begun, *await rollout(pool, 0, chosen, arrays)])
    plain, first, again = episodes
    np.testing.assert_allclose(first, again, atol=1e-9)
    assert not np.allclose(first, plain, atol=1e-6)


@several
async def test_a_partial_reset_leaves_the_others_alone(simulator, case, arrays):
    """Two environments in one process: the episode of one is the same with and without resets of the other.

    Both act in one message: those that are stepped together wait for each other.
    """
    seen = []
    for disturbed in (False, True):
        pool = await opened(simulator, case, count=2, processes=1)
        for environment in range(2):
            await pool.reset(environment, seed=6 + environment)
        chosen = actions(pool, 4)
        observed = []
        for action in chosen:
            if disturbed:
                assert (await pool.reset(0)).status == OK
            both = await pool.send(pool.action_operation(action, 0), pool.action_operation(action, 1))
            assert (both[0].status, both[1].status) == (OK, OK), both
            observed.append(flat(arrays(both[1])))
            for environment, outcome in both.items():
                if outcome.terminated or outcome.truncated:
                    await pool.reset(environment)
        seen.append(observed)
        await close(simulator, pool)
    np.testing.assert_allclose(seen[0], seen[1], atol=1e-9)


@ours
@several
async def test_a_wrong_action_is_refused_and_siblings_go_on(simulator, case):
    pool = await opened(simulator, case, count=2)
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    good = actions(pool, 1)[0]
    wrong = [np.zeros((*good.shape, 2), good.dtype)]
    if good.dtype.kind == "f":
        wrong.append(np.full(good.shape, np.nan, good.dtype))
    for action in wrong:
        both = await pool.send(pool.action_operation(action, 0), pool.action_operation(good, 1))
        assert both[0].status == REFUSED and both[0].detail
        assert both[1].status == OK
        if case.together:  # the others went on without it
            assert (await pool.act(good, 0)).status == LOST
            await pool.reset(0)
    both = await pool.send(pool.action_operation(good, 0), pool.action_operation(good, 1))
    assert (both[0].status, both[1].status) == (OK, OK)


@ours
@several
@pytest.mark.parametrize("fault", ["killed", "hung"])
async def test_a_killed_or_hung_child_is_made_anew(simulator, case, fault):
    pool = await opened(simulator, case, count=2, processes=2, step_timeout_s=4.0)
    before = {child.pid for child in psutil.Process().children()}
    await pool.send(pool.reset_operation(0), pool.reset_operation(1))
    action = actions(pool, 1)[0]
    victim = await process_of(pool, action, before)
    victim.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    losing = asyncio.create_task(pool.act(action, 0))
    assert (await pool.act(action, 1)).status == OK
    lost = await losing
    assert lost.status == LOST and lost.detail
    assert (await pool.act(action, 1)).status == OK
    assert (await pool.reset(0)).status == OK
    assert (await pool.act(action, 0)).status == OK


async def process_of(pool, action, pids: set[int]) -> psutil.Process:
    """The child that holds environment 0: the one that works when it steps."""
    processes = [psutil.Process(pid) for pid in pids]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    while True:
        for _ in range(20):
            outcome = await pool.act(action, 0)
            if outcome.terminated or outcome.truncated:
                await pool.reset(0)
        used = [
            sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)
        ]
        if max(used) > min(used) + 0.05:
            return processes[int(np.argmax(used))]


@every
async def test_an_unknown_name_is_refused_with_the_nearest(simulator, case):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await simulator.open(case.misspelt, backend=case.backend)
    text = message_of(raised.value)
    assert text.startswith("environment.name: ") and case.name.partition("/")[0] in text


@pytest.mark.skipif(UNDER_TEST != "maniskill", reason="tasks of ManiSkill")
async def test_a_thing_on_a_plate_has_an_instruction_and_models_need_a_folder(simulator):
    pool = await simulator.open("PutOnPlatePrimitives-v1/7", backend="maniskill")
    assert pool.opened.instruction == "put yellow bar on plate"
    for options, words in (({}, "give the folder"), ({"assets_dir": "nowhere"}, "there is no nowhere")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await simulator.open("PutOnPlateInScene25Main-v3/7", backend="maniskill", options=options)
        text = message_of(raised.value)
        assert text.startswith("options_json.assets_dir: ") and words in text


@every
async def test_it_is_listed(simulator, case, instance):
    request = simulator_pb2.ListEnvironmentsRequest(page_size=10_000)
    listed = (await simulator.stub.ListEnvironments(request)).environments
    assert case.backend in instance.capabilities["backends"]
    assert ((case.backend, case.name) in {(each.backend, each.name) for each in listed}) == case.listed


@ours
@every
async def test_initial_states_can_be_chosen(simulator, case, arrays):
    pool = await opened(simulator, case)
    count = pool.opened.init_state_count
    refused = await pool.reset(init_state=count)
    assert refused.status == REFUSED and "init_state" in refused.detail
    if not count:
        return
    begins = [flat(arrays(await pool.reset(init_state=i))) for i in (0, 1, 0)]
    np.testing.assert_allclose(begins[0], begins[2], atol=1e-9)
    assert not np.allclose(begins[0], begins[1], atol=1e-6)


@every
async def test_success_is_told_where_the_environment_knows_it(simulator, case):
    pool = await opened(simulator, case, reward_mode=simulator_pb2.REWARD_MODE_SPARSE)
    await pool.reset()
    outcome = await pool.act(actions(pool, 1)[0])
    assert (outcome.status, outcome.success_reported) == (OK, case.has_success)
    assert outcome.reward == float(outcome.success)


if EXPERTS:

    @pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case.name)
    async def test_the_scripted_policy_succeeds_by_actions_of_the_action_space(simulator, case, arrays):
        pool = await opened(simulator, case, options=case.options | {"expert": True}, max_episode_steps=150)
        outcome, succeeded = await pool.reset(seed=11), False
        while not (outcome.terminated or outcome.truncated):
            check_spaces(pool, outcome)
            outcome = await pool.act(arrays(outcome)["expert_action"])
            assert outcome.status == OK, outcome.detail
            succeeded |= outcome.success
        assert succeeded


async def close(simulator, pool) -> None:
    request = simulator_pb2.ClosePoolRequest(header=simulator.header(), pool=pool.opened.pool)
    await simulator.stub.ClosePool(request)


if PIXELS:

    @pytest.mark.parametrize("case", PIXELS, ids=lambda case: case.name)
    async def test_images_by_reference_and_pictures(simulator, case, instance):
        pool = await opened(simulator, case, options=case.pixels, blob_bytes=1024)
        outcomes = [await pool.reset(seed=2), *[await pool.act(action) for action in actions(pool, 2)]]
        images = [
            space.name
            for space in pool.opened.observation_spaces
            if len(space.shape) == 3 and space.shape[2] == 3
        ]
        assert images
        for name in images:
            bodies = [outcome.observation[name] for outcome in outcomes]
            assert all(body.WhichOneof("body") == "blob" for body in bodies)
            path = instance.config.shm_dir / bodies[-1].blob.incarnation / "blobs" / bodies[-1].blob.blob_id
            image = np.frombuffer(path.read_bytes(), np.uint8).reshape(tuple(bodies[-1].shape))
            assert image.std() > 5, "an image of one colour shows nothing"
            dark = await opened(
                simulator, case, options={**case.pixels, "variant": {"vision": {"brightness": 0.2}}}
            )
            shown = decode_tensor((await dark.reset(seed=2)).observation[name], max_bytes=1 << 24)
            assert shown.mean() < 0.5 * image.mean()
        request = simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[0])
        frame = decode_tensor((await simulator.stub.Render(request)).frames[0], max_bytes=1 << 24)
        assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 and frame.std() > 5

    @pytest.mark.parametrize("case", PIXELS, ids=lambda case: case.name)
    async def test_a_recorded_episode_is_a_video_of_every_action(simulator, case):
        import imageio_ffmpeg

        pool = await opened(simulator, case, options=case.pixels)
        await pool.reset(seed=2, record=True)
        chosen = actions(pool, 6)
        for action in chosen[:2]:
            await pool.act(action)
        await pool.act_chunk(np.stack(chosen[2:]))
        request = simulator_pb2.RenderRequest(pool=pool.opened.pool, environments=[0])
        last = decode_tensor((await simulator.stub.Render(request)).frames[0], max_bytes=1 << 24)
        request.video = True
        (video,) = (await simulator.stub.Render(request)).videos
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            file.write(video)
            file.flush()
            frames = imageio_ffmpeg.read_frames(file.name)
            width, height = next(frames)["size"]
            pictures = [np.frombuffer(each, np.uint8).reshape(height, width, 3) for each in frames]
        assert len(pictures) == 7, "the start and each action"
        assert (width, height) == (last.shape[1], last.shape[0])
        error = np.abs(pictures[-1].astype(float) - last).mean()
        assert error < 12, "the last frame is the picture of the moment, but for what H.264 loses"
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was recorded"):
            await simulator.stub.Render(request)
