"""What gpu_check asks of a machine without a fleet, a function each: what to measure at which size, and what is wrong.

Each gets a Bench and returns a Finding. Those that run whole runs are in _gpu_runs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu_bench import Bench, Finding

NORM_TOLERANCE = 1e-3
"""Between ways that sum in other orders."""
DEVICE_GIB_A_PARAMETER = 20 / 2**30
"""Masters, moments, gradients, bf16 copy, and room for activations."""
PARAMETERS = {"qwen2.5-7b": 7.62e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-0.5b": 0.49e9}


def basics(bench: Bench) -> Finding:
    """FSDP trains, suspends and wakes; an engine installs and gives all back; a device is leased once."""
    from _gpu_ranks import Task, problems, ranks
    from headrace_coordinator.domain.devices.leases import KEPT_BYTES

    model = bench.model("qwen2.5-small")
    trained = ranks(model, bench.devices(2), Task(64))
    generated = asyncio.run(_engines(model, bench))
    wrong = problems(trained, KEPT_BYTES)
    if abs(generated[0]["log_prob"] - generated[-1]["log_prob"]) > 0.1:
        wrong.append(f"engines on two devices disagree: {[one['log_prob'] for one in generated]}")
    wrong += [
        f"an engine keeps {one['released_bytes'] / 2**20:.0f} MiB after its release"
        for one in generated
        if one["released_bytes"] > KEPT_BYTES and not bench.cpu
    ]
    if not _refused_twice():
        wrong.append("one device was leased twice")
    return Finding({"ranks": trained, "engines": generated}, tuple(wrong))


def largest(bench: Bench) -> Finding:
    """A model as large as fits in fp32 masters: restore, peak against plan_memory, tokens/s against FLOPs."""
    from _gpu_judging import largest_wrong, peak_tflops
    from _gpu_ranks import Task, problems, ranks
    from headrace_coordinator.domain.devices.leases import KEPT_BYTES

    devices, shape = bench.devices(8), "qwen2.5-small"
    if not bench.cpu:
        import torch

        free = sum(torch.cuda.mem_get_info(name)[0] for name in devices) / 2**30
        fits = [name for name, count in PARAMETERS.items() if count * DEVICE_GIB_A_PARAMETER < 0.9 * free]
        shape = fits[0] if fits else "qwen2.5-0.5b"
    found = ranks(bench.model(shape), devices, Task(128 if bench.cpu else 8192))
    parameters = PARAMETERS.get(shape, 0.0)
    rate = sum(each["tokens_per_s"] for each in found)
    tflops = 6 * parameters * rate / 1e12
    figures = {"shape": shape, "ranks": found, "tokens_per_s": rate, "tflops": tflops}
    wrong = problems(found, KEPT_BYTES)
    if not bench.cpu:
        measured = _product_tflops(devices[0])
        peak = peak_tflops(torch.cuda.get_device_name(devices[0]), measured)
        figures |= {"peak_tflops": peak, "product_tflops": measured}
        wrong += largest_wrong(found, tflops, peak)
    return Finding(figures, tuple(wrong))


def _product_tflops(name: str) -> float:
    """What a product of two large bf16 matrices reaches."""
    import torch

    size, times = 8192, 10
    matrix = torch.randn(size, size, device=name, dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize(name)
    began = time.perf_counter()
    for _ in range(times):
        matrix @ matrix
    torch.cuda.synchronize(name)
    return 2 * size**3 * times / (time.perf_counter() - began) / 1e12


def layouts(bench: Bench) -> Finding:
    """Offload, and with four GPUs HSDP: gradient norms of the plain layout."""
    from _gpu_judging import same_norms_wrong
    from _gpu_ranks import Task, ranks

    model, tokens = bench.model("qwen2.5-small"), 128 if bench.cpu else 1024
    several = 2 if bench.cpu else bench.gpus
    tried: dict[str, tuple[int, dict[str, object]]] = {"offload": (1, {"offload": "parameters"})}
    if several >= 4:
        tried["hsdp"] = (4, {"shard": "weights", "shard_ranks": 2})
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for name, (count, options) in tried.items():
        devices = ["cpu"] * count if bench.cpu else bench.devices(count)
        plain, found = ranks(model, devices, Task(tokens)), ranks(model, devices, Task(tokens, options))
        figures[name] = {"plain": plain, "tried": found}
        norms = [[each["straight_norm"] for each in side] for side in (found, plain)]
        wrong += same_norms_wrong(name, norms[0], norms[1], NORM_TOLERANCE)
    if several < 4:
        figures["hsdp"] = f"skipped: it needs 4 devices and there are {several}"
    return Finding(figures, tuple(wrong))


def two_hosts(bench: Bench) -> Finding:
    """NCCL between ranks that it takes for two hosts': by the network, and no NVLink or shared memory."""
    from _gpu_judging import same_norms_wrong
    from _gpu_ranks import Task, ranks

    if bench.cpu:
        return Finding(skipped="NCCL needs GPUs; two hosts over Gloo have tests of their own")
    model, devices = bench.model("qwen2.5-0.5b"), bench.devices(2)
    one, two = ranks(model, devices, Task(1024)), ranks(model, devices, Task(1024, hosts=True))
    norms = [[each["straight_norm"] for each in side] for side in (two, one)]
    wrong = same_norms_wrong("two hosts", norms[0], norms[1], NORM_TOLERANCE)
    return Finding({"one_host": one, "two_hosts": two}, tuple(wrong))


