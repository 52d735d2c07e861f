"""Pictures of demonstrations that are decoded when a batch takes them: the same as all of them at once, in bounds."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.demonstrations import Demonstrations
from headrace_robots.policies.directory import policy_config
from headrace_robots.trainer.backend.cloning import (
    check_demonstrations,
    drawn_moments,
    read_demonstrations,
)
from headrace_schema.openings import TrainerConfig
from headrace_trainer.errors import Refusal
from PIL import Image

SIZE = (16, 24)
LENGTHS = (7, 40, 3, 21)
ONE = 3 * SIZE[0] * SIZE[1]
"""Bytes of a picture."""


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()


def shaded(number: int) -> np.ndarray:
    """A picture that differs from all others, and which H.264 keeps nearly as it is."""
    steps = np.linspace(0, 100, SIZE[1])[None, :, None] + np.array([0, 20, 40])
    return np.broadcast_to((steps + 5 * (number % 23)), (*SIZE, 3)).astype(np.uint8)


@pytest.fixture(params=["films", "files"])
def data_set(request, tmp_path):
    """Two cameras that see different things; as films, or as files in parquet."""
    number, episodes = 0, []
    for episode, length in enumerate(LENGTHS):
        seen = [(shaded(number + step), shaded(11 + 3 * (number + step))) for step in range(length)]
        episodes.append(
            EpisodeData(
                f"task {episode % 2}",
                [np.array([number + step, episode], np.float32) for step in range(length)],
                [np.array([step / 50, -episode / 50], np.float32) for step in range(length)],
                {"front": [png(front) for front, _ in seen], "wrist": [png(wrist) for _, wrist in seen]},
            )
        )
        number += length
    folder = tmp_path / "shown"
    write_data_set(
        folder, episodes, dict.fromkeys(("front", "wrist"), (*SIZE, 3)), videos=request.param == "films"
    )
    return folder


def config_of(robot_config, folder, policy=None, **warmup):
    warmup = {"demonstrations": str(folder), "steps": 1, **warmup}
    fields = {"kind": "cnn", "cameras": ["front", "wrist"], "height": SIZE[0], "width": SIZE[1]}
    fields |= {"state_size": 2, "chunk_length": 2, "bounds": {"low": [-1.0, -1.0], "high": [1.0, 1.0]}}
    spec = robot_config(trainer={"warmup": warmup})
    return TrainerConfig.model_validate(spec | {"model": {"policy": {**fields, **(policy or {})}}})


@pytest.mark.parametrize("cache_mib", [1, 1024])
def test_a_batch_is_the_same_however_much_is_kept(robot_config, data_set, cache_mib, monkeypatch):
    monkeypatch.setattr("headrace_robots.trainer.backend.cloning.MIB", 20 * ONE)
    config = config_of(robot_config, data_set, cache_mib=cache_mib)
    moments = read_demonstrations(config, policy_config(config.model.policy).build(0))
    whole = list(Demonstrations(data_set, ["front", "wrist"]))
    images = {name: torch.cat([each.images[name] for each in whole]) for name in ("front", "wrist")}
    states = torch.cat([each.state_TS for each in whole])
    for step in range(6):
        index = torch.tensor(drawn_moments(0, step, 16, len(states)))
        found = moments.take(index, torch.device("cpu"))
        assert torch.equal(found.observation.state_BS, states[index])
        for name, image in images.items():
            assert torch.equal(found.observation.images[name], image[index])
        assert moments.films.kept.bytes <= cache_mib * 20 * ONE
    everything = 2 * sum(LENGTHS) * ONE
    assert (moments.films.kept.bytes > 0.5 * everything) == (cache_mib > 1), "what has room is kept"


def test_stacked_frames_are_those_of_the_episode(robot_config, data_set):
    config = config_of(robot_config, data_set)
    moments = read_demonstrations(config, policy_config(config.model.policy).build(0))
    stacked = Demonstrations(data_set, ["front", "wrist"])[1].stacked(3).images["front"]
    three = replace(moments, stacked=3)
    index = torch.tensor([LENGTHS[0], LENGTHS[0] + 1, LENGTHS[0] + 17, LENGTHS[0] + LENGTHS[1] - 1])
    found = three.take(index, torch.device("cpu")).observation.images["front"]
    assert torch.equal(found, stacked[index - LENGTHS[0]])


def test_a_camera_of_the_policy_may_be_called_otherwise(robot_config, data_set):
    named = {"front": "observation.images.wrist", "wrist": "front"}
    config = config_of(robot_config, data_set, cameras=named)
    check_demonstrations(config)
    moments = read_demonstrations(config, policy_config(config.model.policy).build(0))
    found = moments.take(torch.tensor([3]), torch.device("cpu")).observation.images
    exact = Demonstrations(data_set, ["front", "wrist"])[0].images
    assert torch.equal(found["front"][0], exact["wrist"][3]) and torch.equal(
        found["wrist"][0], exact["front"][3]
    )


@pytest.mark.parametrize(
    ("warmup", "policy", "words"),
    [
        ({"fps": 30.0}, {}, "has 10 steps a second, and 30 are wanted"),
        ({}, {"height": 20}, "has pictures of 16 x 24 from camera 'front', and the policy reads 20 x 24"),
        ({"cameras": {"front": "top"}}, {}, r"there is no camera 'top', only \['front', 'wrist'\]"),
        ({"cameras": {"top": "front"}}, {}, r"warmup.cameras: the policy has no camera 'top'"),
    ],
)
def test_other_rates_cameras_and_sizes_are_refused_with_both_values(
    robot_config, data_set, warmup, policy, words
):
    with pytest.raises(Refusal, match=words):
        check_demonstrations(config_of(robot_config, data_set, policy=policy, **warmup))
