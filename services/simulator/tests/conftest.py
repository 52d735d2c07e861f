"""A real simulator instance on a free port with real children, and short ways to speak to it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.process.local import nearest
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor
from headrace_simulator.__main__ import mount

sys.path.insert(0, str(Path(__file__).resolve().parent))

COUNTED = (simulator_pb2.OUTCOME_STATUS_OK, simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST)

# What a test needs of an environment: it counts its steps, and does as its action says.
TEST_ENVIRONMENT = """
import os
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"]}
    action_space = spaces.Box(-10.0, 10.0, (2,), np.float32)

    def __init__(self, ends_at=1000, picture=True):
        self.observation_space = spaces.Dict(
            {
                "steps": spaces.Box(0, 1000, (), np.int64),
                "camera": spaces.Dict({"rgb.front": spaces.Box(0, 255, (4, 6, 3), np.uint8)}),
                "start": spaces.Box(-np.inf, np.inf, (1,), np.float64),
            }
        )
        self.ends_at, self.picture, self.steps, self.start = ends_at, picture, 0, 0.0

    def observe(self):
        image = np.full((4, 6, 3), self.steps % 256, np.uint8)
        return {"steps": self.steps, "camera": {"rgb.front": image}, "start": np.array([self.start])}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        print("noise on stdout")
        if (options or {}).get("hang"):
            time.sleep(60)
        self.steps, self.start = 0, float(self.np_random.random())
        return self.observe(), {"pid": os.getpid(), "options": str(options)}

    def step(self, action):
        what = int(round(float(action[0])))
        if what == 9:
            time.sleep(60)
        if what == 4:
            time.sleep(0.5)
        if what == 8:
            raise RuntimeError("the gripper fell off")
        if what == 7:
            os._exit(7)
        self.steps += 1
        reward = float("nan") if what == 6 else float(action[1])
        info = {"is_success": what == 5, "depth": np.float32(0.5)}
        info |= {"nothing": np.zeros(3), "bad": float("inf")}
        return self.observe(), reward, self.steps >= self.ends_at, False, info

    def render(self):
        return np.full((8, 8, 3), self.steps, np.uint8) if self.picture else None


class Text(gymnasium.Env):
    observation_space = spaces.Text(5)
    action_space = spaces.Discrete(2)


class Many(gymnasium.Env):
    observation_space = spaces.Discrete(5)
    action_space = spaces.Sequence(spaces.Discrete(2))


make_env, make_text, make_many = Counter, Text, Many


def make_broken():
    raise ValueError("no robot today")
"""


def unreachable():
    raise AssertionError("the socket was not reached")


@dataclass
class PoolClient:
    """One open pool; counts the step index of each environment."""

    stub: simulator_pb2_grpc.SimulatorServiceStub
    opened: simulator_pb2.OpenPoolResponse
    header: common_pb2.CommandHeader
    next_index: dict[int, int] = field(default_factory=dict)
    locally: bool = False
    """Whether streams go over the socket."""

    async def stream(self):
        """A stream of its own; one over the socket that cannot be joined is an error."""
        if not self.locally:
            return self.stub.Step(timeout=300)
        offer = self.stub.StepLocally(simulator_pb2.StepLocallyRequest(pool=self.opened.pool), timeout=300)
        return await nearest(offer, unreachable, simulator_pb2.StepResponse.FromString)

    def request(self, *operations, **fields) -> simulator_pb2.StepRequest:
        names = {"pool": self.opened.pool, "pool_incarnation": self.opened.pool_incarnation, **fields}
        return simulator_pb2.StepRequest(header=self.header, operations=operations, **names)

    async def send(self, *operations) -> dict[int, simulator_pb2.EnvironmentOutcome]:
        """Sends operations in one message; outcomes by environment."""
        call = await self.stream()
        await call.write(self.request(*operations))
        await call.done_writing()
        outcomes = {}
        while (response := await call.read()) is not grpc.aio.EOF:
            for outcome in response.outcomes:
                outcomes[outcome.environment] = outcome
                if outcome.status in COUNTED:
                    self.next_index[outcome.environment] = outcome.step_index + 1
        return outcomes

    def reset_operation(self, environment=0, *, index=None, options=None, **fields):
        text = json.dumps(options) if options else ""
        reset = simulator_pb2.ResetOperation(options_json=text, **fields)
        index = self.next_index.get(environment, 0) if index is None else index
        return simulator_pb2.EnvironmentOperation(environment=environment, step_index=index, reset=reset)

    def action_operation(self, action, environment=0, *, index=None):
        index = self.next_index.get(environment, 0) if index is None else index
        tensor = encode_tensor(np.asarray(action))
        return simulator_pb2.EnvironmentOperation(environment=environment, step_index=index, action=tensor)

    def chunk_operation(self, actions, environment=0, *, index=None):
        index = self.next_index.get(environment, 0) if index is None else index
        tensor = encode_tensor(np.asarray(actions))
        return simulator_pb2.EnvironmentOperation(
            environment=environment, step_index=index, action_chunk=tensor
        )

    async def act_chunk(self, actions, environment=0, **fields):
        return (await self.send(self.chunk_operation(actions, environment, **fields)))[environment]

    async def reset(self, environment=0, **fields):
        return (await self.send(self.reset_operation(environment, **fields)))[environment]

    async def say(self, content, environment=0, *, index=None):
        index = self.next_index.get(environment, 0) if index is None else index
        turn = simulator_pb2.AssistantTurn(content=content)
        operation = simulator_pb2.EnvironmentOperation(environment=environment, step_index=index, turn=turn)
        return (await self.send(operation))[environment]

    async def wait_for_agent(self, seconds, environment=0, *, kill=False):
        waits = simulator_pb2.AwaitAgent(kill=kill)
        waits.wait.FromNanoseconds(int(seconds * 1e9))
        index = self.next_index.get(environment, 0)
        operation = simulator_pb2.EnvironmentOperation(
            environment=environment, step_index=index, await_agent=waits
        )
        return (await self.send(operation))[environment]

    async def act(self, action, environment=0, **fields):
        return (await self.send(self.action_operation(action, environment, **fields)))[environment]


@dataclass
class SimulatorClient:
    """Speaks to one instance."""

    stub: simulator_pb2_grpc.SimulatorServiceStub
    requests: count = field(default_factory=count)
    locally: bool = False

    def header(self, request_id="", epoch=1, lease_epoch=0) -> common_pb2.CommandHeader:
        request_id = request_id or f"request-{next(self.requests)}"
        return common_pb2.CommandHeader(
            request_id=request_id, run="runs/test", coordinator_epoch=epoch, lease_epoch=lease_epoch
        )

    async def open(
        self, name, *, request_id="", backend="gymnasium", options=None, step_timeout_s=5.0, **fields
    ):
        """Opens a pool of one environment, or of `count`."""
        header = self.header(request_id, lease_epoch=fields.pop("lease_epoch", 0))
        timeout = duration_pb2.Duration()
        timeout.FromNanoseconds(int(step_timeout_s * 1e9))
        request = simulator_pb2.OpenPoolRequest(
            header=header,
            environment=simulator_pb2.Environment(backend=backend, name=name),
            count=fields.pop("count", 1),
            options_json=json.dumps(options) if options is not None else "",
            step_timeout=timeout,
            **fields,
        )
        opened = await self.stub.OpenPool(request, timeout=300)
        return PoolClient(self.stub, opened, header, locally=self.locally)


@pytest.fixture
def tmp_path(tmp_path):
    """Open to all, below a closed one: users' code, which is another user where this is root, may write here."""
    tmp_path.chmod(0o777)
    return tmp_path


