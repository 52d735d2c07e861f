"""Ranks of the trainer's own backend, a process each, without services: what gpu_check measures of them.

`python benchmarks/_gpu_ranks.py RANK WORLD DEVICE MODEL RENDEZVOUS TOKENS` is one of them, and prints its figures.
"""

from __future__ import annotations

import json
import math
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RANK_TIMEOUT_S = 300
STEPS = 2


def ranks(model: Path, devices: list[str], tokens: int) -> list[dict[str, float]]:
    """`train` in a process for each device; RuntimeError where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    world = str(len(devices))
    commands = [
        [sys.executable, __file__, str(rank), world, device, str(model), rendezvous, str(tokens)]
        for rank, device in enumerate(devices)
    ]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [child.communicate(timeout=RANK_TIMEOUT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError(f"a rank ended with {[child.returncode for child in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def train(model: str, name: str, rank: int, world: int, rendezvous: str, tokens: int) -> dict[str, float]:
    """A rank's figures: two runs of two steps over `tokens`, the second with a suspend between them."""
    import torch
    from headrace_modelkit.devices import used_bytes
    from headrace_schema.openings import TrainerConfig
    from headrace_trainer.algorithms import build_algorithm
    from headrace_trainer.backends.fsdp.backend import FsdpBackend
    from headrace_trainer.group.forming import join_trainer_group
    from headrace_trainer.ranks.device import current

    device = torch.device(name)

    def used() -> int:
        return used_bytes(device) if device.type == "cuda" else 0

    figures: dict[str, float] = {}
    with current(device):
        trainer_group = join_trainer_group(1, rank, world, rendezvous, RANK_TIMEOUT_S, device)
        asked = {"model": {"path": model, "dtype": "bfloat16"}, "trainer": {"ranks": world}}
        config = TrainerConfig.model_validate(asked)
        for suspends in (False, True):
            torch.manual_seed(1)
            backend = FsdpBackend(config, build_algorithm(config.algorithm), trainer_group)
            began = time.perf_counter()
            backend.load_initial()
            figures.setdefault("restore_s", time.perf_counter() - began)
            figures.setdefault("restore_host_bytes", _host_peak())
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            for step in range(STEPS):
                began = time.perf_counter()
                backend.micro(_rows(tokens))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                figures["micro_s"] = time.perf_counter() - began
                if suspends and step:
                    figures["before_bytes"] = used()
                    figures["released_bytes"] = backend.suspend()
                    figures["suspended_bytes"] = used()
                    backend.wake()
                    figures["awake_bytes"] = used()
                norm = backend.commit(float(_answer(tokens) * world), 1e-3).grad_norm
            figures["suspended_norm" if suspends else "straight_norm"] = norm
            plan: Any = backend.memory_plan(trainer_group.least_rooms()[0])
            figures["planned_device_bytes"] = float(sum(plan.device.values()))
            figures["planned_host_bytes"] = float(sum(plan.host.values()))
            if not suspends and device.type == "cuda":
                figures["peak_device_bytes"] = float(torch.cuda.max_memory_allocated(device))
        figures["tokens_per_s"] = tokens / figures["micro_s"]
        trainer_group.leave()
    return figures


def problems(found: list[dict[str, float]], kept_bytes: int) -> list[str]:
    """What is wrong with the ranks' figures; `kept_bytes`: what may stay of a GPU after a suspend."""
    wrong = []
    for rank, each in enumerate(found):
        straight, suspended = each["straight_norm"], each["suspended_norm"]
        if not math.isfinite(straight) or straight <= 0:
            wrong.append(f"rank {rank} has no gradient: norm {straight}")
        elif not math.isclose(straight, suspended, rel_tol=1e-3):
            wrong.append(f"rank {rank} trains on otherwise after a suspend: norms {straight} and {suspended}")
        if each["suspended_bytes"] > kept_bytes:
            kept = each["suspended_bytes"] / 2**20
            wrong.append(
                f"rank {rank} keeps {kept:.0f} MiB when suspended, of {kept_bytes / 2**20:.0f} allowed"
            )
        peak, planned = each.get("peak_device_bytes", 0.0), each["planned_device_bytes"]
        if peak and peak < 0.9 * planned:
            wrong.append(f"rank {rank} took {peak:.4g} bytes at its peak and the plan says {planned:.4g}")
    return wrong


def _rows(tokens: int) -> Any:
    """One row: a prompt of a quarter of the tokens, and an answer that was worth something."""
    from headrace_trainer.learning.samples import Sample

    ids = [3 + index % 29 for index in range(tokens)]
    positions = list(range(tokens - _answer(tokens), tokens))
    return [[Sample(ids, positions, [-1.0] * len(positions), [1.0] * len(positions), 1.0)]]


def _answer(tokens: int) -> int:
    return tokens - tokens // 4


def _host_peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    number, size, where, path, address, row = sys.argv[1:]
    print(json.dumps(train(path, where, int(number), int(size), address, int(row))))
