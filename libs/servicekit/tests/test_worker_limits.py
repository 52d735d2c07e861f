"""A worker uses no more memory than its user or its service allows."""

import os
import resource
import subprocess
import sys

import pytest
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
    from headrace_servicekit.process.confine import named_paths

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    (tmp_path / "mine.py").touch()
    assert named_paths(["~", "~/x", f"{tmp_path}/mine.py:score"], [], tmp_path) == [str(tmp_path)]
