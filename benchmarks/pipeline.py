"""How much of the time that simulating and acting could share they do share: a rollout's alternating parts.

`python benchmarks/pipeline.py`. A rollout instance runs episodes of Pendulum in a real simulator
(`python -m headrace_simulator`, one child process, so that simulator and policy have a core each) with a policy that
costs about as much as the simulator: the physics of a step is repeated until it does. With one part they take turns,
with two they overlap. The least time there is, is that of the longer one alone: the policy's with two parts, or the
simulator's with one. Both settings take turns; the share is the median of the rounds.

Prints one JSON line: `overlap_share` is (one part - two parts) / (one part - least), and the seconds it comes from.
Other work on the machine takes the second core away: measure on an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _harness import emit, free_port, machine, say

GOAL = 0.8
RUN = "runs/pipeline"
LIMIT_S = 300.0
STATE, BOUND = 3, 2.0

ENVIRONMENT = """
import time

from gymnasium.envs.classic_control.pendulum import PendulumEnv


class Repeated(PendulumEnv):
    def __init__(self, repeats, wait):
        super().__init__()
        self.repeats, self.wait = repeats, wait

    def step(self, action):
        if self.wait:
            time.sleep(1e-5 * self.repeats)
            return super().step(action)
        for _ in range(self.repeats - 1):
            super().step(action)
        return super().step(action)


