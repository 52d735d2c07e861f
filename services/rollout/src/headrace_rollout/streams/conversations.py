"""Generate streams of conversations: with environments, or sessions of an online run's outside clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.requests import check_number, json_object
from typing_extensions import override

from headrace_rollout.conversations.runner import ConversationPlan, ConversationRunner, ConversationSample
from headrace_rollout.conversations.speaker import Speaker
from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.desk import Place
from headrace_rollout.endpoint.runner import AgentRunner
from headrace_rollout.engines.samples import SlotKey, TrajectoryUpdate
from headrace_rollout.environments.stage import SimulateStage
from headrace_rollout.runs.opened import ConversationRun, OnlineRun
from headrace_rollout.streams.base import Serving
from headrace_rollout.streams.generation import Generation, Produced
from headrace_rollout.wire import invalid, refusals


class ConversationStream(Generation):
    """The life of a Generate stream whose samples are conversations. A pool among its outputs was lost."""

    def __init__(self, run: ConversationRun, opening: rollout_pb2.GenerateOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        pools = run.pools.of(opening.pools)
        environment = run.config.environment
        assert environment is not None
        plan = ConversationPlan(
            stream=self._stream,
            codec=run.codec,
            template=run.template,
            failed=self._inbox.put_nowait,
            pool_lost=lambda pool: self._inbox.put_nowait([pool]),
            seconds=environment.max_episode_s,
        )
        if run.config.agent is None:
            self._runner = ConversationRunner(plan, run.engine, pools, run.others)
        else:
            terms = Terms(
                model=run.name,
                stream=self._stream,
                codec=run.codec,
                template=run.template,
                most_turns=environment.max_episode_steps,
                most_tokens=run.engine.max_context_tokens,
                tool_calls=run.config.agent.tool_calls,
                asked=run.config.agent.sampling == "request" and not opening.evaluation,
            )
            rewards = run.config.agent_rewards
            self._runner = AgentRunner(plan, run.engine, pools, serving.endpoint, terms, rewards=rewards)
        self._simulate = SimulateStage(run.pools)

    @override
    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        samples = list(conversations_of(request.groups))
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        with refusals():
            self._runner.check(samples)
        self._outstanding += len(samples)
        self._runner.submit(samples)

    @override
    async def _abort(self) -> None:
        self._runner.stop(None)

    @override
    async def _leave(self) -> None:
        await self._runner.close()

    @override
    def _respond(self, outputs: Sequence[Produced]) -> rollout_pb2.GenerateResponse | None:
        response = super()._respond(outputs)
        if response is not None:
            self._simulate.tell(response.stages)
        return response


def conversations_of(groups: Iterable[rollout_pb2.GroupAssignment]) -> Iterable[ConversationSample]:
    """The samples of an assignment, in order. Raises INVALID."""
    for group in groups:
        if group.prompt.WhichOneof("form") != "episode":
            raise invalid("prompt: give episode, where a conversation begins; this run has an environment")
        start = group.prompt.episode
        check_number("prompt_ordinal", group.prompt_ordinal)
        check_number("prompt.episode.seed", start.seed)
        json_object("prompt.episode.options_json", start.options_json)
        for sample in group.samples:
            check_number("samples.sample_index", sample.sample_index)
            key = SlotKey(group.prompt_ordinal, sample.sample_index)
            yield ConversationSample(key, sample.attempt, start, sample.greedy)


class OnlineStream(Generation):
    """The life of a Generate stream whose samples are sessions of outside clients."""

    def __init__(self, run: OnlineRun, opening: rollout_pb2.GenerateOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        self._desk = run.desk
        self._speaker = Speaker(run.engine, self._stream)
        self._desk.opened(self._speaker)

    @override
    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        places = []
        for group in request.groups:
            check_number("prompt_ordinal", group.prompt_ordinal)
            for sample in group.samples:
                check_number("samples.sample_index", sample.sample_index)
                key = SlotKey(group.prompt_ordinal, sample.sample_index)
                places.append(Place(key, sample.attempt, group.oldest_version, self._emit, self))
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        self._outstanding += len(places)
        self._desk.offer(places)
        if self._engine.paused:  # What came behind the pause comes back at once too.
            self._desk.stop(self)

    @override
    def _respond(self, outputs: Sequence[Produced]) -> rollout_pb2.GenerateResponse | None:
        response = super()._respond(outputs)
        if response is not None:
            response.sessions.update(self._desk.news())
        return response

    def _emit(self, update: TrajectoryUpdate) -> None:
        self._inbox.put_nowait([update])

    @override
    async def _abort(self) -> None:
        self._desk.stop(self)

    @override
    async def _leave(self) -> None:
        self._desk.left(self._speaker, self)
        await self._speaker.close()
