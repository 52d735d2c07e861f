"""A vision-language-action policy that acts: rollout and simulator services, beside a bare loop in one process.

`python benchmarks/vla.py`. The policy is an OpenVLA-OFT of few and small parts with random weights, whose passes take
most of the time, as those of a large one do; the environments draw pictures of 256 × 256 × 3 and cost little. Both
sides have one core and one thread, the same policy, environments, batch, start states and numbers of actions:

- bare: `policy.act` of all environments' pictures, then each environment executes its chunk, in this process;
- services: `RunEpisodes` at a rollout with its policy installed, and a simulator beside it, over gRPC: episodes are
  recorded, encoded and come back as trajectories, whose pictures stay in shared memory as the trainer finds them.

They take turns; `vla_rollout_vs_bare` is the median of the rounds' ratios of actions a second.

`images_copies` is the bytes of pictures that are copied between processes, a byte of picture made, counted where they
are written for another process and where they are read from one: environment's child, rollout (up to the batch that
the policy is given: `images_copies_to_batch`), the rollout's store of episodes, trainer. What a process copies within
its own memory is not in it: the batch and the episode's record are each put together once, and a policy on a GPU copies
the batch to it. Pictures are of 512 × 512, which go through shared memory, one host, one action at a time.

Prints one JSON line with these, the goals' among them, and what they come from. About two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
from _harness import emit, machine, say, table

sys.path.insert(0, str(Path(__file__).parents[1] / "integration_tests"))

ACTIONS, CHUNK, PIXELS, CHUNKS = 4, 5, 256, 8
"""Numbers of an action, actions of a chunk, pixels of a picture's side, chunks of an episode."""
LARGE = 512
TASK, INSTRUCTION = "push", "push the square to the edge"
LEASE = 5
WAIT_S = 300.0
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
STEPS = 32
ENVIRONMENT = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Square(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, size):
        self.size = size
        self.observation_space = spaces.Dict({"image": spaces.Box(0, 255, (size, size, 3), np.uint8)})

    def show(self):
        picture = np.full((self.size, self.size, 3), 40, np.uint8)
        row, column = (np.clip(self.place, 0, 1) * (self.size - 16)).astype(int)
        picture[row : row + 16, column : column + 16] = 220
        return {"image": picture}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random(2)
        return self.show(), {}

    def step(self, action):
        self.place = self.place + 0.05 * action[:2]
        return self.show(), 0.0, False, False, {"success": False}


make_env = Square
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parser.add_argument("--core", type=int, default=0, help="the one that all processes compute on")
    parser.add_argument("--only", choices=["copies", "rollout"])
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    os.environ["OMP_NUM_THREADS"] = "1"
    say(machine())
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-vla-", dir="/dev/shm") as folder:
        directory = Path(folder)
        (directory / "square.py").write_text(ENVIRONMENT)
        if options.only != "rollout":
            figures |= copies(directory)
        if options.only != "copies":
            figures |= rollout_and_bare(directory, options.environments, options.rounds, options.core)
    say(f"at the end: {machine()}")
    emit("vla", figures)


def rollout_and_bare(directory: Path, environments: int, rounds: int, core: int) -> dict[str, float]:
    """Both sides in turns."""
    import torch

    torch.set_num_threads(1)
    policy = _policy(directory / "policy")
    bare = Bare(policy, directory, environments)
    rates: dict[str, list[float]] = {"bare": [], "services": []}
    with ExitStack() as stack:
        services = Services(stack, directory, environments, core)
        for turn in range(rounds + 1):
            found = {"bare": bare.round(turn), "services": services.round(turn)}
            if turn:  # the first warms up
                for side, seconds in found.items():
                    rates[side].append(environments * CHUNKS * CHUNK / seconds)
    ratios = [ours / other for ours, other in zip(rates["services"], rates["bare"], strict=True)]
    found = {
        "vla_rollout_vs_bare": median(ratios),
        "vla_rollout_vs_bare_worst": min(ratios),
        "services_actions_per_s": median(rates["services"]),
        "bare_actions_per_s": median(rates["bare"]),
        "pass_ms": 1e3 * bare.pass_s,
        "environment_step_ms": 1e3 * bare.step_s,
    }
    table(["figure", "value"], [[name, value] for name, value in found.items()])
    return found


