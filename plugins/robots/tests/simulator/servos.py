"""Feetech servos on a serial line that is a pseudo-terminal: what an arm's motors answer and do, without an arm.

A packet is FF FF ID LENGTH INSTRUCTION PARAMETERS CHECKSUM, of protocol 0. A motor with torque turns towards its goal
no faster than `SPEED`; one without stays where it is, or, once it has moved, sinks by `sinks` steps a second.
"""

from __future__ import annotations

import os
import select
import threading
import time
import tty

PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 1, 2, 3, 0x82, 0x83
LOW_LIMIT, HIGH_LIMIT, TORQUE, GOAL, POSITION = 9, 11, 40, 42, 56
STS3215, MIDDLE, SPEED = 777, 2048, 3000
"""Model number; steps of 4,096 a turn; steps a second."""


class Servos:
    """Motors of these ids behind `port`. `leaps`: how far a goal was from where its motor, with torque, was; steps."""

    def __init__(self, ids: range, limits: tuple[int, int] = (0, 4095), sinks: float = 0.0) -> None:
        self._controller, device = os.openpty()
        tty.setraw(device)
        self.port, self._device, self.sinks = os.ttyname(device), device, sinks
        self._tables = {each: bytearray(128) for each in ids}
        self.positions = dict.fromkeys(ids, float(MIDDLE))
        self.leaps = dict.fromkeys(ids, 0.0)
        for each, table in self._tables.items():
            table[0], table[1], table[5] = 3, 10, each
            for address, value in (
                *((3, STS3215), (LOW_LIMIT, limits[0]), (HIGH_LIMIT, limits[1])),
                *((GOAL, MIDDLE), (POSITION, MIDDLE)),
            ):
                table[address : address + 2] = value.to_bytes(2, "little")
        self._moved, self._closed = time.monotonic(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def torque(self) -> set[int]:
        """The bytes that say whether motors hold."""
        return {table[TORQUE] for table in self._tables.values()}

    def close(self) -> None:
        """Nobody answers any more."""
        self._closed = True
        self._thread.join()
        os.close(self._device)
        os.close(self._controller)

    def _run(self) -> None:
        held = b""
        while not self._closed:
            ready, _, _ = select.select([self._controller], [], [], 0.005)
            self._move()
            if not ready:
                continue
            held += os.read(self._controller, 4096)
            while (start := held.find(b"\xff\xff")) >= 0 and len(held) >= start + 4:
                end = start + 4 + held[start + 3]
                if len(held) < end:
                    break
                self._take(held[start + 2 : end])
                held = held[end:]

    def _move(self) -> None:
        now = time.monotonic()
        passed, self._moved = now - self._moved, now
        for each, table in self._tables.items():
            before = self.positions[each]
            if table[TORQUE]:
                goal = int.from_bytes(table[GOAL : GOAL + 2], "little")
                after = before + min(max(goal - before, -SPEED * passed), SPEED * passed)
            else:
                after = max(0.0, before - self.sinks * passed) if self.leaps[each] else before
            self.positions[each] = after
            table[POSITION : POSITION + 2] = int(after).to_bytes(2, "little")

    def _take(self, packet: bytes) -> None:
        motor, instruction, parameters = packet[0], packet[2], packet[3:-1]
        assert sum(packet) & 0xFF == 0xFF, f"checksum of {packet.hex()}"
        if instruction == SYNC_WRITE:
            address, size = parameters[:2]
            for start in range(2, len(parameters), size + 1):
                self._write(parameters[start], address, parameters[start + 1 : start + 1 + size])
        elif instruction == SYNC_READ:
            address, size = parameters[:2]
            for each in parameters[2:]:
                self._answer(each, bytes(self._tables[each][address : address + size]))
        elif motor in self._tables:
            address = parameters[0] if parameters else 0
            if instruction == WRITE:
                self._write(motor, address, parameters[1:])
            read = instruction == READ
            self._answer(
                motor, bytes(self._tables[motor][address : address + parameters[1]]) if read else b""
            )

    def _write(self, motor: int, address: int, data: bytes) -> None:
        self._tables[motor][address : address + len(data)] = data
        if address in (TORQUE, GOAL) and self._tables[motor][TORQUE]:
            goal = int.from_bytes(self._tables[motor][GOAL : GOAL + 2], "little")
            self.leaps[motor] = max(self.leaps[motor], abs(goal - self.positions[motor]))

    def _answer(self, motor: int, data: bytes) -> None:
        body = bytes([motor, len(data) + 2, 0]) + data
        os.write(self._controller, b"\xff\xff" + body + bytes([~sum(body) & 0xFF]))
