"""An environment of verifiers (https://github.com/PrimeIntellect-ai/verifiers) as an agent.

Its own code leads the rollout, asking the policy through the endpoint, and its own rubric gives the reward.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers
from openai import AsyncOpenAI, BadRequestError
from typing_extensions import override

from headrace_simulator.backends.agent import ForkedAgent
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.user_file import is_user_environment, load_factory

LIMITS = ("turn_limit", "context_length_exceeded")
"""What the endpoint refuses a request with where a limit of the run has ended the conversation."""


class VerifiersAgent(ForkedAgent):
    """Plays one row of the environment's training dataset, the one at the seed's place in it."""

    def __init__(self, environment: Any) -> None:
        super().__init__()
        self._environment, self._rows = environment, environment.get_dataset()
        self._row: Mapping[str, Any] = {}

    @override
    def run(self, seed: int, item: Mapping[str, Any], variables: Mapping[str, str]) -> int:
        # Read here: pyarrow, which holds the rows, has threads, and a fork has none of them.
        self._row = self._rows[seed % len(self._rows)]
        return super().run(seed, item, variables)

    @override
    async def called(self, seed: int, item: Mapping[str, Any]) -> Mapping[str, Any]:
        async with AsyncOpenAI() as client:
            arguments = self._environment.sampling_args
            state = await self._environment.rollout(self._row, client, "policy", arguments)
            error = state.get("error")
            if error is not None and not any(_is_policys(cause) for cause in _causes(error)):
                raise error
            await self._environment.rubric.score_rollout(state)
        return {"reward": state["reward"]}


def agent(name: str, arguments: Mapping[str, Any]) -> VerifiersAgent:
    """The agent of an installed environment, or of path/to/file.py:load_environment.

    Raises:
        BackendError: there is none of that name.
    """
    # An environment takes these signals for itself, and this process is its parent's to end.
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if is_user_environment(name):
            return VerifiersAgent(load_factory(name, "load_environment")(**arguments))
        return VerifiersAgent(verifiers.load_environment(name, **arguments))
    except ValueError as error:
        if isinstance(error.__cause__, ImportError):
            fix = "install the package of that environment, or give path/to/file.py:load_environment"
            raise BackendError("environment.name", f"{name}: {error.__cause__}; {fix}") from error
        raise
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_policys(error: BaseException) -> bool:
    """Whether it ended the rollout by a limit of the run, or by saying nothing: what was said until then is judged."""
    if isinstance(error, verifiers.EmptyModelResponseError):
        return True
    return isinstance(error, BadRequestError) and error.code in LIMITS
