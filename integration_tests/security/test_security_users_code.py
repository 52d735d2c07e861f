"""Users' code in a worker: what it may not reach, as root with another user id, else with what the machine allows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from headrace_servicekit.process.confine import other_user
from headrace_servicekit.process.worker import UsersCode, Worker, hide_from_workers
from headrace_servicekit.process.worker_pipes import JSON_CODEC
from headrace_servicekit.sandbox.isolation import not_held

CODE = """
import json, os, resource, site, subprocess, sys
from pathlib import Path
from headrace_servicekit.process.worker_pipes import become_worker, encode_json, frame

_, writer = become_worker()
HERE, DATA, SERVICE = Path(__file__).parent, Path({data!r}), os.getppid()
FOUND = {{}}


def tried(name, deed):
    try:
        FOUND[name] = str(deed())
    except (OSError, ValueError) as error:
        FOUND[name] = "refused"


def packages():
    return next(path for path in sys.path if path.endswith("site-packages"))


tried("token", lambda: (DATA / "token").read_text())
tried("data", lambda: sorted(os.listdir(DATA)))
tried("data is written", lambda: (DATA / "new").write_text("x"))
tried("model", lambda: (DATA / "models/one").read_text())
tried("key of the authority", lambda: (DATA / "tls/ca-key.pem").read_text())
tried("hard link", lambda: os.link(DATA / "token", Path.home() / "link"))
tried("pth", lambda: Path(packages(), "evil.pth").write_text("import os"))
tried("sitecustomize", lambda: Path(packages(), "sitecustomize.py").write_text(""))
tried("standard library", lambda: Path(os.__file__).open("r+"))
tried("bytecode", lambda: Path(os.path.dirname(os.__file__), "__pycache__", "evil.pyc").write_text(""))
tried("mode of the library", lambda: os.chmod(os.__file__, 0o666))
tried("its own file", lambda: Path(__file__).open("r+"))
tried("neighbour", lambda: (HERE / "neighbour.txt").read_text())
tried("home", lambda: (Path.home() / "cache").write_text("x"))
tried("environ of the service", lambda: open(f"/proc/{{SERVICE}}/environ").read(1))
tried("memory of the service", lambda: open(f"/proc/{{SERVICE}}/mem", "rb").read(1))
tried("root of the service", lambda: os.listdir(f"/proc/{{SERVICE}}/root"))
tried("descriptors of the service", lambda: os.listdir(f"/proc/{{SERVICE}}/fd"))
tried("file of a descriptor", lambda: [os.readlink(f"/proc/{{SERVICE}}/fd/{{each}}") for each in range(3)])
tried("limits of the service", lambda: resource.prlimit(SERVICE, resource.RLIMIT_CORE, (0, 0)))
tried("niceness of the service", lambda: os.setpriority(os.PRIO_PROCESS, SERVICE, 19))
tried("cores of the service", lambda: os.sched_setaffinity(SERVICE, os.sched_getaffinity(0)))
tried("scheduler of the service", lambda: os.sched_setscheduler(SERVICE, os.SCHED_BATCH, os.sched_param(0)))
tried("cgroups", lambda: os.listdir("/sys/fs/cgroup"))
tried("library of a child", lambda: subprocess.check_output([sys.executable, "-c", "import email; print(1)"]))
FOUND["descriptors"] = sorted(os.readlink(f"/proc/self/fd/{{n}}").partition(":")[0] for n in range(3, 99)
                              if os.path.lexists(f"/proc/self/fd/{{n}}"))
