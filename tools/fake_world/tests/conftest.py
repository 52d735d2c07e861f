"""Tests on an imaginary GPU of CUDA come last: torch's own backward pass fails in a process that has had one.

The other imaginary GPU needs a process of its own: torch's first backward pass makes a queue for each kind of device
that it knows then, so that behind other tests it has none; and registered before them, it takes CUDA's place in theirs.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_fake_cuda.py")
