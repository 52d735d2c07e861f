"""Environment steps a second where an environment costs next to nothing: `python benchmarks/cheap_environments.py`.

CartPole × 8 with a small policy of categories. One side is the rollout's own path: the engine, episodes, turns and
pools of `headrace_robots.rollout`, against `python -m headrace_simulator` in a process of its own over its socket. The
other is a bare loop over gymnasium's SyncVectorEnv (which resets by itself) that asks the same policy, with seeds, for
all rows of a step and keeps what a learner needs. Both take turns; the figure is the median of the rounds' ratios.

Prints one JSON line: `times_slower` (bare over ours, steps a second), `bare_steps_per_s`, `steps_per_s`, and the same
of environments in processes of their own (`times_slower_apart`, `vectorized: false`). `cpu_times_more` compares the CPU
seconds of all processes for a step, which others on the machine change less. `--profile` says where ours spends it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from _harness import emit, free_port, machine, say

NAME, COUNT = "CartPole-v1", 8
POLICY: dict[str, Any] = {
    "kind": "mlp",
    "state_size": 4,
    "hidden": [64, 64],
    "bounds": {"low": [0.0], "high": [1.0]},
    "categories": [2],
}
OPEN_S = 120.0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8_000, help="environment steps of a round of each side")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument(
        "--parts",
        type=int,
        default=1,
        help="environment.alternating, and processes of the simulator where it is vectorized",
    )
    parser.add_argument("--profile", action="store_true", help="functions of ours that take the most")
    options = parser.parse_args()
    say(machine())
    torch.set_num_threads(1)
    figures = asyncio.run(compared(options))
    say(f"at the end: {machine()}")
    emit("cheap_environments", figures)


async def compared(options: argparse.Namespace) -> dict[str, float]:
    """The figures."""
    figures: dict[str, float] = {}
    for suffix, vectorized in (("", True), ("_apart", False)):
        ratios, ours, bare, costs = [], [], [], []
        async with rollout(vectorized, options.parts) as (run, simulator):
            for number in range(options.rounds + 1):
                begun = cpu_s(simulator)
                plain = bare_rate(options.steps)
                between = cpu_s(simulator)
                own, steps = await run(options.steps)
                ended = cpu_s(simulator)
                if number:  # the first round warms up
                    ratios.append(plain / own)
                    ours.append(own)
                    bare.append(plain)
                    costs.append(
                        (sum(ended) - sum(between)) / steps / ((between[0] - begun[0]) / options.steps)
                    )
                    say(
                        f"CPU us a step: bare {(between[0] - begun[0]) / options.steps * 1e6:.0f}, ours "
                        + ", ".join(
                            f"{(b - a) / steps * 1e6:.0f}" for a, b in zip(between, ended, strict=True)
                        )
                    )
            if options.profile and vectorized:
                with cProfile.Profile(time.process_time) as profile:
                    await run(options.steps)
                pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(35)
        figures[f"times_slower{suffix}"] = median(ratios)
        figures[f"steps_per_s{suffix}"] = median(ours)
        figures[f"cpu_times_more{suffix}"] = median(costs)
        figures.setdefault("bare_steps_per_s", median(bare))
        say(
            f"vectorized {vectorized}: ours {median(ours):.0f}/s, bare {median(bare):.0f}/s, {median(ratios):.2f} times"
        )
    return figures


def policy() -> Any:
    """The policy of both sides."""
    from headrace_robots.policies.directory import policy_config

    return policy_config(POLICY).build(seed=0).requires_grad_(False)


def bare_rate(steps: int) -> float:
    """Steps a second of the bare loop."""
    from gymnasium import make_vec
    from headrace_robots.policies.policy import Observation

    own, envs = policy(), make_vec(NAME, num_envs=COUNT, vectorization_mode="sync")
    seen, _ = envs.reset(seed=0)
    kept = []
    began = time.perf_counter()
    for step in range(steps // COUNT):
        chunk = own.act(Observation(torch.from_numpy(seen)), [step * COUNT + row for row in range(COUNT)])
        actions = chunk.executed_BCA[:, 0, 0].numpy()
        following, rewards, terminated, truncated, _ = envs.step(actions)
        kept.append(
            (seen, chunk.sampled, chunk.log_probs_BCA, chunk.values_B, rewards, terminated, truncated)
        )
        seen = following
    seconds = time.perf_counter() - began
    envs.close()
    return steps / seconds


@asynccontextmanager
async def rollout(vectorized: bool, parts: int) -> Any:
    """Runs episodes by the rollout's own path: steps a second of about so many."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: ASYNC240 - before anything runs
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir=shared) as folder:
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headrace_simulator", "--listen", address, "--shm-dir", folder]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220 - before anything runs
        try:
            engine, pool = await opened(address, Path(folder), vectorized, parts)
            yield lambda steps: episodes(engine, pool, steps), psutil.Process(process.pid)
            await engine.close()
        finally:
            process.terminate()
            process.wait(30)


