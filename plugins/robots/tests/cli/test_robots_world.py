"""`headrace world` and `headrace success` with real data sets, and the real simulator service for the spaces."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from headrace_robots.cli.collecting import _png
from headrace_robots.cli.lerobot import EpisodeData, write_data_set


def pendulum(seed, steps=30):
    """An episode whose numbers have a pendulum's sizes."""
    random = np.random.default_rng(seed)
    states = np.cumsum(random.normal(0, 0.1, (steps, 3)), 0).astype(np.float32)
    return EpisodeData(
        "swing",
        [*states],
        [*random.uniform(-2, 2, (steps, 1)).astype(np.float32)],
        rewards=[float(each) for each in states[:, 0]],
        successes=[False] * steps,
        ends=[False] * steps,
    )


@pytest.fixture
def spec(tmp_path):
    def write(**environment):
        section = {"tasks": ["Pendulum-v1"], "count": 1, **environment}
        document = {"workflow": "embodied", "model": {"policy": {"kind": "mlp"}}, "environment": section}
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(document))
        return str(tmp_path / "spec.yaml")

    return write


def test_a_model_is_learned_from_a_data_set_shown_and_followed_by_a_version(headrace, spec, tmp_path):
    write_data_set(tmp_path / "shown", [pendulum(seed) for seed in range(5)], {})
    command = ("world", "train", spec(), str(tmp_path / "shown"), "--output", str(tmp_path / "world"))
    quick = ("--steps", "20", "--hidden", "8", "--members", "2", "--json")
    told = []
    for seed in ("0", "1"):
        done = headrace(*command, *quick, "--seed", seed)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    assert [each["number"] for each in told] == [1, 2] and told[0]["digest"] != told[1]["digest"]
    # The last action of an episode that was cut led to what no data set has.
    assert (told[0]["data"]["episodes"], told[0]["data"]["steps"]) == (5, 5 * 29)
    done = headrace("world", "show", str(tmp_path / "world"))
    assert done.returncode == 0 and told[1]["version"] in done.stdout and "Pendulum-v1" in done.stdout


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"tasks": ["CartPole-v1"]}, "numbers of a state"),
        ({"tasks": ["Pendulum-v1", "CartPole-v1"], "count": 2}, "a model is of one"),
        ({"state": ["height"]}, "'height' is no observation of numbers"),
        ({"tasks": ["Pendulun-v1"]}, "Pendulum-v1"),
    ],
)
def test_data_of_another_environment_is_refused(headrace, spec, tmp_path, environment, words):
    write_data_set(tmp_path / "shown", [pendulum(seed) for seed in range(2)], {})
    command = (
        "world",
        "train",
        spec(**environment),
        str(tmp_path / "shown"),
        "--output",
        str(tmp_path / "world"),
    )
    done = headrace(*command)
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr
    assert not (tmp_path / "world").exists()


def test_a_classifier_is_learned_from_the_successes_of_a_data_set(headrace, tmp_path):
    shades = [40, 60, 200, 210]
    episodes = [
        EpisodeData(
            "light",
            [np.ones(1, np.float32)] * 4,
            [np.zeros(1, np.float32)] * 4,
            images={"front": [_png(np.full((16, 16, 3), shade + seed, np.uint8)) for shade in shades]},
            rewards=[0.0] * 4,
            successes=[False, True, True, True],  # the third picture is the first that shows it
            ends=[False] * 4,
        )
        for seed in range(8)
    ]
    write_data_set(tmp_path / "shown", episodes, {"front": (16, 16, 3)})
    command = ("success", "train", str(tmp_path / "shown"), "--output", str(tmp_path / "light"), "--json")
    done = headrace(*command, "--camera", "front", "--steps", "80", "--pixels", "16")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["errors"]["right"][0] == 1.0
    done = headrace(*command, "--camera", "wrist")
    assert done.returncode == 2 and "there is no camera 'wrist'" in " ".join(done.stderr.split())
