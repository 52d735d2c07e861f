"""Devices: names, and a lease on a core that really binds every thread."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from headrace_servicekit.lease.devices import (
    bind_cpu,
    boot_id,
    detect_devices,
    full_names,
    gpu_uuids,
    own_part,
    prepare_torch,
)
from headrace_servicekit.lease.gpus import Gpu
from headrace_servicekit.process.supervisor import Supervisor
from headrace_servicekit.rpc.errors import ServiceError

BIND = """
import os, threading, time
from headrace_servicekit.lease.devices import bind_cpu
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
core = max(os.sched_getaffinity(0))
count = bind_cpu([f"h/cpu:{core}"])
masks = {tuple(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
print(count, masks == {(core,)})
"""


def test_every_thread_is_bound_to_the_leased_core():
    ended = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, timeout=30)
    assert ended.stdout.split() == ["1", "True"], ended.stderr


def test_gpus_leave_the_affinity_alone():
    before = os.sched_getaffinity(0)
    assert bind_cpu(["h/gpu:0"]) == len(before) and os.sched_getaffinity(0) == before


def test_a_slot_beyond_the_hosts_cores_shares_one(monkeypatch):
    last = max(os.sched_getaffinity(0))
    monkeypatch.setattr("os.cpu_count", lambda: last + 1)
    bound = list[set[int]]()
    monkeypatch.setattr("os.sched_setaffinity", lambda thread, cores: bound.append(cores))
    assert bind_cpu([f"h/cpu:{2 * last + 1}", f"h/cpu:{last}"]) == 1, "one core, one thread"
    assert bound[0] == {last}


def test_a_core_that_a_container_may_not_use_is_refused(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8192)
    with pytest.raises(ServiceError, match=r"cores \[4095\].*leave --devices out"):
        bind_cpu(["h/cpu:4095"])


def test_a_core_is_named_by_the_boot_id_whatever_the_host_is_called(monkeypatch):
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr("socket.gethostname", lambda: "container-1")
    first = full_names([f"cpu:{core}"])
    monkeypatch.setattr("socket.gethostname", lambda: "container-2")
    assert first == full_names([f"cpu:{core}"]) == [f"{boot_id()}/cpu:{core}"]
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert full_names(["other/cpu:1"]) == ["other/cpu:1"]


def test_what_is_no_device_is_refused():
    for name in ("cpu", "cpu:x", "h/h/cpu:0", "tpu:0"):
        with pytest.raises(ServiceError, match="no device"):
            full_names([name])


def test_a_gpu_is_named_by_its_uuid():
    assert gpu_uuids(["b/cpu:0", "GPU-8f2a/gpu:3", "MIG-c7/gpu:0.1"]) == ["GPU-8f2a", "MIG-c7"]


def test_a_gpu_that_this_process_cannot_use_is_refused(monkeypatch):
    shown = [Gpu("GPU-8f2a", "3"), Gpu("MIG-c7", "0.1")]
    monkeypatch.setattr("headrace_servicekit.lease.devices._gpus", lambda: shown)
    assert full_names(["gpu:3", "gpu:0.1"]) == detect_devices() == ["GPU-8f2a/gpu:3", "MIG-c7/gpu:0.1"]
    with pytest.raises(ServiceError, match=r"'gpu:0' is not among .* which are gpu:3, gpu:0\.1; see"):
        full_names(["gpu:0"])


SLICES = ["MIG-a/gpu:0.0", "MIG-b/gpu:0.1", "MIG-c/gpu:0.2"]


def test_of_several_that_see_the_same_mig_devices_each_has_one():
    assert [own_part(SLICES, index) for index in range(4)] == [[SLICES[index % 3]] for index in range(4)]
    assert own_part(SLICES, 0, from_end=True) == [SLICES[2]] and own_part(SLICES[:1], 5) == SLICES[:1]
    whole = ["GPU-x/gpu:1", "GPU-y/gpu:2"]
    assert own_part(whole, 3) == whole and own_part(["b/cpu:0", "b/cpu:1"], 1) == ["b/cpu:0", "b/cpu:1"]
    # A machine with one divided GPU of three: CUDA shows either the whole ones or one part.
    assert [own_part([*whole, SLICES[0]], index) for index in range(3)] == [whole, [SLICES[0]], whole]


PART = """
import os
from headrace_servicekit.entry import run_service
from headrace_servicekit.lease import devices
from headrace_servicekit.lease.gpus import Gpu
from headrace_servicekit.process.supervisor import Supervisor
from headrace_servicekit.rpc.errors import invalid

devices._gpus = lambda: [Gpu(f"MIG-{name}", f"0.{index}") for index, name in enumerate("abc")]

async def mount(instance):
    print(*instance.config.devices, os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    raise invalid("this is enough")

run_service(KIND, mount, ["--listen", "127.0.0.1:0", "--devices", "auto"])
"""


async def test_several_mig_devices_are_divided_between_the_processes_of_one_fleet(tmp_path, until):
    """By the real supervisor, as `headrace up` starts them: each process sees its own part by CUDA's variable."""
    supervisor = Supervisor(
        "h",
        "",
        None,
        lambda kind, index, incarnation: [sys.executable, "-c", PART.replace("KIND", repr(kind))],
        tmp_path,
    )
    supervisor.set_count("rollout", 2)
    supervisor.set_count("trainer", 1)
    await supervisor.start()
    try:
        logs = [tmp_path / f"{name}.log" for name in ("rollout-0", "rollout-1", "trainer-0")]
        said = await until(
            lambda: (
                all(log.exists() and re.search(r"MIG-.*\n", log.read_text()) for log in logs)
                and [next(line for line in log.read_text().splitlines() if "MIG-" in line) for log in logs]
            ),
            "their devices",
        )
    finally:
        await supervisor.stop(2)
    assert said == ["MIG-a/gpu:0.0 MIG-a", "MIG-b/gpu:0.1 MIG-b", "MIG-c/gpu:0.2 MIG-c"]


def test_detection_finds_something():
    kinds = {name.rpartition("/")[2].partition(":")[0] for name in detect_devices()}
    assert kinds in ({"cpu"}, {"gpu"})


def test_what_torch_reads_as_it_starts_is_set_unless_the_user_says_otherwise():
    theirs = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    kept = dict(theirs)
    prepare_torch(kept)
    assert kept == theirs
    ours = {}
    prepare_torch(ours)
    assert ours["OMP_WAIT_POLICY"] == "PASSIVE" and 0 < int(ours["GOMP_SPINCOUNT"]) < 10_000
    assert ours["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


CHILD = """
import os, subprocess, sys
from headrace_servicekit.entry import run_service
from headrace_servicekit.rpc.errors import invalid

async def mount(instance):
    assert "torch" not in sys.modules
    ask = "import os; print(os.environ.get('CUBLAS_WORKSPACE_CONFIG'))"
    print(subprocess.check_output([sys.executable, "-c", ask], text=True).strip(), flush=True)
    raise invalid("this is enough")

run_service("rollout", mount, ["--coordinator", "127.0.0.1:1", "--listen", "127.0.0.1:0"])
"""


def test_a_service_and_what_it_starts_compute_with_cublas_in_one_order():
    """Hosted engines are children of their instance; CUDA has not started where they read it."""
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    ended = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, env=environment
    )
    assert ended.returncode == 2 and ended.stdout == ":4096:8\n", ended.stderr