def _policy(directory: Path) -> Any:
    from headrace_robots.policies.directory import load_policy
    from headrace_robots.tiny import tiny_fields, write_tiny_robot

    fields = tiny_fields("openvla_oft", ACTIONS, chunk_length=CHUNK)
    fields["text"] |= {**WIDTHS, "num_attention_heads": 8, "num_key_value_heads": 8}
    for eye in fields["featurizers"]:
        eye |= {"width": 128, "mlp_width": 512, "depth": 4, "heads": 4, "image_size": 224}
    write_tiny_robot(directory, fields)
    return load_policy(directory)


class Bare:
    """The loop that one writes first: one batch for the policy, then one environment after the other."""

    def __init__(self, policy: Any, directory: Path, environments: int) -> None:
        from headrace_robots.policies.language import instruction_encoder

        self._policy = policy
        self._prompt = tuple(instruction_encoder(policy.config, str(directory / "policy"))(INSTRUCTION))
        made: dict[str, Any] = {}
        exec(ENVIRONMENT, made)
        self._environments = [made["make_env"](PIXELS) for _ in range(environments)]
        self.pass_s = self.step_s = 0.0

    def round(self, turn: int) -> float:
        """Seconds of one episode of each environment."""
        import torch
        from headrace_robots.policies.policy import Observation

        acting = stepping = 0.0
        began = time.perf_counter()
        seen = [env.reset(seed=turn * 100 + i)[0]["image"] for i, env in enumerate(self._environments)]
        for chunk in range(CHUNKS):
            at = time.perf_counter()
            pictures = {"image": torch.from_numpy(np.stack(seen))}
            prompts = (self._prompt,) * len(seen)
            seeds = [turn * 10_000 + chunk * 100 + index for index in range(len(seen))]
            drawn = self._policy.act(Observation(None, pictures, prompts), seeds)
            executed_BCA = drawn.executed_BCA.numpy()
            acting += time.perf_counter() - at
            at = time.perf_counter()
            for index, env in enumerate(self._environments):
                for action in executed_BCA[index]:
                    seen[index] = env.step(action)[0]["image"]
            stepping += time.perf_counter() - at
        self.pass_s = acting / CHUNKS
        self.step_s = stepping / (CHUNKS * CHUNK * len(seen))
        return time.perf_counter() - began


