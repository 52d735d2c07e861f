"""What gpu_check asks of a machine, a function each: what to measure at which size, and what of it is wrong.

Each gets a Bench and returns a Finding.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _gpu_bench import Bench, Finding, figures_of, missing, until, wrong_with

PROBES = {"vllm": "vllm", "megatron": "megatron"}
DEVICE_GIB_A_PARAMETER = 20 / 2**30
"""Masters, moments, gradients, bf16 copy, and room for activations."""
PARAMETERS = {"qwen2.5-7b": 7.62e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-0.5b": 0.49e9}


def basics(bench: Bench) -> Finding:
    """FSDP trains, suspends and wakes; an engine installs and gives all back; a device is leased once."""
    from _gpu_ranks import problems, ranks
    from headrace_coordinator.domain.devices.leases import KEPT_BYTES

    model = bench.model("qwen2.5-small")
    trained = ranks(model, bench.devices(2), tokens=64)
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


def built_in(bench: Bench) -> Finding:
    """A run of a small bf16 model with the built-in engine, in turns on one device."""
    return _collocated(bench, "transformers")


def collocated(bench: Bench) -> Finding:
    """The same with vLLM: what it keeps asleep, how often it was started, how far its log-probs are off."""
    return _collocated(bench, "vllm")


def _collocated(bench: Bench, engine: str) -> Finding:
    from headrace_schema.gpu_defaults import asleep_limit

    shape = "qwen2.5-small" if bench.cpu else "qwen2.5-1.5b"
    large = {} if bench.cpu else {"groups": 8, "samples": 8, "tokens": 256, "context": 1024}
    more = {} if bench.cpu else {"micro_batch_tokens": 16_384}
    found = bench.run(shape, engine=engine, steps=3 if bench.cpu else 5, **large, **more)
    wrong = wrong_with(found)
    if engine == "vllm" and found.get("engine_starts") != 1:
        wrong.append(f"the engine was started {found.get('engine_starts', 0):.0f} times in one run")
    if (asleep := found.get("engine_asleep_bytes", 0.0)) > asleep_limit(0):
        wrong.append(f"a sleeping engine keeps {asleep / 2**20:.0f} MiB of its GPU")
    return Finding({"shape": shape, **found}, tuple(wrong))


def largest(bench: Bench) -> Finding:
    """A model as large as fits in fp32 masters: restore, peak against plan_memory, tokens/s against FLOPs."""
    from _gpu_ranks import problems, ranks
    from headrace_coordinator.domain.devices.leases import KEPT_BYTES

    devices, shape = bench.devices(8), "qwen2.5-small"
    if not bench.cpu:
        import torch

        free = sum(torch.cuda.mem_get_info(name)[0] for name in devices) / 2**30
        fits = [name for name, count in PARAMETERS.items() if count * DEVICE_GIB_A_PARAMETER < 0.9 * free]
        shape = fits[0] if fits else "qwen2.5-0.5b"
    found = ranks(bench.model(shape), devices, tokens=128 if bench.cpu else 4096)
    parameters = PARAMETERS.get(shape, 0.0)
    rate = sum(each["tokens_per_s"] for each in found)
    figures = {
        "shape": shape,
        "ranks": found,
        "tokens_per_s": rate,
        "tflops": 6 * parameters * rate / 1e12,
        "peak_vs_plan": max(
            each.get("peak_device_bytes", 0.0) / max(each["planned_device_bytes"], 1.0) for each in found
        ),
    }
    return Finding(figures, tuple(problems(found, KEPT_BYTES)))


def weight_sync(bench: Bench) -> Finding:
    """Each leg that a version travels, in GB/s: off the device, cast, digest, shared memory, digest again, back up."""
    import torch
    from headrace_servicekit.rpc.digests import digest_bytes

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
    digest = leg("digest", size, lambda: digest_bytes(memoryview(data)))
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else bench.folder
    with tempfile.NamedTemporaryFile(dir=shared) as file:

        def write() -> None:
            file.seek(0)
            file.write(memoryview(data))
            file.flush()

        leg("write_shared_memory", size, write)
        back = torch.from_file(file.name, shared=True, size=count, dtype=torch.bfloat16)
        again = leg("digest_of_mapped", size, lambda: digest_bytes(back.view(torch.uint8).numpy().data))
        leg("mapped_to_device", size, lambda: back.to(device, copy=True))
    wrong = () if again == digest else ("what came out of shared memory is not what went in",)
    return Finding({"bytes": float(size), **legs}, wrong)


def lent_memory(bench: Bench) -> Finding:
    """`cuda_ipc` between two processes: a version's copy on a GPU, mapped and summed by another process."""
    if bench.cpu:
        return Finding(skipped="a CPU has no memory to lend; the contract suite has a stand-in")
    return _between(["lend"], ["map", "cuda:0"], 2**28)


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


