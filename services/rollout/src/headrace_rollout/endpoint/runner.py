"""Runs samples as agents: a simulator starts the agent, which speaks with the policy through a session of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from headrace_rollout.conversations.runner import (
    ConversationPlan,
    ConversationRunner,
    ConversationSample,
    due,
)
from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.server import Endpoint
from headrace_rollout.endpoint.session import Session
from headrace_rollout.engines.base import Engine
from headrace_rollout.engines.samples import Conversation, Finish
from headrace_rollout.environments.pool import Environment, EnvironmentLost, Pool

SLICE_S = 1.0
"""Longest that one operation waits for an agent: what a stopped agent still runs at most."""
_HELD_S = 2 * SLICE_S
"""How long a stopped session's requests are held: until then its agent was killed."""


class AgentRunner(ConversationRunner):
    """The agents of one stream."""

    def __init__(
        self,
        plan: ConversationPlan,
        engine: Engine,
        pools: Sequence[Pool],
        endpoint: Endpoint,
        terms: Terms,
        *,
        rewards: bool,
    ) -> None:
        self._endpoint, self._terms, self._rewards = endpoint, terms, rewards
        super().__init__(plan, engine, pools)

    @override
    async def _talk(
        self, sample: ConversationSample, environment: Environment, talk: Conversation
    ) -> Finish | None:
        session = Session(sample.key, sample.attempt, talk, self._terms, self._speaker, greedy=sample.greedy)
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
                if session.halted.done():
                    session.halted.result()  # Raises what ends the stream, or the sample.
                    return None
                finish = running.result()
            except EnvironmentLost:
                session.join()  # What was said goes with the failure.
                raise
            finally:
                if running is None or running.cancel():
                    environment.end_agent()
                asyncio.get_running_loop().call_later(_HELD_S, session.over.set)
        return self._judged(session, finish)

    async def _run_agent(self, session: Session, environment: Environment) -> Finish:
        """How the agent ended: by itself, or by a limit. Raises EnvironmentLost with what is wrong with it."""
        late, loop = due(self._plan.seconds), asyncio.get_running_loop()
        while loop.time() < late:
            slice_s = min(SLICE_S, environment.step_timeout_s / 2, late - loop.time())
            try:
                outcome = await environment.wait(slice_s)
            except EnvironmentLost:
                if session.limit is None:
                    raise
                return session.limit  # It did not take the refusal well.
            if outcome.terminated:
                if json.loads(outcome.info_json or "{}").get("rewarded") and session.turns:
                    session.reward(outcome.reward)
                if outcome.success_reported:
                    session.talk.success = outcome.success
                return session.limit or (Finish.LENGTH if session.cut else Finish.TERMINATED)
        environment.end_agent()
        return Finish.TIMED_OUT

    def _judged(self, session: Session, finish: Finish) -> Finish:
        """The finish, or ERROR with the reason where there is nothing to learn from."""
        talk, by_limit = session.join(), finish not in (Finish.TERMINATED, Finish.LENGTH)
        if not session.turns and finish is not Finish.PROMPT_TOO_LONG:
            talk.failure = (
                "the agent spoke to nobody: it has to send requests to OPENAI_BASE_URL, with OPENAI_API_KEY"
            )
        elif session.turns and not session.learned:
            talk.failure = (
                "all its requests set temperature: 0 or top_p below 1, so nothing was drawn that can be learned from: "
                "set agent.sampling: run, with which the run's own sampling holds"
            )
        elif self._rewards and not session.rewarded and not by_limit and session.limit is None:
            talk.failure = (
                "the agent ended without a reward: return a number, post one to "
                "$OPENAI_BASE_URL/sessions/$HEADRACE_SESSION/reward, or name other scorers in reward.scorers"
            )
        return Finish.ERROR if talk.failure else finish
