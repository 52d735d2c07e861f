"""A robot file: an arm of two joints with LeRobot's interface, in memory, and a leader arm to intervene with."""

from __future__ import annotations

import enum
import os

import numpy as np
from headrace_robots.simulator.robot import Limit, RobotSetup, Verdict


class Events(enum.Enum):
    IS_INTERVENTION = "is_intervention"
    SUCCESS = "success"
    RERECORD_EPISODE = "rerecord_episode"


class Arm:
    """Each joint is where it was sent. `sent` has all that it was."""

    def __init__(self, camera=False):
        self.position = {"lift.pos": 0.0, "turn.pos": 0.0}
        self.camera, self.sent, self.broken, self.is_connected = camera, [], None, False

    @property
    def observation_features(self):
        return dict.fromkeys(self.position, float) | ({"front": (8, 8, 3)} if self.camera else {})

    @property
    def action_features(self):
        return dict.fromkeys(self.position, float)

    def connect(self, calibrate=True):
        self.is_connected = True

    def get_observation(self):
        if isinstance(self.broken, Exception):
            raise self.broken
        image = {"front": np.full((8, 8, 3), 7, np.uint8)} if self.camera else {}
        return {**self.position, **({"lift.pos": self.broken} if self.broken is not None else {}), **image}

    def send_action(self, action):
        self.sent.append(dict(action))
        self.position = dict(action)
        return action

    def disconnect(self):
        self.is_connected = False


class Leader:
    """What a person does."""

    def __init__(self):
        self.goal, self.events = {"lift.pos": 0.5, "turn.pos": 0.0}, dict.fromkeys(Events, False)

    @property
    def action_features(self):
        return dict.fromkeys(self.goal, float)

    def connect(self, calibrate=True): ...

    def get_action(self):
        return dict(self.goal)

    def get_teleop_events(self):
        return self.events

    def disconnect(self): ...


def reach(seen, action):
    """Up is good; as far as it goes is the goal."""
    return Verdict(seen["lift.pos"], seen["lift.pos"] > 0.9, seen["lift.pos"] > 0.9)


def arm_setup(**changes):
    fields = {
        "robot": Arm(),
        "limits": {"lift.pos": Limit(low=-1, high=1, speed=20), "turn.pos": Limit(low=-1, high=1)},
        "rate_hz": 100,
        "watchdog_s": 0.1,
        "silence_s": 60,
        "confirm_reset": False,
        "judge": reach,
        "leap_s": 30,
        "page_port": 0,
    }
    return RobotSetup(**{**fields, **changes})


def make_arm():
    """What HEADRACE_SIMULATOR_ROBOT names in the tests."""
    return arm_setup(
        stop_file=os.environ["ARM_STOP_FILE"],
        page_port=int(os.environ.get("ARM_PAGE_PORT", "0")),
        confirm_reset=bool(os.environ.get("ARM_CONFIRM")),
        silence_s=float(os.environ.get("ARM_SILENCE_S", "60")),
        robot=Arm(camera=True),
        teleoperator=Leader(),
        operator="ada",
    )


def not_a_setup():
    return Arm()


def without_a_limit():
    return arm_setup(limits={"lift.pos": Limit(low=-1, high=1)})