def write_world(directory: Path) -> None:
    """A world model of random weights, of states and actions like a pendulum's."""
    from headrace_robots.world.model import CONFIG, WEIGHTS, Space, WorldConfig, described
    from safetensors.numpy import save_file

    space = Space(dtype="float32", shape=(3,), low=(-1.0, -1.0, -8.0), high=(1.0, 1.0, 8.0))
    config = WorldConfig(
        number=1,
        backend="gymnasium",
        task="Pendulum-v1",
        observations=(space,),
        action=Space(dtype="float32", shape=(1,), low=(-2.0,), high=(2.0,)),
        members=3,
        hidden=8,
        terminates=False,
        longest=200,
        threshold=1e6,
        data={"episodes": 2},
        errors={},
    )
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape) * 0.3 for name, shape in config.shapes().items()}
    tensors |= {
        "input_std": np.ones(4),
        "output_std": np.full(4, 0.1),
        "starts": random.uniform(-1, 1, (64, 3)),
    }
    tensors = {name: each.astype(np.float32) for name, each in tensors.items()}
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(described(config))
    save_file(tensors | {"first": np.arange(64, dtype=np.uint8) % 32 == 0}, directory / WEIGHTS)


@pytest.fixture
def environment_file(tmp_path) -> str:
    """The name of the test environment's file."""
    (tmp_path / "robots.py").write_text(TEST_ENVIRONMENT)
    return "robots.py"


@pytest.fixture
def reset_timeout_s() -> float:
    """Limit of a reset; a module whose resets take longer overrides it."""
    return 1.0


@pytest.fixture
async def instance(tmp_path, monkeypatch, reset_timeout_s):
    """A stand-alone instance, started in the test's own directory; at most two processes a pool."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_SIMULATOR_CHILDREN", "2")
    monkeypatch.setenv("HEADRACE_SIMULATOR_ENVIRONMENTS", "32")
    monkeypatch.setenv("HEADRACE_SIMULATOR_RESET_TIMEOUT_S", str(reset_timeout_s))
    monkeypatch.setenv("HEADRACE_SIMULATOR_GATHER_S", "0.3")
    if os.environ.get("BACKEND_UNDER_TEST") == "robot":
        file = Path(__file__).parents[3] / "examples/robots/stand_in.py"
        monkeypatch.setenv("HEADRACE_SIMULATOR_ROBOT", f"{file}:pendulum")
    if os.environ.get("BACKEND_UNDER_TEST") == "world":
        write_world(tmp_path / "worlds" / "pendulum")
    made = Instance(InstanceConfig(kind="simulator", shm_dir=tmp_path / "shm", data_dir=tmp_path / "data"))
    close = await mount(made)
    await made.start()
    yield made
    await close()
    await made.stop()


@pytest.fixture
def locally() -> bool:
    """Whether steps go over the socket; a module that asks both ways overrides it."""
    return False


@pytest.fixture
async def simulator(instance, locally):
    channel = dial(instance.address, token=None)
    yield SimulatorClient(simulator_pb2_grpc.SimulatorServiceStub(channel), locally=locally)
    await channel.close()


@pytest.fixture
def arrays():
    """Observation arrays of an outcome, by name."""

    def decode(outcome) -> dict[str, np.ndarray]:
        return {name: decode_tensor(each, max_bytes=1 << 20) for name, each in outcome.observation.items()}

    return decode
