"""The episodes of one environment inside its child: chunks of actions, the time limit, resets at an episode's end.

Environments are other people's code and may raise anything: `call` is the one place that catches it all.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_schema.references import redacted
from headrace_servicekit.causes import first_of, raised
from headrace_servicekit.memory.blobs import BlobWriter
from headrace_servicekit.process.confine import explained
from headrace_servicekit.process.worker_pipes import MAX_FRAME_BYTES
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor

from headrace_simulator.backends.base import BackendError, Observation, SimulatedEnvironment, Transition
from headrace_simulator.spaces import in_shape, picture

FRAMES_PER_S = 20
MAX_BYTES = 16 * 1024 * 1024
"""Of one video: it travels in one message."""


class NoVideo(Exception):
    """There is no video; the message says why, and what to do."""


class Film:
    """Takes (height, width, 3) uint8 frames of one size, then gives the video once."""

    def __init__(self) -> None:
        try:
            self._encode = importlib.import_module("imageio_ffmpeg").write_frames
        except ImportError as error:
            message = f"videos need imageio-ffmpeg: pip install 'headrace-simulator[video]' ({error})"
            raise NoVideo(message) from error
        # A file of this user: ffmpeg is another process, which may not look into the descriptors of this one.
        self._file = tempfile.NamedTemporaryFile(prefix="video-", suffix=".mp4")  # noqa: SIM115
        self._encoder: Generator[None, Any, None] | None = None
        self._shape: tuple[int, ...] = ()

    def add(self, frame: np.ndarray) -> None:
        """Adds a frame. Raises NoVideo for one of another size, or when the encoder has ended."""
        if self._encoder is None:
            self._shape = frame.shape
            self._encoder = self._encode(
                self._file.name,
                (frame.shape[1], frame.shape[0]),
                fps=FRAMES_PER_S,
                codec="libx264",
                macro_block_size=2,
                ffmpeg_log_level="error",
                output_params=["-f", "mp4", "-threads", "1", "-movflags", "+faststart"],
            )
            self._encoder.send(None)
        if frame.shape != self._shape:
            raise NoVideo(f"its frames change their size: {self._shape}, then {frame.shape}")
        try:
            self._encoder.send(np.ascontiguousarray(frame))
        except OSError as error:
            raise NoVideo(f"ffmpeg ended: {error}") from error

    def finish(self) -> bytes:
        """The whole video, and its end. Raises NoVideo when it is larger than MAX_BYTES, or empty."""
        try:
            if self._encoder is not None:
                self._encoder.close()
            size = os.fstat(self._file.fileno()).st_size
            if not 0 < size <= MAX_BYTES:
                raise NoVideo(f"the video of this episode has {size} bytes; 1 to {MAX_BYTES} can be sent")
            return os.pread(self._file.fileno(), size, 0)
        finally:
            self._file.close()

    def drop(self) -> None:
        """Ends it without a video."""
        if self._encoder is not None:
            self._encoder.close()
        self._file.close()


_RESULT = TypeVar("_RESULT")
_MAX_INFO_TEXT = 1000
_MOST_REWARD = float(np.finfo(np.float32).max)


class Raised(Exception):
    """Other people's code raised; the message says what and where."""


def call(function: Callable[[], _RESULT]) -> _RESULT:
    """What the function returns; whatever it raises but a BackendError becomes Raised."""
    try:
        return function()
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        raise Raised(f"{raised(error)}{explained(first_of(error))}") from error


@dataclass(frozen=True)
class Shelf:
    """Where observations of at least `least_bytes` are written, in place of travelling in messages."""

    writer: BlobWriter
    least_bytes: int


@dataclass(frozen=True)
class Rules:
    """How a pool's episodes go."""

    max_episode_steps: int
    """0 leaves the end of an episode to the environment."""
    sparse: bool
    """Whether the reward is 1 for a step that ends in success and 0 for any other."""
    auto_reset: bool
    without_info: bool = False
    """Whether the outcomes of actions leave out what the environment says beside the reward."""
    shelf: Shelf | None = None


