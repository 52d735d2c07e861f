"""The scalars of steps and evaluations, and TensorBoard event files with them, written without TensorBoard.

Every package that writes them imports torch where it finds it, and the coordinator must stay free of torch.
Format: TFRecord frames (length, masked CRC-32C, data) around `tensorboard.Event` protobufs, of which four
fields are encoded here.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import BinaryIO

from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import StepView


def step_scalars(view: StepView) -> dict[str, float]:
    """Tags grouped by their first part: train, speed, stage_seconds, slots, trainer; none that was not measured."""
    measured = {
        "train/reward": view.reward_mean,
        "train/max_staleness": view.max_staleness,
        "speed/tokens_per_second": view.tokens_per_s,
    }
    return {
        **{tag: float(value) for tag, value in measured.items() if value is not None},
        "speed/step_seconds": view.wall_s,
        "speed/tokens": float(view.tokens),
        "slots/trained": float(view.trained),
        "slots/dropped": float(view.dropped),
        "slots/filtered": float(view.filtered),
        "slots/refilled_groups": float(view.refilled),
        **{f"stage_seconds/{stage}": seconds for stage, seconds in view.stage_s.items()},
        **{f"trainer/{name}": value for name, value in view.figures.items()},
    }


def evaluation_scalars(view: EvaluationView) -> dict[str, float]:
    """The score, each scorer's mean and figures of episodes, by kind of evaluation."""
    named = {**view.parts, **view.episodes}
    return {
        f"evaluation/{view.kind}": view.score,
        **{f"evaluation/{view.kind}/{name}": value for name, value in named.items()},
    }


DOUBLE, BYTES, FLOAT, VARINT = 1, 2, 5, 0
_POLYNOMIAL = 0x82F63B78


class EventFile:
    """Scalars by step. A write that fails leaves a torn frame, so the next one begins a new file."""

    _numbers = count()

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: BinaryIO | None = None
        self._last_step = -1

    def write(self, time: float, step: int, scalars: Mapping[str, float]) -> None:
        """Adds scalars at a step; a step below the last one hides what was written from it on (a rewind)."""
        frames = b""
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = (self._directory / self._name(time)).open("xb", buffering=0)
            frames += _frame(_event(time, 0, _field(3, b"brain.Event:2")))
        if step < self._last_step:
            frames += _frame(_event(time, step, _field(7, _key(1, VARINT) + _varint(1))))  # SessionLog START
        summary = b"".join(_field(1, _scalar(tag, value)) for tag, value in scalars.items())
        try:
            self._file.write(frames + _frame(_event(time, step, _field(5, summary))))
        except OSError:
            self.close()
            raise
        self._last_step = step

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file:
            file.close()

    def _name(self, time: float) -> str:
        return (
            f"events.out.tfevents.{int(time):010d}.{socket.gethostname()}.{os.getpid()}.{next(self._numbers)}"
        )


def _event(time: float, step: int, body: bytes) -> bytes:
    return _key(1, DOUBLE) + struct.pack("<d", time) + _key(2, VARINT) + _varint(step) + body


def _scalar(tag: str, value: float) -> bytes:
    return _field(1, tag.encode()) + _key(2, FLOAT) + struct.pack("<f", _single(value))


def _single(value: float) -> float:
    limit = 3.4028234e38
    return (
        value
        if -limit <= value <= limit or value != value
        else (float("inf") if value > 0 else -float("inf"))
    )


def _field(number: int, data: bytes) -> bytes:
    return _key(number, BYTES) + _varint(len(data)) + data


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _frame(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_table_entry(value) for value in range(256)]
