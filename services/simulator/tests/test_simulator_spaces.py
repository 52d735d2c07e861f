"""Which actions a space takes, and its way over the wire."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from headrace_servicekit.rpc.episodes import is_image
from headrace_servicekit.rpc.tensors import decode_tensor
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.gymnasium_spaces import Actions, Observations
from headrace_simulator.spaces import ArraySpace, action_fault, from_message, in_shape, to_message

BOX = ArraySpace("", np.dtype(np.float64), (2,), np.array([-1.0, -np.inf]), np.array([1.0, np.inf]))
DISCRETE = ArraySpace("", np.dtype(np.int64), (), np.asarray(3), None, (4,))
MIXED = ArraySpace("", np.dtype(np.float32), (2,), np.array([2.0, -1.0]), np.array([4.0, 1.0]), (3, 0))

PONG = """
import ale_py
import gymnasium
from gymnasium.wrappers import FrameStackObservation

gymnasium.register_envs(ale_py)


def make_env():
    return FrameStackObservation(gymnasium.make("ALE/Pong-v5", obs_type="grayscale"), 4)
"""


@pytest.mark.parametrize(
    ("space", "action", "fault"),
    [
        (BOX, np.array([1.0, 1e9]), None),
        (BOX, np.array([0.5, 0], np.float32), None),
        (BOX, np.array([1, 0]), None),
        (BOX, np.array([1.001, 0.0]), "out of its bounds"),
        (BOX, np.array([0.0, np.nan]), "not finite"),
        (BOX, np.array([0.0, np.inf]), "not finite"),
        (BOX, np.zeros(3), "shape [3]"),
        (BOX, np.zeros((1, 2)), "shape [1, 2]"),
        (BOX, np.zeros(2, np.bool_), "type bool"),
        (DISCRETE, np.asarray(3), None),
        (DISCRETE, np.asarray(6, np.int32), None),
        (DISCRETE, np.asarray(7), "not among 3 to 6"),
        (DISCRETE, np.asarray(2), "not among 3 to 6"),
        (DISCRETE, np.asarray(3.0), "type float64"),
        (DISCRETE, np.asarray([3]), "shape [1]"),
        (MIXED, np.array([4.0, 0.3], np.float32), None),
        (MIXED, np.array([5.0, 0.3], np.float32), "element [0] of the action 5 is not among 2 to 4"),
        (MIXED, np.array([2.5, 0.3], np.float32), "element [0] of the action 2.5 is not among 2 to 4"),
        (MIXED, np.array([2.0, 1.5], np.float32), "out of its bounds"),
    ],
)
def test_action_faults(space, action, fault):
    found = action_fault(space, action)
    assert (found is None) if fault is None else (fault in found)


@pytest.mark.parametrize("space", [BOX, DISCRETE, MIXED, ArraySpace("camera", np.dtype(np.uint8), (2, 3, 3))])
def test_spaces_survive_the_wire(space):
    again = from_message(to_message(space))
    assert (again.name, again.dtype, again.shape, again.categories) == (
        space.name,
        space.dtype,
        space.shape,
        space.categories,
    )
    np.testing.assert_equal((again.low, again.high), (space.low, space.high))


ACTIONS = {
    "Discrete": (spaces.Discrete(3, start=2), (), [3], [4]),
    "MultiDiscrete": (spaces.MultiDiscrete([[2, 3], [4, 5]]), (2, 2), [2, 3, 4, 5], [1, 2, 3, 4]),
    "MultiBinary": (spaces.MultiBinary(3), (3,), [2, 2, 2], [1, 0, 1]),
    "whole Box": (spaces.Box(-1, 1, (2,), np.int32), (2,), [3, 3], [-1, 1]),
    "Box": (spaces.Box(-1, 1, (2,)), (2,), [], [0.5, -0.5]),
    "Dict": (
        spaces.Dict({"turn": spaces.Box(-1, 1, (2,), np.float64), "gear": spaces.Discrete(4)}),
        (3,),
        [4, 0, 0],
        [3, 0.25, -0.5],
    ),
    "Tuple": (
        spaces.Tuple([spaces.Discrete(2), spaces.Dict({"b": spaces.MultiBinary(2)})]),
        (3,),
        [2, 2, 2],
        [1, 0, 1],
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_rows_of_numbers_become_actions_of_every_gymnasium_space(name):
    space, shape, categories, row = ACTIONS[name]
    actions = Actions(space)
    assert (actions.space.shape, list(actions.space.categories)) == (shape, categories)
    served = in_shape(actions.space, np.array(row, actions.space.dtype), chunk=False)
    assert action_fault(actions.space, served) is None
    made = actions(served)
    assert space.contains(made)
    np.testing.assert_array_equal(flattened(made), row)


def flattened(action) -> list[float]:
    if isinstance(action, dict):
        return [number for key in action for number in flattened(action[key])]
    if isinstance(action, tuple):
        return [number for each in action for number in flattened(each)]
    return np.ravel(action).tolist()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Text(5), "its actions are Text"),
        (spaces.Box(0, 10**6, (1,), np.int64), "whole numbers of 1000001 values"),
    ],
)
def test_actions_that_no_policy_draws_are_named(space, words):
    with pytest.raises(BackendError, match=words):
        Actions(space)


RANDOM = np.random.default_rng(0)


def picture(*shape: int) -> tuple[spaces.Box, np.ndarray]:
    return spaces.Box(0, 255, shape, np.uint8), RANDOM.integers(0, 256, shape).astype(np.uint8)


def test_pictures_of_every_layout_are_height_by_width_by_channels():
    layouts = {
        "rgb": (picture(20, 30, 3), lambda image: image),
        "channels first": (picture(4, 20, 30), lambda image: np.moveaxis(image, 0, -1)),
        "gray": (picture(20, 30), lambda image: image[..., None]),
        "stacked": (picture(2, 20, 30, 3), lambda image: np.concatenate(list(image), -1)),
        "stacked, channels first": (
            picture(2, 3, 20, 30),
            lambda image: np.moveaxis(np.concatenate(list(image)), 0, -1),
        ),
    }
    shown = Observations(spaces.Dict({name: space for name, ((space, _), _) in layouts.items()}))
    found = shown({name: image for name, ((_, image), _) in layouts.items()})
    for space in shown.spaces:
        (_, image), wanted = layouts[space.name]
        assert is_image(space.dtype, space.shape) and space.shape == found[space.name].shape
        np.testing.assert_array_equal(found[space.name], wanted(image))


def test_categories_are_one_hot_boards_are_numbers_and_text_is_left_out():
    shown = Observations(
        spaces.Dict(
            {
                "a": spaces.Discrete(3, start=5),
                "b": spaces.MultiDiscrete([2, 3]),
                "board": spaces.Box(0, 2, (9, 9), np.uint8),
                "mission": spaces.Text(10),
                "order": spaces.Space(dtype=str),
                "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(2)]),
            }
        )
    )
    board = np.full((9, 9), 2, np.uint8)
    found = shown(
        {
            "a": 6,
            "b": np.array([1, 2]),
            "board": board,
            "mission": "go",
            "order": "now",
            "pair": (np.array([0, 1]), 1),
        }
    )
    assert [space.name for space in shown.spaces] == ["a", "b", "board", "pair.0", "pair.1"]
    assert found["a"].tolist() == [0, 1, 0] and found["b"].tolist() == [0, 1, 0, 0, 1]
    assert found["board"].shape == (9, 9) and found["pair.1"].tolist() == [0, 1]
    with pytest.raises(BackendError, match="one of 5000 values"):
        Observations(spaces.Discrete(5000))


async def test_pong_shows_stacked_frames_and_takes_one_of_six_actions(simulator, tmp_path):
    pytest.importorskip("ale_py")
    (tmp_path / "pong.py").write_text(PONG)
    pool = await simulator.open("pong.py:make_env", step_timeout_s=60.0, max_episode_steps=5)
    (frames,) = pool.opened.observation_spaces
    assert (list(frames.shape), list(pool.opened.action_space.categories)) == ([210, 160, 4], [6])
    outcomes = [await pool.reset(seed=1), *[await pool.act(np.array([way])) for way in (0, 2, 3, 2, 5)]]
    assert outcomes[-1].truncated and not outcomes[-1].success_reported
    images = [decode_tensor(each.observation[frames.name], max_bytes=1 << 20) for each in outcomes]
    assert images[-1].std() > 5 and not np.array_equal(images[-1][..., 0], images[-1][..., 3])
    np.testing.assert_array_equal(images[-1][..., 2], images[-2][..., 3])
