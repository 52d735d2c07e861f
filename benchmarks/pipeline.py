"""How much of the time that simulating and acting could share they do share: a rollout's alternating parts.

`python benchmarks/pipeline.py`: two minutes, for a machine with two cores that does nothing else. A rollout instance
runs episodes with pictures in a real simulator (`python -m headrace_simulator`, one child process) with a policy of
convolutions, whose cost grows with the rows; the physics of a step is repeated until it costs about as much. With one
part they take turns, with two they overlap. Both are open from the begin to the end and take turns, one episode in
every environment each.

The least time there is follows from what the round with one part used: the policy's seconds, the processor seconds of
the environments' process, or half of all processor seconds (policy, environments, both services, on two cores),
whichever is the longest. Nothing else may then cost time: that is the bound, not what a program can reach.

Prints one JSON line: `overlap_share` is (one part - two parts) / (one part - least), the median of the rounds, with
`overlap_share_least` and `_most` of them; the seconds it comes from; and `waited_share`, the part of the time for which
our processes were ready and others had the core: above 0.1 the figures say little.
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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from _harness import CoreUse, emit, free_port, machine, say, table

GOAL = 0.8
CORES = 2
DISTURBED = 0.1
RUN = "runs/pipeline"
LIMIT_S = 300.0
BOUND = 2.0
WAIT_S = 1e-5

ENVIRONMENT = """
import time

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.pendulum import PendulumEnv


class Repeated(PendulumEnv):
    def __init__(self, repeats, wait, pixels):
        super().__init__()
        self.repeats, self.wait = repeats, wait
        self.picture = np.random.default_rng(0).integers(0, 256, (pixels, pixels, 3), np.uint8)
        self.observation_space = spaces.Dict({"camera": spaces.Box(0, 255, self.picture.shape, np.uint8)})

    def seen(self):
        return {"camera": np.roll(self.picture, int(20 * self.state[0]), 0)}

    def step(self, action):
        if self.wait:
            time.sleep(self.wait * self.repeats)
        for _ in range(1 if self.wait else self.repeats):
            found = super().step(action)
        return self.seen(), *found[1:]

    def reset(self, **arguments):
        super().reset(**arguments)
        return self.seen(), {}


