"""Recorded episodes of training: which are asked for, and what is kept of them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.projections.videos import list_videos, read_episode
from headrace_coordinator.run.step.dispatch import Dispatch
from headrace_coordinator.run.step.videos import write_videos
from headrace_schema.spec import RunSpec
from headrace_servicekit.rpc.episodes import ACTIONS, Episode, encode_episode

PROMPTS = 4


def context(directory, videos):
    spec = {
        "workflow": "embodied",
        "model": {"policy": {"kind": "mlp"}},
        "environment": {"tasks": ["push"], "videos": videos},
        "algorithm": {"name": "ppo", "group_size": 1, "prompts_per_step": PROMPTS},
    }
    return SimpleNamespace(
        spec=RunSpec.model_validate(spec),
        run_id="push-1",
        state=SimpleNamespace(directory=str(directory)),
        item=lambda prompt: DataItem("push", "", {}, {"task": "push"}),
    )


def step_of(prompt):
    """As the ledger counts them: from 0 on."""
    return prompt // PROMPTS


def ended(prompt, *, success=True, pictures=None):
    """A response with a recorded episode of two actions."""
    zeros, flags = np.zeros((2, 1, 3), np.float32), np.ones((2, 1), np.bool_)
    seen = {"state": np.zeros((2, 5), np.float32)} | (
        {"image/front": pictures} if pictures is not None else {}
    )
    episode = Episode(
        observation=seen,
        sampled={ACTIONS: zeros},
        executed_TCA=zeros,
        valid_TC=flags,
        log_probs_TCA=zeros,
        rewards_TC=np.ones((2, 1), np.float32),
        successes_TC=flags & success,
        terminated=True,
        truncated=False,
    )
    key = common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=0)
    told = {"return": 2.0, "success": success, "steps": 2}
    trajectory = common_pb2.Trajectory(sample=key, completion_text=json.dumps(told))

    def hold(data):
        return common_pb2.BlobRef(blob_id="1", size_bytes=data.nbytes)

    trajectory.branches.add().segments.add(policy_number=1).actions.CopyFrom(encode_episode(episode, hold))
    response = rollout_pb2.RunEpisodesResponse()
    response.chunks.add(sample=key, finished=trajectory)
    response.videos.add(sample=key, content=b"film" * 100)
    return response


@pytest.mark.parametrize(
    ("videos", "wanted"),
    [
        (None, []),
        ({"every": 2}, [(1, 0), (3, 0)]),
        ({"every": 1, "starts": 2}, [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]),
    ],
)
def test_the_first_start_states_of_every_so_manyth_step_are_recorded(tmp_path, videos, wanted):
    ledger = SimpleNamespace(
        step_of=step_of, prompts_of=lambda step: range(PROMPTS * step, PROMPTS * (step + 1))
    )
    dispatch = object.__new__(Dispatch)
    dispatch._context, dispatch._ledger = context(tmp_path, videos), ledger
    found = [prompt for prompt in range(3 * PROMPTS) if dispatch._recorded(prompt)]
    assert [(step_of(prompt) + 1, prompt % PROMPTS) for prompt in found] == wanted


async def test_videos_are_kept_beside_their_episodes_without_pictures_that_are_elsewhere(tmp_path):
    run = context(tmp_path, {"every": 1})
    pictures = np.zeros((2, 400, 400, 3), np.uint8)
    await write_videos(run, step_of, ended(9, success=False, pictures=pictures))
    await write_videos(run, step_of, ended(0))
    found = list_videos(tmp_path)
    assert [(each.step, each.item, each.success) for each in found] == [(1, 0, True), (3, 9, False)]
    kept = read_episode(tmp_path / "videos" / found[1].name.replace(".mp4", ".episode"))
    assert kept.steps == 2 and [*kept.observation] == ["state"]


async def test_a_full_disk_costs_the_videos_alone(tmp_path, caplog):
    (tmp_path / "videos").write_text("no directory")
    await write_videos(context(tmp_path, {"every": 1}), step_of, ended(0))
    assert "videos of its episodes cannot be written" in caplog.text
