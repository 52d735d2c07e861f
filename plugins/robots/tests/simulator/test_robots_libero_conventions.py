"""What published policies read of LIBERO and say to it, against what their own programs do, written by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from headrace_robots.simulator.libero import axis_angle, seen, simulated

RANDOM = np.random.default_rng(0)
OBSERVED = {
    "robot0_eef_pos": np.array([0.1, -0.2, 1.1]),
    "robot0_eef_quat": np.array([0.5, -0.5, 0.1, math.sqrt(1 - 0.51)]),
    "robot0_gripper_qpos": np.array([0.04, -0.04]),
    "robot0_joint_pos": RANDOM.random(7),
    "object-state": RANDOM.random(70),
    "agentview_image": RANDOM.integers(0, 256, (6, 5, 3), np.uint8),
    "robot0_eye_in_hand_image": RANDOM.integers(0, 256, (6, 5, 3), np.uint8),
}
PICTURES = ["agentview_image", "robot0_eye_in_hand_image"]


def rotation(vector):
    """(3, 3) of axis times angle, by Rodrigues."""
    angle = np.linalg.norm(vector)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def of_quaternion(x, y, z, w):
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_axis_and_angle_are_the_quaternion_s_rotation(sign):
    for _ in range(20):
        quaternion = RANDOM.normal(size=4)
        quaternion *= sign / np.linalg.norm(quaternion)
        found = axis_angle(quaternion)
        np.testing.assert_allclose(rotation(found), of_quaternion(*quaternion), atol=1e-9)
        # robosuite, openpi and lerobot do not turn a quaternion over: an angle may be above pi.
        assert (np.linalg.norm(found) > math.pi) == (quaternion[3] < 0)
    assert not axis_angle(np.array([0.0, 0, 0, 1])).any()
    assert not axis_angle(np.array([0.0, 0, 0, 1 + 1e-9])).any()


@pytest.mark.parametrize("convention", ["lerobot", "openpi", "openvla"])
def test_a_policy_reads_eight_numbers_and_pictures_turned_upright(convention):
    found = seen(OBSERVED, PICTURES, convention)
    assert [*found] == ["state", *PICTURES]
    axis = OBSERVED["robot0_eef_quat"][:3] / np.linalg.norm(OBSERVED["robot0_eef_quat"][:3])
    angle = 2 * math.acos(OBSERVED["robot0_eef_quat"][3])
    np.testing.assert_allclose(found["state"], [0.1, -0.2, 1.1, *(axis * angle), 0.04, -0.04])
    for name in PICTURES:
        # Row 0 of the simulator's picture is the lowest one, and its columns run the other way.
        assert found[name].flags.c_contiguous and found[name].dtype == np.uint8
        assert np.array_equal(found[name][0, 0], OBSERVED[name][-1, -1])
        assert np.array_equal(found[name], np.rot90(OBSERVED[name], 2))


def test_without_a_convention_all_is_the_simulator_s():
    found = seen(OBSERVED, PICTURES, "")
    assert sum(array.size for name, array in found.items() if name not in PICTURES) == 86
    assert all(np.array_equal(found[name], OBSERVED[name]) for name in found)


@pytest.mark.parametrize(
    ("said", "done"), [(1.0, -1), (0.996, -1), (0.51, -1), (0.49, 1), (0.0, 1), (-0.2, 1)]
)
def test_openvla_s_open_gripper_is_one(said, done):
    action = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, said])
    assert simulated(action, "openvla").tolist() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, done]
    assert action[-1] == said
    assert simulated(action, "openpi") is action and simulated(action, "lerobot") is action
