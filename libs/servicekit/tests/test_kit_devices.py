"""Devices: names, and a lease on a core that really binds every thread."""

import os
import subprocess
import sys

import pytest
from headrace_servicekit.devices import bind_cpu, detect_devices, let_idle_threads_sleep, qualify
from headrace_servicekit.errors import ServiceError

BIND = """
import os, threading, time
from headrace_servicekit.devices import bind_cpu
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


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(ServiceError, match="4095"):
        bind_cpu(["h/cpu:4095"])


def test_names():
    assert qualify("h", ["cpu:0", "other/gpu:1"]) == ["h/cpu:0", "other/gpu:1"]
    for name in ("cpu", "cpu:x", "h/h/cpu:0", "tpu:0"):
        with pytest.raises(ServiceError, match="no device"):
            qualify("h", [name])


def test_detection_finds_something():
    kinds = {name.partition(":")[0] for name in detect_devices()}
    assert kinds in ({"cpu"}, {"gpu"})


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
