"""LeRobot's own follower and leader of an SO-101 are held by a station, over a serial line with made servos.

LeRobot runs in an environment of its own (`ci/lerobot.sh`). The quick twin, of the interface alone, is
test_robots_station.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from servos import Servos

ROOT = Path(__file__).resolve().parents[4]
PEER = ROOT / ".envs/lerobot/bin/python"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not PEER.exists(), reason="sh ci/lerobot.sh makes .envs/lerobot"),
]
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
LIMITS = (0, 4095)
SOURCES = ("plugins/robots", "services/simulator", "libs/servicekit", "libs/schema", "proto")
STEPS_A_DEGREE = 4095 / 360
ROOM = 6.0
"""Degrees, or hundredths of the gripper's way: where a motor is while it still turns."""


@pytest.fixture
def arms():
    made = [Servos(range(1, 7), LIMITS, sinks=400.0), Servos(range(1, 7), LIMITS)]
    yield made
    for each in made:
        each.close()


def calibrate(folder: Path, *, low: int = LIMITS[0]) -> None:
    """The files that lerobot-calibrate leaves for both arms."""
    own = {
        joint: {"id": number, "drive_mode": 0, "homing_offset": 0, "range_min": low, "range_max": LIMITS[1]}
        for number, joint in enumerate(JOINTS, 1)
    }
    for place in ("robots/so_follower/follower", "teleoperators/so_leader/leader"):
        file = folder / f"{place}.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(own))


def run_arm(arms: list[Servos], folder: Path) -> dict[str, object]:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / each / "src") for each in SOURCES),
        "HF_LEROBOT_CALIBRATION": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    script = Path(__file__).with_name("lerobot_arm.py")
    done = subprocess.run(
        [str(PEER), str(script), arms[0].port, arms[1].port, str(folder / "stop")],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_an_arm_acts_follows_a_person_stops_and_starts_again_without_a_leap(arms, tmp_path):
    follower, leader = arms
    leader.positions[1] += 10 * STEPS_A_DEGREE  # the person holds the pan joint at 10 degrees
    calibrate(tmp_path)
    told = run_arm(arms, tmp_path)
    assert told["home"] == pytest.approx([0, 0, 0, 0, 0, 50], abs=ROOM)
    assert told["acted"] == pytest.approx([20, -10, 15, 0, 30, 80], abs=ROOM)
    assert abs(told["followed"][0] - told["acted"][0]) < ROOM, "a person's action is slowed down as well"
    assert "emergency stop" in told["stopped"]
    assert told["sunk"] < -10, "without torque the arm sinks"
    assert told["again"] == pytest.approx([0, 0, 0, 0, 0, 50], abs=ROOM)
    joints = [follower.leaps[motor] / STEPS_A_DEGREE for motor in range(1, 6)]
    assert max(joints) < 60 / 30 + ROOM, "no goal was further away than the speed allows"
    assert follower.torque() == leader.torque() == {0}


def test_an_arm_of_another_calibration_is_refused_by_name(arms, tmp_path):
    calibrate(tmp_path, low=100)
    told = run_arm(arms, tmp_path)
    assert "robot: follower has no calibration, or its motors hold another one" in told["refused"]
    assert not any(arms[0].leaps.values()), "nothing has moved"
