"""Videos of episodes: those that were asked for come with them. The encoder is a stand-in beside the robots."""

from __future__ import annotations

import pytest
from episode_rig import WALKER, new_policy, open_robot, run_episodes, starts
from rollout_calls import refused
from simulator_rig import SimulatorProcess, open_pool

TASK = "robots.py:make_env"
# A "video" is one byte of each frame.
ENCODER = """
def write_frames(path, size, **options):
    frames = []
    try:
        while True:
            frame = yield
            if frame is not None:
                frames.append(int(frame[0, 0, 0]))
    finally:
        with open(path, "wb") as file:
            file.write(bytes([size[0], *frames]))
"""


@pytest.fixture
def simulator(tmp_path):
    """A simulator whose children find the stand-in."""
    (tmp_path / "imageio_ffmpeg.py").write_text(ENCODER)
    process = SimulatorProcess(tmp_path)
    yield process
    process.kill()


async def walker(new_rollout, publish, **environment):
    """An instance with an open run of the walking robot and version 1 of its policy."""
    policy = {**WALKER, "chunk_length": 4}
    rollout = await new_rollout()
    await open_robot(rollout, policy, tasks=[TASK], **environment)
    await rollout.install(publish(new_policy(policy), 1))
    return rollout


def recorded(prompts, wanted):
    groups = starts(prompts, task=TASK)
    for group in groups:
        group.prompt.episode.record = group.prompt_ordinal in wanted
    return groups


@pytest.mark.parametrize("stop_on_success", [False, True])
async def test_the_episodes_asked_for_come_with_their_videos(
    new_rollout, publish, simulator, stop_on_success
):
    """Six actions, or three where an episode ends with its success."""
    rollout = await walker(new_rollout, publish, stop_on_success=stop_on_success)
    options = {"ends_at": 6, "goal": 3}
    pool = await open_pool(simulator.address, TASK, count=2, max_episode_steps=0, options=options)
    call = await run_episodes(rollout, [pool], recorded(range(5), {1, 4}), evaluation=True)
    trajectories = await call.read_all()
    assert len(trajectories) == 5
    shown = 3 if stop_on_success else 6
    assert call.videos == dict.fromkeys((1, 4), bytes([8, *range(shown + 1)]))


async def test_a_simulator_without_an_encoder_says_what_to_install(new_rollout, publish, tmp_path):
    (tmp_path / "imageio_ffmpeg.py").write_text("raise ImportError('broken')")
    process = SimulatorProcess(tmp_path)
    try:
        rollout = await walker(new_rollout, publish)
        pool = await open_pool(process.address, TASK, count=1, max_episode_steps=0, options={"ends_at": 2})
        call = await run_episodes(rollout, [pool], recorded([0], {0}))
        await refused(call.read_all(), "INVALID", "headrace-simulator[video]", "ask for no videos")
    finally:
        process.kill()
