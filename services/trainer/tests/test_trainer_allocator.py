"""Freed memory stays in the process until the host is short of it."""

from __future__ import annotations

import subprocess
import sys

KEEPS = """
import sys
from headrace_trainer import allocator
if not allocator.keep_freed_memory():
    sys.exit("no glibc here")
blocks = [bytearray(b"x") * (8 << 20) for _ in range(16)]
end = bytearray(b"x") * (1 << 20)
full = allocator.resident_bytes()
del blocks
assert allocator.resident_bytes() > full - (8 << 20), "freed memory went back at once"
allocator.SHORT_SHARE = 0.0
assert allocator.give_back_if_short() == 0
allocator.SHORT_SHARE = 1.0
assert allocator.give_back_if_short() > (100 << 20)
"""


def test_memory_is_kept_and_given_back_when_the_host_is_short():
    subprocess.run([sys.executable, "-c", KEEPS], check=True, timeout=60)
