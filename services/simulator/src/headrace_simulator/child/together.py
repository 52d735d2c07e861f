"""Environments of one child that one call steps: their operations come together, and each has an episode of its own."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from headrace.simulator.v1 import simulator_pb2

from headrace_simulator.backends.base import (
    BackendError,
    Observation,
    SimulatedEnvironment,
    Start,
    Transition,
    VectorEnvironment,
)
from headrace_simulator.child.episodes import Episodes, Raised, Rules, call, decoded, write_chunk, written
from headrace_simulator.child.variants import Variant, VariedEnvironment, varied

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
        operations: Iterable[simulator_pb2.EnvironmentOperation],
        response: simulator_pb2.StepResponse,
    ) -> None:
        """Steps those that act until each has executed its actions, then resets those that are to be.

        In this order: a step moves all, also one whose episode has just begun and shown its first observation.
        """
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
