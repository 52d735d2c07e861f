"""Tests on an imaginary GPU of CUDA come last: torch's own backward pass fails in a process that has had one.

The other imaginary GPU is there before any test: torch's first backward pass in a process makes a queue for each kind
of device that it knows then, and a later one would have none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headrace_fake_world.device import fake_device

fake_device()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_fake_cuda.py")
