"""A station at a socket of its host: operations of simulators' processes in, outcomes out, as the service has them."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.process.worker_pipes import frame, read_frame
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor
from headrace_simulator.spaces import to_message

from headrace_robots.simulator.robot.body import Fault
from headrace_robots.simulator.robot.station import Seen, Station

SOCKET = "robot"
_MOST_BYTES = 1 << 16
_PEER = struct.Struct("3i")
Outcome = simulator_pb2.EnvironmentOutcome


class Server:
    """Listens in a folder, to processes of these users alone."""

    def __init__(self, station: Station, name: str, folder: Path, users: Sequence[int]) -> None:
        self._station, self._users = station, {*users}
        self._description = simulator_pb2.OpenPoolResponse(
            pool=name,
            observation_spaces=[to_message(space) for space in station.body.observation_spaces],
            action_space=to_message(station.body.action_space),
            instruction=station.setup.instruction,
        )
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        path.chmod(0o666)  # who may connect is asked of the kernel, below
        self._listening.listen(16)
        threading.Thread(target=self._accept, name="callers", daemon=True).start()

    def close(self) -> None:
        """Takes no more callers."""
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(credentials)[1] not in self._users:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        station, owner = self._station, object()
        try:
            with connection, connection.makefile("rb") as reader:
                connection.sendall(frame(self._description.SerializeToString()))
                while (body := read_frame(reader)) is not None:
                    operation = simulator_pb2.EnvironmentOperation.FromString(body)
                    outcome = self._operate(operation, owner, connection)
                    connection.sendall(frame(outcome.SerializeToString()))
        except OSError:
            pass  # it has gone
        except Exception as error:  # noqa: BLE001 - of one caller; the robot goes on
            sys.stderr.write(f"robot: a caller is cut off: {error!r}\n")
        finally:
            station.leave(owner)

    def _operate(
        self, operation: simulator_pb2.EnvironmentOperation, owner: object, connection: socket.socket
    ) -> Outcome:
        station, outcome = self._station, Outcome(status=simulator_pb2.OUTCOME_STATUS_OK)

        def gone() -> bool:
            readable, _, _ = select.select([connection], [], [], 0)
            return bool(readable) and not connection.recv(1, socket.MSG_PEEK)

        try:
            if operation.HasField("reset"):
                seed = operation.reset.seed if operation.reset.HasField("seed") else None
                seen = station.reset(owner, seed, gone)
            else:
                row_A = decode_tensor(operation.action, max_bytes=_MOST_BYTES).astype(np.float32)
                seen = station.act(owner, row_A.reshape(len(station.body.names)), gone)
        except Fault as fault:
            return Outcome(status=simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST, detail=str(fault))
        _write(seen, outcome)
        return outcome


def _write(seen: Seen, outcome: Outcome) -> None:
    for name, array in seen.observation.items():
        write_tensor(outcome.observation[name], array)
    outcome.reward, outcome.success = seen.verdict.reward, seen.verdict.success
    outcome.terminated, outcome.author = seen.verdict.ended, seen.author
    if seen.done_A is not None:
        write_tensor(outcome.interventions, seen.done_A)


def connect(folder: str) -> socket.socket:
    """A connection with the station of a folder. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.path.join(folder, SOCKET))
    return connection
