"""One engine over two hosts: vLLM's two ranks, each in a rollout instance of its own host, one of which is killed."""

from __future__ import annotations

import os
import shutil
import signal

import psutil
import pytest
from harness.hosts import Host, at, can_make_hosts, hosts, options, ready, submit
from harness.specs import small_spec
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces"),
    pytest.mark.skipif(os.environ.get("ENGINE") != "vllm", reason="vLLM's options; `make nightly` runs it"),
]


def rollout_of(host: Host) -> int:
    """The process id of a host's rollout."""
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if "headrace_rollout" in words and str(host.data_dir) in words:
            found: int = process.pid
            return found
    raise AssertionError(f"no rollout runs on {host.name}")


def test_two_ranks_on_two_hosts_make_the_answers_of_a_run_and_both_start_again_when_one_is_killed(tmp_path):
    from headrace_modelkit.loading import save_model

    model = tmp_path / "model"
    save_model(
        tiny_model(1, head_dim=32, num_attention_heads=2, num_key_value_heads=1), character_tokenizer(), model
    )
    with hosts(tmp_path, "head", "b", own_cores=True) as (head, b):
        engine = ("--devices", "cpu:0,cpu:1", "--engine", "vllm")
        head.json(
            "up", "--listen", head.address, *engine, *options({"rollout": 1, "trainer": 1, "reward": 1})
        )
        shutil.copy(head.data_dir / "token", b.data_dir / "head-token")
        arguments = ("--name", b.name, "--token-file", str(b.data_dir / "head-token"))
        done = b.headrace("join", head.address, *arguments, *engine, *options({"rollout": 1}), "--json")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{b.logs()}"
        ready(head, "rollout-0", "trainer-0", "reward-0", "rollout-0.b")
        spec = small_spec(
            str(model),
            steps=200,
            placement={"mode": "disaggregated"},
            evaluation={"every": 0},
            limits={"max_mismatch_kl": 1e-3, "recoveries": 20},
        )
        spec["rollout"] |= {
            "engine": "vllm",
            "instances": 2,
            "engine_options": {"tensor_parallel_size": 2, "hosts": 2, "kv_cache_gib": 0.25},
        }
        run = submit(head, tmp_path, spec)
        at(head, run, 3, 600)
        leased = {lease["instance"]: lease["devices"] for lease in head.json("leases")["leases"]}
        assert leased["rollout-0"][0].startswith("head/") and leased["rollout-0.b"][0].startswith("b/"), (
            leased
        )

        os.kill(rollout_of(b), signal.SIGKILL)
        before = head.json("run", "get", run)["step"]
        assert at(head, run, before + 3, 600)["counts"]["duplicates"] == 0
        log = "".join(file.read_text() for file in (head.data_dir / "logs").glob("rollout*"))
        assert "rollout-0.b is gone" in log
        head.json("run", "cancel", run)
