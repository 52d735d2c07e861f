"""Real robots: what a robot file says, and the process on the robot's host that holds the robot.

A robot file imports this module alone.
"""

from headrace_robots.simulator.robot.setup import Limit, RobotSetup, Verdict
from headrace_robots.simulator.robot.stand_in import GymnasiumRobot

__all__ = ["GymnasiumRobot", "Limit", "RobotSetup", "Verdict"]
