"""Sessions of agents: a simulator starts the agent, which speaks with the policy behind the endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from headrace.rollout.v1 import rollout_pb2
from typing_extensions import override

from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.server import Endpoint
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.engines.samples import Finish, Stream
from headrace_rollout.environments.pool import Environment, EnvironmentLost
from headrace_rollout.sessions.drivers.environment import EnvironmentDriver, SessionSample
from headrace_rollout.sessions.session import Session

if TYPE_CHECKING:
    from headrace_rollout.runs.opened import ConversationRun
    from headrace_rollout.sessions.drivers.base import Put

SLICE_S = 1.0
"""Longest that one operation waits for an agent: what a stopped agent still runs at most."""
_HELD_S = 2 * SLICE_S
"""How long a stopped session's requests are held: until then its agent was killed."""


class AgentDriver(EnvironmentDriver):
    """The agents of one stream."""

    def __init__(
        self,
        run: ConversationRun,
        opening: rollout_pb2.GenerateOpen,
        stream: Stream,
        put: Put,
        endpoint: Endpoint,
    ) -> None:
        environment, agent = run.config.environment, run.config.agent
        assert environment is not None and agent is not None
        self._endpoint = endpoint
        self._terms = Terms(
            run.name,
            agent.tool_calls,
            environment.max_episode_steps,
            hints=agent.forms == "hint",
            asked=agent.sampling == "request" and not opening.evaluation,
            rewards=run.config.agent_rewards,
        )
        super().__init__(run, opening, stream, put)

    @override
    def _session(self, sample: SessionSample) -> AgentSession:
        return AgentSession(
            sample.key,
            sample.attempt,
            self._terms,
            self._speaker,
            greedy=sample.greedy,
            most_tokens=self._most_tokens,
        )

    @override
    async def _drive(self, session: Session, sample: SessionSample, environment: Environment) -> Finish:
        assert isinstance(session, AgentSession)
        given = {
            "item": json.loads(sample.start.options_json or "{}"),
            "base_url": await self._endpoint.url(),
            "api_key": session.api_key,
            "session": session.id,
        }
        with self._endpoint.serving(session):
            running: asyncio.Future[Finish] | None = None
            try:
                await environment.reset(sample.start, json.dumps(given))
                running = asyncio.ensure_future(self._run_agent(session, environment))
                ends: set[asyncio.Future[Any]] = {running, session.halted}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                ended = session.halted if session.halted.done() else running
                return ended.result()  # Raises what ends the stream, or the sample.
            finally:
                if running is None or running.cancel():
                    environment.end_agent()
                asyncio.get_running_loop().call_later(_HELD_S, session.over.set)

    async def _run_agent(self, session: AgentSession, environment: Environment) -> Finish:
        """How the agent ended: by itself, or by a limit. Raises EnvironmentLost with what is wrong with it."""
        late, loop = self._late(), asyncio.get_running_loop()
        while loop.time() < late:
            slice_s = min(SLICE_S, environment.pool.step_timeout_s / 2, late - loop.time())
            try:
                outcome = await environment.wait(slice_s)
            except EnvironmentLost:
                if session.limit is None:
                    raise
                return session.limit  # It did not take the refusal well.
            if outcome.terminated:
                told = json.loads(outcome.info_json or "{}")
                if told.get("rewarded") and session.talk.turns:
                    session.reward(outcome.reward)
                session.talk.figures = told.get("figures", {})
                if outcome.success_reported:
                    session.talk.success = outcome.success
                return session.finish
        environment.end_agent()
        return Finish.TIMED_OUT
