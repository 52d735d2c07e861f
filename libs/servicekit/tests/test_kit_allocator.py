"""The allocator's settings take effect; in a process of their own, as they are for good."""

import subprocess
import sys

PROGRAM = """
import resource
from headrace_servicekit.memory.allocator import reuse_freed_memory
taken = {setting}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks = [b"x" * (1 << 20) for _ in range(8)]
del blocks
before = faults()
for _ in range(20):
    blocks = [b"x" * (1 << 20) for _ in range(8)]
    del blocks
print(taken, faults() - before)
"""


def faults(setting):
    program = PROGRAM.format(setting=setting)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    taken, count = done.stdout.split()
    return taken, int(count)


def test_freed_blocks_are_used_again_without_page_faults():
    taken, count = faults("reuse_freed_memory()")
    assert taken == "True"
    assert count < faults("None")[1] / 5
