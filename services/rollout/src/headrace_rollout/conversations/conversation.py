"""A conversation under way: its branches grow until it has ended. Knows no engine and no simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.common.v1 import common_pb2
from headrace_schema.images import MOST_IMAGES, MOST_PROMPT_IMAGE_BYTES

from headrace_rollout.engines.samples import (
    GIVEN,
    Branch,
    Conversation,
    Distribution,
    Finish,
    ImageAt,
    Message,
    Prefix,
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
class BranchUnderWay(Branch):
    """A branch that grows."""

    @property
    def context(self) -> list[int]:
        """What the policy reads next."""
        return [*self.prompt_ids, *self.tokens]

    def begins(self, given: Given) -> None:
        """Sets the prompt."""
        self.prompt_ids, self.images = given.ids, list(given.images)

    def spoke(self, whole: Prefix, drawn: Distribution | None = None) -> int:
        """Adds a turn of the policy, sampled from `drawn` (None: as the stream says); its tokens that carry loss.

        All of them, or none where what it was drawn from is not whole: a trainer cannot compute its log-probs.
        """
        if drawn is not None and not drawn.whole:
            self.gave(Given(whole.token_ids))
            return 0
        self.tokens += whole.token_ids
        self.log_probs += whole.log_probs
        self.spans += whole.spans
        self.drawn += [drawn] * len(whole.spans)
        return len(whole.token_ids)

    def gave(self, given: Given) -> None:
        """Adds ids between two turns: context, without loss."""
        if given.ids:
            length = len(self.prompt_ids) + len(self.tokens)
            self.images += [image.behind(length) for image in given.images]
            self.tokens += given.ids
            self.log_probs += [0.0] * len(given.ids)
            self.spans.append((GIVEN, len(given.ids)))
            self.drawn.append(None)


def ended(
    talk: Conversation, key: SlotKey, attempt: int, number: int, finish: Finish, *, greedy: bool
) -> TrajectoryUpdate:
    """The whole conversation for its stream's caller."""
    talk.branches = talk.branches or [Branch()]
    first, *others = talk.branches
    behind = [token for branch in others for token in (*branch.prompt_ids, *branch.tokens)]
    whole = Prefix([*first.tokens, *behind], [], [])
    return TrajectoryUpdate(
        key=key,
        attempt=attempt,
        offset=0,
        token_ids=whole.token_ids,
        log_probs=[],
        policy_number=number,
        prompt_ids=first.prompt_ids,
        finish=finish,
        whole=whole,
        greedy=greedy,
        images=tuple(image for branch in talk.branches for image in branch.images),
        talk=talk,
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
