"""A child process: `python -m headrace_simulator.child`. Reads frames, runs its environments in turn."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from headrace.simulator.v1 import simulator_pb2
from headrace_schema.references import Unread, redacted, resolved
from headrace_servicekit.memory.blobs import BlobWriter
from headrace_servicekit.process.worker_pipes import become_worker, frame, read_frame
from headrace_servicekit.registry import PluginError
from headrace_servicekit.rpc.tensors import encode_tensor

from headrace_simulator import backends
from headrace_simulator.backends.base import (
    AgentBackend,
    AnyBackend,
    BackendError,
    ConversationBackend,
    VectorBackend,
    VectorEnvironment,
)
from headrace_simulator.child.conversations import Agents, Conversations
from headrace_simulator.child.episodes import Episodes, Raised, Rules, Shelf, call, written
from headrace_simulator.child.together import Together
from headrace_simulator.child.variants import Variant, split, varied
from headrace_simulator.pipes import Kind, Message, decode, encode
from headrace_simulator.spaces import to_message

MOST_BYTES = 1 << 20
"""Of what other people's code prints, as much is passed on; the rest is dropped."""
_PIECE = 1 << 16
SIMULATORS = (
    *(
        "gymnasium",
        "minigrid",
        "metaworld",
        "mujoco",
        "mani_skill",
        "sapien",
        "libero",
        "robosuite",
        "isaaclab",
    ),
    *("genesis", "robocasa"),
)
"""Modules of simulators, whose versions say what an evaluation was made in."""
_TOGETHER_S = 0.005
"""Outcomes of a batch that come within this time are one answer. The parent's limits have more room than that."""


class Host:
    """The environments of one child, by index. One that raised is made anew at its next reset."""

    def __init__(self) -> None:
        self._opening: dict[str, Any] = {}
        self._backend: AnyBackend | None = None
        self._environments: dict[int, Any] = {}
        """Episodes, Conversations or Agents."""
        self.together: Together | None = None
        """Of environments that are stepped in one call: operations of several go there."""
        self._shelf: Shelf | None = None

    def open(self, opening: dict[str, Any]) -> simulator_pb2.OpenPoolResponse:
        """Makes the environments; BackendError or Raised where they cannot be made."""
        self._opening = opening = {**opening, "options": _with_secrets(opening["options"])}
        if opening["shelf"] is not None:
            folder, prefix, least_bytes = opening["shelf"]
            if os.access(folder, os.W_OK | os.X_OK):  # as another user without mounts it may not be reached
                self._shelf = Shelf(BlobWriter(Path(folder), prefix), least_bytes)
        self._backend = call(lambda: backends.create(opening["backend"]))
        if isinstance(self._backend, ConversationBackend | AgentBackend):
            bound_output()
        if opening["vectorized"]:
            self.together = Together(self._make_vector, self._rules, opening["environments"])
            self._environments = self.together.members
        else:
            for index in opening["environments"]:
                self._environments[index] = self._make(index)
        opened = self._environments[opening["environments"][0]]
        if not isinstance(opened, Episodes):
            talks = isinstance(opened, Conversations)
            return simulator_pb2.OpenPoolResponse(
                conversation=True,
                roles=opened.roles if talks else (),
                images=talks and opened.images,
                agents=not talks,
            )
        first = opened.environment
        return simulator_pb2.OpenPoolResponse(
            observation_spaces=[to_message(space) for space in first.observation_spaces],
            action_space=to_message(first.action_space),
            init_state_count=first.init_state_count,
            instruction=first.instruction,
            versions={**_versions(), **getattr(first, "versions", {})},
        )

    def operate(
        self, operation: simulator_pb2.EnvironmentOperation, outcome: simulator_pb2.EnvironmentOutcome
    ) -> None:
        """Resets or steps one environment, and writes how it went into an empty outcome."""
        index = operation.environment
        with written(operation, outcome, self._environments):
            if index not in self._environments:
                if not operation.HasField("reset"):
                    raise Raised("an action before its reset")
                self._environments[index] = self._make(index)
            self._environments[index].operate(operation, outcome)

    def render(self, index: int) -> bytes:
        """A picture as a serialized Tensor; Raised where there is none."""
        episodes = self._environments.get(index)
        if episodes is None:
            raise Raised("the environment is new; reset it first")
        if not isinstance(episodes, Episodes):
            raise Raised("a conversation has no picture")
        return encode_tensor(episodes.render()).SerializeToString()

    def video(self, index: int) -> bytes:
        """The video of an environment's episode; Raised where there is none."""
        if index not in self._environments:
            raise Raised("the environment is new; reset it first")
        episodes = self._environments[index]
        if not isinstance(episodes, Episodes):
            raise Raised("a conversation has no video")
        return episodes.take_video()

    def _make(self, index: int) -> Episodes | Conversations | Agents:
        opening, backend = self._opening, self._backend
        if backend is None:
            raise Raised("no backend is open")
        limit = opening["max_episode_steps"]
        if isinstance(backend, ConversationBackend):
            made = call(lambda: backend.converse(opening["name"], opening["options"]))
            return Conversations(made, limit)
        if isinstance(backend, AgentBackend):
            return Agents(call(lambda: backend.agent(opening["name"], opening["options"])))
        variant, options = call(lambda: split(opening["options"], backend, opening["name"]))
        environment = call(
            lambda: varied(
                backend.make(opening["name"], options, own_time_limit=limit == 0, dense=opening["dense"]),
                variant,
            )
        )
        return Episodes(environment, self._rules, str(index))

    def _make_vector(self) -> tuple[VectorEnvironment, Variant]:
        opening, backend = self._opening, self._backend
        if not isinstance(backend, VectorBackend):
            reason = f"{opening['backend']} steps no environments together"
            raise BackendError("environment.vectorized", f"{reason}; leave it out")
        variant, options = call(lambda: split(opening["options"], backend, opening["name"]))
        made = call(
            lambda: backend.make_vector(
                opening["name"],
                len(opening["environments"]),
                options,
                own_time_limit=opening["max_episode_steps"] == 0,
                dense=opening["dense"],
            )
        )
        return made, variant

    @property
    def _rules(self) -> Rules:
        opening = self._opening
        limit, sparse = opening["max_episode_steps"], opening["sparse"]
        return Rules(limit, sparse, opening["auto_reset"], opening["without_info"], self._shelf)


