"""Imitation losses, and LeRobot data sets that pandas and PIL write here as lerobot does."""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from headrace_robots.demonstrations import Demonstrations, DemonstrationsNotReadable
from headrace_robots.policies.actor_critic import MlpConfig
from headrace_robots.policies.policy import Observation, imitation_loss
from headrace_robots.policies.scaling import ActionBounds
from PIL import Image

LENGTHS = (5, 3, 4)
TASKS = ("reach the cube", "open the drawer")


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), number, dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def data_set(tmp_path):
    """Three episodes, two in one file; states are running numbers, actions twice the states' first two."""
    rows, episodes, start = [], [], 0
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            index = start + frame
            rows.append(
                {
                    "observation.state": np.array([index, episode, frame], dtype=np.float32),
                    "action": np.array([2 * index, 2 * episode], dtype=np.float32),
                    "observation.images.front": {"bytes": picture(index), "path": None},
                    "episode_index": episode,
                    "frame_index": frame,
                    "task_index": episode % 2,
                }
            )
        file = min(episode, 1)
        place = {"data/chunk_index": 0, "data/file_index": file}
        episodes.append({"episode_index": episode, "length": length, "tasks": [TASKS[episode % 2]], **place})
        start += length
    table = pd.DataFrame(rows)
    for folder in ("data/chunk-000", "meta/episodes/chunk-000"):
        (tmp_path / folder).mkdir(parents=True)
    table[table.episode_index == 0].to_parquet(tmp_path / "data/chunk-000/file-000.parquet")
    table[table.episode_index > 0].to_parquet(tmp_path / "data/chunk-000/file-001.parquet")
    pd.DataFrame(episodes).to_parquet(tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    pd.DataFrame({"task_index": [0, 1]}, index=list(TASKS)).to_parquet(tmp_path / "meta/tasks.parquet")
    info = {
        "codebase_version": "v3.0",
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "features": {
            "action": {"dtype": "float32", "shape": [2]},
            "observation.state": {"dtype": "float32", "shape": [3]},
            "observation.images.front": {"dtype": "image", "shape": [6, 8, 3]},
            "observation.images.wrist": {"dtype": "video", "shape": [6, 8, 3]},
        },
    }
    (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
    return tmp_path


def test_episodes_are_read_from_shared_files(data_set):
    found = list(Demonstrations(data_set, ["front"]))
    assert [len(one.action_TA) for one in found] == list(LENGTHS)
    assert [one.task for one in found] == [TASKS[0], TASKS[1], TASKS[0]]
    assert found[1].state_TS.tolist() == [[5, 1, 0], [6, 1, 1], [7, 1, 2]]
    assert found[1].action_TA.tolist() == [[10, 2], [12, 2], [14, 2]]
    assert (
        found[2].images["front"].shape == (4, 6, 8, 3) and found[2].images["front"][3].unique().item() == 11
    )
    assert Demonstrations(data_set)[0].images == {}


def test_horizons_end_with_the_episode(data_set):
    actions_THA, valid_TH = Demonstrations(data_set)[1].horizons(2)
    assert actions_THA[:, :, 0].tolist() == [[10, 12], [12, 14], [14, 14]]
    assert valid_TH.tolist() == [[True, True], [True, True], [True, False]]


def test_data_sets_that_cannot_be_read_are_named(data_set):
    with pytest.raises(DemonstrationsNotReadable, match=r"no camera 'top', only \['front', 'wrist'\]"):
        Demonstrations(data_set, ["top"])
    with pytest.raises(DemonstrationsNotReadable, match=r"'wrist' is a video, and .* states no video_path"):
        Demonstrations(data_set, ["wrist"])
    (data_set / "data/chunk-000/file-001.parquet").unlink()
    with pytest.raises(DemonstrationsNotReadable, match=r"file-001\.parquet cannot be read"):
        Demonstrations(data_set)[1]
    info = json.loads((data_set / "meta/info.json").read_text())
    (data_set / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    with pytest.raises(DemonstrationsNotReadable, match=r"its format is v2\.1, only v3 is read"):
        Demonstrations(data_set)


def test_an_episode_with_steps_missing_is_refused(data_set):
    file = data_set / "data/chunk-000/file-000.parquet"
    pd.read_parquet(file).iloc[:-1].to_parquet(file)
    with pytest.raises(DemonstrationsNotReadable, match="holds 4 steps of episode 0, not 5"):
        Demonstrations(data_set)[0]


def test_cloning_takes_the_actions_of_the_demonstrations(data_set):
    """Actions in the environment's units; steps behind an episode's end teach nothing."""
    policy = MlpConfig(
        bounds=ActionBounds(low=(0.0, 0.0), high=(30.0, 5.0)), state_size=3, chunk_length=2
    ).build(seed=0)
    episodes = list(Demonstrations(data_set))
    state_NS = torch.cat([one.state_TS for one in episodes])
    parts = [one.horizons(policy.horizon) for one in episodes]
    actions_NHA, valid_NH = (torch.cat([part[place] for part in parts]) for place in (0, 1))
    policy.normalizer.update(state_NS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    spoilt = torch.where(valid_NH[..., None], actions_NHA, 1e3)
    for _ in range(200):
        loss = imitation_loss(policy.imitate(Observation(state_NS), spoilt, range(len(state_NS))), valid_NH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3
    executed = policy.act(Observation(state_NS), range(len(state_NS)), deterministic=True).executed_BCA
    assert (executed - actions_NHA)[valid_NH].abs().max() < 2


def rewritten(data_set, column: str, frame: int, value) -> None:
    """Changes a cell of the third episode."""
    file = data_set / "data/chunk-000/file-001.parquet"
    table = pd.read_parquet(file)
    place = table.index[(table.episode_index == 2) & (table.frame_index == frame)][0]
    table[column] = [value if at == place else cell for at, cell in table[column].items()]
    table.to_parquet(file)


@pytest.mark.parametrize("column", ["action", "observation.state"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("frame", [0, 3])
def test_a_number_that_is_not_finite_is_refused_with_its_episode_and_frame(data_set, column, value, frame):
    size = {"action": 2, "observation.state": 3}[column]
    rewritten(data_set, column, frame, [0.0] * (size - 1) + [value])
    words = rf"episode 2, frame {frame}: number {size - 1} of {column} is -?(nan|inf), which is not finite"
    found = Demonstrations(data_set)
    assert [len(found[place].action_TA) for place in range(2)] == [5, 3]
    with pytest.raises(DemonstrationsNotReadable, match=words):
        list(found)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("action", None, "frame 1: action has 1 numbers, not 2|frame 1: action is no row of numbers"),
        ("action", [1.0], "frame 1: action has 1 numbers, not 2"),
        ("action", [1.0, None], "number 1 of action is nan"),
        ("observation.images.front", None, "frame 1 of observation.images.front: an image cannot be read"),
        ("observation.images.front", {"bytes": b"x", "path": None}, "an image cannot be read"),
    ],
)
def test_a_cell_that_holds_something_else_is_named(data_set, column, value, words):
    rewritten(data_set, column, 1, value)
    with pytest.raises(DemonstrationsNotReadable, match=words):
        list(Demonstrations(data_set, ["front"]))


@pytest.mark.parametrize("camera", ["image", "observation.image"])
def test_the_only_camera_of_a_data_set_may_be_called_image(data_set, camera):
    files = [*(data_set / "data/chunk-000").iterdir()]
    for file in files:
        pd.read_parquet(file).rename(columns={"observation.images.front": "observation.image"}).to_parquet(
            file
        )
    info = json.loads((data_set / "meta/info.json").read_text())
    info["features"]["observation.image"] = info["features"].pop("observation.images.front")
    (data_set / "meta/info.json").write_text(json.dumps(info))
    assert Demonstrations(data_set, [camera])[0].images[camera].shape == (5, 6, 8, 3)


def test_a_transparent_picture_is_refused_with_its_frame(data_set):
    file = io.BytesIO()
    Image.new("RGBA", (8, 6)).save(file, "PNG")
    rewritten(data_set, "observation.images.front", 2, {"bytes": file.getvalue(), "path": None})
    with pytest.raises(DemonstrationsNotReadable, match=r"episode 2, frame 2 .*transparent parts"):
        list(Demonstrations(data_set, ["front"]))
