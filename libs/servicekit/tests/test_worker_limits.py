"""What a worker may not: use more memory than its user or its service allows, and reach its service's secrets."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from headrace_servicekit.process.confine import other_user
from headrace_servicekit.process.worker_pipes import MEMORY_VARIABLE, PARENT_VARIABLE

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


def test_a_user_without_a_home_and_a_name_has_paths_too(tmp_path, monkeypatch):
    """As in a container that is started with a number for its user."""
    from headrace_servicekit.process.users_code import named_paths

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    (tmp_path / "mine.py").touch()
    assert named_paths(["~", "~/x", f"{tmp_path}/mine.py:score"], [], tmp_path) == [str(tmp_path)]


SPIES = """
import ctypes, json, os, subprocess, sys
from dataclasses import asdict
from pathlib import Path
from headrace_servicekit.process.confine import Confinement
from headrace_servicekit.process.worker_pipes import CONFINED_VARIABLE, PARENT_VARIABLE, become_worker
data, other, user, walls = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
token, libc = data / "token", ctypes.CDLL(None, use_errno=True)
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after an exec
os.environ[PARENT_VARIABLE] = str(os.getpid())
os.environ["HOME"] = str(other.parent)
given = Confinement(hidden=[str(token), str(data)], write=[str(other.parent)], user=walls)
os.environ[CONFINED_VARIABLE] = json.dumps(asdict(given))
handle = (ctypes.c_char * 136)(*(128).to_bytes(4, sys.byteorder))
libc.name_to_handle_at(-100, os.fsencode(token), handle, ctypes.byref(ctypes.c_int()), 0)
if spy := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(spy, 0)[1]))
_, writer = become_worker()
parent, refused = f"/proc/{os.getppid()}", {}
ways = {
    "token": lambda: token.read_text(),
    "folder": lambda: token in data.iterdir(),
    "umount of the token": lambda: libc.umount2(os.fsencode(token), 2) == 0,
    "umount of the folder": lambda: libc.umount2(os.fsencode(data), 2) == 0,
    "program umount": lambda: subprocess.run(["umount", data], capture_output=True).returncode == 0,
    "root of its parent": lambda: Path(f"{parent}/root{token}").read_text(),
    "environ of its parent": lambda: Path(parent, "environ").read_bytes(),
    "memory of its parent": lambda: Path(parent, "mem").open("rb").read(9),
    "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0) == 0,
    "handle": lambda: libc.open_by_handle_at(os.open(other.parent, os.O_RDONLY), handle, os.O_RDONLY) >= 0,
    "rename of the token": lambda: os.rename(token, other.with_name("renamed")) or True,
    "rename of the folder": lambda: os.rename(data, data.with_name("renamed")) or True,
    "link": lambda: os.link(token, other.with_name("linked")) or True,
    "mount over": lambda: libc.mount(b"tmpfs", os.fsencode(other.parent), b"tmpfs", 0, None) == 0,
    "namespace": lambda: libc.setns(os.open(f"{parent}/ns/mnt", os.O_RDONLY), 0) == 0,
}
for name, way in ways.items():
    try:
        refused[name] = not way()
    except OSError:
        refused[name] = True
other.with_name("written").write_text("as before")
writer.write(json.dumps([name for name, was in refused.items() if not was]).encode())
writer.flush()
"""
NOBODY = 65534


@pytest.mark.parametrize("user", [0, NOBODY], ids=["own_user", "nobody"])
def test_no_way_leads_to_the_folder_of_secrets(user):
    """Neither unmounting, nor a file's handle, nor a new name, nor the way through its parent; root or not."""
    if user and os.getuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own is closed to other users
        data, other = Path(folder, "data"), Path(folder, "home/other")
        for path in (data, other.parent):
            path.mkdir(mode=0o700)
        (data / "token").write_text("secret")
        (data / "token").chmod(0o600)
        other.write_text("its own")
        walls = 0 if user else other_user()
        mine = user or walls or os.getuid()
        for path in (Path(folder), *([data, data / "token"] if user else [])):
            os.chown(path, user or -1, user or -1)
        os.chmod(folder, 0o755)
        for path in (other.parent, other):
            os.chown(path, mine, mine)
        command = [sys.executable, "-c", SPIES, str(data), str(other), str(user), str(walls)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr.decode()
        if not other_user() and not can_mount():
            pytest.skip("this kernel or container lets nobody make a mount namespace")
        assert json.loads(done.stdout) == []
        assert (data / "token").read_text() == "secret" and other.with_name(
            "written"
        ).read_text() == "as before"


def can_mount():
    code = "from headrace_servicekit.process.mounts import Mounts; raise SystemExit(not Mounts.enter())"
    return subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
