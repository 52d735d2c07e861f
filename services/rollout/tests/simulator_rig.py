"""Real simulators, and pools of environments at them."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.rpc.addresses import free_port
from headrace_servicekit.rpc.client import dial
from rollout_calls import RUN

WAIT_S = 120.0
# Walks by what it is told; what it is told beyond 5 is a fault.
ROBOTS = """
import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Walker(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Box(-10.0, 10.0, (2,), np.float32)

    def __init__(self, goal=1.0, ends_at=1000, image=0, step_s=0.0, says=True):
        self.goal, self.ends_at, self.image, self.step_s, self.says = goal, ends_at, image, step_s, says
        shown = {"place": spaces.Box(-np.inf, np.inf, (2,), np.float64), "steps": spaces.Box(0, 1000, (1,), np.int64)}
        if image:
            shown["front"] = spaces.Box(0, 255, (image, image, 3), np.uint8)
        self.observation_space = spaces.Dict(shown)

    def observe(self):
        shown = {"place": self.place.copy(), "steps": np.array([self.steps])}
        if self.image:
            shown["front"] = np.full((self.image, self.image, 3), self.steps % 256, np.uint8)
        return shown

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps, self.place = seed, 0, self.np_random.random(2)
        return self.observe(), {}

    def step(self, action):
        time.sleep(self.step_s)
        if self.seed == 666 and self.steps == 2:
            os._exit(7)
        self.steps += 1
        self.place = self.place + action
        if self.seed in (667, 668) and self.steps == 2:
            self.place[1] = np.nan if self.seed == 667 else -np.inf
        reached = bool(self.steps >= self.goal)
        said = {"success": reached} if self.says else {}
        return self.observe(), float(self.steps), self.steps >= self.ends_at, False, said

    def render(self):
        return np.full((8, 8, 3), self.steps, np.uint8)


make_env = Walker
"""
SIMULATOR_HEADER = common_pb2.CommandHeader(run=RUN, coordinator_epoch=1, open_id=1)


# A simulator that dies with half of an answer written to the socket of its host.
HALF = """
import os
import signal

from headrace_servicekit.process.local import LocalStream, frame

whole, answers = LocalStream.write, iter(range({answers}))


async def write(self, body):
    if len(body) == 16 or next(answers, None) is not None:  # 16: the ticket
        return await whole(self, body)
    half = frame(body)[: 4 + len(body) // 2]
    assert os.write(self._writer.get_extra_info("socket").fileno(), half) == len(half)
    os.kill(os.getpid(), signal.SIGKILL)


LocalStream.write = write
"""


class SimulatorProcess:
    """`python -m headrace_simulator` in a directory of its own, with the environments of ROBOTS in robots.py.

    It ends with half of its answer after so many `answers`, if given.
    """

    def __init__(self, directory: Path, *, answers: int | None = None) -> None:
        self.shm_dir = directory / "shm"
        (directory / "robots.py").write_text(ROBOTS)
        self.address = f"127.0.0.1:{free_port()}"
        run = "import runpy; runpy.run_module('headrace_simulator', run_name='__main__', alter_sys=True)"
        dies = HALF.format(answers=answers) if answers is not None else ""
        command = [sys.executable, "-c", f"{dies}\n{run}", "--listen", self.address]
        command += ["--shm-dir", str(self.shm_dir), "--data-dir", str(directory / "data")]
        self._process = subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL)

    def ended(self) -> int:
        """What it ended with."""
        return self._process.wait(30)

    def kill(self) -> None:
        """Ends it as a crash does."""
        self._process.kill()
        self._process.wait(30)


async def open_pool(
    address,
    name="Pendulum-v1",
    *,
    count=4,
    options=None,
    task="",
    backend="gymnasium",
    step_timeout_s=20,
    **fields,
):
    """Opens a pool at a simulator, as the coordinator does."""
    async with dial(address, token=None) as channel:
        header = common_pb2.CommandHeader()
        header.CopyFrom(SIMULATOR_HEADER)
        header.request_id = uuid.uuid4().hex
        request = simulator_pb2.OpenPoolRequest(
            header=header,
            environment=simulator_pb2.Environment(backend=backend, name=name),
            count=count,
            options_json=json.dumps(options or {}),
            step_timeout=duration_pb2.Duration(seconds=step_timeout_s),
            **{"max_episode_steps": 12, "processes": 2, **fields},
        )
        opened = await simulator_pb2_grpc.SimulatorServiceStub(channel).OpenPool(
            request, timeout=WAIT_S, wait_for_ready=True
        )
    return rollout_pb2.EnvironmentPool(
        address=address,
        header=SIMULATOR_HEADER,
        pool=opened.pool,
        pool_incarnation=opened.pool_incarnation,
        count=count,
        task=task or name,
    )
