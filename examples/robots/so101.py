"""LeRobot's SO-101, with a leader arm to intervene by: pip install 'lerobot[feetech]' on the robot's host.

    HEADRACE_SIMULATOR_ROBOT=$PWD/examples/robots/so101.py:pick \
        headrace join HEAD --token-file head-token --outgoing --rollout 0 --simulator 1
"""

from collections.abc import Mapping
from typing import Any

from headrace_robots.simulator.robot import Limit, RobotSetup


def pick() -> RobotSetup:
    from lerobot.cameras.opencv import OpenCVCameraConfig
    from lerobot.robots.so101_follower import SO101Follower, SO101FollowerConfig
    from lerobot.teleoperators.so101_leader import SO101Leader, SO101LeaderConfig

    camera = OpenCVCameraConfig(index_or_path=0, width=320, height=240, fps=30)
    follower = SO101Follower(
        SO101FollowerConfig(port="/dev/ttyACM0", id="follower", cameras={"front": camera})
    )
    leader = SO101Leader(SO101LeaderConfig(port="/dev/ttyACM1", id="leader"))
    joints = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
    # In LeRobot's units: -100 to 100 of each joint's calibrated range, the gripper 0 to 100.
    limits = {f"{joint}.pos": Limit(low=-80, high=80, speed=60) for joint in joints}
    limits["gripper.pos"] = Limit(low=5, high=95, speed=120)
    return RobotSetup(
        robot=follower,
        teleoperator=leader,
        operator="ada",
        limits=limits,
        home=dict.fromkeys(limits, 0.0) | {"gripper.pos": 50.0},
        rate_hz=30,
        slow_down=True,
        workspace=above_the_table,
        on_stop=follower.bus.disable_torque,  # the arm sinks: hold it, or leave this out and it stays where it is
        instruction="put the cube into the box",
    )


def above_the_table(seen: Mapping[str, Any], action: Mapping[str, float]) -> str | None:
    """The two joints that lower the hand, together."""
    if action["shoulder_lift.pos"] + action["elbow_flex.pos"] > 120:
        return "the hand would go below the table"
    return None
