"""A trainer process computes with no denormal numbers, in any thread."""

from __future__ import annotations

import subprocess
import sys

FLUSHES = """
import asyncio
import sys
import tempfile
from pathlib import Path

from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_trainer.__main__ import mount


def left():
    import torch

    torch.set_num_threads(2)
    tiny = torch.full((1 << 20,), 1e-20)
    return int((tiny * 1e-20).count_nonzero())


async def main():
    with tempfile.TemporaryDirectory() as folder:
        close = await mount(Instance(InstanceConfig(kind="trainer", shm_dir=Path(folder), data_dir=Path(folder))))
        found = left(), await asyncio.to_thread(left)
        await close()
    return found


sys.exit(f"denormals are left: {found}" if any(found := asyncio.run(main())) else 0)
"""


def test_products_too_small_for_a_normal_number_are_zero_in_all_threads():
    subprocess.run([sys.executable, "-c", FLUSHES], check=True, timeout=120)
