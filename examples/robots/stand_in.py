"""Robot files without a robot: Gymnasium's environments with LeRobot's interface, to try a setup before the arm.

HEADRACE_SIMULATOR_ROBOT=$PWD/examples/robots/stand_in.py:reach headrace up
headrace run submit examples/robots/reach.yaml --watch
"""

from typing import Any

import gymnasium
from headrace_robots.simulator.robot import GymnasiumRobot, RobotSetup


def stand_in(name: str, hold: float, **fields: Any) -> RobotSetup:
    robot = GymnasiumRobot(gymnasium.make(name))
    return RobotSetup(
        robot=robot,
        limits=robot.limits(),
        hold=dict.fromkeys(robot.action_features, hold),  # torques: none
        judge=robot.judge,
        on_reset=robot.reset,
        confirm_reset=False,
        page_port=0,
        **fields,
    )


def reach() -> RobotSetup:
    """MuJoCo's arm of two joints: pip install 'headrace-simulator[mujoco]'."""
    return stand_in("Reacher-v5", 0.0, rate_hz=50, instruction="reach the target")


def pendulum() -> RobotSetup:
    """Without MuJoCo."""
    return stand_in("Pendulum-v1", 0.0, rate_hz=200, watchdog_s=1.0)
