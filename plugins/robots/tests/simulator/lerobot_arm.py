"""`examples/robots/so101.py` with LeRobot's own classes, in LeRobot's Python: `lerobot_arm.py FOLLOWER LEADER STOP`.

The ports are those of the arms, STOP the stop file. Prints a JSON object of what happened.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from headrace_robots.simulator.robot.body import Fault
from headrace_robots.simulator.robot.station import RESET, Station
from headrace_simulator.backends.base import BackendError

FILE = Path(__file__).resolve().parents[4] / "examples/robots/so101.py"
WAIT_S = 30.0


def main() -> None:
    specification = importlib.util.spec_from_file_location("so101", FILE)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.FOLLOWER, module.LEADER, module.CAMERAS = sys.argv[1], sys.argv[2], {}
    station = Station(module.pick(), Path(sys.argv[3]))
    told: dict[str, object] = {}
    try:
        station.start()
    except BackendError as error:
        print(json.dumps({"refused": f"{error.field}: {error.message}"}))
        return
    owner = object()
    try:
        told["home"] = reset(station, owner)
        told["acted"] = [act(station, owner, [20, -10, 15, 0, 30, 80]) for _ in range(20)][-1]
        station.taken_over = True
        time.sleep(2 / station.setup.rate_hz)  # a tick that has begun acts once more
        done = station.act(owner, np.zeros(6, np.float32)).done_A
        assert done is not None
        told["followed"] = done.tolist()
        station.taken_over = False
        station.stop("a test")
        try:
            act(station, owner, [0] * 5 + [50])
        except Fault as fault:
            told["stopped"] = str(fault)
        time.sleep(0.5)
        told["sunk"] = station.setup.robot.get_observation()["shoulder_lift.pos"]
        station.clear()
        told["again"] = reset(station, owner)
    finally:
        station.close()
    print(json.dumps(told))


def reset(station: Station, owner: object) -> list[float]:
    """The state in which a person found the scene ready."""

    def confirm() -> None:
        while not done.wait(0.05):
            if station.state == RESET:
                station.say("confirmed")

    done = threading.Event()
    person = threading.Thread(target=confirm)
    person.start()
    try:
        return station.reset(owner, 1).observation["state"].tolist()
    finally:
        done.set()
        person.join(WAIT_S)


def act(station: Station, owner: object, goal: list[float]) -> list[float]:
    return station.act(owner, np.array(goal, np.float32)).observation["state"].tolist()


if __name__ == "__main__":
    main()
