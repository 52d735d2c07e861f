"""Devices: names, and a lease on a core that really binds every thread."""

import os
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
    let_idle_threads_sleep,
)
from headrace_servicekit.lease.gpus import Gpu
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


def test_detection_finds_something():
    kinds = {name.rpartition("/")[2].partition(":")[0] for name in detect_devices()}
    assert kinds in ({"cpu"}, {"gpu"})


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    # Set before they are deleted, so that what the function sets ends with the test.
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    let_idle_threads_sleep()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["GOMP_SPINCOUNT"]) == ("ACTIVE", "1")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) < 10_000