make_env = Repeated
"""


@dataclass(frozen=True)
class Round:
    """Seconds: of a round, the policy's, the environments' process's, of all processors, and waited for a core."""

    total: float
    policy: float
    environments: float
    used: float
    waited: float

    @property
    def least(self) -> float:
        """In which two cores could do this work."""
        return max(self.policy, self.environments, self.used / CORES)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, default=8, help="environments of the pool")
    parser.add_argument("--steps", type=int, default=30, help="steps of an episode")
    parser.add_argument("--pixels", type=int, default=256, help="height and width of a picture")
    parser.add_argument(
        "--wait", action="store_true", help="a step waits, as for a robot or a GPU, and needs no core"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of each setting")
    options = parser.parse_args()
    say(machine())
    figures = asyncio.run(measure(options))
    share = figures["overlap_share"]
    say("no round shows an overlap" if share is None else f"{share:.0%}, goal {GOAL:.0%}")
    say(f"at the end: {machine()}")
    emit("pipeline", figures)


async def measure(options: argparse.Namespace) -> dict[str, float | None]:
    """The figures of all rounds."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        service, address = stack.enter_context(simulator(folder))
        trial = await stack.enter_async_context(setting(folder, service, address, options, 1, 1))
        repeats = repeats_for(await trial.round(), options)
        say(f"the physics of a step is repeated {repeats} times")
        one, two = [
            await stack.enter_async_context(setting(folder, service, address, options, repeats, parts))
            for parts in (1, 2)
        ]
        pairs = [(await one.round(), await two.round()) for _ in range(options.rounds + 1)][1:]
    return figures_of(pairs)


def figures_of(pairs: Sequence[tuple[Round, Round]]) -> dict[str, float | None]:
    """The figures of pairs of rounds, with one part and with two."""
    shares, rows = list[float](), []
    for one, two in pairs:
        share = (one.total - two.total) / (one.total - one.least) if one.total > one.least else None
        shares += [share] if share is not None else []
        rows.append((one.total, two.total, one.least, one.policy, one.environments, one.used, share or "-"))
    table(["one part", "two", "least", "policy", "environments", "all cores", "share"], rows)
    waited = sum(each.waited for pair in pairs for each in pair) / sum(
        each.total for pair in pairs for each in pair
    )
    if waited > DISTURBED:
        say(f"other work had the cores for {waited:.0%} of the time: the figures say little")
    return {
        "overlap_share": median(shares) if shares else None,
        "overlap_share_least": min(shares, default=None),
        "overlap_share_most": max(shares, default=None),
        "one_part_s": median(one.total for one, _ in pairs),
        "two_parts_s": median(two.total for _, two in pairs),
        "least_s": median(one.least for one, _ in pairs),
        "policy_s": median(one.policy for one, _ in pairs),
        "environments_s": median(one.environments for one, _ in pairs),
        "waited_share": waited,
    }


def repeats_for(trial: Round, options: argparse.Namespace) -> int:
    """How often the physics of a step is repeated so that it costs what the policy's row does."""
    row_s: float = trial.policy / (options.environments * options.steps)
    if options.wait:
        return round(row_s / WAIT_S)
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    environment: Any = PendulumEnv()
    steps = 2000
    environment.reset(seed=0)
    action = environment.action_space.sample()
    began = time.process_time()
    for _ in range(steps):
        environment.step(action)
    return max(1, round(row_s * steps / (time.process_time() - began)))


@contextmanager
def simulator(folder: Path) -> Iterator[tuple[int, str]]:
    """Process and address of a simulator."""
    (folder / "robots.py").write_text(ENVIRONMENT)
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "headrace_simulator", "--listen", address]
    process = subprocess.Popen(
        [*command, "--shm-dir", str(folder / "shm")], cwd=folder, stderr=subprocess.DEVNULL
    )
    try:
        yield process.pid, address
    finally:
        process.terminate()
        process.wait(30)


@asynccontextmanager
async def setting(
    folder: Path, service: int, address: str, options: argparse.Namespace, repeats: int, parts: int
) -> AsyncIterator[Setting]:
    """A pool and a rollout that acts in it in so many parts, ready for rounds."""
    before = {child.pid for child in psutil.Process(service).children()}
    async with rollout(folder) as (instance, stub), open_pool(address, options, repeats) as pool:
        (child,) = {child.pid for child in psutil.Process(service).children()} - before
        slept_s = options.wait * WAIT_S * repeats * options.environments * options.steps
        made = Setting(instance, stub, pool, [os.getpid(), service], child, options, slept_s)
        await made.open(parts)
        await made.round()  # the first one warms up
        yield made


