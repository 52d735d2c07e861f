"""What a backend is. Third parties import this module alone. Runs in child processes only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace_simulator.spaces import ArraySpace

Observation = Mapping[str, np.ndarray]
EXPERT_ACTION = "expert_action"
"""The observation that a scripted policy's action is, in the action's space; of environments made with the option
`expert`, whose episodes become demonstrations.
"""
Knob = Callable[[float], None]
"""Changes one thing of a simulator from the next reset on; see `headrace_simulator.child.variants`."""


class BackendError(Exception):
    """An environment cannot be made; `field` is the request's key that has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


@dataclass(frozen=True)
class Transition:
    """What one step led to. At an episode's end the observation is the final one: nothing resets itself."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    """None where the environment has no notion of success."""
    info: Mapping[str, Any] = field(default_factory=dict)
    done: np.ndarray | None = None
    """What a person did in place of the action."""
    author: str = ""
    """Who."""


class Described(Protocol):
    """What one environment takes and shows.

    It may have an attribute `versions` beside these: by name, the version of what was learned or made for it, which a
    run records beside those of simulators' packages.
    """

    @property
    def observation_spaces(self) -> list[ArraySpace]:
        """Space of each named observation."""
        ...

    @property
    def action_space(self) -> ArraySpace:
        """Space of the action; what `step` gets lies in it."""
        ...

    @property
    def init_state_count(self) -> int:
        """Number of initial states that a reset may choose from; 0 where the seed decides."""
        ...

    @property
    def instruction(self) -> str:
        """What the task asks for, in words; empty where the environment has none."""
        ...


class SimulatedEnvironment(Described, Protocol):
    """One environment. It may raise anything: the service then makes a new one.

    It may have an attribute `knobs` beside these: a Knob by each name that a variant may use, such as
    "execution.gravity" or "vision.lighting".
    """

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode: observation and info. Without a seed the environment's own stream goes on.

        `init_state` is below `init_state_count`; None lets the environment choose, by the seed or its stream.
        """
        ...

    def step(self, action: np.ndarray) -> Transition:
        """Acts once."""
        ...

    def render(self) -> np.ndarray:
        """A picture, (height, width, 3) uint8."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


@dataclass(frozen=True)
class Start:
    """How an episode begins: the arguments of `SimulatedEnvironment.reset`."""

    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    init_state: int | None = None


class VectorEnvironment(Described, Protocol):
    """Environments that one call steps, numbered from 0. It may raise anything: the service then makes a new one."""

    def reset(self, starts: Mapping[int, Start]) -> Mapping[int, tuple[Observation, Mapping[str, Any]]]:
        """Starts episodes in some environments; those of the others go on, and a seed decides its own alone."""
        ...

    def step(self, actions: Mapping[int, np.ndarray]) -> Mapping[int, Transition]:
        """Acts once in some environments. The episodes of the others are over, or abandoned: they may go on too."""
        ...

    def render(self, environment: int) -> np.ndarray:
        """A picture, (height, width, 3) uint8."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


Message = Mapping[str, Any]
"""{"role": …, "content": …}; roles are system, user, assistant and tool. Where several parties speak: with "to", who is
told it, or "by", who said it. A content is a text, or a list of {"type": "text", "text": …} and {"type": "image",
"image": …}: a file's bytes, an image of Pillow, or uint8 (height, width, 3).
"""
Reward = float | Mapping[str, float]
Tool = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters"}}, as chat templates take it."""


class ConversationEnvironment(Protocol):
    """One conversation at a time with a language model. It may raise anything: the service then makes a new one.

    Same seed and same item: the same first messages, as the answers of one prompt are compared with each other.

    Where several parties speak it has an attribute `roles`, their names. Each reads what is `to` it alone, and who is
    told the last message speaks next. One whose messages have images has an attribute `images` that is true.
    """

    def reset(
        self, seed: int, item: Mapping[str, Any]
    ) -> Sequence[Message] | tuple[Sequence[Message], Sequence[Tool]]:
        """Begins a conversation about a data item: its first messages, and the tools that the model may call.

        `item` has `question`, `answer`, `metadata` and the item's `fields`.
        """
        ...

    def step(
        self, message: Message
    ) -> tuple[Sequence[Message], Reward, bool] | tuple[Sequence[Message], Reward, bool, Mapping[str, Any]]:
        """Takes what the model says: what follows it, the turn's reward, and whether the conversation is over.

        With several roles the reward may be one for each of some. A fourth value may hold `success`.
        """
        ...


class Backend(Protocol):
    """A simulator; made without arguments, imports its heavy packages only then.

    It may have a method `perturbations(name)` beside these: by each name that `semantic.perturbation` of a variant may
    say for an environment, the options with which `make` makes it so (other objects, places, words). One that is a
    VectorBackend too makes environments that are stepped together.
    """

    def environments(self) -> list[str]:
        """Names that `make` knows, sorted."""
        ...

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> SimulatedEnvironment:
        """Makes an environment; without `own_time_limit` its episodes end only by themselves.

        `dense` says that the caller counts on a shaped reward. (A sparse one is made of the success flag for it.)

        Raises:
            BackendError: the name or an option is wrong, there is no shaped reward, or a package is missing.
        """
        ...


@runtime_checkable
class VectorBackend(Protocol):
    """A simulator that steps many environments in one call."""

    def make_vector(
        self, name: str, count: int, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> VectorEnvironment:
        """Makes `count` environments; the rest is as in `Backend.make`."""
        ...


@runtime_checkable
class ConversationBackend(Protocol):
    """A backend whose environments are conversations; made without arguments."""

    def environments(self) -> list[str]:
        """Names that `converse` knows, sorted."""
        ...

    def converse(self, name: str, options: Mapping[str, Any]) -> ConversationEnvironment:
        """Makes an environment.

        Raises:
            BackendError: the name or an option is wrong, or a package is missing.
        """
        ...


class Agent(Protocol):
    """A program that speaks with a policy by itself, through an endpoint; one at a time."""

    def run(self, seed: int, item: Mapping[str, Any], variables: Mapping[str, str]) -> int:
        """Starts a process of it, with `variables` in its environment; returns the process's id."""
        ...

    def result(self) -> Mapping[str, Any]:
        """What the process that ended has said of itself: `reward`, `success`, `error`; each may be missing.

        `figures` may hold numbers by name that people are shown, such as turns, tokens and errors.
        """
        ...


@runtime_checkable
class AgentBackend(Protocol):
    """A backend that starts agents; made without arguments."""

    def environments(self) -> list[str]:
        """Names of agents that it brings, sorted."""
        ...

    def agent(self, name: str, options: Mapping[str, Any]) -> Agent:
        """Prepares an agent, without starting it.

        Raises:
            BackendError: the name or an option is wrong.
        """
        ...


AnyBackend = Backend | ConversationBackend | AgentBackend
