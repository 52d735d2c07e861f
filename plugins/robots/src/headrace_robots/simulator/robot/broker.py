"""The robot's process: `python -m headrace_robots.simulator.robot.broker`, which the simulator service starts.

It has the robot from its start to the service's end, whatever pools are opened and whichever of their processes is
killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from headrace_servicekit.causes import raised
from headrace_servicekit.process.worker_pipes import JSON_CODEC, PARENT_VARIABLE, frame, read_frame
from headrace_simulator.backends.base import BackendError

from headrace_robots.simulator.robot.page import Page
from headrace_robots.simulator.robot.serving import Server
from headrace_robots.simulator.robot.setup import VARIABLE, read_setup, stop_file_of, task_name
from headrace_robots.simulator.robot.station import Station


def main() -> None:
    """Holds the robot until its parent closes the pipe, or ends."""
    os.environ.pop(PARENT_VARIABLE, None)
    with os.fdopen(os.dup(0), "rb") as reader, os.fdopen(os.dup(1), "wb") as writer:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if (body := read_frame(reader)) is None:
            return
        told = JSON_CODEC.decode(body)
        try:
            station = _station(os.environ.get(VARIABLE, ""))
            page = Page(station)
        except Exception as error:  # noqa: BLE001 - the robot's own code
            why = f"{error.field}: {error.message}" if isinstance(error, BackendError) else raised(error)
            writer.write(frame(JSON_CODEC.encode({"error": why})))
            return

        def stop(number: int, at: FrameType | None) -> None:
            station.stop(f"signal {number}")

        signal.signal(signal.SIGUSR1, stop)
        server = Server(station, task_name(os.environ[VARIABLE]), Path(told["folder"]), told["users"])
        sys.stderr.write(f"robot: the operator's page is {page.url}; the stop is {station.stop_file}\n")
        writer.write(frame(JSON_CODEC.encode({"listening": True})))
        writer.flush()
        while read_frame(reader) is not None:
            pass
        server.close()
        page.close()
        station.close()


def _station(place: str) -> Station:
    if not place:
        raise BackendError(VARIABLE, "names no robot; set it to PATH.py:FUNCTION of this host's robot file")
    setup = read_setup(place)
    station = Station(setup, stop_file_of(setup, place))
    station.start()
    return station


if __name__ == "__main__":
    main()