class Setting:
    """A pool and a policy; each round is one episode in every environment."""

    def __init__(
        self,
        instance: Any,
        stub: Any,
        pool: Any,
        services: list[int],
        child: int,
        options: argparse.Namespace,
        slept_s: float,
    ) -> None:
        self._instance, self._stub, self._pool = instance, stub, pool
        self._services, self._child, self._options = services, child, options
        self._attempt, self._slept_s = 0, slept_s

    async def open(self, parts: int) -> None:
        """The run, with its policy."""
        from headrace.rollout.v1 import rollout_pb2

        config = json.dumps(make_config(self._options.pixels, parts))
        await self._stub.OpenRun(rollout_pb2.OpenRunRequest(header=header(), config_json=config))
        install = rollout_pb2.InstallPolicyRequest(header=header(), files=rollout_pb2.PolicyFiles())
        install.version.number = 1
        await self._stub.InstallPolicy(install)

    async def round(self) -> Round:
        """One episode in every environment."""
        self._attempt += 1
        figures = self._instance.on_grant.__self__._run.engine.figures
        uses = [CoreUse(process) for process in (*self._services, self._child)]
        before, began = figures.policy_s, time.perf_counter()
        await self._episodes()
        total = time.perf_counter() - began
        for use in uses:
            use.look()
        return Round(
            total,
            min(figures.policy_s - before, uses[0].seconds[0]),  # what it waited for a core is no work
            max(uses[-1].seconds[0], self._slept_s),
            sum(use.seconds[0] for use in uses),
            sum(use.seconds[1] for use in uses),
        )

    async def _episodes(self) -> None:
        from headrace.rollout.v1 import rollout_pb2

        call = self._stub.RunEpisodes(timeout=LIMIT_S)
        opening = rollout_pb2.RunEpisodesOpen(
            header=header(), policy_number=1, seed=1, pools=[self._pool], evaluation=True
        )
        await call.write(rollout_pb2.RunEpisodesRequest(open=opening))
        groups = [
            rollout_pb2.GroupAssignment(
                prompt_ordinal=seed,
                prompt=rollout_pb2.Prompt(episode=rollout_pb2.EpisodeStart(task="pendulum", seed=seed)),
                samples=[rollout_pb2.SampleAssignment(attempt=self._attempt)],
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


def make_config(pixels: int, parts: int) -> dict[str, Any]:
    """What the rollout is opened with."""
    policy = {
        "kind": "cnn",
        "cameras": ["camera"],
        "height": pixels,
        "width": pixels,
        "bounds": {"low": [-BOUND], "high": [BOUND]},
    }
    environment = {"backend": "gymnasium", "tasks": ["pendulum"], "alternating": parts}
    return {"model": {"policy": policy}, "environment": environment, "seed": 1}


@asynccontextmanager
async def rollout(folder: Path) -> AsyncIterator[tuple[Any, Any]]:
    """A rollout instance in this process, and a stub to it."""
    from headrace.rollout.v1 import rollout_pb2_grpc
    from headrace_rollout.__main__ import mount
    from headrace_servicekit.instance import Instance, InstanceConfig
    from headrace_servicekit.rpc.client import dial

    settings = {"kind": "rollout", "shm_dir": folder / "shm", "devices": ("cpu:0",)}
    instance = Instance(InstanceConfig.model_validate(settings))
    close = await mount(instance)
    address = await instance.start()
    instance.fence.grant(1)
    async with dial(address, token=None) as channel:
        yield instance, rollout_pb2_grpc.RolloutServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
    await close()
    await instance.stop(2.0)


@asynccontextmanager
async def open_pool(address: str, options: argparse.Namespace, repeats: int) -> AsyncIterator[Any]:
    """Environments in one child process."""
    from headrace.rollout.v1 import rollout_pb2
    from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
    from headrace_servicekit.rpc.client import dial

    head = header(request_id=f"{time.time_ns()}", lease_epoch=0)
    own = {"repeats": repeats, "wait": options.wait * WAIT_S, "pixels": options.pixels}
    async with dial(address, token=None) as channel:
        stub = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        request = simulator_pb2.OpenPoolRequest(
            header=head,
            environment=simulator_pb2.Environment(backend="gymnasium", name="robots.py:make_env"),
            count=options.environments,
            options_json=json.dumps(own),
            max_episode_steps=options.steps,
            processes=1,
        )
        opened = await stub.OpenPool(request, timeout=LIMIT_S, wait_for_ready=True)
        yield rollout_pb2.EnvironmentPool(
            address=address,
            header=head,
            pool=opened.pool,
            pool_incarnation=opened.pool_incarnation,
            count=options.environments,
            task="pendulum",
        )
        await stub.ClosePool(simulator_pb2.ClosePoolRequest(header=head, pool=opened.pool))


def header(*, request_id: str = "", lease_epoch: int = 1) -> Any:
    from headrace.common.v1 import common_pb2

    return common_pb2.CommandHeader(
        run=RUN, coordinator_epoch=1, request_id=request_id, lease_epoch=lease_epoch
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