FOUND["user"] = os.getuid()
FOUND["environment"] = dict(os.environ)
SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")
FOUND["capabilities"] = "".join(line.split()[1] for line in open("/proc/self/status") if line.startswith(SETS))
writer.write(frame(encode_json(FOUND)))
writer.flush()
"""


async def asked(folder: Path, *, variables: tuple[str, ...] = ()) -> dict:
    """What code in a folder that is closed to others found."""
    data = folder / "data"
    for name, text in (("token", "secret"), ("models/one", "weights"), ("tls/ca-key.pem", "secret")):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(text)
    (folder / "neighbour.txt").write_text("beside")
    (folder / "users_code.py").write_text(CODE.format(data=str(data)))
    hide_from_workers(data / "token", data)
    try:
        code = UsersCode({"name": "users_code.py:f"}, folder, variables)
        worker = await Worker.start("users_code", JSON_CODEC, code=code)
        try:
            return await worker.receive(30.0)
        finally:
            await worker.kill()
            assert worker.scratch is not None and not worker.scratch.exists()
    finally:
        hide_from_workers()


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HEADRACE_TOKEN_FILE", "NAMED"):
        monkeypatch.setenv(name, "of-the-service")
    tmp_path.chmod(0o700)
    return asyncio.run(asked(tmp_path, variables=("NAMED", "HEADRACE_TOKEN_FILE")))


def test_users_code_gets_what_its_spec_names_and_nothing_of_the_service(found):
    held = found["environment"]
    assert [name for name, value in held.items() if value == "of-the-service"] == ["NAMED"]
    assert held["HOME"] == held["TMPDIR"] and Path(held["HOME"]).name.startswith("headrace-code-")
    assert (
        found["neighbour"] == "beside" and found["home"] == "1" and found["library of a child"] == "b'1\\n'"
    )
    assert found["capabilities"].strip("0") == ""
    assert set(found["descriptors"]) <= {"pipe", "/proc/self/fd"}


def test_as_root_it_is_another_user_that_changes_nothing_of_the_service(found):
    if not (user := other_user()):
        pytest.skip("this process may not change user ids: SECURITY.md says what is left")
    assert found["user"] == user != os.getuid()
    check_another_user(found)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a user capabilities")
def test_a_service_that_is_no_root_and_may_change_ids_gives_its_code_another_one():
    """As in the containers of compose."""
    found = found_of_a_normal_user("+chown,+dac_override,+fowner,+kill,+setgid,+setuid,+sys_ptrace")
    assert found["user"] not in (0, NORMAL) and found["capabilities"].strip("0") == ""
    check_another_user(found)


def check_another_user(found: dict) -> None:
    """It reads nothing of the service's own, and changes nothing."""
    assert found["model"] in ("weights", "refused")
    refused = {name for name, value in found.items() if value == "refused"}
    assert refused >= {
        *("token", "data is written", "key of the authority", "hard link", "pth", "sitecustomize"),
        *("standard library", "bytecode", "mode of the library", "its own file", "environ of the service"),
        *(
            "memory of the service",
            "root of the service",
            "descriptors of the service",
            "file of a descriptor",
            "limits of the service",
        ),
        *("niceness of the service", "cores of the service", "scheduler of the service"),
    }
    assert found["data"] in ("['models']", "refused")


NORMAL = 12345
ASKED = """
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, {here!r})
os.environ["PYTHONPATH"] = str(Path.home())
from test_security_users_code import asked
print(json.dumps(asyncio.run(asked(Path.home()))))
"""


def found_of_a_normal_user(capabilities: str = "") -> dict:
    """As `found`, of a service that is no root, with a home and a data directory of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", ASKED.format(here=os.path.dirname(__file__))]
        if os.getuid() == 0:
            os.chown(folder, NORMAL, NORMAL)
            script = Path(__file__).with_name("as_normal_user.sh")
            command = ["sh", str(script), str(NORMAL), os.path.realpath(sys.base_prefix), folder, *command]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HOME": folder, "CAPABILITIES": capabilities},
        )
        if "unshare failed" in done.stderr:
            pytest.skip("no mounts can be made here: SECURITY.md says what is left")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts are Linux'")
def test_a_normal_users_code_is_the_same_user_behind_mounts():
    found = found_of_a_normal_user()
    if any("no mounts of its own" in text for text in asyncio.run(not_held())):
        pytest.skip("this machine allows no namespaces: SECURITY.md says what is left")
    assert found["user"] == (NORMAL if os.getuid() == 0 else os.getuid())
    refused = {name for name, value in found.items() if value == "refused"}
    assert refused >= {
        *("token", "data is written", "key of the authority", "hard link", "pth", "sitecustomize"),
        *("standard library", "bytecode", "mode of the library", "environ of the service"),
        *("memory of the service", "root of the service", "file of a descriptor"),
    }
    assert (found["data"], found["model"], found["capabilities"].strip("0")) == ("['models']", "weights", "")
    # What SECURITY.md says does not hold; a row there changes with this.
    assert refused.isdisjoint({"limits of the service", "niceness of the service", "cores of the service"})


def test_what_it_cannot_read_and_no_mount_opens_is_hidden_or_an_error(tmp_path):
    """A token that is open to all, where no mount can hide it: the worker does not start."""
    from headrace_servicekit.process.confine import Confinement, NotConfined, _check

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        token = Path(folder, "token")
        token.write_text("secret")
        with pytest.raises(NotConfined, match=r"users' code can read .*token: chmod 600"):
            _check(Confinement(hidden=[str(token)], user=1))
