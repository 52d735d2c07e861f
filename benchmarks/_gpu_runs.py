"""What gpu_check asks of a machine by whole runs on fleets, a function each: it gets a Bench and returns a Finding."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from _gpu_bench import Bench, Finding, missing, until, wrong_with


def built_in(bench: Bench) -> Finding:
    """A run of a small bf16 model with the built-in engine, in turns on one device."""
    found = _in_turns(bench, "transformers")
    return Finding(found, tuple(wrong_with(found)))


def collocated(bench: Bench) -> Finding:
    """The same with vLLM: what it keeps asleep, how often it was started, how far its log-probs are off."""
    return _hosted(bench, "vllm")


def sglang(bench: Bench) -> Finding:
    """The same with SGLang."""
    return _hosted(bench, "sglang")


def asleep(bench: Bench) -> Finding:
    """VLLM over two GPUs, in turns with two ranks: 40 to 180 s a step where it is started again each time."""
    return _hosted(bench, "vllm", ranks=2, gpus=2, engine_options={"tensor_parallel_size": 2}, steps=4)


def _hosted(bench: Bench, engine: str, **size: Any) -> Finding:
    from _gpu_judging import asleep_wrong
    from headrace_schema.gpu_defaults import asleep_limit

    found = _in_turns(bench, engine, **size)
    # On the CPU a process is told of by its name in vLLM's log alone, and keeps its memory.
    judged = (
        [] if bench.cpu and engine != "vllm" else asleep_wrong(found, asleep_limit(0) * size.get("gpus", 1))
    )
    return Finding(found, (*wrong_with(found), *judged))


def _in_turns(bench: Bench, engine: str, **size: Any) -> dict[str, Any]:
    shape = "qwen2.5-small" if bench.cpu else "qwen2.5-1.5b"
    large = {} if bench.cpu else {"groups": 8, "samples": 8, "tokens": 256, "context": 1024}
    more = {} if bench.cpu else {"micro_batch_tokens": 16_384}
    steps = {"steps": 3 if bench.cpu else 5}
    return {"shape": shape, **bench.run(shape, **{"engine": engine, **steps, **large, **more, **size})}


def deterministic(bench: Bench) -> Finding:
    """`deterministic: true` with the built-in engine, twice: what differs in one bit differs in the next norm."""
    from _gpu_judging import same_norms_wrong

    both = [bench.run("qwen2.5-small", steps=3, groups=4, more={"deterministic": True}) for _ in range(2)]
    norms = [[found[f"grad_norm_{step}"] for step in range(1, 4)] for found in both]
    wrong = [*wrong_with(both[0]), *same_norms_wrong("twice", norms[0], norms[1])]
    return Finding({"norms": norms, **both[0]}, tuple(wrong))


def lora(bench: Bench) -> Finding:
    """Adapters of rank 16 on a frozen bf16 model: trained, published, merged by the engine."""
    shape = "qwen2.5-small" if bench.cpu else "qwen2.5-1.5b"
    found = bench.run(shape, steps=3, groups=4, more={"trainer.lora": {"rank": 16}, "optimizer.lr": 1e-4})
    return Finding({"shape": shape, **found}, tuple(wrong_with(found)))


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
