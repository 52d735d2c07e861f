"""One conversation under way: the ids so far, what was said, and how it ended. Knows no engine and no simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.common.v1 import common_pb2
from headrace_schema.images import MOST_IMAGES, MOST_PROMPT_IMAGE_BYTES

from headrace_rollout.engines.samples import (
    BEGINS,
    GIVEN,
    Distribution,
    Finish,
    ImageAt,
    Message,
    Prefix,
    Said,
    SlotKey,
    TrajectoryUpdate,
)

if TYPE_CHECKING:
    from headrace_modelkit.vision import ImageReader


@dataclass(frozen=True)
class Given:
    """Ids that the policy reads at once, and the images among them."""

    ids: Sequence[int]
    images: tuple[ImageAt, ...] = ()

    @classmethod
    def of(cls, reader: ImageReader, ids: Sequence[int], files: Sequence[bytes]) -> Given:
        """Ids in which each of the images has its tokens. Raises ValueError."""
        starts = reader.starts(ids, [reader.read(data) for data in files])
        return cls(ids, tuple(map(ImageAt, starts, files)))


@dataclass(eq=False)
class Conversation:
    """A sample under way. `tokens` are all those behind the prompt, `said` all messages, those of the prompt first.

    `images` are those of `context`.

    `parties`: with several roles, who said or is told each message.
    """

    prompt_ids: Sequence[int]
    said: list[Message]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turn_tokens: list[int] = field(default_factory=list)
    turn_messages: list[int] = field(default_factory=list)
    parties: list[str] = field(default_factory=list)
    images: list[ImageAt] = field(default_factory=list)
    drawn: list[Distribution | None] = field(default_factory=list)
    """As `Said.drawn`."""
    cut_line: int | None = None
    """As `Said.cut_line`, where a limit has cut it."""
    turn_places: list[int] = field(default_factory=list)
    """As `Said.turn_places`."""
    success: bool = False
    failure: str = ""

    @property
    def context(self) -> list[int]:
        """What the policy reads next."""
        return [*self.prompt_ids, *self.tokens]

    @property
    def _length(self) -> int:
        """Tokens of the context."""
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def turns(self) -> int:
        """Turns that the environment has taken."""
        return len(self.rewards)

    def spoke(self, whole: Prefix, text: str, drawn: Distribution | None = None) -> None:
        """Adds a turn of the policy, sampled from `drawn` (None: as the stream says).

        It carries loss, unless what it was drawn from is not whole: a trainer cannot compute its log-probs.
        """
        learned = drawn is None or drawn.whole
        self.takes(whole) if learned else self.gave(Given(whole.token_ids))
        self.drawn.append(drawn)
        self.turn_tokens.append(len(whole.token_ids) if learned else 0)
        self.turn_messages.append(len(self.said))
        self.said.append(Message("assistant", text))

    def takes(self, whole: Prefix) -> None:
        """Adds sampled ids, which carry loss."""
        self.tokens += whole.token_ids
        self.log_probs += whole.log_probs
        self.spans += whole.spans

    def begins(self, given: Given) -> None:
        """Sets the prompt."""
        self.prompt_ids, self.images = given.ids, list(given.images)

    def gave(self, given: Given, what: int = GIVEN) -> None:
        """Adds ids between two turns: context, without loss."""
        if given.ids:
            self._shows(given.images)
            self.tokens += given.ids
            self.log_probs += [0.0] * len(given.ids)
            self.spans.append((what, len(given.ids)))

    def _shows(self, images: Iterable[ImageAt]) -> None:
        """Adds the images of tokens that come next."""
        self.images += [image.behind(self._length) for image in images]

    def joined(self, siblings: Sequence[Conversation]) -> None:
        """Puts other lines of the same session behind this one: they are trained apart, and share its reward."""
        for each in siblings:
            self.reads(each)
            self.rewards += each.rewards
            self.turn_tokens += each.turn_tokens
            self.turn_messages += [len(self.said) + place for place in each.turn_messages]
            self.said += each.said
            self.drawn += each.drawn

    def reads(self, line: Conversation, *, begins: bool = False) -> None:
        """Puts the ids of another line behind this one's, which are not read with it; `begins`: this one has none."""
        self._shows(line.images)
        if begins:
            self.prompt_ids = line.prompt_ids
        else:
            self.spans.append((BEGINS, len(line.prompt_ids)))
            self.log_probs += [0.0] * len(line.prompt_ids)
            self.tokens += line.prompt_ids
        self.tokens += line.tokens
        self.log_probs += line.log_probs
        self.spans += line.spans

    def ended(
        self, key: SlotKey, attempt: int, number: int, finish: Finish, *, greedy: bool
    ) -> TrajectoryUpdate:
        """The whole conversation for the stream's caller."""
        whole = Prefix(self.tokens, self.log_probs, self.spans)
        return TrajectoryUpdate(
            key=key,
            attempt=attempt,
            offset=0,
            token_ids=whole.token_ids,
            log_probs=whole.log_probs,
            policy_number=number,
            prompt_ids=self.prompt_ids,
            finish=finish,
            whole=whole,
            greedy=greedy,
            images=tuple(self.images),
            said=Said(
                tuple(self.said),
                tuple(self.rewards),
                self.success,
                self.failure,
                tuple(self.turn_tokens),
                tuple(self.turn_messages),
                tuple(self.parties),
                tuple(self.drawn),
                self.cut_line if finish is Finish.LENGTH else None,
                tuple(self.turn_places),
            ),
        )


def heard(message: common_pb2.ChatMessage) -> Message:
    """A message as it came."""
    files = tuple(image.data for image in message.images)
    return Message(message.role, message.content, files, message.keys_json)


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


def stopped(key: SlotKey, attempt: int, number: int) -> TrajectoryUpdate:
    """A conversation that was stopped: it begins anew elsewhere, so nothing of it goes with it."""
    return TrajectoryUpdate(key, attempt, 0, [], [], number, [], stopped=True, whole=Prefix([], [], []))