class Services:
    """A rollout that holds a lease, with the policy installed, and a simulator with a pool of the environments."""

    def __init__(self, stack: ExitStack, directory: Path, environments: int, core: int) -> None:
        from harness.services import alone
        from harness.services.by_hand import Engine, header
        from harness.services.fake_fleet import FakeFleet
        from headrace.common.v1 import common_pb2
        from headrace.rollout.v1 import rollout_pb2

        fleet = stack.enter_context(FakeFleet())
        told = ("--coordinator", fleet.address, "--name", "rollout-0", "--devices", f"cpu:{core}")
        place = directory / "services"
        simulator = stack.enter_context(alone.Service("simulator", place))
        rollout = stack.enter_context(alone.Service("rollout", place, *told, OMP_NUM_THREADS="1"))
        fleet.grant("rollout-0", LEASE)
        self._engine = Engine(stack.enter_context(alone.channel_to(rollout.address)), LEASE)
        environment = {
            "backend": "gymnasium",
            "tasks": [TASK],
            "cameras": {"image": "image"},
            "count": environments,
            "alternating": 1,
        }
        model = {"path": str(directory / "policy"), "dtype": "float32"}
        config = json.dumps({"model": model, "environment": environment, "seed": 7})
        self._engine.stub.OpenRun(
            rollout_pb2.OpenRunRequest(header=header(), config_json=config), timeout=alone.CALL_S
        )
        self._engine.wake()
        installed = rollout_pb2.InstallPolicyRequest(
            header=header(LEASE),
            version=common_pb2.PolicyVersion(number=1),
            files=rollout_pb2.PolicyFiles(checkpoint=""),
        )
        self._engine.stub.InstallPolicy(installed, timeout=alone.CALL_S)
        self._pool = asyncio.run(opened(simulator.address, directory, environments, PIXELS, CHUNKS * CHUNK))
        self._environments = environments

    def round(self, turn: int) -> float:
        """Seconds of one episode of each environment."""
        from harness.services.by_hand import header
        from headrace.rollout.v1 import rollout_pb2 as rollout

        opening = rollout.RunEpisodesOpen(
            header=header(LEASE), pools=[self._pool], policy_number=1, seed=turn
        )
        groups = [
            rollout.GroupAssignment(
                prompt_ordinal=turn * 100 + index,
                prompt=rollout.Prompt(
                    episode=rollout.EpisodeStart(task=TASK, seed=turn * 100 + index, instruction=INSTRUCTION)
                ),
                samples=[rollout.SampleAssignment(sample_index=0, attempt=1)],
            )
            for index in range(self._environments)
        ]
        asked = [
            rollout.RunEpisodesRequest(open=opening),
            rollout.RunEpisodesRequest(assign=rollout.AssignGroups(groups=groups)),
        ]
        began, ended = time.perf_counter(), 0
        for response in self._engine.stub.RunEpisodes(iter(asked), timeout=WAIT_S):
            ended += len(response.chunks)
        seconds = time.perf_counter() - began
        if ended != self._environments:
            raise RuntimeError(f"{ended} of {self._environments} episodes came back")
        return seconds


async def opened(address: str, directory: Path, count: int, size: int, limit: int) -> Any:
    """A pool of the environments at a simulator, as runs open it."""
    from harness.services.by_hand import header
    from headrace.rollout.v1 import rollout_pb2
    from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
    from headrace_servicekit.rpc.client import dial
    from simulator_overhead import BLOB_BYTES

    asked = simulator_pb2.OpenPoolRequest(
        header=header(),
        environment=simulator_pb2.Environment(
            backend="gymnasium", name=f"{directory / 'square.py'}:make_env"
        ),
        count=count,
        options_json=json.dumps({"size": size}),
        max_episode_steps=limit,
        blob_bytes=BLOB_BYTES,
        without_info=True,
    )
    asked.step_timeout.FromSeconds(60)
    async with dial(address, token=None) as channel:
        stub: Any = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]
        found = await stub.OpenPool(asked, timeout=WAIT_S, wait_for_ready=True)
    return rollout_pb2.EnvironmentPool(
        address=address,
        header=header(),
        pool=found.pool,
        pool_incarnation=found.pool_incarnation,
        count=count,
        task=TASK,
    )