def serving(bench: Bench) -> Finding:
    """The engine by itself against the rollout service, by streams at once."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    shape = "qwen2.5-small" if bench.cpu else "qwen2.5-1.5b"
    for streams in (4,) if bench.cpu else (64, 256, 512):
        options = ["--requests", str(streams), "--turns", "1" if bench.cpu else "2"]
        options += ["--prompt", "16" if bench.cpu else "128", "--tokens", "8" if bench.cpu else "128"]
        options += ["--model", str(bench.model(shape)), "--dtype", "bfloat16"]
        options += [] if bench.cpu else ["--gpu", "0"]
        found = figures_of("engines.py", "--engines", "vllm", *options)
        figures |= {f"{name}_{streams}": value for name, value in found.items() if "tokens_per_s" in name}
        figures[f"service_vs_bare_{streams}"] = ratio = found["service_vs_bare_vllm"]
        if ratio < 0.5 and not bench.cpu:
            wrong.append(f"with {streams} streams the service makes {ratio:.0%} of the bare engine's tokens")
    return Finding(figures, tuple(wrong))


def prefixes(bench: Bench) -> Finding:
    """A group whose prompt is computed once against one row an answer, by length of the prompt."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    shape = "qwen2.5-small" if bench.cpu else "qwen2.5-1.5b"
    for tokens in (128,) if bench.cpu else (2048, 8192, 16_384):
        options = ["--prompt", str(tokens), "--answer", str(tokens // 16), "--repetitions", "1"]
        found = figures_of(
            "prefix.py", *options, "--model", str(bench.model(shape)), "--device", bench.devices(1)[0]
        )
        figures |= {f"speedup_{tokens}": found["speedup_bf16"]}
        if found["gradient_difference"] > 0.05:
            difference = found["gradient_difference"]
            wrong.append(f"at {tokens} tokens shared prompts change the gradient by {difference:.3g}")
    return Finding(figures, tuple(wrong))


def killed_rank(bench: Bench) -> Finding:
    """SIGKILL of one rank of two in a run: seconds until its trainer group has committed the next step."""
    lost: dict[str, float] = {}

    def kill(fleet: Any, run: tuple[Any, str]) -> None:
        client, name = run
        until(lambda: client.get(name).step >= 1, "the first step")
        step = client.get(name).step
        pid = next(item["pid"] for item in fleet.processes() if item["name"] == "trainer-1")
        subprocess.run(["kill", "-9", str(pid)], check=True)
        began = time.perf_counter()
        until(lambda: client.get(name).step > step + 1, "a step after the kill")
        lost["recovered_s"] = time.perf_counter() - began

    found = bench.run("qwen2.5-small", kill, ranks=2, steps=6, gpus=2, groups=4)
    return Finding({**found, **lost}, tuple(wrong_with(found)))


def megatron(bench: Bench) -> Finding:
    """Megatron with tensor 2 and pipeline 2, and with context 2; the engine's log-probs say that it is one model."""
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    layouts = {
        "tp2_pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        "cp2": (2, {"context_parallel": 2}),
    }
    for name, (count, options) in layouts.items():
        if (bench.gpus or len(os.sched_getaffinity(0))) < count:
            figures[name] = f"skipped: it needs {count} devices"
            continue
        shape = {"backend": "megatron", "backend_options": options, "ranks": count, "gpus": count}
        found = bench.run("qwen2.5-small", steps=2, groups=4, **shape)
        figures |= {f"{name}_{key}": value for key, value in found.items()}
        wrong += [f"{name}: {problem}" for problem in wrong_with(found)]
    ran = any(not isinstance(value, str) for value in figures.values())
    return Finding(figures, tuple(wrong), "" if ran else "it needs 2 GPUs, and 4 for TP2 x PP2")


def experts(bench: Bench) -> Finding:
    """A run of a tiny Qwen3-MoE: versions under the checkpoint's names reach an engine with fused experts."""
    engine = "transformers" if missing("vllm") else "vllm"
    found = bench.run("qwen3-moe-tiny", engine=engine, steps=3)
    return Finding({"engine": engine, **found}, tuple(wrong_with(found)))


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
    table.apply(plan_grant(table, [LeaseRequest("a", "r", "generate", ("GPU-1/gpu:0",), "one")], 0.0)[0])
    try:
        plan_grant(table, [LeaseRequest("b", "s", "learn", ("GPU-1/gpu:0",), "two")], 0.0)
    except Blocked:
        return True
    return False
