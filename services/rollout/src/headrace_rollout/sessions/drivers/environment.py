"""Sessions with environments of simulators, of which each takes one at a time.

In a conversation the environment speaks, the policy answers, until one of them or a limit ends it.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.causes import cause_first, raised
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_number, json_object
from typing_extensions import override

from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import Branch, Finish, Message, SlotKey, Stream, TrajectoryUpdate, Turn
from headrace_rollout.environments.pool import Environment, EnvironmentLost, PoolLost
from headrace_rollout.environments.pools import SimulateStage
from headrace_rollout.environments.runner import EnvironmentRunner
from headrace_rollout.sessions.drivers.overflow import Overflow
from headrace_rollout.sessions.session import Limited, Place, Session, Stopped, too_many
from headrace_rollout.sessions.template import turns_of
from headrace_rollout.sessions.turns import Player, Speaker
from headrace_rollout.wire import invalid

if TYPE_CHECKING:
    from headrace_rollout.runs.opened import ConversationRun
    from headrace_rollout.sessions.drivers.base import Put


@dataclass(frozen=True)
class SessionSample:
    """One session to have."""

    key: SlotKey
    attempt: int
    start: rollout_pb2.EpisodeStart
    greedy: bool = False


class EnvironmentDriver(EnvironmentRunner[SessionSample, TrajectoryUpdate]):
    """The sessions of one stream in its environments; what one does there is a subclass's affair."""

    def __init__(
        self, run: ConversationRun, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put
    ) -> None:
        assert run.config.environment is not None
        self._stream, self._put = stream, put
        self._seconds = run.config.environment.max_episode_s or math.inf
        self._most_tokens = run.config.environment.max_episode_tokens or sys.maxsize
        self._way = run.config.environment.on_overflow
        self._speaker = Speaker(run.policy, stream)
        self._simulate = SimulateStage(run.pools)
        super().__init__(run.pools.of(opening.pools), lambda pool: put([pool]))

    @abstractmethod
    async def _drive(self, session: Session, sample: SessionSample, environment: Environment) -> Finish:
        """How the session ended. Raises Limited, Stopped, EnvironmentLost, and what ends the stream."""

    def _session(self, sample: SessionSample) -> Session:
        return Session(sample.key, sample.attempt, sample.greedy, self._most_tokens)

    async def read(self, groups: Sequence[rollout_pb2.GroupAssignment]) -> Sequence[SessionSample]:
        """The samples of an assignment, in order. Raises INVALID."""
        found = []
        for group in groups:
            if group.prompt.WhichOneof("form") != "episode":
                reason = "give episode, where a conversation begins; this run has an environment"
                raise invalid(f"prompt: {reason}")
            start = group.prompt.episode
            check_number("prompt_ordinal", group.prompt_ordinal)
            check_number("prompt.episode.seed", start.seed)
            json_object("prompt.episode.options_json", start.options_json)
            for sample in group.samples:
                check_number("samples.sample_index", sample.sample_index)
                key = SlotKey(group.prompt_ordinal, sample.sample_index)
                found.append(SessionSample(key, sample.attempt, start, sample.greedy))
        return found

    async def begin(self, samples: Sequence[SessionSample]) -> None:
        """Queues them. Raises Refused."""
        self.check(samples)
        self.submit(samples)

    async def abort(self) -> None:
        """Stops all; they come back as stopped."""
        self.stop(None)

    @override
    async def close(self) -> None:
        await super().close()
        await self._speaker.close()

    def tell(self, response: rollout_pb2.GenerateResponse) -> None:
        """Adds what was asked of environments."""
        self._simulate.tell(response.stages)

    def _late(self) -> float:
        """The moment by the loop's clock from which a session that begins now takes too long."""
        return asyncio.get_running_loop().time() + self._seconds

    @override
    def _stopped(self, sample: SessionSample) -> TrajectoryUpdate:
        return TrajectoryUpdate.untouched(sample.key, sample.attempt, self._stream.policy_number)

    @override
    def _emit(self, ended: TrajectoryUpdate) -> None:
        self._put([ended])

    @override
    async def _play(self, sample: SessionSample, environment: Environment) -> TrajectoryUpdate:
        session = self._session(sample)
        try:
            finish = await self._drive(session, sample, environment)
        except Limited as limited:
            finish = limited.finish
        except EnvironmentLost as lost:
            session.talk.failure, finish = str(lost), Finish.ERROR
        except (PoolLost, Refused, Stopped):  # Refused: the policy was paused, replaced or released meanwhile
            return self._stopped(sample)
        except Exception as error:  # noqa: BLE001  # the stream would wait for this session for ever
            self._put(_failure(sample, error))
            return self._stopped(sample)
        return session.ended(finish, self._stream.policy_number)


