"""Environment steps a second through the simulator service, beside gymnasium's AsyncVectorEnv.

`python benchmarks/simulator_overhead.py`, in an environment that holds the simulator: `make simulators SIM=maniskill`,
then `.envs/maniskill/bin/python benchmarks/simulator_overhead.py --only maniskill_state`. Both sides run the same
environments with the same seeds and actions, one environment a process, and give every observation to the caller as
an array. The service is `python -m headrace_simulator` on loopback; a client sends all actions of a step in one
message and waits for all outcomes, as a policy would. Both take turns; the ratio is the median of the rounds.
A message costs the same for one environment as for many, so the ratio rises with their number: state is compared for
one environment a core, and for four, of which runs have at least as many.

Prints one JSON line: `gym_state`, `maniskill_state` and `pixels` are the ratios (service over AsyncVectorEnv; pixels
are those of Meta-World where it is installed, else of ManiSkill), null for what this environment cannot run, and the
steps a second that they come from. They are of the most environments that were tried, pixels of the fewest;
`..._at_N` are the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _harness import emit, free_port, machine, say, table

GOALS = {"gym_state": 0.5, "maniskill_state": 0.8, "pixels": 0.95}
BLOB_BYTES = 96 * 1024
"""As runs ask: smaller pictures stay in the message."""
LIMIT_S = 300.0


@dataclass(frozen=True)
class Setting:
    """Environments to compare; `steps` are those of one environment in one measured round."""

    backend: str
    name: str
    steps: int
    options: dict[str, Any] = field(default_factory=dict)
    blob_bytes: int = BLOB_BYTES


def settings() -> dict[str, Setting]:
    """What this environment can run, by figure."""
    found = {"gym_state": Setting("gymnasium", "Pendulum-v1", 2000)}
    if find_spec("metaworld"):
        found["gym_state"] = Setting("metaworld", "reach-v3", 600)
        found["pixels"] = Setting("metaworld", "reach-v3", 30, {"image_size": 128})
    if find_spec("mani_skill"):
        found["maniskill_state"] = Setting("maniskill", "PushCube-v1", 300)
        images = {"obs_mode": "rgb", "sensor_configs": {"width": 128, "height": 128}}
        found.setdefault("pixels", Setting("maniskill", "PushCube-v1", 60, images))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = max(2, os.cpu_count() or 1)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[cores, 4 * cores], help="numbers of environments"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the steps of a round")
    parser.add_argument("--only", choices=[*GOALS], help="one figure alone")
    options = parser.parse_args()
    say(machine())
    figures: dict[str, float | None] = dict.fromkeys(GOALS)
    rows = []
    for figure, setting in settings().items():
        if options.only not in (None, figure):
            continue
        tried = sorted(set(options.processes))
        for processes in tried[:1] if figure == "pixels" else tried:
            steps = max(5, int(setting.steps * options.scale * tried[0] / processes))
            ratio, rates = compare(setting, processes, steps, options.rounds)
            name = figure if figure == "pixels" or processes == tried[-1] else f"{figure}_at_{processes}"
            figures |= {name: ratio, **{f"{name}_{side}_steps_per_s": rate for side, rate in rates.items()}}
            rows.append([setting.name, processes, rates["service"], rates["vector"], ratio, GOALS[figure]])
    table(["environment", "of them", "service", "AsyncVectorEnv", "ratio", "goal"], rows)
    say(f"at the end: {machine()}")
    emit("simulator_overhead", figures)


def compare(setting: Setting, processes: int, steps: int, rounds: int) -> tuple[float, dict[str, float]]:
    """Median ratio, and median steps a second of each side; the sides take turns."""
    rates: dict[str, list[float]] = {"service": [], "vector": []}
    with vector(setting, processes) as other, service(setting, processes) as ours:
        for number in range(rounds + 1):
            sides = [("service", ours), ("vector", other)]
            for side, run in sides if number % 2 else reversed(sides):
                seconds = run(steps)
                if number:  # the first round warms up
                    rates[side].append(processes * steps / seconds)
    ratio = median(a / b for a, b in zip(rates["service"], rates["vector"], strict=True))
    return ratio, {side: median(found) for side, found in rates.items()}


def actions_of(space: Any, processes: int, steps: int) -> np.ndarray:
    """The same random actions for both sides, (steps, environments, action shape)."""
    random = np.random.default_rng(0)
    return random.uniform(space.low, space.high, (steps, processes, *space.shape)).astype(space.dtype)


@contextmanager
def vector(setting: Setting, processes: int) -> Iterator[Callable[[int], float]]:
    """AsyncVectorEnv over the backend's own environments: seconds of a round."""
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    makers = [partial(plain_environment, setting) for _ in range(processes)]
    envs = AsyncVectorEnv(makers, context="forkserver", autoreset_mode=AutoresetMode.DISABLED)

    def run(steps: int) -> float:
        actions = actions_of(envs.single_action_space, processes, steps)
        envs.reset(seed=list(range(processes)))
        began = time.perf_counter()
        for action in actions:
            envs.step(action)
        return time.perf_counter() - began

    try:
        yield run
    finally:
        envs.close()