async def opened(address: str, folder: Path, vectorized: bool, parts: int) -> tuple[Any, Any]:
    """The engine with the policy installed, and the pool as a stream's opening names it."""
    from headrace.common.v1 import common_pb2
    from headrace.rollout.v1 import rollout_pb2
    from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
    from headrace_modelkit.weights import state_tensors
    from headrace_robots.policies.directory import policy_config
    from headrace_robots.rollout.engine import RobotEngine
    from headrace_rollout.engines.base import Policy, WeightView
    from headrace_schema.sections.embodied import EnvironmentSection
    from headrace_servicekit.memory.blobs import BlobReader
    from headrace_servicekit.rpc.client import dial

    section = EnvironmentSection(tasks=[NAME], count=COUNT, alternating=parts, vectorized=vectorized)
    engine = RobotEngine(policy_config(POLICY), torch.float32, section, (), BlobReader(folder, None), None)
    views = [
        WeightView(name, str(array.dtype), tuple(tensor.shape), array.reshape(-1).view(np.uint8).data)
        for name, tensor in state_tensors(policy())
        for array in [np.ascontiguousarray(tensor.numpy())]
    ]
    engine._held.install(Policy(1, "digest"), views, {})  # no trainer publishes a version here
    header = common_pb2.CommandHeader(request_id="benchmark", run="runs/benchmark")
    async with dial(address, token=None) as channel:
        stub: Any = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]
        request = simulator_pb2.OpenPoolRequest(
            header=header,
            environment=simulator_pb2.Environment(backend="gymnasium", name=NAME),
            count=COUNT,
            blob_bytes=96 * 1024,
            without_info=True,
            vectorized=vectorized,
            processes=parts if vectorized else 0,
            options_json='{"vectorization_mode": "sync"}' if vectorized else "",
        )
        found = await stub.OpenPool(request, timeout=OPEN_S, wait_for_ready=True)
    return engine, rollout_pb2.EnvironmentPool(
        header=header,
        address=address,
        pool=found.pool,
        pool_incarnation=found.pool_incarnation,
        task=NAME,
        count=COUNT,
    )


async def episodes(engine: Any, pool: Any, steps: int) -> tuple[float, int]:
    """Steps a second of episodes until there are so many, and how many; what is begun by then is left."""
    from headrace.rollout.v1 import rollout_pb2
    from headrace_robots.rollout.runner import EpisodeSample, Plan
    from headrace_rollout.engines.samples import SlotKey

    done, enough, loop = 0, asyncio.Event(), asyncio.get_running_loop()
    next_seed = iter(range(1 << 30))

    def begin(number: int) -> None:
        samples = []
        for _ in range(number):
            seed = next(next_seed)
            start = rollout_pb2.EpisodeStart(task=NAME, seed=seed)
            samples.append(EpisodeSample(SlotKey(seed, 0), 1, start))
        engine.submit(runner, 1, samples)

    def ended(found: Any) -> None:
        nonlocal done
        if found.episode is None:
            if found.failure:
                raise RuntimeError(found.failure)
            return
        done += found.episode.steps
        begin(1)
        if done >= steps:
            enough.set()

    def failed(error: Exception) -> None:
        loop.call_exception_handler({"message": "a stream failed", "exception": error})

    plan = Plan(1, 0, engine.environment, engine.views, ended, failed, lambda pool: None, lambda: True)
    runner = engine.run_episodes(plan, [pool])
    began = time.perf_counter()
    begin(4 * COUNT)  # as groups wait in a stream
    async with asyncio.timeout(600):
        await enough.wait()
    seconds = time.perf_counter() - began
    await engine.leave(runner)
    return done / seconds, done


def cpu_s(simulator: psutil.Process) -> tuple[float, float, float]:
    """CPU seconds of this process, of the simulator service, and of its children."""
    children = sum(sum(each.cpu_times()[:2]) for each in simulator.children())
    return time.process_time(), sum(simulator.cpu_times()[:2]), children


if __name__ == "__main__":
    main()
