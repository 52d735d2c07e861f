"""What holds for the tests of all packages."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Keeps the cyclic collector from what is imported by now: walks through torch cost tests most of their time."""
    gc.collect()
    gc.freeze()
