"""Where a service's control groups are made, what they bound, and what a worker's proxy carries.

Real ones are in integration_tests/security/test_security_contained.py; of v2 a machine may have none.
"""

import os

import pytest
from headrace_servicekit.contained.groups import Bounds, Groups
from headrace_servicekit.contained.proxy import BadHost, Hosts
from headrace_servicekit.contained.settings import ContainedSettings, NotContained, is_contained

BOUNDS = Bounds(processes=40, memory_bytes=1 << 28, cores=0.5)


class Machine:
    """Files as the kernel has them: a v2 hierarchy, of which this process is in a service's group."""

    def __init__(self, folder, own="/system.slice/headrace.service", root="/"):
        self.proc, self.mount = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        (self.mount / own.removeprefix(root).lstrip("/")).mkdir(parents=True)
        (self.proc / "cgroup").write_text(f"1:name=systemd:/x\n0::{own}\n")
        options = "rw - cgroup2 cgroup2 rw,nsdelegate"
        (self.proc / "mountinfo").write_text(
            f"20 1 0:5 / /proc rw - proc proc rw\n30 23 0:26 {root} {self.mount} {options}\n"
        )

    def control(self, path, controllers):
        (self.mount / path / "cgroup.subtree_control").write_text(controllers)


def test_groups_of_v2_are_below_the_nearest_whose_children_are_controlled(tmp_path):
    """Not below the service's own, which has processes: the kernel lets none of its children be controlled."""
    machine = Machine(tmp_path)
    machine.control("", "cpu memory pids\n")
    machine.control("system.slice", "memory pids\n")
    groups = Groups.find(machine.proc)
    own = machine.mount / "system.slice" / f"headrace-{os.getpid()}"
    assert str(groups) == "cgroup v2 (pids, memory)"
    assert (own / "cgroup.subtree_control").read_text() == "+pids +memory"
    (own / "1").mkdir()
    for name in ("pids.max", "memory.max", "cpu.max", "memory.oom.group"):
        (own / "1" / name).touch()
    group = groups.start(4321, BOUNDS)
    assert group.folders == [own / "1"] and (own / "1" / "cgroup.procs").read_text() == "4321"
    found = {name: (own / "1" / name).read_text() for name in ("pids.max", "memory.max", "cpu.max")}
    assert found == {"pids.max": "40", "memory.max": str(1 << 28), "cpu.max": "50000 100000"}


def test_in_a_container_the_mount_begins_at_its_own_group(tmp_path):
    machine = Machine(tmp_path, own="/docker/abc", root="/docker/abc")
    assert Groups.find(machine.proc) is None, "its processes are in the root: no child may be controlled"
    machine.control("", "cpu memory pids")
    assert "cpu" in str(Groups.find(machine.proc))


def test_without_processes_and_memory_there_are_no_groups(tmp_path):
    machine = Machine(tmp_path)
    machine.control("", "cpu io")
    assert Groups.find(machine.proc) is None
    assert not list(machine.mount.rglob("headrace-*")), "what was tried is removed"


def test_levels_and_hosts_that_are_none_are_named(monkeypatch):
    with pytest.raises(NotContained, match="use open or contained"):
        is_contained("closed")
    monkeypatch.setenv("HEADRACE_TRUST", "contained")
    assert is_contained()
    assert ContainedSettings(reach=" a:1, *.b ,").reach == ("a:1", "*.b")
    with pytest.raises(BadHost, match="no host"):
        Hosts(["*.*"], "HEADRACE_CONTAINED_REACH")
