"""What holds for the tests of all packages."""

from __future__ import annotations

import gc
import os
import signal

# No test asks a model hub: what a submission says of a model must not depend on who is connected.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish() -> None:
    """Keeps the cyclic collector from what is imported by now: walks through torch cost tests most of their time."""
    gc.collect()
    gc.freeze()


# In a shell's background Ctrl-C is ignored, by all that tests start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
