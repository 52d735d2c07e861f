"""What a worker may not: use more memory than its user or its service allows, and read its service's secrets."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

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
from headrace_servicekit.process.spawn import hide_files
from headrace_servicekit.process.worker_pipes import become_worker
token, other, user, alone = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if int(user):
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after an exec
os.environ["HEADRACE_CHILD_PARENT"] = str(os.getpid())  # of the same user, for the spy to look into
if spy := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(spy, 0)[1]))
if alone == "alone":
    hide_files([Path(token)])
    writer = os.fdopen(os.dup(1), "wb")
else:
    _, writer = become_worker()
found = [Path(name).read_text() for name in (token, other)]
found.append(str(libc.umount2(os.fsencode(token), 2)))
found.append(subprocess.run(["umount", token], capture_output=True).returncode and "kept" or "gone")
parent = f"/proc/{os.getppid()}"
for each in (f"root{token}", "environ", "mem"):
    try:
        found.append(Path(parent, each).open("rb").read(9).decode() and "read")
    except PermissionError:
        found.append("refused")
found.append(str(libc.ptrace(16, os.getppid(), 0, 0)))
handle = (ctypes.c_char * 136)(*(128).to_bytes(4, sys.byteorder))
libc.name_to_handle_at(-100, os.fsencode(other), handle, ctypes.byref(ctypes.c_int()), 0)
folder = os.open(os.path.dirname(other), os.O_RDONLY)
found.append(str(libc.open_by_handle_at(folder, handle, os.O_RDONLY)))
for name in ("renamed", "linked"):
    try:
        (os.rename if name == "renamed" else os.link)(token, Path(token).with_name(name))
        found.append(Path(token).with_name(name).read_text())
    except OSError:
        found.append("refused")
Path(other).with_name("written").write_text("as before")
writer.write("|".join(found).encode())
writer.flush()
"""
NOBODY = 65534


@pytest.mark.parametrize("alone", ["alone", "worker"], ids=["without_landlock", "worker"])
@pytest.mark.parametrize("user", [0, NOBODY], ids=["own_user", "nobody"])
def test_secrets_read_as_empty_files_in_a_worker_and_as_themselves_elsewhere(user, alone):
    """Neither unmounting, nor a file's handle, nor the way through its parent brings them back; root or not."""
    if user and os.getuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to other users
        token, other = Path(folder, "token"), Path(folder, "other")
        token.write_text("secret")
        other.write_text("open to all")
        for path in (Path(folder), token, other):
            os.chown(path, user or -1, user or -1)
        done = subprocess.run(
            [sys.executable, "-c", SPIES, str(token), str(other), str(user), alone],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=100,
            env={**os.environ, HIDDEN_VARIABLE: os.pathsep.join([str(token), str(Path(folder, "none"))])},
        )
        assert done.returncode == 0, done.stderr.decode()
        if not can_hide():
            pytest.skip("this kernel or container lets nobody make a mount namespace")
        found = done.stdout.decode().split("|")
        assert found == ["", "open to all", "-1", "kept", *["refused"] * 3, "-1", "-1", *["refused"] * 2]
        assert token.read_text() == "secret" and Path(folder, "written").read_text() == "as before"


def can_hide():
    code = "from headrace_servicekit.process.spawn import hide_files; raise SystemExit(not hide_files([]))"
    return subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
