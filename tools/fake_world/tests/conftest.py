"""Tests on an imaginary GPU of CUDA come last: torch's own backward pass fails in a process that has had one."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_fake_cuda.py")
