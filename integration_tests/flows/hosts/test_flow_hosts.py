"""One fleet over several hosts: `headrace up --listen` at the head, `headrace join` on the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest
import yaml
from harness.hosts import Host, at, can_make_hosts, hosts, options, ready, submit
from harness.specs import small_spec
from harness.waiting import wait_for

pytestmark = [
    pytest.mark.nightly,  # Its quick twin, on one host, is cli/tests/test_hosts.py.
    pytest.mark.timeout(420),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
]


def up(head: Host, **counts: int) -> None:
    """The head's own part, with as many processes of each service."""
    head.json("up", "--listen", head.address, "--devices", "cpu:0", *options(counts))


def join(head: Host, host: Host, token: str = "token", **counts: int) -> subprocess.CompletedProcess[str]:
    """A host joins the head, with a copy of its token."""
    shutil.copy(head.data_dir / token, host.data_dir / "head-token")
    arguments = ("--name", host.name, "--token-file", str(host.data_dir / "head-token"), "--devices", "cpu:1")
    return host.headrace("join", head.address, *arguments, *options(counts), "--json")


def joined(head: Host, host: Host, **counts: int) -> int:
    """As `join`, which succeeds; the launcher's process id."""
    done = join(head, host, **counts)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{host.logs()}"
    found: int = yaml.safe_load(done.stdout)["launcher_pid"]
    return found


def test_a_run_goes_on_over_three_hosts_of_which_one_is_cut_off_and_one_is_killed(tmp_path, tiny_model):
    with hosts(tmp_path, "head", "b", "c") as (head, b, c):
        up(head, trainer=1)
        joined(head, b, rollout=1)
        launcher = joined(head, c, reward=1)
        found = ready(head, "trainer-0", "rollout-0.b", "reward-0.c")["rollout-0.b"]
        assert found["host"] == "b" and found["address"].startswith(b.address)
        spec = small_spec(tiny_model, steps=400, placement={"mode": "disaggregated"}, evaluation={"every": 0})
        run = submit(head, tmp_path, spec)
        at(head, run, 3)

        b.cut_off()
        time.sleep(40)  # beyond the leases
        before = head.json("run", "get", run)
        b.connect()
        at(head, run, before["step"] + 3)

        os.kill(launcher, signal.SIGKILL)
        ready(head, "trainer-0", "rollout-0.b")
        after = head.json("run", "get", run)
        joined(head, c, reward=1)
        assert at(head, run, after["step"] + 3)["counts"]["duplicates"] == 0
        head.json("run", "cancel", run)


def test_ranks_on_two_hosts_train_one_model_and_what_cannot_be_is_named(tmp_path, tiny_model):
    with hosts(tmp_path, "head", "b", "c") as (head, b, c):
        up(head, trainer=1, rollout=1, reward=1)
        joined(head, b, trainer=1)
        ready(head, "trainer-0", "rollout-0", "reward-0", "trainer-0.b")
        spec = small_spec(tiny_model, steps=3, trainer__ranks=2, evaluation={"every": 0})
        run = submit(head, tmp_path, spec)

        def end() -> dict[str, Any] | None:
            now: dict[str, Any] = head.json("run", "get", run)
            return now if now["finished_at"] else None

        ended = wait_for(end, "its end", 240)
        assert (ended["state"], ended["ranks"]) == ("SUCCEEDED", 2), ended["reason"]

        c.name = "b"
        rival = join(head, c, rollout=1)
        assert (
            rival.returncode == 2 and "another launcher runs processes of this fleet as host" in rival.stdout
        )
        c.name = "c"
        wrong = join(head, c, token="http-token", rollout=1)
        assert wrong.returncode == 2 and "--token-file" in wrong.stdout
        several = head.headrace("scale", "trainer=2")
        assert several.returncode == 2 and "say which (b, " in several.stderr
        head.json("scale", "trainer=0", "--host", "b")
        ready(head, "trainer-0", "rollout-0", "reward-0")