def copies(directory: Path) -> dict[str, float]:
    """Bytes of pictures that cross between processes, a byte of picture made; RuntimeError for wrong pixels."""
    made = STEPS * LARGE * LARGE * 3
    to_batch = asyncio.run(_to_batch(directory)) / made
    to_trainer = asyncio.run(_to_trainer(directory)) / made
    found = {
        "images_copies": to_batch + to_trainer,
        "images_copies_to_batch": to_batch,
        "images_copies_batch_to_trainer": to_trainer,
    }
    table(["figure", "value"], [[name, value] for name, value in found.items()])
    return found


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Bytes that this process writes for others and takes from them as bodies, by "held" and "read"."""
    from headrace_servicekit.memory.blobs import BlobReader, BlobStore

    moved: Counter[str] = Counter()

    async def read(reader: Any, reference: Any) -> bytearray:
        found = await reads(reader, reference)
        moved["read"] += len(found)
        return found

    def hold(store: Any, data: Any) -> Any:
        moved["held"] += memoryview(data).nbytes
        return holds(store, data)

    reads, holds = BlobReader.read, BlobStore.hold
    with patch.object(BlobReader, "read", read), patch.object(BlobStore, "hold", hold):
        yield moved


async def _to_batch(directory: Path) -> int:
    """Bytes of STEPS pictures: what the environment's child wrote, and what the rollout's pool read."""
    from headrace.rollout.v1 import rollout_pb2
    from headrace_rollout.environments.outcomes import arrays_of

    written = 0
    async with _environment(directory) as environment:
        chunks = np.zeros((1, 1, 4), np.float32)
        await environment.reset(rollout_pb2.EpisodeStart(task=TASK, seed=1))
        with _counted() as moved:
            for _ in range(STEPS):
                answered = asyncio.get_running_loop().create_future()
                environment.pool.act([environment], chunks, [answered], together=False)
                outcome = await environment.settled(await answered)
                written += sum(each.blob.size_bytes for each in outcome.observation.values())
                picture = arrays_of(outcome, environment.bodies)["image"]
                if picture.shape != (LARGE, LARGE, 3) or np.unique(picture).tolist() != [40, 220]:
                    raise RuntimeError(f"another picture came than the environment's: {picture.shape}")
    return written + moved["read"]


@asynccontextmanager
async def _environment(directory: Path) -> AsyncIterator[Any]:
    from harness.services import alone
    from headrace_rollout.environments.pools import Pools
    from headrace_servicekit.memory.blobs import BlobReader

    place = directory / uuid.uuid4().hex
    with alone.Service("simulator", place) as simulator:
        pools = Pools(BlobReader(place / "shm", None), None, 60)
        (pool,) = pools.of([await opened(simulator.address, directory, 1, LARGE, 1 << 30)])
        yield pool.environments[0]
        await pools.close()


async def _to_trainer(directory: Path) -> int:
    """Bytes of STEPS pictures: what the rollout keeps of its record of an episode, and what the trainer reads."""
    from headrace.common.v1 import common_pb2
    from headrace_servicekit.memory.blobs import BlobReader, BlobStore
    from headrace_servicekit.rpc.episodes import ACTIONS as DRAWN
    from headrace_servicekit.rpc.episodes import IMAGE, Episode, bodies_of, decode_episode, encode_episode

    pictures = np.random.default_rng(0).integers(0, 256, (STEPS, LARGE, LARGE, 3), np.uint8)
    place = directory / uuid.uuid4().hex / "incarnation"
    place.mkdir(parents=True)
    store, reader = BlobStore(place), BlobReader(place.parent, None)
    zeros, flags = np.zeros((STEPS, 1, 4), np.float32), np.ones((STEPS, 1), np.bool_)
    episode = Episode(
        observation={IMAGE + "image": pictures},
        sampled={DRAWN: zeros},
        executed_TCA=zeros,
        valid_TC=flags,
        log_probs_TCA=zeros,
        rewards_TC=np.zeros((STEPS, 1), np.float32),
        successes_TC=flags,
        terminated=True,
        truncated=False,
    )
    with _counted() as moved:
        trajectory = common_pb2.Trajectory()
        trajectory.branches.add().segments.add().actions.CopyFrom(encode_episode(episode, store.hold))
        bodies = {each.digest: await reader.read(each) for each in bodies_of(trajectory)}
    found = decode_episode(trajectory.branches[0].segments[0].actions, bodies=bodies)
    if not np.array_equal(found.observation[IMAGE + "image"], pictures):
        raise RuntimeError("the trainer reads other pictures than the rollout recorded")
    return moved["held"] + moved["read"]


if __name__ == "__main__":
    main()