def out_of_memory(bench: Bench) -> Finding:
    """A micro-batch with no room, on a real GPU's allocator: known by name, and half of it goes on."""
    from _gpu_judging import same_norms_wrong
    from _gpu_ranks import Task, ranks

    if bench.cpu:
        return Finding(skipped="a CPU has no memory of its own; test_trainer_out_of_memory has a stand-in")
    (found,) = ranks(bench.model("qwen2.5-0.5b"), bench.devices(1), Task(2048, short=True))
    wrong = [] if found["out_of_memory"] else ["eight times the rows found room: nothing was tried"]
    wrong += same_norms_wrong(
        "after it", [found["norm_after"]], [found["norm_before"]], tolerance=NORM_TOLERANCE
    )
    return Finding({"ranks": [found]}, tuple(wrong))


def weight_sync(bench: Bench) -> Finding:
    """Each leg that a version travels, in GB/s: off the device, cast, digest, shared memory, digest again, back up."""
    import torch
    from headrace_servicekit.rpc.digests import tensor_digest

    count = 2**22 if bench.cpu else 2**29
    device = torch.device(bench.devices(1)[0])
    master = torch.randn(count, device=device)
    legs: dict[str, float] = {}

    def leg(name: str, size: int, act: Callable[[], Any]) -> Any:
        best, made = float("inf"), None
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            made = act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - began)
        legs[f"{name}_gb_per_s"] = size / best / 1e9
        return made

    size = 2 * count
    leg("fp32_to_host_then_cast", size, lambda: master.cpu().bfloat16())
    cast = leg("cast_on_device", size, master.bfloat16)
    host = leg("bf16_to_host", size, cast.cpu)
    if device.type == "cuda":
        pinned = torch.empty(count, dtype=torch.bfloat16, pin_memory=True)
        leg("bf16_to_pinned", size, lambda: pinned.copy_(cast))
        leg("pinned_to_device", size, lambda: cast.copy_(pinned))
    data = host.view(torch.uint8).numpy()
    digest = leg("digest", size, lambda: tensor_digest(memoryview(data)))
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else bench.folder
    with tempfile.NamedTemporaryFile(dir=shared) as file:

        def write() -> None:
            file.seek(0)
            file.write(memoryview(data))
            file.flush()

        leg("write_shared_memory", size, write)
        back = torch.from_file(file.name, shared=True, size=count, dtype=torch.bfloat16)
        again = leg("digest_of_mapped", size, lambda: tensor_digest(back.view(torch.uint8).numpy().data))
        leg("mapped_to_device", size, lambda: back.to(device, copy=True))
    wrong = [] if again == digest else ["what came out of shared memory is not what went in"]
    figures: dict[str, Any] = {"bytes": float(size), **legs}
    if not bench.cpu:  # a version's copy on a GPU, mapped and summed by another process
        lent = _between(["lend"], ["map", "cuda:0"], 2**28)
        figures["cuda_ipc"], wrong = lent.figures, [*wrong, *lent.problems]
    return Finding(figures, tuple(wrong))


def broadcast(bench: Bench) -> Finding:
    """`collective` by NCCL: two processes with a GPU each. Two members on one GPU are refused by NCCL."""
    if bench.cpu:
        return Finding(skipped="NCCL needs GPUs; broadcasts over Gloo have tests of their own")
    return _between(["send"], ["receive", "cuda:1"], 2**28)


