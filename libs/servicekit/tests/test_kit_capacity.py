"""How many processes a host can hold, from its memory and theirs."""

import os
import subprocess
import sys

import pytest
from headrace_servicekit.memory.capacity import GIB, Capacity, HostMemory, host_memory, process_bytes

FLEET = [("rollout", 1), ("rollout", 2), ("trainer", 3)]
SIZES = {1: GIB, 2: 2 * GIB, 3: GIB, 0: 0}


def of(total, available, sizes=SIZES, assumed=None):
    memory = HostMemory(total * GIB, available * GIB)
    return Capacity(lambda: memory, lambda pid: sizes[pid], assumed or {"rollout": GIB // 2, "trainer": GIB})


def test_what_fits_is_accepted_and_one_more_is_not():
    # 30 available, 10 kept free, 1 for rollout-0 to grow to 2: 19, which is nine of 2 beside the two that run.
    assert of(100, 30).refusal("rollout", 11, FLEET) == ""
    said = of(100, 30).refusal("rollout", 12, FLEET)
    assert said == (
        "scale rollout=12: this host can hold 11 rollout processes (2.0 GiB each, measured; 30.0 of 100.0 GiB "
        "available, 10.0 kept free and 1.0 for processes that may still grow); 2 run now"
    )


def test_fewer_are_accepted_on_a_full_host():
    assert of(100, 1).refusal("rollout", 1, FLEET) == ""
    assert "can hold 2 rollout" in of(100, 1).refusal("rollout", 3, FLEET)


def test_without_a_measurement_the_estimate_is_named():
    said = of(100, 20, {0: 0}).refusal("rollout", 999, [])
    assert "can hold 20 rollout processes (0.5 GiB each, assumed: none has been measured yet;" in said
    said = of(100, 20, {1: GIB // 4}).refusal("rollout", 999, [("rollout", 1)])
    assert "assumed: the largest so far has 0.25" in said, "one that has not opened a run says little"


def test_processes_that_wait_for_their_start_are_counted():
    waiting = [("rollout", 0)] * 19
    assert of(100, 20, {0: 0}).refusal("rollout", 20, waiting) == ""
    assert "can hold 20 rollout" in of(100, 20, {0: 0}).refusal("rollout", 21, waiting)


def test_the_largest_size_of_a_kind_is_remembered():
    sizes = {1: 4 * GIB}
    known = of(100, 30, sizes)
    known.sample([("rollout", 1)])
    sizes[1] = GIB // 8
    assert "4.0 GiB each, measured" in known.refusal("rollout", 999, [("rollout", 1)])


def test_a_process_is_measured_with_its_children():
    script = "import subprocess, sys, time; x = bytearray(64 << 20); print(flush=True); time.sleep(600)"
    parent = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {script!r}]); child.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    measured = process_bytes(process.pid)
    os.killpg(process.pid, 9)
    process.wait()
    assert 64 << 20 < measured < 256 << 20
    assert process_bytes(process.pid) == 0


def test_the_hosts_memory_is_positive():
    memory = host_memory()
    assert 0 < memory.available <= memory.total and memory.reserved >= GIB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts(tmp_path, version):
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    (folder / limit).write_text(f"{GIB // 2}\n")
    (folder / used).write_text(f"{GIB // 4}\n")
    key = "total_inactive_file" if version == 1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{key} {GIB // 16}\n")
    assert host_memory(tmp_path) == HostMemory(GIB // 2, GIB // 4 + GIB // 16)
    (folder / limit).write_text("max\n")
    assert host_memory(tmp_path).total > GIB // 2
