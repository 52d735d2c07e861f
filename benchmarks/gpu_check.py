"""What only a GPU can show, unattended: `make gpu-check`, or `python benchmarks/gpu_check.py`.

FSDP2 on NCCL trains, suspends and wakes (one process a GPU, two at most) with measured memory; an engine installs
weights on the leased GPU and gives all of it back; two instances run on two GPUs, or a second lease on the only one is
refused. Prints one JSON line; `passed` is false, and the exit status 1, when a check fails. Without a GPU it says so on
standard error and exits 3. `--rehearse` runs the same code on the CPU, where the memory figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from headrace_coordinator.domain.devices.leases import Blocked, LeaseRequest, LeaseTable, plan_grant
from headrace_modelkit.devices import torch_devices, used_bytes
from headrace_modelkit.presets.tiny import write_tiny
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines.base import EngineConfig, Policy
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.engines.transformers.engine import TransformersEngine
from headrace_rollout.runs.policy_files import read_policy
from headrace_rollout.wire import weights_of
from headrace_schema.openings import RolloutConfig, TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.lease.devices import detect_devices, gpu_uuids
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.group.device import current
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.learning.samples import Sequence

NO_GPU = 3
RANK_TIMEOUT_S = 300
KEPT_BYTES = 32 * 2**20
"""What may stay reserved after a suspend or a release."""


def train(model: str, device: torch.device, rank: int, world: int, rendezvous: str) -> dict[str, float]:
    """A rank's figures: two runs of two steps, the second with a suspend between them."""
    figures: dict[str, float] = {}
    with current(device):
        trainer_group = join_trainer_group(1, rank, world, rendezvous, RANK_TIMEOUT_S, device)
        config = TrainerConfig.model_validate(
            {"model": {"path": model, "dtype": "float32"}, "trainer": {"ranks": world}}
        )
        for suspends in (False, True):
            torch.manual_seed(1)
            backend = FsdpBackend(config, build_algorithm(config.algorithm), trainer_group)
            backend.load_initial()
            rows = [[Sequence([3, 5, 7, 9, 11], [2, 3, 4], [-1.0] * 3, [1.0] * 3, 1.0)]]
            for step in range(2):
                backend.micro(rows)
                if suspends and step:
                    figures["before_bytes"] = _used(device)
                    figures["released_bytes"] = backend.suspend()
                    figures["suspended_bytes"] = _used(device)
                    backend.wake()
                    figures["awake_bytes"] = _used(device)
                norm = backend.commit(3.0 * world, 1e-3).grad_norm
            figures["suspended_norm" if suspends else "straight_norm"] = norm
        trainer_group.leave()
    return figures


def ranks(model: str, devices: list[torch.device]) -> list[dict[str, float]]:
    """`train` in a process for each device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{probe.getsockname()[1]}"
    commands = [
        [sys.executable, __file__, "--rank", str(rank), str(len(devices)), str(device), model, rendezvous]
        for rank, device in enumerate(devices)
    ]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [child.communicate(timeout=RANK_TIMEOUT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    if any(child.returncode for child in children):
        raise SystemExit(f"gpu_check: a rank ended with {[child.returncode for child in children]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


async def generate(model: str, devices: list[torch.device]) -> list[dict[str, float]]:
    """An engine on each device, all at once: installs, scores, gives back; and its log-prob, which must agree."""
    section = ModelSection(path=model, dtype="float32", max_context=128)
    weights = weights_of(*read_policy(RolloutConfig(model=section), "", ""))
    codec = load_tokenizer(section)
    engines = [TransformersEngine(EngineConfig(section, codec, 4, (device,))) for device in devices]
    found = []
    for engine in engines:
        await engine.install(Policy(1, "one"), weights)
    for engine, device in zip(engines, devices, strict=True):
        scored, _ = await engine.score([([3, 5, 7, 9], 1)], Distribution())
        figures = {"log_prob": sum(scored[0]), "installed_bytes": float(_used(device))}
        figures["released_bytes"] = float((await engine.release()).used_bytes)
        found.append(figures)
        await engine.close()
    return found


def refused_twice(name: str) -> bool:
    """Whether a second lease on one device, asked for from another container, is refused."""
    table = LeaseTable()
    table.apply(plan_grant(table, [LeaseRequest("a", "r", "generate", (name,), "one")], 0.0)[0])
    try:
        plan_grant(table, [LeaseRequest("b", "s", "learn", (name,), "two")], 0.0)
    except Blocked:
        return True
    return False


def check(names: list[str], *, rehearse: bool) -> dict[str, Any]:
    """All figures, and whether each check passed."""
    devices = [torch.device("cpu")] if rehearse else list(torch_devices(gpu_uuids(names)))[:2]
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "tiny")
        write_tiny(Path(model))
        trained = ranks(model, devices)
        generated = asyncio.run(generate(model, devices))
    agree = abs(generated[0]["log_prob"] - generated[-1]["log_prob"]) < 1e-3
    checks = {
        "fsdp_trains": all(math.isfinite(rank["straight_norm"]) for rank in trained),
        "suspend_changes_nothing": all(
            math.isclose(rank["straight_norm"], rank["suspended_norm"], rel_tol=1e-4) for rank in trained
        ),
        "suspend_gives_back": rehearse or all(rank["suspended_bytes"] <= KEPT_BYTES for rank in trained),
        "engines_agree": agree,
        "release_gives_back": rehearse or all(engine["released_bytes"] <= KEPT_BYTES for engine in generated),
        "second_lease_refused": refused_twice(names[0]),
    }
    return {
        "passed": all(checks.values()),
        "devices": names,
        "checks": checks,
        "trained": trained,
        "generated": generated,
    }


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU")
    parser.add_argument("--rank", nargs=5, metavar=("RANK", "WORLD", "DEVICE", "MODEL", "RENDEZVOUS"))
    given = parser.parse_args()
    if given.rank:
        rank, world, device, model, rendezvous = given.rank
        print(json.dumps(train(model, torch.device(device), int(rank), int(world), rendezvous)))
        return 0
    names = detect_devices()
    if not given.rehearse and not (gpu_uuids(names) and torch.cuda.is_available()):
        print(
            "gpu_check: this machine shows no NVIDIA GPU that torch can use; nothing was checked",
            file=sys.stderr,
        )
        return NO_GPU
    figures = check(names, rehearse=given.rehearse)
    print(json.dumps({"benchmark": "gpu_check", "figures": figures}))
    return 0 if figures["passed"] else 1


def _used(device: torch.device) -> int:
    return used_bytes(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())
