"""Episodes between arrays and the wire: what goes in comes out, and what does not fit is named."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.episodes import ACTIONS, Episode, decode_episode, encode_episode, references
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import encode_tensor

T, C, A = 3, 2, 4


@pytest.fixture
def episode() -> Episode:
    """Three chunks of two actions, cut by the time limit in the middle of the last."""
    random = np.random.default_rng(3)
    valid_TC = np.array([[True, True], [True, True], [True, False]])
    return Episode(
        observation={
            "state": random.normal(size=(T, 5)).astype(np.float32),
            "image/front": random.integers(0, 255, (T, 4, 6, 3), np.uint8),
        },
        sampled={ACTIONS: random.normal(size=(T, C, A)).astype(np.float32), "path": np.arange(T)},
        executed_TCA=random.normal(size=(T, C, A)).astype(np.float32),
        valid_TC=valid_TC,
        log_probs_TCA=random.normal(size=(T, C, A)).astype(np.float32),
        rewards_TC=np.where(valid_TC, 0.5, 0).astype(np.float32),
        successes_TC=np.array([[False, False], [False, True], [False, False]]),
        terminated=False,
        truncated=True,
        values_T=random.normal(size=T).astype(np.float32),
        final_observation={"state": np.ones(5, np.float32), "image/front": np.zeros((4, 6, 3), np.uint8)},
    )


def same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("ended", ["truncated", "terminated"])
@pytest.mark.parametrize("critic", [True, False])
def test_an_episode_comes_back_as_it_was(episode, ended, critic):
    if ended == "terminated":
        episode = replace(episode, terminated=True, truncated=False, final_observation={})
    if not critic:
        episode = replace(episode, values_T=None)
    wire = encode_episode(episode).SerializeToString()
    found = decode_episode(common_pb2.ActionSegment.FromString(wire))
    for each in fields(Episode):
        assert same(getattr(found, each.name), getattr(episode, each.name)), each.name
    assert (found.steps, found.total_reward, found.success) == (5, 2.5, True)


WRONG = {
    "no chunk": ("valid_mask", {"valid_TC": np.ones((0, C), np.bool_)}),
    "an empty chunk": ("valid_mask", {"valid_TC": np.array([[True, True], [False, False], [True, False]])}),
    "a gap in a chunk": ("valid_mask", {"valid_TC": np.array([[True, True], [False, True], [True, True]])}),
    "a mask of numbers": ("valid_mask", {"valid_TC": np.ones((T, C), np.int8)}),
    "actions of another length": ("executed_action", {"executed_TCA": np.zeros((T, C + 1, A), np.float32)}),
    "flat actions": ("executed_action", {"executed_TCA": np.zeros((T, C), np.float32)}),
    "log-probs of doubles": ("log_probs", {"log_probs_TCA": np.zeros((T, C, A))}),
    "rewards of other chunks": ("rewards", {"rewards_TC": np.zeros((T + 1, C), np.float32)}),
    "successes of numbers": ("successes", {"successes_TC": np.zeros((T, C), np.uint8)}),
    "values of other chunks": ("values", {"values_T": np.zeros(T - 1, np.float32)}),
    "no actions drawn": ("sampled", {"sampled": {"path": np.arange(T)}}),
    "actions drawn for other chunks": ("sampled", {"sampled": {ACTIONS: np.zeros((T - 1, C, A))}}),
    "an observation too few": ("observation", {"observation": {"state": np.zeros((T - 1, 5), np.float32)}}),
    "two ends": ("terminated", {"terminated": True}),
    "no final observation": ("final_observation", {"final_observation": {}}),
    "another final observation": (
        "final_observation",
        {
            "final_observation": {
                "state": np.ones(6, np.float32),
                "image/front": np.zeros((4, 6, 3), np.uint8),
            }
        },
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(episode, what):
    field, change = WRONG[what]
    with pytest.raises(ServiceError, match=field) as caught:
        decode_episode(encode_episode(replace(episode, **change)))
    assert caught.value.reason == "INVALID"


def test_a_body_beyond_the_limit_or_elsewhere_is_refused(episode):
    with pytest.raises(ServiceError, match="limit"):
        decode_episode(encode_episode(episode), max_bytes=64)
    message = encode_episode(episode)
    message.rewards.blob.blob_id = "7"
    with pytest.raises(ServiceError, match="blob"):
        decode_episode(message)
    message = encode_episode(episode)
    message.log_probs.CopyFrom(encode_tensor(np.zeros((T, C, A), np.float32)))
    message.log_probs.shape[0] = 2**40
    with pytest.raises(ServiceError):
        decode_episode(message)


def test_what_is_large_stays_with_its_producer(episode):
    large = np.random.default_rng(1).integers(0, 255, (T, 300, 300, 3), np.uint8)
    episode = replace(episode, observation=episode.observation | {"image/front": large[:, ::-1]})
    episode = replace(episode, final_observation=episode.final_observation | {"image/front": large[0]})
    bodies = {}

    def hold(data):
        bodies[digest_bytes(data)] = bytes(data)
        return common_pb2.BlobRef(digest=digest_bytes(data), size_bytes=data.nbytes)

    message = encode_episode(episode, hold)
    assert len(references(message)) == 2 and message.ByteSize() < 2000
    found = decode_episode(common_pb2.ActionSegment.FromString(message.SerializeToString()), bodies=bodies)
    assert all(same(getattr(found, each.name), getattr(episode, each.name)) for each in fields(Episode))
    with pytest.raises(ServiceError, match=r"observation: 'image/front': .* blob reference"):
        decode_episode(message)
