"""Environments of one child that one call steps: their operations come together, and each has an episode of its own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.process.worker_pipes import MAX_FRAME_BYTES
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor

from headrace_simulator.backends.base import (
    BackendError,
    Observation,
    SimulatedEnvironment,
    Start,
    Transition,
    Transitions,
    VectorEnvironment,
)
from headrace_simulator.batches import ChunkBatch, operations_of
from headrace_simulator.child.episodes import Episodes, Raised, Rules, call, decoded, write_chunk, written
from headrace_simulator.child.variants import Variant, VariedEnvironment, varied
from headrace_simulator.spaces import in_shape

COLUMN_BYTES = 16 * 1024
"""Observations of one environment that are written as rows of a batch's: of larger ones the bytes cost more."""
Asked = tuple[simulator_pb2.EnvironmentOperation, simulator_pb2.EnvironmentOutcome]
"""An operation, and the empty outcome to write."""


class Member:
    """One environment of a vector, seen as an environment that others step."""

    steps_alone = False

    def __init__(self, vector: VectorEnvironment, place: int) -> None:
        self.vector, self.place = vector, place
        self.begun: tuple[Observation, Mapping[str, Any]] | None = None
        """What its next reset returns, where it was reset together with others."""
        self.observation_spaces, self.action_space = vector.observation_spaces, vector.action_space
        self.init_state_count, self.instruction = vector.init_state_count, vector.instruction
        self.versions = getattr(vector, "versions", {})

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode."""
        begun, self.begun = self.begun, None
        if begun is None:
            begun = self.vector.reset({self.place: Start(seed, options, init_state)})[self.place]
        return begun

    def step(self, action: np.ndarray) -> Transition:
        """Is not called: the vector steps."""
        raise RuntimeError("it is stepped together with others")

    def render(self) -> np.ndarray:
        """A picture."""
        return self.vector.render(self.place)

    def close(self) -> None:
        """The vector holds everything."""


class Together:
    """The episodes of a vector's environments, by the pool's index. One that raised is made anew at the next reset."""

    def __init__(
        self, make: Callable[[], tuple[VectorEnvironment, Variant]], rules: Rules, indices: Sequence[int]
    ) -> None:
        self.members: dict[int, Episodes] = {}
        """Those that can act."""
        self._make, self._rules = make, rules
        self._places = {index: place for place, index in enumerate(indices)}
        self._vector: VectorEnvironment | None = None
        self._variant = Variant()
        self._open()

    def operate(
        self,
        request: simulator_pb2.StepRequest,
        response: simulator_pb2.StepResponse,
    ) -> None:
        """Steps those that act until each has executed its actions, then resets those that are to be.

        In this order: a step moves all, also one whose episode has just begun and shown its first observation.
        """
        operations = [*request.operations]
        if request.HasField("batch"):
            if self._is_plain(request.batch):
                self._act_rows(request.batch, response)
            else:
                operations += operations_of(request.batch)
        asked = [(operation, response.outcomes.add()) for operation in operations]
        if acts := [each for each in asked if not each[0].HasField("reset")]:
            self._act(acts)
        if resets := [each for each in asked if each[0].HasField("reset")]:
            self._begin(resets)

    def _open(self) -> VectorEnvironment:
        vector, self._variant = self._make()
        self._vector = vector
        self.members |= {index: self._episodes(vector, index) for index in self._places}
        return vector

    def _episodes(self, vector: VectorEnvironment, index: int) -> Episodes:
        member = Member(vector, self._places[index])
        return Episodes(call(lambda: varied(member, self._variant)), self._rules, str(index))

    def _drop(self) -> None:
        """After the vector raised: none of its episodes goes on."""
        vector, self._vector = self._vector, None
        for episodes in self.members.values():
            episodes.stop_recording()
        self.members.clear()
        if vector is not None:
            try:
                call(vector.close)
            except (Raised, BackendError):
                return  # It is broken, and was told to close.

    def _begin(self, asked: Sequence[Asked]) -> None:
        starts = {self._places[operation.environment]: _start(operation.reset) for operation, _ in asked}
        begun: Mapping[int, tuple[Observation, Mapping[str, Any]]] = {}
        why: Raised | BackendError | None = None
        try:
            vector = self._vector or self._open()
            begun = call(lambda: vector.reset(starts))
        except (Raised, BackendError) as error:
            self._drop()
            why = error
        for operation, outcome in asked:
            index = operation.environment
            with written(operation, outcome, self.members):
                if why is not None:
                    raise why
                if index not in self.members:
                    self.members[index] = self._episodes(vector, index)
                _member(self.members[index].environment).begun = begun[self._places[index]]
                self.members[index].operate(operation, outcome)

    def _is_plain(self, batch: ChunkBatch) -> bool:
        """Whether a batch is answered in rows: nothing is said, varied, recorded or referred to beside them."""
        vector, rules = self._vector, self._rules
        if vector is None or not hasattr(vector, "step_rows") or self._variant != Variant():
            return False
        sizes = [space.dtype.itemsize * prod(space.shape) for space in vector.observation_spaces]
        least = rules.shelf.least_bytes if rules.shelf is not None else COLUMN_BYTES
        return (
            rules.without_info
            and not rules.auto_reset
            and sum(sizes) <= COLUMN_BYTES
            and max(sizes, default=0) < least
            and all(each in self.members and not self.members[each].recorded for each in batch.environments)
        )

    def _act_rows(self, batch: ChunkBatch, response: simulator_pb2.StepResponse) -> None:
        """Steps a plain batch; its outcomes are rows, and those of environments that are lost are not."""
        try:
            rows = Rows(self._vector, decode_tensor(batch.action_chunks, max_bytes=MAX_FRAME_BYTES))
            members = [self.members[each] for each in batch.environments]
            failed = rows.step(members, [self._places[each] for each in batch.environments])
        except (Raised, BackendError) as error:
            self._drop()
            failed = dict.fromkeys(range(len(batch.environments)), error)
        for row, why in failed.items():
            operation = simulator_pb2.EnvironmentOperation(
                environment=batch.environments[row], step_index=batch.step_indices[row]
            )
            with written(operation, response.outcomes.add(), self.members):
                raise why
        kept = [row for row in range(len(batch.environments)) if row not in failed]
        if kept:
            response.batch.environments.extend(batch.environments[row] for row in kept)
            response.batch.step_indices.extend(batch.step_indices[row] for row in kept)
            rows.write(kept, response.batch)

    def _act(self, asked: Sequence[Asked]) -> None:
        ahead: dict[int, deque[np.ndarray]] = {}
        for operation, outcome in asked:
            with written(operation, outcome, self.members):
                if operation.environment not in self.members:
                    raise Raised("an action before its reset")
                ahead[operation.environment] = deque(
                    self.members[operation.environment].actions(decoded(operation))
                )
        done, failed = self._step(ahead)
        for operation, outcome in asked:
            if (index := operation.environment) not in ahead:
                continue
            with written(operation, outcome, self.members):
                if index in failed:
                    raise failed[index]
                self.members[index].write(done[index], outcome)
                if operation.HasField("action_chunk"):
                    write_chunk(done[index], outcome)

    def _step(
        self, ahead: Mapping[int, deque[np.ndarray]]
    ) -> tuple[dict[int, list[Transition]], dict[int, Raised | BackendError]]:
        """What the actions led to, and why there is nothing of some environments."""
        done: dict[int, list[Transition]] = {index: [] for index in ahead}
        failed: dict[int, Raised | BackendError] = {}
        acting, vector = set(ahead), self._vector
        while acting and vector is not None:
            actions = {
                self._places[index]: _given(self.members[index].environment, ahead[index].popleft())
                for index in sorted(acting)
            }
            try:
                made = call(lambda: vector.step(actions))  # noqa: B023 - called at once
            except (Raised, BackendError) as error:
                self._drop()
                return done, dict.fromkeys(ahead, error)
            for index in sorted(acting):
                episodes = self.members[index]
                try:
                    last = episodes.take(_shown(episodes.environment, made[self._places[index]]))
                except Raised as error:
                    failed[index] = error
                    acting.discard(index)
                    continue
                done[index].append(last)
                if last.terminated or last.truncated or not ahead[index]:
                    acting.discard(index)
        return done, failed


class Rows:
    """Chunks of several environments, a row each, and what they led to. Shapes: N rows, C actions of a chunk."""

    def __init__(self, vector: Any, chunks_NCA: np.ndarray) -> None:
        self._vector, self._count, self._length = vector, *chunks_NCA.shape[:2]
        space = vector.action_space
        flat = in_shape(space, chunks_NCA.reshape(-1, *chunks_NCA.shape[2:]), chunk=True)
        self._chunks = flat.reshape(self._count, self._length, *space.shape)
        self._rewards = np.zeros((self._count, self._length))
        self._successes = np.zeros((self._count, self._length), np.bool_)
        self._executed, self._reported = [0] * self._count, [False] * self._count
        self._terminated, self._truncated = [False] * self._count, [False] * self._count
        self._observation: dict[str, np.ndarray] = {}

    def step(self, members: Sequence[Episodes], places: Sequence[int]) -> dict[int, Raised | BackendError]:
        """Executes each chunk until its episode ends; returns the rows that are lost, with the reason.

        Raises Raised or BackendError where all are.
        """
        failed: dict[int, Raised | BackendError] = {}
        acting = list(range(self._count))
        for moment in range(self._length):
            actions, chosen = self._chunks[acting, moment], [places[row] for row in acting]
            made: Transitions = call(lambda: self._vector.step_rows(chosen, actions))  # noqa: B023 - called at once
            self._keep(acting, made.observation)
            going_on = []
            for at, row in enumerate(acting):
                try:
                    ended = self._count_row(members[row], row, moment, made, at)
                except Raised as error:
                    failed[row] = error
                    continue
                if not ended:
                    going_on.append(row)
            acting = going_on
            if not acting:
                break
        return failed

    def write(self, rows: Sequence[int], batch: simulator_pb2.OutcomeBatch) -> None:
        """Writes these rows."""
        whole = len(rows) == self._count
        for name, column in self._observation.items():
            write_tensor(batch.observation[name], column if whole else column[rows])
        write_tensor(batch.rewards, self._rewards[rows])
        write_tensor(batch.successes, self._successes[rows])
        batch.executed_lengths.extend(self._executed[row] for row in rows)
        batch.terminated.extend(self._terminated[row] for row in rows)
        batch.truncated.extend(self._truncated[row] for row in rows)
        batch.success_reported.extend(self._reported[row] for row in rows)

    def _keep(self, rows: Sequence[int], observation: Observation) -> None:
        for space in self._vector.observation_spaces:
            column = observation[space.name]
            if column.shape[1:] != space.shape or column.dtype != space.dtype:
                raise Raised(
                    f"observations {space.name!r} of shape {column.shape[1:]} and type {column.dtype}, where their "
                    f"space has {space.shape} and {space.dtype}"
                )
            if len(rows) == self._count:
                self._observation[space.name] = column
            else:
                self._observation[space.name][rows] = column

    def _count_row(self, episodes: Episodes, row: int, moment: int, made: Transitions, at: int) -> bool:
        """Counts an action of a row; returns whether its episode has ended."""
        success = made.successes[at]
        reward, terminated, truncated = episodes.count(
            made.rewards[at], made.terminated[at], made.truncated[at], success
        )
        self._rewards[row, moment], self._executed[row] = reward, moment + 1
        if success is not None:
            self._successes[row, moment], self._reported[row] = success, True
        self._terminated[row], self._truncated[row] = terminated, truncated
        return terminated or truncated


def _start(reset: simulator_pb2.ResetOperation) -> Start:
    return Start(
        reset.seed if reset.HasField("seed") else None,
        json.loads(reset.options_json or "{}"),
        reset.init_state if reset.HasField("init_state") else None,
    )


def _member(environment: SimulatedEnvironment) -> Member:
    inner = environment.inner if isinstance(environment, VariedEnvironment) else environment
    assert isinstance(inner, Member)
    return inner


def _given(environment: SimulatedEnvironment, action: np.ndarray) -> np.ndarray:
    return environment.given(action) if isinstance(environment, VariedEnvironment) else action


def _shown(environment: SimulatedEnvironment, transition: Transition) -> Transition:
    return environment.shown(transition) if isinstance(environment, VariedEnvironment) else transition