make_env = Repeated
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, default=16, help="environments of the pool")
    parser.add_argument("--steps", type=int, default=200, help="steps of an episode")
    parser.add_argument("--hidden", type=int, default=2048, help="units of each of the policy's two layers")
    parser.add_argument(
        "--wait", action="store_true", help="a step waits, as for a robot or a GPU, and needs no core"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each setting")
    options = parser.parse_args()
    say(machine())
    figures = asyncio.run(measure(options))
    share = figures["overlap_share"]
    say(
        "no round shows an overlap: the machine is busy" if share is None else f"{share:.0%}, goal {GOAL:.0%}"
    )
    emit("pipeline", figures)


async def measure(options: argparse.Namespace) -> dict[str, float | None]:
    """The figures of all rounds."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        with simulator(Path(folder)) as address:
            few, many = [
                await Setting(address, Path(folder), options, repeats).seconds(1) for repeats in (1, 41)
            ]
            each = (many.simulator - few.simulator) / 40
            repeats = max(1, round(1 + (many.policy - few.simulator) / max(each, 1e-9)))
            say(f"the physics of a step is repeated {repeats} times")
            setting = Setting(address, Path(folder), options, repeats)
            rounds = [(await setting.seconds(1), await setting.seconds(2)) for _ in range(options.rounds)]
    shares = []
    for one, two in rounds:
        least = max(two.policy, one.simulator)
        if one.total > least:  # else something else held a core, and the round says nothing
            shares.append((one.total - two.total) / (one.total - least))
        say(
            f"one part {one.total:.2f} s (policy {one.policy:.2f}), two {two.total:.2f} s, least {least:.2f} s"
        )
    return {
        "overlap_share": median(shares) if shares else None,
        "one_part_s": median(one.total for one, _ in rounds),
        "two_parts_s": median(two.total for _, two in rounds),
        "policy_s": median(one.policy for one, _ in rounds),
    }


@contextmanager
def simulator(folder: Path) -> Iterator[str]:
    """The address of a simulator in a process of its own."""
    (folder / "robots.py").write_text(ENVIRONMENT)
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "headrace_simulator",
        "--listen",
        address,
        "--shm-dir",
        str(folder / "shm"),
    ]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        process.terminate()
        process.wait(30)


class Seconds:
    """Of all episodes, and of those the policy's."""

    def __init__(self, total: float, policy: float) -> None:
        self.total, self.policy = total, policy

    @property
    def simulator(self) -> float:
        """Those of everything else, where one waited for the other."""
        return self.total - self.policy


class Setting:
    """A pool and a policy; each measurement is a run of its own, after an episode in every environment to warm up."""

    def __init__(self, address: str, folder: Path, options: argparse.Namespace, repeats: int) -> None:
        self._address, self._folder, self._options, self._repeats = address, folder, options, repeats

    async def seconds(self, parts: int) -> Seconds:
        """The time of one episode in every environment, in so many alternating parts."""
        async with self._rollout() as (instance, stub), self._pool() as pool:
            await self._open(stub, parts)
            await self._episodes(stub, pool, attempt=1)
            figures = instance.on_grant.__self__._run.engine.figures
            before, began = figures.policy_s, time.perf_counter()
            await self._episodes(stub, pool, attempt=2)
            return Seconds(time.perf_counter() - began, figures.policy_s - before)

    @asynccontextmanager
    async def _rollout(self) -> AsyncIterator[tuple[Any, Any]]:
        from headrace.rollout.v1 import rollout_pb2_grpc
        from headrace_rollout.__main__ import mount
        from headrace_servicekit.instance import Instance, InstanceConfig
        from headrace_servicekit.rpc.client import dial

        instance = Instance(InstanceConfig(kind="rollout", shm_dir=self._folder / "shm", devices=("cpu:0",)))
        close = await mount(instance)
        address = await instance.start()
        instance.fence.grant(1)
        async with dial(address, token=None) as channel:
            yield instance, rollout_pb2_grpc.RolloutServiceStub(channel)
        await close()
        await instance.stop(2.0)

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[Any]:
        from headrace.rollout.v1 import rollout_pb2
        from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
        from headrace_servicekit.rpc.client import dial

        header = _header(request_id=f"{time.time_ns()}", lease_epoch=0)
        async with dial(self._address, token=None) as channel:
            stub = simulator_pb2_grpc.SimulatorServiceStub(channel)
            request = simulator_pb2.OpenPoolRequest(
                header=header,
                environment=simulator_pb2.Environment(backend="gymnasium", name="robots.py:make_env"),
                count=self._options.environments,
                options_json=json.dumps({"repeats": self._repeats, "wait": self._options.wait}),
                max_episode_steps=self._options.steps,
                processes=1,
            )
            opened = await stub.OpenPool(request, timeout=LIMIT_S, wait_for_ready=True)
            yield rollout_pb2.EnvironmentPool(
                address=self._address,
                header=header,
                pool=opened.pool,
                pool_incarnation=opened.pool_incarnation,
                count=self._options.environments,
                task="pendulum",
            )
            await stub.ClosePool(simulator_pb2.ClosePoolRequest(header=header, pool=opened.pool))

    async def _open(self, stub: Any, parts: int) -> None:
        from headrace.rollout.v1 import rollout_pb2

        policy = {
            "kind": "mlp",
            "bounds": {"low": [-BOUND], "high": [BOUND]},
            "state_size": STATE,
            "hidden": [self._options.hidden] * 2,
        }
        environment = {"backend": "gymnasium", "tasks": ["pendulum"], "alternating": parts}
        config = json.dumps({"model": {"policy": policy}, "environment": environment, "seed": 1})
        await stub.OpenRun(rollout_pb2.OpenRunRequest(header=_header(), config_json=config))
        install = rollout_pb2.InstallPolicyRequest(header=_header(), files=rollout_pb2.PolicyFiles())
        install.version.number = 1
        await stub.InstallPolicy(install)

    async def _episodes(self, stub: Any, pool: Any, attempt: int) -> None:
        from headrace.rollout.v1 import rollout_pb2

        call = stub.RunEpisodes(timeout=LIMIT_S)
        opening = rollout_pb2.RunEpisodesOpen(
            header=_header(), policy_number=1, seed=1, pools=[pool], evaluation=True
        )
        await call.write(rollout_pb2.RunEpisodesRequest(open=opening))
        groups = [
            rollout_pb2.GroupAssignment(
                prompt_ordinal=seed,
                prompt=rollout_pb2.Prompt(episode=rollout_pb2.EpisodeStart(task="pendulum", seed=seed)),
                samples=[rollout_pb2.SampleAssignment(attempt=attempt)],
            )
            for seed in range(self._options.environments)
        ]
        await call.write(rollout_pb2.RunEpisodesRequest(assign=rollout_pb2.AssignGroups(groups=groups)))
        await call.done_writing()
        ended = 0
        async for response in call:
            ended += len(response.chunks)
        if ended != self._options.environments:
            raise RuntimeError(f"{ended} of {self._options.environments} episodes ended")


def _header(*, request_id: str = "", lease_epoch: int = 1) -> Any:
    from headrace.common.v1 import common_pb2

    return common_pb2.CommandHeader(
        run=RUN, coordinator_epoch=1, request_id=request_id, lease_epoch=lease_epoch
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
