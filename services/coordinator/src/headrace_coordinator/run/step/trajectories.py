"""The finished trajectories of open steps: a record of each, and the messages that fit the byte budget.

A message beyond the budget stays with its producer, which retains it, and is fetched when the trainer group needs it.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_servicekit.rpc.digests import digest_and_size
from headrace_servicekit.rpc.episodes import bodies_of
from headrace_servicekit.rpc.trajectories import segments_of
from headrace_servicekit.tool_calls import PARSERS, TAGGED

from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.projections.trajectories import LOG_PROBS_KEPT, Call, Message, is_kept
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.workers.clients import SlotKey, slot_key
from headrace_coordinator.run.workers.rollout_client import RolloutClient


class Spoken(NamedTuple):
    """A message of a conversation, and the files of its images."""

    role: str
    party: str
    content: str
    turn: int | None
    """Which of the policy's turns it is; None for what others said."""
    tokens: int | None
    """What was sampled of it."""
    branch: int | None
    """Which branch has these tokens."""
    files: tuple[bytes, ...]


@dataclass(slots=True)
class Shown:
    """What people are shown of a trajectory, beside its slot and its reward."""

    completion: str
    finish_reason: int
    log_probs: array[float]
    """The engine's log-probs of the first LOG_PROBS_KEPT sampled tokens."""
    text_bytes: array[int]
    """The bytes of text that each of these tokens is; empty where the producer does not say."""
    new_log_probs: Sequence[float] = ()
    """The same tokens' log-probs under the version that the step made."""
    advantage: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    said: list[Spoken] = field(default_factory=list)
    """All messages of a conversation."""
    read: list[list[str]] = field(default_factory=list)
    """`read_of` the message."""

    @classmethod
    def of(cls, message: common.Trajectory) -> Shown:
        """The part of a message that is shown."""
        log_probs, text_bytes = array("f"), array("I")
        for tokens, first, last in _in_order(message):
            log_probs.extend(tokens.log_probs[first : min(last, first + LOG_PROBS_KEPT - len(log_probs))])
            text_bytes.extend(tokens.text_bytes[first : min(last, first + LOG_PROBS_KEPT - len(text_bytes))])
        spoken = said(message) if message.HasField("conversation") else []
        return cls(
            message.completion_text,
            message.finish_reason,
            log_probs,
            text_bytes,
            said=spoken,
            read=read_of(message),
        )


@dataclass(slots=True)
class Trajectory:
    """A finished answer, or a finished episode: what the ledger does not have of its slot."""

    slot: Slot
    message: common.Trajectory | None
    """As the producer sent it; None once it is released, and where only the producer keeps it."""
    size: int
    """Bytes of the message."""
    tokens: int
    versions: Sequence[tuple[int, int]]
    """(number of a version, tokens that it sampled), in order; empty once scored, unless it is shown."""
    oldest: int = 0
    """Number of the oldest version that sampled it."""
    shown: Shown | None = None
    reward: float | None = None
    """None until it is scored."""
    turn_rewards: list[float] = field(default_factory=list)
    """Rewards of a conversation's turns: the environment's; once it is scored, those that add up to the reward."""
    turn_roles: list[str] = field(default_factory=list)
    """The role of each turn, in a conversation of several roles."""
    figures: dict[str, float] = field(default_factory=dict)
    """What a conversation's agent says that it was, such as turns and tokens, by name."""
    success: bool | None = None
    """Of an episode: whether it succeeded; None where its environment never says so."""
    cut_early: bool | None = None
    """Of an episode: whether its environment cut it before environment.max_episode_steps; None without that limit."""
    stage_rewards: dict[str, float] | None = None
    """What each stage gave it, in a workflow with several reward stages."""

    @property
    def by_role(self) -> dict[str, float]:
        """What each role's turns were worth; empty where there are no roles."""
        found: dict[str, float] = defaultdict(float)
        for role, reward in zip(self.turn_roles, self.turn_rewards, strict=False):
            found[role] += reward
        return found

    @property
    def received(self) -> common.Trajectory:
        """Its message, before that is released."""
        assert self.message is not None
        return self.message