def _between(giver: list[str], taker: list[str], size: int) -> Finding:
    """What `_gpu_weights` finds with a process that gives a version and one that takes it."""
    script = str(Path(__file__).with_name("_gpu_weights.py"))
    children = [
        subprocess.Popen(
            [sys.executable, script, *own, str(size)], stdin=source, stdout=subprocess.PIPE, text=True
        )
        for own, source in ((giver, subprocess.PIPE), (taker, subprocess.PIPE))
    ]
    first, second = children
    assert first.stdout and first.stdin and second.stdout and second.stdin
    try:
        second.stdin.write(first.stdout.readline())
        second.stdin.close()
        figures: dict[str, float] = json.loads(second.stdout.readline() or "{}")
        first.stdin.close()
        ended = [child.wait(30) for child in children]
    finally:
        for child in children:
            child.kill()
    wrong = [] if ended == [0, 0] else [f"the processes ended with {ended}"]
    if not figures.get("whole"):
        wrong.append("what arrived is not what was sent")
    return Finding(figures, tuple(wrong))


def simulated(bench: Bench) -> Finding:
    """ManiSkill's PushCube many times in one process: starts follow from seeds, and what a step and a reset cost."""
    import numpy as np
    import torch
    from headrace_simulator import backends
    from headrace_simulator.backends.base import Start

    number = 1 if bench.cpu else 256
    where = {"sim_backend": "physx_cpu", "render_backend": "cpu"} if bench.cpu else {}
    backend: Any = backends.create("maniskill")
    vector = backend.make_vector("PushCube-v1", number, where, own_time_limit=False, dense=True)
    try:
        began = time.perf_counter()
        begun = vector.reset({place: Start(seed=place // 2) for place in range(number)})
        figures: dict[str, Any] = {"environments": number, "reset_s": time.perf_counter() - began}
        states = [begun[place][0][vector.observation_spaces[0].name] for place in range(number)]
        steps, action = 20, np.zeros(vector.action_space.shape, vector.action_space.dtype)
        began = time.perf_counter()
        for _ in range(steps):
            vector.step(dict.fromkeys(range(number), action))
        figures["steps_per_s"] = number * steps / (time.perf_counter() - began)
        if not bench.cpu:
            free, whole = torch.cuda.mem_get_info()
            figures["device_gib"] = (whole - free) / 2**30
    finally:
        vector.close()
    wrong = []
    if any(not np.allclose(states[place], states[place + 1], atol=1e-4) for place in range(0, number - 1, 2)):
        wrong.append("two environments with one seed begin differently")
    if number > 2 and np.allclose(states[0], states[2], atol=1e-4):
        wrong.append("two seeds begin alike")
    return Finding(figures, tuple(wrong))


async def _engines(model: Path, bench: Bench) -> list[dict[str, float]]:
    """A built-in engine on each device: installs, scores, gives back."""
    import torch
    from headrace_modelkit.devices import used_bytes
    from headrace_modelkit.tokenizer import load_tokenizer
    from headrace_rollout.engines.base import EngineConfig, Policy
    from headrace_rollout.engines.samples import Distribution
    from headrace_rollout.engines.transformers.engine import TransformersEngine
    from headrace_rollout.runs.policy_files import read_policy
    from headrace_rollout.wire import weights_of
    from headrace_schema.openings import RolloutConfig
    from headrace_schema.sections.generating import ModelSection

    section = ModelSection(path=str(model), dtype="bfloat16", max_context=128)
    weights = weights_of(*read_policy(RolloutConfig(model=section), "", ""))
    codec = load_tokenizer(section)
    found: list[dict[str, float]] = []
    for name in bench.devices(2):
        device = torch.device(name)
        engine = TransformersEngine(EngineConfig(section, codec, 4, (device,)))
        await engine.install(Policy(1, "one"), weights)
        scored, _ = await engine.score([([3, 5, 7, 9], 1)], Distribution())
        used = used_bytes(device) if device.type == "cuda" else 0
        freed = await engine.release()
        figures = {"log_prob": sum(scored[0]), "installed_bytes": float(used)}
        found.append({**figures, "released_bytes": float(freed.used_bytes if device.type == "cuda" else 0)})
        await engine.close()
    return found


def _refused_twice() -> bool:
    """Whether a second lease on one device, asked for from another container, is refused."""
    from headrace_coordinator.domain.devices.leases import Blocked, LeaseRequest, LeaseTable, plan_grant

    table = LeaseTable()
    table.apply(plan_grant(table, [LeaseRequest("a", "r", "generate", ("GPU-1/gpu:0",), "one")])[0])
    try:
        plan_grant(table, [LeaseRequest("b", "s", "learn", ("GPU-1/gpu:0",), "two")])
    except Blocked:
        return True
    return False
