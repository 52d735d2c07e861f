"""Harm done to a checkpoint's files."""

from __future__ import annotations

import json
from pathlib import Path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove_field(path: Path) -> None:
    body = json.loads(path.read_text())
    del body["optimizer_steps"]
    path.write_text(json.dumps(body))
