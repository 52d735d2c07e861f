"""Episodes of a scripted policy, played in a simulator service that this starts for itself. Knows no file format.

The environment is opened with the option `expert`: its observation `expert_action` is what the scripted policy would
do. Noise moves the robot off the script's path, and what is kept is the script's answer there (DART, Laskey et al.
2017). Shapes: S numbers of a state, A of an action.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, user_error
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.causes import cause_first
from headrace_servicekit.process.spawn import start_child
from headrace_servicekit.rpc.addresses import LOOPBACK, free_port
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.episodes import IMAGE, STATE, is_image
from headrace_servicekit.rpc.errors import metadata_of
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor

from headrace_robots.cli.acting import PolicyActor
from headrace_robots.cli.lerobot import EpisodeData

EXPERT_ACTION = "expert_action"
OPEN_S = 300.0
STOP_S = 30.0
RESET_S = 300.0
"""Longest a reset may take, or any operation beyond its own limit."""
MOST_TRIES = 4
"""Episodes that are played for each one that is wanted, before the collection fails."""
MOST_BYTES = 1 << 28

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Collection:
    """What to collect: `episodes` successful ones of each task, from `first_seed` on.

    `noise` is the standard deviation of what is added to the script's actions, as a share of half the action's range.
    `cameras` maps a camera, as the policy calls it, to an observation; None: all images by their own names.
    `actor` is a policy that plays in place of the script; then every episode is kept.
    """

    environment: EnvironmentSection
    episodes: int
    first_seed: int
    noise: float
    cameras: Mapping[str, str] | None
    actor: PolicyActor | None = None


@dataclass
class Collected:
    """Demonstrations, and how many episodes were played for them."""

    episodes: list[EpisodeData]
    played: int
    steps: int
    image_shapes: dict[str, tuple[int, ...]]


async def collect(wanted: Collection, python: str, say: Callable[[str], None]) -> Collected:
    """Plays each task. Raises CommandError."""
    found = Collected([], 0, 0, {})
    async with simulator(python) as stub:
        for task in wanted.environment.tasks:
            await _collect_task(wanted, task, stub, found)
            say(f"{task}: {len(found.episodes)} demonstrations of {found.played} episodes")
    return found


@asynccontextmanager
async def simulator(python: str) -> AsyncIterator[simulator_pb2_grpc.SimulatorServiceStub]:
    """A simulator service in a process of its own, which ends with the block or this process. Raises CommandError."""
    address = f"{LOOPBACK}:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="headrace-demonstrations-") as folder:
        log = Path(folder) / "simulator.log"
        command = ("-m", "headrace_simulator", "--listen", address, "--shm-dir", folder)
        with log.open("wb") as output:
            process = await start_child(
                (python or sys.executable, *command), environment=os.environ, output=output.fileno()
            )
        channel = dial(address, token=None)
        stub = simulator_pb2_grpc.SimulatorServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            await _wait_until_ready(stub, process, log)
            yield stub
        finally:
            await channel.close(None)
            await _stop(process)


async def _wait_until_ready(stub: Any, process: asyncio.subprocess.Process, log: Path) -> None:
    call = asyncio.ensure_future(
        stub.ListEnvironments(simulator_pb2.ListEnvironmentsRequest(), timeout=OPEN_S, wait_for_ready=True)
    )
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not call.done():
        call.cancel()
        raise CommandError(f"the simulator service ended: {_last_line(log)}")
    ended.cancel()
    _answered(call)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _answered(call: asyncio.Future[Any]) -> Any:
    try:
        return call.result()
    except grpc.aio.AioRpcError as error:
        raise CommandError(f"the simulator service does not answer: {error.details()}") from error


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _collect_task(wanted: Collection, task: str, stub: Any, found: Collected) -> None:
    count = min(wanted.environment.count, wanted.episodes)
    scripted = wanted.actor is None
    fix = "demonstrations are collected of environments with the option `expert`, such as Meta-World's"
    if not scripted:
        fix = "name an environment that the policy acts in"
    more = {"expert": True} if scripted else {}
    pool = await open_pool(wanted.environment, task, count, stub, more, fix)
    if scripted and EXPERT_ACTION not in {space.name for space in pool.observation_spaces}:
        raise user_error(
            "environment.tasks",
            f"{task} of {wanted.environment.backend} has no observation {EXPERT_ACTION!r}",
            "choose a task with a scripted policy, such as Meta-World's",
        )
    player = _Player(wanted, task, pool, stub)
    kept: list[EpisodeData] = []
    for first in range(0, MOST_TRIES * wanted.episodes, count):
        played = await player.play(range(wanted.first_seed + first, wanted.first_seed + first + count))
        found.played += len(played)
        found.steps += sum(len(episode) for episode, _ in played)
        kept += [episode for episode, success in played if success or wanted.actor]
        if len(kept) >= wanted.episodes:
            break
    await stub.ClosePool(simulator_pb2.ClosePoolRequest(header=_header(task), pool=pool.pool))
    if len(kept) < wanted.episodes:
        reason = f"{len(kept)} of {MOST_TRIES * wanted.episodes} episodes of {task} succeeded"
        problem = f"{wanted.episodes} are wanted, and {reason}"
        if player.lost:
            count = sum(player.lost.values())
            raise _caused(next(iter(player.lost)), f"{count} of them were lost; {problem}", "--episodes")
        raise user_error("--episodes", problem, "lower --noise, or raise environment.max_episode_steps")
    found.episodes += kept[: wanted.episodes]
    found.image_shapes.update(player.image_shapes)


async def open_pool(
    environment: EnvironmentSection, task: str, count: int, stub: Any, more: Mapping[str, Any], fix: str
) -> Any:
    """Environments of a task, with `more` options. Raises CommandError, which ends with `fix`."""
    modes = {"dense": simulator_pb2.REWARD_MODE_DENSE, "sparse": simulator_pb2.REWARD_MODE_SPARSE}
    request = simulator_pb2.OpenPoolRequest(
        header=_header(task),
        environment=simulator_pb2.Environment(
            backend=environment.backend, name=environment.variant_of(task)[0]
        ),
        count=count,
        options_json=json.dumps({**environment.options_of(task), **more}),
        max_episode_steps=environment.max_episode_steps,
        # The simulator's own choice is for long runs: starting a process takes longer than these episodes.
        processes=min(count, environment.processes or os.cpu_count() or 1),
        reward_mode=modes.get(environment.reward, simulator_pb2.REWARD_MODE_UNSPECIFIED),
    )
    request.step_timeout.FromTimedelta(_seconds(environment.step_timeout_s))
    try:
        return await stub.OpenPool(request, timeout=OPEN_S)
    except grpc.aio.AioRpcError as error:
        cause = (error.details() or "").removeprefix(f"{metadata_of(error).get('key')}: ")
        refusal = f"{environment.backend} does not open {task}: {fix}"
        raise _caused(cause, refusal, "environment.tasks") from error


def _caused(cause: str, effect: str, key: str) -> CommandError:
    """A user's error with the words of what an environment raised."""
    return CommandError(cause_first(cause, effect, key), reason="INVALID", exit_code=EXIT_USER_ERROR)


