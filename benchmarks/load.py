"""What loading and saving a model in parts costs two ranks: `python benchmarks/load.py`.

Two trainer processes on this machine load a model of Qwen2.5-0.5B's shape with random weights (on disk in bf16),
and then save a checkpoint, each its part. The trainers compute in bf16 with fp32 master weights. `--small` takes a
model of 17 million parameters, which says that it works and little about bytes.

Prints one JSON line. `host_bytes_vs_shard` is a rank's peak of resident memory while it loads, above what the
process had before, over the bytes of its own shard of the master weights; the worse rank's. `saving_bytes_vs_shard`
is the same of the copy of a checkpoint, over 12 bytes a parameter of the rank. `load_s` is the time until both have
loaded, `stop_s` how long training stands still for a checkpoint, `save_s` until it is complete on disk.
`whole_copy_s` is three times as long as the ranks take to gather all weights and copy them on the leader: how a
checkpoint used to begin.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _harness import emit, machine, say

RANKS = 2
CHILD_S = 1800.0
GOAL = 1.5
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SMALL = {**LARGE, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model, for a quick look")
    parser.add_argument(
        "--load-only", action="store_true", help="no checkpoint, which takes 12 GB of host memory"
    )
    parser.add_argument("--check", action="store_true", help="fail where a rank takes more than the goal")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options.folder, options.rank, options.port, saves=not options.load_only)))
        return
    say(machine())
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        write_model(Path(folder) / "model", SMALL if options.small else LARGE)
        found = figures(run_ranks(Path(folder), *(["--load-only"] if options.load_only else [])))
    emit("load", found)
    say(f"at the end: {machine()}")
    if options.check and found["host_bytes_vs_shard"] > GOAL:
        sys.exit(f"a rank takes {found['host_bytes_vs_shard']:.2f} of its shard, and {GOAL} is the goal")


def figures(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Of both ranks' measurements."""
    leader = ranks[0]
    loading = {
        "host_bytes_vs_shard": max(own["load_bytes"] / own["shard_bytes"] for own in ranks),
        "load_s": max(own["load_s"] for own in ranks),
        "shard_gb": leader["shard_bytes"] / 1e9,
    }
    if "stop_s" not in leader:
        return loading
    return loading | {
        "saving_bytes_vs_shard": max(own["copy_bytes"] / (3 * own["shard_bytes"]) for own in ranks),
        "stop_s": max(own["stop_s"] for own in ranks),
        "save_s": leader["save_s"],
        "whole_copy_s": leader["whole_copy_s"],
    }


def write_model(directory: Path, shape: dict[str, Any]) -> None:
    """Random bf16 weights in Qwen2's architecture, with a tokenizer."""
    import torch
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    finally:
        torch.set_default_dtype(before)
    save_model(model, character_tokenizer(), directory)


def run_ranks(folder: Path, *more: str) -> list[dict[str, float]]:
    """What each rank measures, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--folder", str(folder), "--port", str(port), *more, "--rank"]
    children = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        outputs = [child.communicate(timeout=CHILD_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    if failed := [rank for rank, child in enumerate(children) if child.returncode]:
        raise RuntimeError(f"rank {failed[0]} failed; see what it says above")
    found: list[dict[str, float]] = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    for rank, own in enumerate(found):
        say(f"rank {rank}: {own}")
    return found


def measure(folder: Path, number: int, port: int, *, saves: bool) -> dict[str, float]:
    """One rank: seconds and bytes of a load, and of a checkpoint."""
    import torch
    from headrace_schema.openings import TrainerConfig
    from headrace_trainer.checkpoints.directory import Snapshot, write_state
    from headrace_trainer.group.forming import join_trainer_group
    from headrace_trainer.learning.step import Version
    from headrace_trainer.ranks.messages import RestoreRound, SnapshotRound
    from headrace_trainer.ranks.rank import Rank

    torch.set_num_threads(1)
    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "algorithm": {"group_size": 2, "prompts_per_step": 1},
            "trainer": {"ranks": RANKS},
            "checkpoint": {"keep": 1},
            "seed": 1,
            "steps": 1,
        }
    )
    group = join_trainer_group(1, number, RANKS, f"127.0.0.1:{port}", 120.0, torch.device("cpu"))
    rank = Rank(config, group, directory=folder / "run")
    before, started = peak_from_here(), time.monotonic()
    rank.execute(RestoreRound("", 1))
    load_s, load_bytes = time.monotonic() - started, peak_bytes() - before
    backend: Any = rank.backend
    shards = backend._sharded.shards()
    loading = {
        "load_s": load_s,
        "load_bytes": load_bytes,
        "shard_bytes": sum(shard.nbytes for shard in shards.values()),
    }
    if not saves:
        group.all_true(True)
        group.leave()
        return loading
    backend._adamw.load({kind: dict(shards) for kind in ("exp_avg", "exp_avg_sq")}, 1)
    directory = folder / "checkpoint"
    if group.leads:
        directory.mkdir()
    group.all_true(True)
    before, started = peak_from_here(), time.monotonic()
    copy: Any = rank.execute(SnapshotRound(directory.name))
    stop_s, copy_bytes = time.monotonic() - started, peak_bytes() - before
    if group.leads:
        write_state(directory, Snapshot(Version(1, 0, 0, ""), copy, {}, "store", b"", parts=RANKS))
    save_s = time.monotonic() - started
    rank._writer.wait()
    del copy
    group.all_true(True)
    started = time.monotonic()
    whole = [tensor.clone() for _, tensor in backend.weights() if group.leads]
    whole_copy_s = 3 * (time.monotonic() - started)  # Weights, and two moments of their size.
    del whole
    group.leave()
    return loading | {
        "stop_s": stop_s,
        "copy_bytes": copy_bytes,
        "save_s": save_s,
        "whole_copy_s": whole_copy_s,
    }


def peak_from_here() -> int:
    """Resident bytes of the moment, from which on `peak_bytes` counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The largest resident memory since `peak_from_here`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