class Trajectories(dict[SlotKey, Trajectory]):
    """The trajectories of open steps by slot; keeps at most `limit_bytes` of messages."""

    def __init__(self, limit_bytes: int, made: Callable[[Slot], common.Trajectory] | None = None) -> None:
        """`made`: makes the message of a slot again, where no producer keeps it."""
        super().__init__()
        self._made = made
        self._limit = limit_bytes
        self._kept_bytes = 0
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the messages that are kept have reached the limit."""
        return self._kept_bytes >= self._limit

    async def released(self) -> None:
        """Waits for the next release."""
        self._released.clear()
        await self._released.wait()

    def put(self, trajectory: Trajectory) -> None:
        """Keeps the record, and its message until `release` if the message fits."""
        key = trajectory.slot.key
        self.release([key])
        self[key] = trajectory
        if self._kept_bytes + trajectory.size > self._limit:
            trajectory.message = None
        else:
            self._kept_bytes += trajectory.size

    def release(self, keys: Iterable[SlotKey]) -> None:
        """Forgets messages that the trainer group has, or that nobody needs. Ends every wait for a release."""
        for key in keys:
            trajectory = self.get(key)
            if trajectory is not None and trajectory.message is not None:
                trajectory.message = None
                self._kept_bytes -= trajectory.size
        self._released.set()

    def forget(self, keys: Iterable[SlotKey]) -> None:
        """Removes the records of a step that has ended."""
        for key in keys:
            self.release([key])
            self.pop(key, None)

    def rate(self, rated: Iterable[trainer.RatedTrajectory]) -> None:
        """Keeps what the new version makes of tokens, where the trainer took all of them that are shown."""
        for each in rated:
            shown = kept.shown if (kept := self.get(slot_key(each.sample))) else None
            if shown is not None and len(shown.log_probs) == len(each.log_probs):
                shown.new_log_probs = each.log_probs

    async def messages(
        self, slots: Iterable[Slot], producers: Iterable[RolloutClient]
    ) -> dict[SlotKey, common.Trajectory]:
        """Messages of finished slots, fetched from the producers where they are not kept here.

        Leaves out those that no producer has: one with another attempt, or another digest, is another trajectory. A
        message that is kept here may refer to bodies, which are lost with their producer.
        """
        wanted, producers = {slot.key: slot for slot in slots}, [*producers]
        living = {producer.incarnation for producer in producers}
        found = {}
        for key in wanted:
            message = kept.message if (kept := self.get(key)) else None
            if message is None and self._made is not None:
                message = self._made(wanted[key])
            if message is not None and all(body.incarnation in living for body in bodies_of(message)):
                found[key] = message
        for producer in producers:
            missing = [key for key in wanted if key not in found]
            for message in await producer.fetch(missing) if missing else ():
                slot = wanted[slot_key(message.sample)]
                if (slot.attempt, slot.digest) == (message.attempt, digest_and_size(message)[0]):
                    found[slot.key] = message
        return found


def is_shown(context: RunContext, slot: Slot) -> bool:
    """Whether the text of a slot is kept: a large step shows only some trajectories."""
    ledger = context.state.ledger
    first = ledger.prompts_of(ledger.step_of(slot.prompt)).start
    place = ledger.ordinal(slot.prompt, slot.sample) - ledger.ordinal(first, 0)
    room = context.spec.tracking.trajectories_per_step
    return is_kept(place, ledger.prompts_per_step, ledger.group_size, room)


def _in_order(message: common.Trajectory) -> Iterator[tuple[common.TokenSegment, int, int]]:
    """Pieces of segments that were sampled, from a first token to before a last one, in the order of messages."""
    sampled = [
        deque((each.tokens, 0, len(each.tokens.token_ids)) for each in branch.segments if each.policy_number)
        for branch in message.branches
    ]
    if not message.conversation.turns:
        yield from (piece for pieces in sampled for piece in pieces)
    by_message: dict[int, list[tuple[common.TokenSegment, int, int]]] = defaultdict(list)
    for turn in message.conversation.turns:
        left = turn.tokens
        while left:
            tokens, first, last = sampled[turn.branch].popleft()
            end = min(first + left, last)
            by_message[turn.message].append((tokens, first, end))
            left -= end - first
            if end < last:
                sampled[turn.branch].appendleft((tokens, end, last))
    for place in sorted(by_message):
        yield from by_message[place]


def said(message: common.Trajectory) -> list[Spoken]:
    """What was said in a conversation; nothing of an answer."""
    talk, files = message.conversation, {image.digest: image.data for image in message.images}
    own = {turn.message: (number, turn) for number, turn in enumerate(talk.turns)}
    found = list[Spoken]()
    for at, each in enumerate(talk.messages):
        number, turn = own.get(at, (None, None))
        tokens, branch = (turn.tokens, turn.branch) if turn is not None else (None, None)
        of = tuple(files[image.digest] for image in each.images if image.digest in files)
        found.append(Spoken(each.role, each.party, each.content, number, tokens, branch, of))
    return found


def read_of(message: common.Trajectory) -> list[list[str]]:
    """What the model read, for each branch what was given and what was sampled in turns; empty where it is not said."""
    return [list(branch.parts) for branch in message.branch_texts]


def told(form: str, said: Iterable[Spoken], turn_rewards: Sequence[float]) -> list[Message]:
    """What was said in a conversation, with the calls of tools in the `form` that the run's spec names."""
    found, messages = [], list(said)
    for at, (role, party, content, turn, tokens, branch, files) in enumerate(messages, 1):
        own, called = turn is not None, [each.role for each in messages[at : at + 1]] == ["tool"]
        # JSON without marks is an answer, unless a tool answered it.
        calls = PARSERS[form](content) if own and (called or form in TAGGED) and form in PARSERS else []
        listed = [Call(call.name, json.dumps(call.arguments), call.problem) for call in calls]
        reward = turn_rewards[turn] if turn is not None and turn < len(turn_rewards) else None
        found.append(Message(role, content, tokens, reward, listed, party, branch, files=list(files)))
    return found


def failure_of(message: common.Trajectory) -> str:
    """What an episode or a conversation that failed says of it, such as what its environment raised, else ""."""
    if message.finish_reason != common.FINISH_REASON_ERROR:
        return ""
    if message.conversation.failure:
        return message.conversation.failure
    try:
        return str(json.loads(message.completion_text)["error"])
    except (ValueError, TypeError, KeyError):
        return ""


def sampled(message: common.Trajectory) -> tuple[int, list[tuple[int, int]]]:
    """How many tokens were sampled, and (number of a version, tokens that it sampled), in order.

    An action that was executed counts as a token.
    """
    total, spans = 0, []
    for segment in segments_of(message):
        if number := segment.policy_number:
            episode = segment.WhichOneof("body") == "actions"
            count = sum(segment.actions.valid_mask.data) if episode else len(segment.tokens.token_ids)
            spans.append((number, count))
            total += count
    return total, spans