class Episodes:
    """An environment with the count of its episode's steps; `name` is that of its bodies on the shelf."""

    def __init__(self, environment: SimulatedEnvironment, rules: Rules, name: str = "0") -> None:
        self.environment = environment
        self._name = name
        self._rules = rules
        self._steps = 0
        self._success_reported = self._until_success = False
        self._film: Film | NoVideo | None = None

    def operate(
        self, operation: simulator_pb2.EnvironmentOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        """Runs a valid operation and writes how it went into the outcome; Raised where the environment failed."""
        kind = operation.WhichOneof("operation")
        if kind == "reset":
            reset = operation.reset
            init_state = reset.init_state if reset.HasField("init_state") else None
            observation, info = self._reset(
                reset.seed if reset.HasField("seed") else None,
                json.loads(reset.options_json or "{}"),
                init_state,
            )
            self._until_success = reset.until_success
            if reset.record:
                self._record()
            self._write(outcome.observation, observation)
            outcome.info_json = _info_json(info)
        elif kind == "action_chunk":
            write_chunk(self._act(decoded(operation), outcome), outcome)
        else:
            self._act(decoded(operation), outcome)

    def render(self) -> np.ndarray:
        """A picture, (height, width, 3) uint8; Raised where there is none."""
        return call(lambda: picture(self.environment.render()))

    def take_video(self) -> bytes:
        """The video of the episode so far, once; Raised where there is none, with the reason."""
        film, self._film = self._film, None
        if film is None:
            raise Raised("nothing was recorded: the reset that began the episode has to say so")
        try:
            if isinstance(film, NoVideo):
                raise film
            return film.finish()
        except NoVideo as why:
            raise Raised(str(why)) from why

    @property
    def recorded(self) -> bool:
        """Whether its actions are pictures of a video too."""
        return self._film is not None

    def stop_recording(self) -> None:
        """Drops what was recorded."""
        if isinstance(self._film, Film):
            self._film.drop()
        self._film = None

    def _record(self) -> None:
        try:
            self._film = Film()
        except NoVideo as why:
            self._film = why
        self._picture()

    def _picture(self) -> None:
        """Adds a frame where the episode is recorded. An episode goes on without its video."""
        if not isinstance(self._film, Film):
            return
        try:
            self._film.add(self.render())
        except (NoVideo, Raised, BackendError) as why:
            self.stop_recording()
            self._film = NoVideo(str(why))

    def _reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        self.stop_recording()
        observation, info = call(lambda: self.environment.reset(seed, options, init_state))
        self._steps, self._success_reported = 0, False
        return self._checked(observation), info

    def _act(self, actions: np.ndarray, outcome: simulator_pb2.EnvironmentOutcome) -> list[Transition]:
        """Executes actions, (length, action shape), until the episode ends."""
        done: list[Transition] = []
        for action in self.actions(actions):
            done.append(self.take(call(lambda: self.environment.step(action))))  # noqa: B023 - called at once
            if done[-1].terminated or done[-1].truncated:
                break
        self.write(done, outcome)
        return done

    def actions(self, rows: np.ndarray) -> np.ndarray:
        """A chunk of actions, (length, action shape), in the shape of the action's space."""
        return in_shape(self.environment.action_space, rows, chunk=True)

    def take(self, transition: Transition) -> Transition:
        """Counts an action of the episode; what it led to, with the reward and the limit of the rules."""
        self._checked(transition.observation)
        self._picture()
        reward, terminated, truncated = self.count(
            transition.reward, transition.terminated, transition.truncated, transition.success
        )
        return replace(transition, reward=reward, terminated=terminated, truncated=truncated)

    def count(
        self, reward: float, terminated: bool, truncated: bool, success: bool | None
    ) -> tuple[float, bool, bool]:
        """Counts an action of the episode: its reward by the rules, and whether and how the episode ends with it."""
        if self._rules.sparse:
            reward = float(bool(success))  # Many environments report it with their episode's end alone.
        if not abs(reward) <= _MOST_REWARD:
            raise Raised(f"a reward of {reward}, which is not finite in float32")
        self._steps += 1
        self._success_reported |= success is not None
        if self._until_success and success:
            terminated, truncated = True, False
        # One that is cut by its limit of steps may only not have come to say it.
        if self._rules.sparse and terminated and not self._success_reported:
            raise Raised(
                "an episode ended without a success flag, which environment.reward: sparse needs (info['success'])"
            )
        limit = self._steps == self._rules.max_episode_steps and not terminated
        return reward, terminated, truncated or limit

    def write(self, done: Sequence[Transition], outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """Writes how a chunk's executed actions went; begins the next episode where the rules say so."""
        last = done[-1]
        outcome.success_reported = any(each.success is not None for each in done)
        outcome.executed_length = len(done)
        outcome.reward = float(sum(each.reward for each in done))
        outcome.success = any(each.success for each in done)
        outcome.terminated, outcome.truncated = last.terminated, last.truncated
        write_interventions(done, outcome)
        if not self._rules.without_info:
            outcome.info_json = _info_json(last.info)
        observation = last.observation
        if self._rules.auto_reset and (last.terminated or last.truncated):
            self._write(outcome.final_observation, observation, "final-")
            observation, _ = self._reset(None, {}, None)
        self._write(outcome.observation, observation)

    def _write(self, fields: Any, observation: Observation, kind: str = "") -> None:
        """Encodes the arrays into a map field of tensors, of which the large ones are references to the shelf."""
        for place, (name, array) in enumerate(observation.items()):
            try:
                self._write_tensor(fields[name], array, f"{self._name}-{kind}{place}")
            except ServiceError as error:
                raise Raised(f"observation {name!r}: {error.message}") from error

    def _write_tensor(self, tensor: common_pb2.Tensor, array: np.ndarray, name: str) -> None:
        shelf = self._rules.shelf
        if shelf is not None and array.nbytes >= shelf.least_bytes:
            try:
                write_tensor(tensor, array, lambda data: shelf.writer.put(name, data))
                return
            except OSError as error:  # the tmpfs is full: inline tensors need none
                sys.stderr.write(f"an observation travels inline: {error}\n")
                tensor.Clear()
        write_tensor(tensor, array)

    def _checked(self, observation: Observation) -> Observation:
        for space in self.environment.observation_spaces:
            array = observation.get(space.name)
            if array is None:
                raise Raised(f"no observation {space.name!r}, which its spaces name")
            if array.shape != space.shape or array.dtype != space.dtype:
                raise Raised(
                    f"observation {space.name!r} of shape {array.shape} and type {array.dtype}, where its space has "
                    f"{space.shape} and {space.dtype}"
                )
        return observation


@contextmanager
def written(
    operation: simulator_pb2.EnvironmentOperation,
    outcome: simulator_pb2.EnvironmentOutcome,
    environments: MutableMapping[int, Any],
) -> Iterator[None]:
    """Says of an empty outcome whose it is, and how the operation ended: one that raises is lost, and taken out."""
    index = operation.environment
    outcome.environment, outcome.step_index = index, operation.step_index
    try:
        yield
        outcome.status = simulator_pb2.OUTCOME_STATUS_OK
    except (Raised, BackendError) as error:
        lost = environments.pop(index, None)
        if isinstance(lost, Episodes):
            lost.stop_recording()
        outcome.Clear()
        outcome.environment, outcome.step_index = index, operation.step_index
        outcome.status = simulator_pb2.OUTCOME_STATUS_ENVIRONMENT_LOST
        outcome.detail = redacted(f"the environment raised {error}")


def decoded(operation: simulator_pb2.EnvironmentOperation) -> np.ndarray:
    """The actions of an operation, (length, …); one of an `action`."""
    if operation.HasField("action_chunk"):
        return decode_tensor(operation.action_chunk, max_bytes=MAX_FRAME_BYTES)
    return decode_tensor(operation.action, max_bytes=MAX_FRAME_BYTES)[None]


def write_chunk(done: Sequence[Transition], outcome: simulator_pb2.EnvironmentOutcome) -> None:
    """Reward and success of each executed action, which the outcome of a chunk has."""
    write_tensor(outcome.rewards, np.array([each.reward for each in done]))
    write_tensor(outcome.successes, np.array([bool(each.success) for each in done]))


def write_interventions(done: Sequence[Transition], outcome: simulator_pb2.EnvironmentOutcome) -> None:
    """What a person did in place of some of the actions, and who."""
    theirs = {place: np.ravel(each.done) for place, each in enumerate(done) if each.done is not None}
    if not theirs:
        return
    rows = np.full((len(done), len(next(iter(theirs.values())))), np.nan, np.float32)
    for place, row in theirs.items():
        rows[place] = row
    write_tensor(outcome.interventions, rows)
    outcome.author = done[max(theirs)].author


def _info_json(info: Mapping[str, Any]) -> str:
    figures = {str(key): _figure(value) for key, value in info.items()}
    return json.dumps({key: value for key, value in figures.items() if value is not None})


def _figure(value: Any) -> bool | int | float | str | None:
    """A scalar as JSON holds it; None for everything else, and for what is not finite."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        value = value.item()
    if isinstance(value, str):
        return str(redacted(value))[:_MAX_INFO_TEXT]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float) else None
