"""Every malformed field of an episode is refused with its name, and nothing of it goes further."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from headrace.common.v1 import common_pb2
from headrace_robots.policies.directory import policy_config
from headrace_robots.trainer.wire import Spaces, read_episodes
from headrace_servicekit.memory.blobs import BlobReader, BlobStore
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.episodes import decode_episode, encode_episode, references
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor
from headrace_servicekit.weights.store import WeightStore
from headrace_trainer.errors import Refusal
from headrace_trainer.wire.learn import fetch_bodies

TENSORS = ("executed_action", "valid_mask", "log_probs", "rewards", "successes")
NAMED = (("observation", "state"), ("sampled", "actions"), ("final_observation", "state"))


@pytest.fixture(scope="module")
def episode(robots):
    """An episode that was cut, and the spaces of the policy that played it."""
    config = policy_config(robots.POLICY | {"chunk_length": 4})
    [played] = robots.play(config.build(0), [robots.Reach(horizon=10)], [3], 0)
    return encode_episode(played), Spaces.of(config)


def read(actions, spaces, robots, finish=common_pb2.FINISH_REASON_TRUNCATED):
    trajectory = common_pb2.Trajectory(attempt=1, finish_reason=finish)
    trajectory.branches.add().segments.add(policy_number=1, actions=actions)
    trajectory.body_digest = trajectory_digest(trajectory)
    group = robots.trainer_pb2.SettledGroup()
    group.members.add(trajectory=trajectory)
    return read_episodes(group, spaces)


def tensors(actions):
    """(name as a refusal calls it, tensor) of every tensor."""
    for name in TENSORS:
        yield name, getattr(actions, name)
    for name, key in NAMED:
        yield name, getattr(actions, name)[key]


def test_an_episode_is_read_as_it_was_played(episode, robots):
    [member] = read(*episode, robots).members
    assert (member.size, member.truncated, member.versions) == (10, True, [1] * 10)


@pytest.mark.parametrize("field", [*TENSORS, *(name for name, _ in NAMED)])
@pytest.mark.parametrize("spoil", ["missing", "shape", "type", "bytes"])
def test_a_malformed_tensor_is_refused_with_its_field(field, spoil, episode, robots):
    actions = common_pb2.ActionSegment()
    actions.CopyFrom(episode[0])
    tensor = dict(tensors(actions))[field]
    if spoil == "missing":
        tensor.Clear()
    elif spoil == "shape":
        tensor.shape.insert(0, 1)
    elif spoil == "type":
        tensor.data_type = common_pb2.DATA_TYPE_INT8
        tensor.data = tensor.data[: max(1, len(tensor.data) // 4)]
    else:
        tensor.data = tensor.data[:-1]
    if spoil == "type" and field in ("valid_mask", "successes"):
        tensor.data = episode[0].successes.data
    with pytest.raises(Refusal, match=field) as refusal:
        read(actions, episode[1], robots)
    assert refusal.value.reason == "INVALID"


def test_an_episode_that_goes_on_or_ended_otherwise_is_refused(episode, robots):
    for reason in ("ERROR", "ABORTED", "EOS"):
        finish = common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
        with pytest.raises(Refusal, match="finished episodes"):
            read(*episode, robots, finish)
    other = common_pb2.ActionSegment()
    other.CopyFrom(episode[0])
    other.truncated = False
    with pytest.raises(Refusal, match="finish_reason"):
        read(other, episode[1], robots)


def test_a_camera_that_the_policy_reads_must_be_there(episode, robots):
    spaces = Spaces(4, 2, 6, ("wrist",))
    with pytest.raises(Refusal, match=r"observation.*wrist"):
        read(episode[0], spaces, robots)


@pytest.mark.parametrize(
    ("drawn", "fits"),
    [(0.0, True), (1.0, True), (2.0, False), (-1.0, False), (0.5, False), (math.nan, False)],
)
def test_what_is_none_of_the_policys_categories_is_refused(drawn, fits, episode, robots):
    actions, spaces = common_pb2.ActionSegment(), replace(episode[1], categories=(2, 0))
    actions.CopyFrom(episode[0])
    numbers = decode_tensor(actions.sampled["actions"], max_bytes=1 << 20).copy()
    numbers[..., 0], numbers[-1, -1, 0] = 1.0, drawn
    actions.sampled["actions"].CopyFrom(encode_tensor(numbers))
    if fits:
        assert read(actions, spaces, robots).members
        return
    with pytest.raises(Refusal, match="none of the policy's categories"):
        read(actions, spaces, robots)


def test_an_action_of_categories_alone_is_whole_numbers(episode, robots):
    spaces = replace(episode[1], categories=(2, 2))
    with pytest.raises(Refusal, match="executed_action: float32"):
        read(episode[0], spaces, robots)


async def test_what_an_episode_refers_to_is_fetched_and_what_is_gone_is_named(
    episode, robots, tmp_path, monkeypatch
):
    monkeypatch.setattr("headrace_servicekit.rpc.episodes.INLINE_BYTES", 16)
    actions, spaces = episode
    store = WeightStore(tmp_path / "shm", "producer")
    blobs, reader = BlobStore(store.directory), BlobReader(tmp_path / "shm", None)
    group = robots.trainer_pb2.SettledGroup()
    trajectory = common_pb2.Trajectory(attempt=1, finish_reason=common_pb2.FINISH_REASON_TRUNCATED)
    seen = encode_episode(decode_episode(actions), blobs.hold)
    trajectory.branches.add().segments.add(policy_number=1, actions=seen)
    trajectory.body_digest = trajectory_digest(trajectory)
    group.members.add(trajectory=trajectory)
    bodies = await fetch_bodies([group], reader)
    [member] = read_episodes(group, spaces, bodies).members
    [whole] = read(actions, spaces, robots).members
    assert len(bodies) == len(references(seen)) > 0
    for name, array in whole.episode.observation.items():
        assert (member.episode.observation[name] == array).all()
    blobs.release(references(seen)[0].blob)
    with pytest.raises(ServiceError) as gone:
        await fetch_bodies([group], reader)
    assert gone.value.reason == "BLOB_GONE"
    store.close()
