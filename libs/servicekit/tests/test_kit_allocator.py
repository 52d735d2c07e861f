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


KEEPS = """
import sys
from headrace_servicekit.memory import allocator
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
