"""What a service says that it does not hold is what code then finds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from headrace_servicekit.process.confine import other_user
from headrace_servicekit.sandbox.isolation import not_held
from headrace_servicekit.sandbox.run import walls

_BLOCK = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {unshare}), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filters)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


os.execv(sys.executable, [sys.executable, "-m", "headrace_servicekit.sandbox.isolation"])
"""


def test_it_says_what_the_kernel_allows():
    found = asyncio.run(not_held())
    assert any("user id" in text for text in found) is not bool(other_user())
    assert any("best_effort" in text for text in found) is bool(walls().missing)


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or os.getuid() != 0, reason="makes a container's filter as root"
)
def test_where_namespaces_are_refused_it_says_so():
    code = _BLOCK.format(unshare=272)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "no mounts of its own" in done.stdout and "best_effort" in done.stdout
