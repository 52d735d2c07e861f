"""A session makes one trajectory turn by turn, for a driver that says what is read before each.

It asks for turns, keeps what was said, and applies the limits of context and images. Knows no environment and no HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_schema.images import MOST_IMAGES, MOST_PROMPT_IMAGE_BYTES

from headrace_rollout.engines.samples import (
    Branch,
    Conversation,
    Distribution,
    Finish,
    Given,
    ImageAt,
    Message,
    SlotKey,
    TrajectoryUpdate,
    Turn,
)
from headrace_rollout.sessions.turns import AS_STREAM, Asked, Draw, Heard, Player, Says


class Stopped(Exception):
    """The sample was stopped from outside, or its lease is not held any more: it begins anew elsewhere."""


class Limited(Exception):
    """A limit, or what the engine says of the sample, leaves no turn to take; `finish` says which."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.value)
        self.finish = finish


@dataclass(frozen=True)
class Place:
    """Where a turn goes: a branch, what is read of it first, and the messages that this is."""

    branch: Branch
    given: Given
    messages: Sequence[Message] = ()

    @property
    def context(self) -> list[int]:
        """What the policy reads."""
        return [*self.branch.context, *self.given.ids]

    @property
    def images(self) -> tuple[ImageAt, ...]:
        """Those of the context."""
        before = len(self.branch.context)
        return (*self.branch.images, *(image.behind(before) for image in self.given.images))


@dataclass(frozen=True)
class Said:
    """A turn that has come to its end, and is not kept yet: the `number`-th of its session."""

    place: Place
    player: Player
    update: TrajectoryUpdate
    number: int
    drawn: Distribution | None
    cut: bool
    """A limit of the run has ended it, and with it its branch."""


@dataclass(eq=False)
class Session:
    """The session of one sample, to which `talk` is what was said.

    `limit` is the limit that it has met last, None once a turn was taken behind it.
    """

    key: SlotKey
    attempt: int
    greedy: bool = False
    most_tokens: int = sys.maxsize
    """That it may sample; the turn that reaches it is the last one."""
    talk: Conversation = field(default_factory=Conversation)
    limit: Finish | None = None
    learned: bool = False
    """Whether anything was drawn that can be learned from."""
    taken: int = 0
    """Turns that were kept, those of players that do not learn among them."""
    sampled: int = 0
    """Tokens of the turns that were kept."""

    def check(self, place: Place, player: Player) -> None:
        """Raises Limited where all tokens were sampled, or the context has no room for what is read and one more."""
        if self.sampled >= self.most_tokens:
            raise self._limited(place, Finish.TRUNCATED)
        if len(place.context) >= player.engine.max_context_tokens:
            raise self._limited(place, Finish.PROMPT_TOO_LONG)

    async def say(
        self, place: Place, says: Says, number: int, draw: Draw = AS_STREAM, heard: Heard | None = None
    ) -> Said:
        """Asks for a turn, which `heard` is told as it is made. Raises Limited, Stopped, and what the engine does."""
        stream, greedy = says.stream, says.player.greedy(self.greedy)
        ids = place.context
        asked = Asked(self.key, self.attempt, number - 1, ids, place.images, greedy, draw, heard)
        update = await says.say(asked)
        if update.finish in (Finish.ERROR, Finish.PROMPT_TOO_LONG):
            raise self._limited(place, update.finish)
        if update.stopped or update.finish is None or not stream.holds():
            raise Stopped
        assert update.whole is not None
        # An end before the answer's own limit is that of the context.
        most = draw.most_tokens(stream)
        own = most < stream.max_new_tokens and len(update.whole.token_ids) >= most
        cut = update.finish is Finish.LENGTH and not own
        return Said(place, says.player, update, number, draw.distribution, cut)

    def keep(self, said: Said, party: str = "") -> Message:
        """Adds a turn; returns it as a message, which is not added. One that does not learn is a message alone."""
        branch, whole, player = said.place.branch, said.update.whole, said.player
        assert whole is not None
        message = Message("assistant", player.codec.decode(whole.token_ids), party=party)
        branch.reads(said.place.given)
        tokens = branch.spoke(whole, said.drawn)
        self.limit, self.talk.cut = None, branch if said.cut and player.learns else None
        self.taken += 1
        self.sampled += len(whole.token_ids)
        if player.learns:
            self.talk.turns.append(Turn(said.number, message, branch, tokens))
            self.learned |= said.drawn is None or said.drawn.whole
        return message

    def ended(self, finish: Finish, number: int) -> TrajectoryUpdate:
        """What fills the slot, of version `number`: an error where there is nothing to learn from."""
        talk = self.talk
        talk.failure = talk.failure or self.nothing_learned(finish)
        finish = Finish.ERROR if talk.failure else finish
        return talk.ended(self.key, self.attempt, number, finish, greedy=self.greedy)

    def nothing_learned(self, finish: Finish) -> str:
        """Why there is nothing to learn from; empty where there is something."""
        if self.talk.turns or finish is Finish.PROMPT_TOO_LONG:
            return ""
        return "it ended before a role had a turn that is learned from"

    def _limited(self, place: Place, finish: Finish) -> Limited:
        """`finish`, or LENGTH where a turn was taken before."""
        if not self.taken:
            self.talk.opened = Branch()
            self.talk.opened.reads(place.given)
        elif finish is Finish.PROMPT_TOO_LONG:
            finish = Finish.LENGTH
        self.limit, self.talk.cut = finish, place.branch
        return Limited(finish)


def too_many(images: Sequence[bytes], *others: bytes) -> str:
    """Why a conversation does not take these images; empty: it does. `others` travel with it too, each file once."""
    size = sum(map(len, {*images, *others}))
    if len(images) > MOST_IMAGES:
        return f"its messages have {len(images)} images, and a conversation takes {MOST_IMAGES}"
    if size > MOST_PROMPT_IMAGE_BYTES:
        return (
            f"its images have {size:,} bytes, and those of a conversation {MOST_PROMPT_IMAGE_BYTES:,} at most"
        )
    return ""
