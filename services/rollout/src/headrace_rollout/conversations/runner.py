"""Runs samples as conversations: an environment speaks, the policy answers, until one of them or a limit ends it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.causes import cause_first, raised
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from typing_extensions import override

from headrace_rollout.conversations.conversation import BranchUnderWay, ended, heard, stopped, too_many
from headrace_rollout.conversations.players import Player
from headrace_rollout.conversations.speaker import Asked, Speaker
from headrace_rollout.conversations.template import TurnTemplate, turns_of
from headrace_rollout.engines.base import Engine, Refused
from headrace_rollout.engines.samples import (
    Conversation,
    Finish,
    Message,
    Prefix,
    SlotKey,
    Stream,
    TrajectoryUpdate,
    Turn,
)
from headrace_rollout.environments.pool import Environment, EnvironmentLost, Pool, PoolLost
from headrace_rollout.environments.runner import EnvironmentRunner

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(eq=False)
class View:
    """What a role reads: `told` are messages that it has not read yet, `spoken` its last turn."""

    branch: BranchUnderWay = field(default_factory=BranchUnderWay)
    told: list[Message] = field(default_factory=list)
    spoken: Sequence[int] = ()


class Roles:
    """The roles of a conversation; `talk` gets what is said, and with `end` what was read."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk
        self._views: dict[str, View] = {"": View()}
        self._last: dict[str, Turn] = {}
        """The last turn of each role that learns, in the order in which they spoke first."""
        self._owed: dict[str, float] = defaultdict(float)
        """Rewards of roles that have not spoken yet."""

    def view(self, role: str) -> View:
        """That of a role."""
        return self._views.setdefault(role, View())

    def hears(self, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment says; returns who speaks next."""
        for message in outcome.messages:
            told = heard(message)
            self._say(told, message.party)
            self.view(message.party).told.append(told)
        return outcome.messages[-1].party if outcome.messages else ""

    def spoke(self, role: str, whole: Prefix, text: str, *, learns: bool = True) -> None:
        """Adds a turn of a role; one that does not learn is a message alone."""
        view = self.view(role)
        view.spoken = whole.token_ids
        tokens = view.branch.spoke(whole)
        if learns:
            turn = Turn(len(self._talk.messages), view.branch, tokens, self._owed.pop(role, 0.0))
            self._talk.turns.append(turn)
            self._last[role] = turn
        self._say(Message("assistant", text), role)

    def judged(self, role: str, outcome: simulator_pb2.EnvironmentOutcome) -> str:
        """Adds what the environment answered to a role's turn; returns who speaks next.

        A role's reward is of its last turn, or of its first where it has had none yet.
        """
        for party, reward in (outcome.role_rewards or {role: outcome.reward}).items():
            if party in self._last:
                self._last[party].reward += reward
            else:
                self._owed[party] += reward
        self._talk.success = outcome.success
        return self.hears(outcome)

    def end(self, last: str) -> None:
        """Gives the conversation the branches of the roles that learn.

        `last` had the last turn, or had no room for it: where a limit has ended the conversation it was that role's.
        """
        roles = [*self._last] or [""]
        self._talk.branches += [self._views[role].branch for role in roles]
        self._talk.cut = self._views[last].branch if last in roles else None

    def _say(self, message: Message, party: str) -> None:
        self._talk.messages.append(message)
        if party:
            self._talk.parties.append(party)


@dataclass(frozen=True)
class ConversationSample:
    """One conversation to have."""

    key: SlotKey
    attempt: int
    start: rollout_pb2.EpisodeStart
    greedy: bool = False


@dataclass(frozen=True)
class ConversationPlan:
    """What holds for all conversations of a stream; `stream.sink` gets what ended, `failed` what ends the stream.

    `seconds` is the longest that one may take; 0: as long as it likes.
    """

    stream: Stream
    codec: TextCodec
    template: TurnTemplate
    failed: Callable[[ServiceError], None]
    pool_lost: Callable[[Pool], None]
    seconds: float = 0.0


class ConversationRunner(EnvironmentRunner[ConversationSample, TrajectoryUpdate]):
    """The conversations of one stream."""

    def __init__(
        self,
        plan: ConversationPlan,
        engine: Engine,
        pools: Sequence[Pool],
        others: Mapping[str, Player] | None = None,
    ) -> None:
        self._plan, self._stream = plan, plan.stream
        self._speaker = Speaker(engine, plan.stream)
        self._policy = Player(engine, plan.codec, plan.template)
        self._others = {
            role: (player, player.speaker(plan.stream)) for role, player in (others or {}).items()
        }
        self._openings: dict[int, tuple[int | str, ...]] = {}
        super().__init__(pools, plan.pool_lost)

    @override
    async def close(self) -> None:
        await super().close()
        for speaker in (self._speaker, *(speaker for _, speaker in self._others.values())):
            await speaker.close()

    @override
    def _stopped(self, sample: ConversationSample) -> TrajectoryUpdate:
        return stopped(sample.key, sample.attempt, self._stream.policy_number)

    @override
    def _emit(self, ended: TrajectoryUpdate) -> None:
        self._stream.sink([ended])

    @override
    async def _play(self, sample: ConversationSample, environment: Environment) -> TrajectoryUpdate:
        talk = Conversation()
        try:
            finish = await self._talk(sample, environment, talk)
        except EnvironmentLost as lost:
            talk.failure, finish = str(lost), Finish.ERROR
        except (PoolLost, Refused):  # Refused: the policy was paused, replaced or released meanwhile
            return self._stopped(sample)
        except ServiceError as error:
            self._plan.failed(error)
            return self._stopped(sample)
        except ValueError as error:
            self._plan.failed(_unfit(sample, str(error)))
            return self._stopped(sample)
        except Exception as error:  # noqa: BLE001  # the stream would wait for this conversation for ever
            self._plan.failed(_failed(sample, error))
            return self._stopped(sample)
        if finish is None:
            return self._stopped(sample)
        number = self._stream.policy_number
        return ended(talk, sample.key, sample.attempt, number, finish, greedy=sample.greedy)

    async def _talk(
        self, sample: ConversationSample, environment: Environment, talk: Conversation
    ) -> Finish | None:
        """How the conversation ended; None where it was stopped. Fills `talk`."""
        late = due(self._plan.seconds)
        outcome = await environment.reset(sample.start)
        tools = json.loads(outcome.tools_json) if outcome.tools_json else None
        roles = Roles(talk)
        role = speaks = roles.hears(outcome)
        try:
            for index in itertools.count():
                speaks = role
                player, speaker = self._others.get(role, (self._policy, self._speaker))
                view = roles.view(role)
                if many := too_many([image for message in talk.messages for image in message.images]):
                    raise EnvironmentLost(many)
                if (finish := await _tell(view, player, tools)) is not None:
                    return _judged(talk, finish)
                if not index:
                    self._check_opening(sample, view.branch)
                greedy, branch = player.greedy(sample.greedy), view.branch
                asked = Asked(
                    sample.key, sample.attempt, index, branch.context, greedy, images=tuple(branch.images)
                )
                turn = await speaker.say(asked)
                if turn.stopped or turn.finish is None:
                    return None
                if turn.finish in (Finish.ERROR, Finish.PROMPT_TOO_LONG):
                    later = index and turn.finish is Finish.PROMPT_TOO_LONG  # of a role that speaks first now
                    return _judged(talk, Finish.LENGTH if later else turn.finish)
                assert turn.whole is not None
                text = player.codec.decode(turn.whole.token_ids)
                roles.spoke(role, turn.whole, text, learns=player.learns)
                if not self._stream.holds():
                    return None
                outcome = await environment.say(text)
                role = roles.judged(role, outcome)
                # What another one said may be cut: the policy's own turn is the last one.
                cut = turn.finish if player.learns else Finish.EOS
                if finish := _end(cut, outcome, late=asyncio.get_running_loop().time() > late):
                    return _judged(talk, finish)
            return None
        finally:
            roles.end(speaks)

    def _check_opening(self, sample: ConversationSample, branch: BranchUnderWay) -> None:
        """Raises ServiceError where two samples of a prompt begin otherwise, as their rewards would not compare."""
        shown = [digest_bytes(image.data) for image in branch.images]
        begins: tuple[int | str, ...] = (*branch.prompt_ids, *shown)
        if not begins:
            raise _unfit(sample, "its first messages are empty texts, and the model has to read something")
        first = self._openings.setdefault(sample.key.prompt_ordinal, begins)
        if first != begins:
            raise _unfit(
                sample,
                "it begins otherwise for the same seed and item, and the answers of one prompt are compared with each "
                "other; draw all that is random in reset from its seed",
            )


async def _tell(view: View, player: Player, tools: Sequence[Any] | None) -> Finish | None:
    """Adds what a role reads before its turn; LENGTH where the context has no room for it and a token."""
    branch, told = view.branch, turns_of(view.told)
    await player.template.reads([image for message in view.told for image in message.images])
    view.told = []
    if not branch.prompt_ids:
        branch.begins(await asyncio.to_thread(player.template.opened, told, tools))
        return None
    given = await asyncio.to_thread(player.template.between, view.spoken, told, tools)
    if len(branch.prompt_ids) + len(branch.tokens) + len(given.ids) >= player.engine.max_context_tokens:
        return Finish.LENGTH
    branch.gave(given)
    return None


def _judged(talk: Conversation, finish: Finish) -> Finish:
    """The finish, or ERROR where there is nothing to learn from."""
    if not talk.turns and finish is not Finish.PROMPT_TOO_LONG:
        talk.failure = talk.failure or "it ended before a role had a turn that is learned from"
        return Finish.ERROR
    return finish


def due(seconds: float) -> float:
    """The moment by the loop's clock that is so many seconds away; 0 seconds: never."""
    return asyncio.get_running_loop().time() + seconds if seconds else math.inf


def _end(turn: Finish, outcome: simulator_pb2.EnvironmentOutcome, *, late: bool) -> Finish | None:
    """How a conversation ends with a turn that the environment has taken; None: it goes on.

    A turn that a limit of tokens has cut is the last one.
    """
    if turn is Finish.LENGTH:
        return Finish.LENGTH
    if outcome.terminated:
        return Finish.TERMINATED
    if outcome.truncated:
        return Finish.TRUNCATED
    return Finish.TIMED_OUT if late else None


def _unfit(sample: ConversationSample, reason: str) -> ServiceError:
    message = cause_first(f"{sample.start.task}: {reason}", "", "environment.tasks")
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


def _failed(sample: ConversationSample, error: Exception) -> ServiceError:
    message = cause_first(raised(error), f"a conversation of {sample.start.task!r} failed")
    return ServiceError(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", message)
