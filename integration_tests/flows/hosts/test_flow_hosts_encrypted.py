"""A run over hosts that have addresses of IPv6 alone and trust each other by certificates alone."""

from __future__ import annotations

import shutil

import pytest
from harness.hosts import can_make_hosts, hosts
from harness.specs import small_spec
from harness.waiting import wait_for

pytestmark = [
    pytest.mark.nightly,  # Its quick twin, on one host, is cli/tests/test_encryption.py.
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
]
NONE = ("--rollout", "0", "--trainer", "0", "--reward", "0", "--simulator", "0")


def test_a_run_over_encrypted_hosts_of_ipv6(tmp_path, tiny_model):
    import yaml

    with hosts(tmp_path, "head", "b", "c", ipv6=True) as (head, b, c):
        head.json("up", "--tls", "--listen", head.address, "--devices", "cpu:0", *NONE, "--trainer", "1")
        for host, kind in ((b, "rollout"), (c, "reward")):
            for file in ("token", "tls/ca.pem"):
                shutil.copy(head.data_dir / file, host.data_dir)
            trust = ("--token-file", str(host.data_dir / "token"), "--ca-file", str(host.data_dir / "ca.pem"))
            options = ("--name", host.name, "--devices", "cpu:1", *NONE, f"--{kind}", "1")
            host.json("join", f"[{head.address}]:8470", *trust, *options)
        spec = small_spec(tiny_model, placement={"mode": "disaggregated"}, evaluation={"every": 0})
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
        run = head.json("run", "submit", str(tmp_path / "run.yaml"))["id"]

        def end():
            now = head.json("run", "get", run)
            return now if now["finished_at"] else None

        assert wait_for(end, "its end", 200)["state"] == "SUCCEEDED"
        addresses = {item["name"]: item["address"] for item in head.json("instances")["instances"]}
        assert addresses["rollout-0.b"].startswith(f"[{b.address}]:")
        plain = head.headrace("run", "list", "--url", f"http://[{head.address}]:8470")
        assert plain.returncode and "is encrypted" in plain.stdout + plain.stderr