def plain_environment(setting: Setting) -> Any:
    """A gymnasium.Env over the same simulator calls as the backend's, without service or child."""
    import gymnasium
    from gymnasium import spaces
    from headrace_simulator import backends

    backend: Any = backends.create(setting.backend)  # of one that acts
    made = backend.make(setting.name, setting.options, own_time_limit=False, dense=False)

    class Plain(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            boxes: dict[str, spaces.Space[Any]] = {
                space.name or "state": spaces.Box(-np.inf, np.inf, space.shape, space.dtype.type)
                if space.dtype.kind == "f"
                else spaces.Box(0, 255, space.shape, space.dtype.type)
                for space in made.observation_spaces
            }
            self.observation_space = spaces.Dict(boxes)
            action = made.action_space
            low, high = action.low, action.high
            self.action_space = spaces.Box(np.asarray(low), np.asarray(high), action.shape, action.dtype.type)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            observation, _ = made.reset(seed, {}, None)
            return {name or "state": array for name, array in observation.items()}, {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            done = made.step(action)
            observation = {name or "state": array for name, array in done.observation.items()}
            return observation, done.reward, False, False, {}

    return Plain()


@contextmanager
def service(setting: Setting, processes: int) -> Iterator[Callable[[int], float]]:
    """The real service in a process of its own: seconds of a round."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-", dir=shared) as folder:
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headrace_simulator", "--listen", address, "--shm-dir", folder]
        environment = {**os.environ, "HEADRACE_SIMULATOR_OPEN_TIMEOUT_S": str(LIMIT_S)}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        loop = asyncio.new_event_loop()
        try:
            client = loop.run_until_complete(Client.open(address, Path(folder), setting, processes))
            yield lambda steps: loop.run_until_complete(client.run(steps))
            loop.run_until_complete(client.close())
        finally:
            loop.close()
            process.terminate()
            process.wait(30)


class Client:
    """One stream to a pool, over the socket as of a rollout on its host; every observation becomes an array."""

    def __init__(self, channel: Any, stub: Any, pool: Any, header: Any, folder: Path, processes: int) -> None:
        from headrace_servicekit.memory.blobs import BlobReader
        from headrace_simulator.spaces import from_message

        self._channel, self._stub, self._pool, self._header = channel, stub, pool, header
        self._processes = processes
        self._space = from_message(pool.action_space)
        self._reader = BlobReader(folder, None)
        self._index = 0

    @classmethod
    async def open(cls, address: str, folder: Path, setting: Setting, processes: int) -> Client:
        """Waits for the service and opens the pool."""
        import json

        from headrace.common.v1 import common_pb2
        from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
        from headrace_servicekit.rpc.client import dial

        channel = dial(address, token=None)
        stub = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        header = common_pb2.CommandHeader(request_id="benchmark", run="runs/benchmark")
        request = simulator_pb2.OpenPoolRequest(
            header=header,
            environment=simulator_pb2.Environment(backend=setting.backend, name=setting.name),
            count=processes,
            processes=processes,
            options_json=json.dumps(setting.options),
            max_episode_steps=1 << 30,
            blob_bytes=setting.blob_bytes,
            without_info=True,  # as runs ask, and as the other side has none
        )
        pool = await stub.OpenPool(request, timeout=LIMIT_S, wait_for_ready=True)
        return cls(channel, stub, pool, header, folder, processes)

    async def run(self, steps: int) -> float:
        """Seconds of a round, resets not counted."""
        from headrace.simulator.v1 import simulator_pb2
        from headrace_servicekit.rpc.tensors import encode_tensor

        call = await self._opened()
        await self._exchange(
            call, [{"reset": simulator_pb2.ResetOperation(seed=i)} for i in range(self._processes)]
        )
        actions = actions_of(self._space, self._processes, steps)
        began = time.perf_counter()
        for row in actions:
            await self._exchange(call, [{"action": encode_tensor(action)} for action in row])
        seconds = time.perf_counter() - began
        await call.done_writing()
        return seconds

    async def _opened(self) -> Any:
        """The stream that a rollout takes."""
        from headrace.simulator.v1 import simulator_pb2
        from headrace_servicekit.process.local import nearest

        request = simulator_pb2.StepLocallyRequest(pool=self._pool.pool)
        offer = self._stub.StepLocally(request, timeout=LIMIT_S)
        return await nearest(offer, self._stub.Step, simulator_pb2.StepResponse.FromString)

    async def close(self) -> None:
        """Closes the channel."""
        await self._reader.close()
        await self._channel.close(None)

    async def _exchange(self, call: Any, operations: list[dict[str, Any]]) -> None:
        from headrace.simulator.v1 import simulator_pb2

        request = simulator_pb2.StepRequest(
            pool=self._pool.pool, pool_incarnation=self._pool.pool_incarnation
        )
        if self._index == 0 or "reset" in operations[0]:
            request.header.CopyFrom(self._header)
        for environment, operation in enumerate(operations):
            request.operations.add(environment=environment, step_index=self._index, **operation)
        self._index += 1
        await call.write(request)
        left = self._processes
        while left:
            for outcome in (await call.read()).outcomes:
                if outcome.status != simulator_pb2.OUTCOME_STATUS_OK:
                    raise RuntimeError(f"environment {outcome.environment}: {outcome.detail}")
                for tensor in outcome.observation.values():
                    await self._array(tensor)
                left -= 1

    async def _array(self, tensor: Any) -> np.ndarray:
        from headrace_servicekit.rpc.tensors import NUMPY_TYPES

        data = await self._reader.read(tensor.blob) if tensor.WhichOneof("body") == "blob" else tensor.data
        return np.frombuffer(data, NUMPY_TYPES[tensor.data_type]).reshape(tuple(tensor.shape))


if __name__ == "__main__":
    main()