def _with_secrets(options: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = resolved(options)
    except Unread as error:
        raise BackendError(f"options_json.{error.key}", str(error)) from error
    return found


def _versions() -> dict[str, str]:
    """Of the simulators that this process has imported."""
    dists = packages_distributions()
    return {name: version(dists[name][0]) for name in SIMULATORS if name in sys.modules and dists.get(name)}


def main() -> None:
    """Serves until the parent closes the pipe."""
    reader, writer = become_worker()
    _keep_from_forks([reader.fileno(), writer.fileno()])
    host = Host()
    while (body := read_frame(reader)) is not None:
        for answer in _answers(host, *decode(body)):
            writer.write(frame(encode(answer)))
            writer.flush()


def _keep_from_forks(descriptors: list[int]) -> None:
    """What users' code forks must not write among this process's frames."""

    def close() -> None:
        while descriptors:  # once: a fork of the fork has other files under these numbers
            os.close(descriptors.pop())

    os.register_at_fork(after_in_child=close)


def _answers(host: Host, kind: Kind, payload: bytes) -> Iterator[Message]:
    if kind is Kind.OPERATE:
        yield from _operated(host, simulator_pb2.StepRequest.FromString(payload))
        return
    try:
        yield _answer(host, kind, payload)
    except BackendError as error:
        yield _fault(error.field, error.message)
    except Raised as error:
        yield _fault("options_json", str(error))


def _operated(host: Host, request: simulator_pb2.StepRequest) -> Iterator[Message]:
    """Outcomes in the order of the operations; those that come fast leave together."""
    response, begun = simulator_pb2.StepResponse(), time.monotonic()
    if host.together is not None:
        host.together.operate(request.operations, response)
        yield Kind.OPERATE, response.SerializeToString()
        return
    for operation in request.operations:
        host.operate(operation, response.outcomes.add())
        if time.monotonic() - begun > _TOGETHER_S:
            yield Kind.OPERATE, response.SerializeToString()
            response, begun = simulator_pb2.StepResponse(), time.monotonic()
    if response.outcomes:
        yield Kind.OPERATE, response.SerializeToString()


def _answer(host: Host, kind: Kind, payload: bytes) -> Message:
    if kind is Kind.OPEN:
        return kind, host.open(json.loads(payload)).SerializeToString()
    if kind is Kind.RENDER:
        return kind, host.render(json.loads(payload)["environment"])
    if kind is Kind.VIDEO:
        return kind, host.video(json.loads(payload)["environment"])
    if kind is Kind.THREADS:
        _compute_with(json.loads(payload)["threads"])
        return kind, b""
    return Kind.CATALOGUE, json.dumps({"environments": catalogue(), "brokers": brokers()}).encode()


def _compute_with(threads: int) -> None:
    """Also for what is imported later; a library that reads neither is held by the process's cores alone."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def catalogue() -> list[tuple[str, str]]:
    """Backend and name of every environment of the installed backends; a name is "" where a backend lists none."""
    listed: list[tuple[str, str]] = []
    for name in backends.BACKENDS.names():
        try:
            listed += [(name, each) for each in call(backends.create(name).environments) or [""]]
        except (BackendError, Raised) as error:
            # A backend whose extra is not installed is no fault: it is not offered.
            sys.stderr.write(f"backend {name} is left out: {error}\n")
    return listed


def brokers() -> dict[str, str]:
    """The broker's module of each installed backend that has one."""
    found = {}
    for name in backends.BACKENDS.names():
        with suppress(PluginError):  # the catalogue says why it is left out
            if module := backends.BACKENDS.find(name).broker:
                found[name] = module
    return found


def _fault(field: str, message: str) -> Message:
    return Kind.FAULT, json.dumps({"field": field, "message": redacted(message)}).encode()


def bound_output(most_bytes: int = MOST_BYTES) -> None:
    """From now on, of what this process and its children print, the first `most_bytes` go where all of it went.

    What comes behind them is read and dropped, so that nothing that prints ever waits, and no log fills a disk.
    """
    passed_on, (reader, writer) = os.dup(2), os.pipe()
    os.set_inheritable(passed_on, False)
    for printed in (1, 2):
        os.dup2(writer, printed)
    os.close(writer)
    threading.Thread(target=_pass_on, args=(reader, passed_on, most_bytes), daemon=True).start()


def _pass_on(reader: int, to: int, left: int) -> None:
    while piece := os.read(reader, _PIECE):
        if left <= 0:
            continue
        os.write(to, piece[:left])
        left -= len(piece)
        if left <= 0:
            os.write(to, b"\n[what this process prints from here on is left out]\n")


if __name__ == "__main__":
    main()
