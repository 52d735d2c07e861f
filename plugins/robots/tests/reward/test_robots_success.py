"""A success classifier: learned from labelled pictures, and asked over the real reward service about episodes."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from headrace.reward.v1 import reward_pb2
from headrace_reward.scorers.base import Answer, AnswerFailed
from headrace_reward.scorers.contract import check_scorer
from headrace_robots.reward.network import ClassifierProblem, Labelled, train
from headrace_servicekit.memory.blobs import BlobStore
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.rpc.tensors import write_tensor

SIZE, LENGTH = 24, 8
GOOD = reward_pb2.SCORE_STATUS_OK


def frames(seed, *, reached):
    """A bright square that moves to the right over an episode, and reaches the edge at its end or not."""
    random = np.random.default_rng(seed)
    seen = np.tile(random.integers(0, 90, 3, np.uint8), (LENGTH, SIZE, SIZE, 1))
    end = SIZE - 6 if reached else random.integers(2, SIZE - 13)
    for place, left in enumerate(np.linspace(0, end, LENGTH).round().astype(int)):
        seen[place, 8:14, left : left + 6] = 255
    return seen


def labelled(seed):
    seen, labels = frames(seed, reached=seed % 2 == 0), np.zeros(LENGTH, np.bool_)
    labels[-1] = seed % 2 == 0
    return Labelled(seen, labels)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("success") / "square"
    episodes = [labelled(seed) for seed in range(60)]
    config = train("front", episodes, directory, steps=250, heldout=0.2, seed=0, pixels=32)
    assert config.data["heldout_episodes"] == 12
    assert (
        config.errors["successes told as such"][0] > 0.7 and config.errors["failures told as such"][0] > 0.9
    )
    return directory


def scorers(directory, **options):
    return {"name": "success_classifier", "options": {"path": str(directory), **options}}


def item(reward, seen, ordinal=None, hold=None):
    """An episode with its pictures, whose last one is what a time limit cut it at."""
    made = reward.item('{"return": 0.0, "success": null, "steps": 8}', ordinal=ordinal)
    write_tensor(made.pictures["front"], seen[:-1], hold)
    write_tensor(made.last_picture["front"], seen[-1])
    return made


async def test_an_episode_is_worth_what_its_last_picture_shows(reward, classifier, tmp_path):
    await reward.open(scorers(classifier), pictures=2, timeout_s=30)
    (tmp_path / "shm" / "rollout").mkdir(parents=True)
    store = BlobStore(tmp_path / "shm" / "rollout")
    seeds = range(100, 110)
    items = [
        item(reward, frames(seed, reached=seed % 2 == 0), hold=store.hold if seed % 3 else None)
        for seed in seeds
    ]
    found = await reward.score(*items)
    assert [each.status for each in found] == [GOOD] * len(found), found[0].detail
    right = [each.reward == float(seed % 2 == 0) for seed, each in zip(seeds, found, strict=True)]
    assert sum(right) >= 9
    assert all(0 <= each.parts["success_classifier/probability"] <= 1 for each in found)


async def test_pictures_whose_producer_is_gone_cost_their_episode_alone(reward, classifier):
    await reward.open(scorers(classifier), pictures=1, timeout_s=30, failed_reward=-1.0)
    lost, there = (item(reward, frames(seed, reached=True)) for seed in (2, 4))
    blob = lost.pictures["front"].blob
    blob.incarnation, blob.blob_id, blob.size_bytes, blob.digest = "gone", "b1", 7 * SIZE * SIZE * 3, "0" * 32
    found = await reward.score(lost, there)
    assert (found[0].status, found[0].reward) == (reward_pb2.SCORE_STATUS_ANSWER_FAILED, -1.0)
    assert "has pictures of none" in found[0].detail
    assert (found[1].status, found[1].reward) == (GOOD, 1.0)


@pytest.mark.parametrize(
    ("options", "section", "words"),
    [
        ({}, {}, "success_classifier reads pictures of episodes; set reward.pictures: 1"),
        ({"threshold": 0}, {"pictures": 1}, "options.threshold"),
        ({"path": "nowhere"}, {"pictures": 1}, "options.path: nowhere is no success classifier"),
    ],
)
async def test_what_cannot_judge_is_refused_by_key(reward, classifier, options, section, words):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reward.open(scorers(classifier, **options), timeout_s=30, **section)
    assert words in message_of(refused.value)


async def test_held_out_episodes_are_not_judged_by_pictures(reward, classifier):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reward.open("episode", evaluation=[scorers(classifier)], pictures=1, timeout_s=30)
    assert message_of(refused.value).startswith("reward.evaluation[0].name: ")


def test_a_damaged_classifier_or_another_camera_is_named(classifier, tmp_path):
    seen = frames(0, reached=True)
    right = Answer("", "{}", pictures={"front": seen})
    scorer = check_scorer("success_classifier", {"path": str(classifier), "of": "probability"}, right)
    for pictures, words in (
        ({"wrist": seen}, "reads camera 'front'"),
        ({"front": seen[..., :1]}, "have 1 channels"),
    ):
        with pytest.raises(AnswerFailed, match=words):
            scorer.score(Answer("", "{}", pictures=pictures))
    with pytest.raises(ClassifierProblem, match="0 of 48 pictures of 6 episodes show a success"):
        episodes = [Labelled(labelled(1).frames, np.zeros(LENGTH, np.bool_)) for _ in range(8)]
        train("front", episodes, tmp_path / "new", steps=1, heldout=0.2, seed=0, pixels=16)
