"""Ranks of the trainer's own backend, a process each, without services: what gpu_check measures of them.

`python benchmarks/_gpu_ranks.py RANK WORLD DEVICE MODEL RENDEZVOUS TASK` is one of them, and prints its figures; TASK
is a `Task` in JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RANK_TIMEOUT_S = 300
STEPS = 2
SPARE_BYTES = 2**29


@dataclass(frozen=True)
class Task:
    """`options`: of the fsdp backend. `hosts`: ranks that NCCL takes for each on a host of its own.

    `short`: a micro-batch with no room is tried, and one of half as many rows after it.
    """

    tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    hosts: bool = False
    short: bool = False


def ranks(model: Path, devices: list[str], task: Task) -> list[dict[str, float]]:
    """`train` in a process for each device; RuntimeError where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    world, asked = str(len(devices)), json.dumps(asdict(task))
    children = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), world, device, str(model), rendezvous, asked],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **({"NCCL_HOSTID": f"host-{rank}"} if task.hosts else {})},
        )
        for rank, device in enumerate(devices)
    ]
    try:
        outputs = [child.communicate(timeout=RANK_TIMEOUT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise RuntimeError(f"a rank ended with {[child.returncode for child in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def train(model: str, name: str, rank: int, world: int, rendezvous: str, task: Task) -> dict[str, float]:
    """A rank's figures: two runs of two steps over `tokens`, the second with a suspend between them."""
    import torch
    from headrace_modelkit.devices import used_bytes
    from headrace_schema.openings import TrainerConfig
    from headrace_trainer.algorithms import build_algorithm
    from headrace_trainer.backends.fsdp.backend import FsdpBackend
    from headrace_trainer.group.forming import join_trainer_group
    from headrace_trainer.ranks.device import current

    tokens = task.tokens
    device = torch.device(name)

    def used() -> int:
        return used_bytes(device) if device.type == "cuda" else 0

    figures: dict[str, float] = {}
    with current(device):
        trainer_group = join_trainer_group(1, rank, world, rendezvous, RANK_TIMEOUT_S, device)
        trainer = {"ranks": world, "backend_options": dict(task.options)}
        asked = {"model": {"path": model, "dtype": "bfloat16"}, "trainer": trainer}
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
        if task.short:
            figures |= _without_room(backend, device, tokens)
        trainer_group.leave()
    return figures


def _without_room(backend: Any, device: Any, tokens: int) -> dict[str, float]:
    """What a micro-batch does that this process has no memory for, and one that it has, after it."""
    import torch
    from headrace_modelkit.devices import is_out_of_memory

    backend.micro(_rows(tokens))
    before = backend.commit(float(_answer(tokens)), 0.0).grad_norm
    # What the allocator holds and a little more: of eight times the rows it has no room for the activations.
    room = torch.cuda.memory_reserved(device) + SPARE_BYTES
    torch.cuda.set_per_process_memory_fraction(
        room / torch.cuda.get_device_properties(device).total_memory, device
    )
    known = 0.0
    try:
        backend.micro([_rows(tokens)[0] for _ in range(8)])
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        known = 1.0
    torch.cuda.empty_cache()
    backend.recover()
    backend.micro(_rows(tokens))
    after = backend.commit(float(_answer(tokens)), 0.0).grad_norm
    return {"out_of_memory": known, "norm_before": before, "norm_after": after}


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
    number, size, where, path, address, what = sys.argv[1:]
    print(json.dumps(train(path, where, int(number), int(size), address, Task(**json.loads(what)))))
