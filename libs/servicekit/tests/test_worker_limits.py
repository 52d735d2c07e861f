"""What a worker may not: use more memory than its user or its service allows, and read its service's secrets."""

import os
import resource
import subprocess
import sys

import pytest
from headrace_servicekit.process.worker_pipes import HIDDEN_VARIABLE, MEMORY_VARIABLE, PARENT_VARIABLE

LIMITS = """
import resource
from headrace_servicekit.process.worker_pipes import become_worker
_, writer = become_worker()
writer.write(b"%d" % resource.getrlimit(resource.RLIMIT_AS)[0])
writer.flush()
"""
GIB = 1 << 30


@pytest.mark.parametrize(("users", "wanted", "holds"), [(4, 8, 4), (8, 4, 4)])
def test_the_tighter_limit_holds(users, wanted, holds):
    names = {PARENT_VARIABLE: str(os.getpid()), MEMORY_VARIABLE: str(wanted * GIB)}
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v {users * GIB // 1024}; exec {sys.executable} -c '{LIMITS}'"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        env={**os.environ, **names},
    )
    assert (done.returncode, done.stdout) == (0, str(holds * GIB).encode()), done.stderr.decode()
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != holds * GIB, "of the worker alone"


SPIES = """
import ctypes, os, subprocess, sys
from pathlib import Path
from headrace_servicekit.process.worker_pipes import become_worker
_, writer = become_worker()
found = [Path(name).read_text() for name in sys.argv[1:]]
libc = ctypes.CDLL(None)
found.append(str(libc.umount2(os.fsencode(sys.argv[1]), 2)))
found.append(subprocess.run(["umount", sys.argv[1]], capture_output=True).returncode and "kept" or "gone")
try:
    found.append(Path(f"/proc/{os.getppid()}/root{sys.argv[1]}").read_text())
except PermissionError:
    found.append("refused")
Path(sys.argv[2]).with_name("written").write_text("as before")
writer.write("|".join(found).encode())
writer.flush()
"""


def test_secrets_read_as_empty_files_in_a_worker_and_as_themselves_elsewhere(tmp_path):
    """Neither unmounting nor the way through the parent's root brings them back."""
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("secret")
    other.write_text("open to all")
    names = {
        PARENT_VARIABLE: str(os.getpid()),
        HIDDEN_VARIABLE: os.pathsep.join([str(token), str(tmp_path / "none")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SPIES, str(token), str(other)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
        env={**os.environ, **names},
    )
    assert done.returncode == 0, done.stderr.decode()
    if not can_hide():
        pytest.skip("this kernel or container lets nobody make a mount namespace")
    assert done.stdout.decode().split("|") == ["", "open to all", "-1", "kept", "refused"]
    assert token.read_text() == "secret" and (tmp_path / "written").read_text() == "as before"


def can_hide():
    code = "from headrace_servicekit.process.spawn import hide_files; raise SystemExit(not hide_files([]))"
    return subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