class Roles:
    """The roles of a conversation, each with a branch of its own."""

    def __init__(self, session: Session) -> None:
        self._talk = session.talk
        self._branches: dict[str, Branch] = defaultdict(Branch)
        self._told: dict[str, list[Message]] = defaultdict(list)
        """Messages that a role has not read yet."""
        self._last: dict[str, Turn] = {}
        self._owed: dict[str, float] = defaultdict(float)
        """Rewards of roles that have not spoken yet."""

    def hear(self, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment says; returns who speaks next."""
        for each in outcome.messages:
            files = tuple(image.data for image in each.images)
            message = Message(each.role, each.content, files, each.keys_json, each.party)
            self._talk.messages.append(message)
            self._told[each.party].append(message)
        return outcome.messages[-1].party if outcome.messages else ""

    async def place(self, role: str, player: Player, tools: Sequence[Any] | None) -> Place:
        """Where the next turn of a role goes. Raises EnvironmentLost for too many images, and ValueError."""
        if many := too_many([image for message in self._talk.messages for image in message.images]):
            raise EnvironmentLost(many)
        messages, branch, template = self._told.pop(role, []), self._branches[role], player.template
        await template.reads([image for message in messages for image in message.images])
        told = turns_of(messages)
        if branch.prompt_ids:
            given = await asyncio.to_thread(template.between, branch.spoken, told, tools)
        else:
            given = await asyncio.to_thread(template.opened, told, tools)
        return Place(branch, given)

    def goes_on(self, role: str, branch: Branch) -> None:
        """The role's next turn is in this branch."""
        self._branches[role] = branch

    def spoke(self, role: str, message: Message) -> None:
        """Adds a role's turn, which the session has kept."""
        self._talk.messages.append(message)
        if self._talk.turns and (turn := self._talk.turns[-1]).message is message:
            self._last[role] = turn
            turn.reward += self._owed.pop(role, 0.0)

    def judge(self, role: str, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment answered to a role's turn; returns who speaks next.

        A role's reward is of its last turn, or of its first where it has had none yet.
        """
        for party, reward in (outcome.role_rewards or {role: outcome.reward}).items():
            if party in self._last:
                self._last[party].reward += reward
            else:
                self._owed[party] += reward
        self._talk.success = outcome.success
        return self.hear(outcome)


class ConversationDriver(EnvironmentDriver):
    """Conversations with the environments."""

    def __init__(
        self, run: ConversationRun, opening: rollout_pb2.GenerateOpen, stream: Stream, put: Put
    ) -> None:
        self._others = {role: Speaker(player, stream) for role, player in run.others.items()}
        self._openings: dict[int, tuple[int | str, ...]] = {}
        super().__init__(run, opening, stream, put)

    @override
    async def close(self) -> None:
        await super().close()
        for speaker in self._others.values():
            await speaker.close()

    @override
    async def _drive(self, session: Session, sample: SessionSample, environment: Environment) -> Finish:
        late, number, roles = self._late(), 0, Roles(session)
        outcome = await environment.reset(sample.start)
        tools = json.loads(outcome.tools_json) if outcome.tools_json else None
        role = roles.hear(outcome)
        while True:
            number += 1
            speaker = self._others.get(role, self._speaker)
            place = await roles.place(role, speaker.player, tools)
            if number == 1:
                self._check_opening(sample, place)
            place, number = await self._fit(Overflow(self._way, session, speaker, tools), role, place, number)
            roles.goes_on(role, place.branch)
            session.check(place, speaker.player)
            said = await session.say(place, speaker, number)
            message = session.keep(said, role)
            roles.spoke(role, message)
            outcome = await environment.say(message.content)
            role = roles.judge(role, outcome)
            # What another one said may be cut: the policy's own turn is the last one.
            if said.cut and speaker.player.learns:
                return Finish.LENGTH
            if outcome.terminated or outcome.truncated:
                return Finish.TERMINATED if outcome.terminated else Finish.TRUNCATED
            if asyncio.get_running_loop().time() > late:
                return Finish.TIMED_OUT

    async def _fit(self, overflow: Overflow, role: str, place: Place, number: int) -> tuple[Place, int]:
        """As `Overflow.fit`. Raises ValueError for a conversation of roles, whose trainer wants one branch a role."""
        if role and overflow.way != "end":
            reason = "this environment has roles, and a role has one branch"
            raise ValueError(f"environment.on_overflow: {reason}; set it to end")
        return await overflow.fit(place, number)

    def _check_opening(self, sample: SessionSample, place: Place) -> None:
        """Raises ValueError where two samples of a prompt begin otherwise, as their rewards would not compare."""
        begins: tuple[int | str, ...] = (
            *place.given.ids,
            *(digest_bytes(image.data) for image in place.given.images),
        )
        if not begins:
            raise ValueError("its first messages are empty texts, and the model has to read something")
        first = self._openings.setdefault(sample.key.prompt_ordinal, begins)
        if first != begins:
            raise ValueError(
                "it begins otherwise for the same seed and item, and the answers of one prompt are compared with each "
                "other; draw all that is random in reset from its seed"
            )


def _failure(sample: SessionSample, error: Exception) -> ServiceError:
    """What ends the stream: the user's mistake where it is one, a failure of this service's otherwise."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, ValueError):
        message = cause_first(f"{sample.start.task}: {error}", "", "environment.tasks")
        return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)
    message = cause_first(raised(error), f"a session of {sample.start.task!r} failed")
    return ServiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", message)