def _header(task: str) -> common_pb2.CommandHeader:
    return common_pb2.CommandHeader(request_id=f"demonstrations-{task}", run="runs/demonstrations")


def _seconds(value: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=value)


class _Player:
    """Plays episodes in the environments of a pool, a round at a time."""

    def __init__(self, wanted: Collection, task: str, pool: Any, stub: Any) -> None:
        self.image_shapes: dict[str, tuple[int, ...]] = {}
        self._wanted, self._pool, self._stub = wanted, pool, stub
        self._task = wanted.environment.instruction_of(task) or pool.instruction or task
        self._low, self._high = (
            decode_tensor(bound, max_bytes=MOST_BYTES)
            for bound in (pool.action_space.low, pool.action_space.high)
        )
        categories = np.array(pool.action_space.categories or np.zeros(self._low.shape), np.int64)
        self._counts = categories.reshape(self._low.shape)
        self._header: common_pb2.CommandHeader | None = _header(task)
        self._steps: dict[int, int] = {}
        self.lost = Counter[str]()
        """Environments that were lost, by what is said of it."""
        self._call = stub.Step()

    async def play(self, seeds: Sequence[int]) -> list[tuple[EpisodeData, bool]]:
        """An episode of each seed, and whether it succeeded. Episodes of lost environments are left out."""
        environments = dict(enumerate(seeds))
        random = {place: np.random.default_rng(seed) for place, seed in environments.items()}
        episodes = {place: EpisodeData(self._task) for place in environments}
        succeeded: set[int] = set()
        stops = self._wanted.environment.stop_on_success
        resets = {
            place: {"reset": simulator_pb2.ResetOperation(seed=seed, until_success=stops)}
            for place, seed in environments.items()
        }
        going = await self._exchange(resets)
        lost = environments.keys() - going.keys()
        actor = self._wanted.actor
        while going:
            seen = {place: self._keep(episodes[place], _arrays(outcome)) for place, outcome in going.items()}
            chosen = (
                {place: arrays[EXPERT_ACTION] for place, arrays in seen.items()}
                if actor is None
                else actor.actions(seen, environments, self._task)
            )
            actions = {}
            for place, action in chosen.items():
                episodes[place].actions.append(action.astype(np.float32).reshape(-1))
                moved = self._moved(action, random[place])
                actions[place] = {
                    "action": encode_tensor(moved if actor is None else moved.astype(self._low.dtype))
                }
            found = await self._exchange(actions)
            lost |= going.keys() - found.keys()
            succeeded |= {place for place, outcome in found.items() if outcome.success}
            if not self._wanted.noise:  # else what is kept is not what was done, and has not earned this
                for place, outcome in found.items():
                    episodes[place].rewards.append(outcome.reward)
                    episodes[place].successes.append(outcome.success)
                    episodes[place].ends.append(outcome.terminated)
            going = {
                place: outcome
                for place, outcome in found.items()
                if not (outcome.terminated or outcome.truncated)
            }
        return [(episode, place in succeeded) for place, episode in episodes.items() if place not in lost]

    def _moved(self, action_A: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """A number with noise; a category is another one as often as the noise says."""
        noise_A = random.normal(size=action_A.shape) * self._wanted.noise * (self._high - self._low) / 2
        moved_A = np.clip(action_A + noise_A, self._low, self._high)
        if self._counts.any():
            any_A = self._low + np.floor(random.random(action_A.shape) * self._counts)
            chosen_A = np.where(random.random(action_A.shape) < self._wanted.noise, any_A, action_A)
            moved_A = np.where(self._counts > 0, chosen_A, moved_A)
        return np.asarray(moved_A).astype(action_A.dtype)

    def _keep(self, episode: EpisodeData, seen: Arrays) -> Arrays:
        """Adds what is seen to an episode; gives the state and the cameras beside it, as a policy reads them."""
        environment, read = self._wanted.environment, dict(seen)
        images = sorted(name for name, array in seen.items() if is_image(array.dtype, array.shape))
        names = environment.state
        if names is None:
            names = sorted(seen.keys() - {*images, EXPERT_ACTION})
        if names:
            state = np.concatenate([seen[name].astype(np.float32).reshape(-1) for name in names])
            if not np.isfinite(state).all():
                shown = f"the environment's state after {len(episode)} actions of an episode"
                raise CommandError(f"{shown} is not finite, which teaches nothing: {', '.join(names)}")
            episode.states.append(state)
            read[STATE] = state
        cameras = self._wanted.cameras
        for camera, name in ({name: name for name in images} if cameras is None else cameras).items():
            self.image_shapes[camera] = seen[name].shape
            episode.images.setdefault(camera, []).append(_png(seen[name]))
            read[IMAGE + camera] = seen[name]
        return read

    async def _exchange(self, operations: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """The outcomes of operations by environment, without those that were lost. Raises CommandError."""
        request = simulator_pb2.StepRequest(
            header=self._header, pool=self._pool.pool, pool_incarnation=self._pool.pool_incarnation
        )
        for place, operation in operations.items():
            step = self._steps.get(place, 0)
            request.operations.add(environment=place, step_index=step, **operation)
        self._header, left = None, len(operations)
        found: dict[int, Any] = {}
        try:
            async with asyncio.timeout(RESET_S + self._wanted.environment.step_timeout_s * left):
                await self._call.write(request)
                while left:
                    response = await self._call.read()
                    if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                        raise CommandError("the simulator service has ended the stream")
                    left -= len(response.outcomes)
                    found |= {each.environment: each for each in response.outcomes}
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"the simulator service is lost: {error.details()}") from error
        except TimeoutError as error:
            raise CommandError(f"the simulator has not answered {left} operations in time") from error
        self._steps |= {place: outcome.step_index + 1 for place, outcome in found.items()}
        return {place: outcome for place, outcome in found.items() if self._is_done(outcome)}

    def _is_done(self, outcome: Any) -> bool:
        """False where the environment was lost. Raises CommandError where the operation was refused."""
        if outcome.status == simulator_pb2.OUTCOME_STATUS_OK:
            return True
        if outcome.status == simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST:
            self.lost[outcome.detail] += 1
            return False
        raise CommandError(f"the simulator refuses an action: {outcome.detail}")


def _arrays(outcome: Any) -> dict[str, np.ndarray]:
    return {name: decode_tensor(tensor, max_bytes=MOST_BYTES) for name, tensor in outcome.observation.items()}


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
