"""One fleet that test modules use one after the other. Knows no test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.fleet import Fleet
from harness.processes import free_port


class SharedFleet:
    """A fleet for several modules: started when the first asks, started anew after `close`."""

    def __init__(self, new_data_dir: Callable[[], Path]) -> None:
        self._new_data_dir = new_data_dir
        self._fleet: Fleet | None = None

    def lend(self) -> Fleet:
        """The fleet, which is up."""
        if self._fleet is None:
            port = str(free_port())
            made = Fleet(self._new_data_dir(), "--simulator", "0", "--sessions-grpc", port)
            made.sessions_grpc = f"127.0.0.1:{port}"
            self._fleet = made.__enter__()
        return self._fleet

    def close(self) -> None:
        """Stops the fleet, if there is one; fails as the end of its block would."""
        if self._fleet is not None:
            ended, self._fleet = self._fleet, None
            ended.__exit__(None, None, None)
