"""LeRobot's SO-101, with a leader arm to intervene by: pip install 'lerobot[feetech]' on the robot's host.

Calibrate both arms there first: lerobot-calibrate with these ports and ids. Then:

    HEADRACE_SIMULATOR_ROBOT=$PWD/examples/robots/so101.py:pick \
        headrace join HEAD --token-file head-token --outgoing --rollout 0 --simulator 1
"""

from collections.abc import Mapping
from typing import Any

from headrace_robots.simulator.robot import Limit, RobotSetup

FOLLOWER, LEADER = "/dev/ttyACM0", "/dev/ttyACM1"
CAMERAS = {"front": 0}
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")


def pick() -> RobotSetup:
    from lerobot.cameras.opencv import OpenCVCameraConfig
    from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig
    from lerobot.teleoperators.so_leader import SO101Leader, SO101LeaderConfig

    cameras = {
        name: OpenCVCameraConfig(index_or_path=index, width=320, height=240, fps=30)
        for name, index in CAMERAS.items()
    }
    follower = SO101Follower(SO101FollowerConfig(port=FOLLOWER, id="follower", cameras=cameras))
    leader = SO101Leader(SO101LeaderConfig(port=LEADER, id="leader"))
    # In LeRobot's units: degrees from the middle of each joint's calibrated range, the gripper 0 to 100.
    limits = {f"{joint}.pos": Limit(low=-80, high=80, speed=60) for joint in JOINTS}
    limits["gripper.pos"] = Limit(low=5, high=95, speed=120)

    def power_on(seed: int | None) -> None:
        # A motor without torque keeps its old goal, and would leap there.
        follower.bus.sync_write("Goal_Position", follower.bus.sync_read("Present_Position"))
        follower.bus.enable_torque()

    return RobotSetup(
        robot=follower,
        teleoperator=leader,
        operator="ada",
        limits=limits,
        home=dict.fromkeys(limits, 0.0) | {"gripper.pos": 50.0},
        rate_hz=30,
        slow_down=True,
        workspace=above_the_table,
        on_stop=follower.bus.disable_torque,  # the arm sinks; without this line it stays where it is
        on_reset=power_on,
        instruction="put the cube into the box",
    )


def above_the_table(seen: Mapping[str, Any], action: Mapping[str, float]) -> str | None:
    """The two joints that lower the hand, together."""
    if action["shoulder_lift.pos"] + action["elbow_flex.pos"] > 120:
        return "the hand would go below the table"
    return None
