"""Starts servers of environments: stubs of their wire, and the real ones from environments of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from headrace_servicekit.rpc.addresses import free_port

ROOT = Path(__file__).resolve().parents[3]
SERVERS = Path(__file__).parent / "servers"
START_S = 100
BOTH = ["stub", pytest.param("real", marks=pytest.mark.nightly)]
"""Which servers a test asks; the stubs are what is quick."""


@contextmanager
def serving(*command: str | Path, at: str = "") -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's address, once it answers, and its process. The command gets the port: that of `at`, or a free one."""
    port = int(at.rpartition(":")[2]) if at else free_port()
    process = subprocess.Popen([*command, str(port)])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < until, f"{command} does not start"
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.wait()


def stub(name: str) -> tuple[str | Path, ...]:
    """The command of a stub."""
    return sys.executable, SERVERS / "stubs.py", name


def real(environment: str, script: str, *more: str) -> tuple[str | Path, ...]:
    """The command of a real server; skips the test where there is no Python that has its package."""
    python = ROOT / ".envs" / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"make simulators SIM={environment}")
    return python, ROOT / "examples/environments" / script, *more


Started = Callable[[tuple[str | Path, ...]], tuple[str, subprocess.Popen[bytes]]]
