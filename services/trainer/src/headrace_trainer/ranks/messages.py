"""What the leader of a trainer group announces: one struct for each kind of round, with that round's own fields."""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from headrace_trainer.backends.policies import Gathered as Gathered
from headrace_trainer.learning.samples import CreditData, EpisodeData, Image, LentPictures, Rows, Sample


def _kind(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix("Round")).lower()


class Round(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_kind):
    """What all ranks do next. A `governed` one needs every rank's lease; the others end or hand out what it made.

    What computes is of one `policy`, by name, "" being the run's own; the rest is of all that there are.
    """

    governed: ClassVar[bool] = True
    policy: str = ""

    @property
    def kind(self) -> str:
        """For people and measurements."""
        return _kind(type(self).__name__)


class RestoreRound(Round, frozen=True):
    """Loads a checkpoint, or the initial model when `checkpoint` is empty, as version `number`.

    A rank that finds the state `digest` in `directory`, below the directory of all runs, reads its own parts there.
    """

    checkpoint: str
    number: int
    directory: str = ""
    digest: str = ""
    reduced: tuple[int, bool] | None = None
    """Tokens of a micro-batch, and whether layers are recomputed, after a device has run out of memory."""
    weights_only: bool = False
    """The optimizer begins anew."""


class HelpRound(Round, frozen=True):
    """Loads a published version's weights alone."""


class MicroRound(Round, frozen=True):
    """Accumulates the gradient of `work`, this rank's rows of each micro-batch: without rows, a zero-weight dummy's.

    Several micro-batches are announced at once, each rank gets its own, and one vote on the leases holds for them all.
    `algorithm_state` is `Algorithm.state` on the leader.
    """

    work: list[Rows]
    algorithm_state: dict[str, float]
    tells: bool = False
    """The leader gets the log-probs of the trained tokens."""


class CountRound(Round, frozen=True):
    """Counts which experts the tokens of `work` go to, which are this rank's rows."""

    work: Rows


class BalanceRound(Round, frozen=True):
    """Fixes the load-balance loss from what was counted since the last one: it is to be divided by `denominator`."""

    denominator: float


class CheckRound(Round, frozen=True):
    """Asks whether the accumulated gradient is finite."""


class InferRound(Round, frozen=True):
    """Computes `columns` of `work`, which are this rank's rows."""

    work: Rows
    columns: list[str]


class ReadRound(Round, frozen=True):
    """Gives every rank a step's episodes: pictures alone of its `own`, which are numbered here and which it scores."""

    episodes: list[EpisodeData]
    own: list[int]


class CreditRound(Round, frozen=True):
    """Says what the chunks of the episodes that were read are worth."""

    credit: CreditData


class ChunksRound(Round, frozen=True):
    """Accumulates the gradient of this rank's `chunks`, by number; `lent` has pictures of those it does not own."""

    chunks: list[int]
    lent: LentPictures


class EndEpisodesRound(Round, frozen=True):
    """Drops the episodes; when `learned`, the normaliser learns first of what was seen in them."""

    governed = False
    learned: bool


class HoldRound(Round, frozen=True):
    """Keeps weights and optimizer state as they are."""


class EndHoldRound(Round, frozen=True):
    """Drops what is held; `back` returns to it first."""

    governed = False
    back: bool


class AddRound(Round, frozen=True):
    """Adds a helper's gradient, which the leader has, to what is accumulated."""


class CommitRound(Round, frozen=True):
    """One optimizer step with what is accumulated."""

    denominator: float
    learning_rate: float
    critic_rate: float
    optimizer: bytes = b""
    """The section of the spec, as JSON, that stands in for the run's own from now on."""


class PublishRound(Round, frozen=True):
    """Gathers tensors whole on the leader."""

    governed = False
    what: Gathered
    published: bool = False
    """Weights may come in their published types."""


class StagePartsRound(Round, frozen=True):
    """Gathers each tensor on its owner, which casts it as a part of version `number`."""

    governed = False
    number: int


class PublishPartsRound(Round, frozen=True):
    """Makes the staged parts of a version visible."""

    governed = False
    number: int
    parent: int
    ordinal: int


class SnapshotRound(Round, frozen=True):
    """Copies weights and optimizer state into host memory, each rank its part; the followers write theirs into
    `directory`, below the directory of all runs, which the leader has made. With `in_place` nothing is copied: every
    rank writes its part within the round.
    """

    governed = False
    directory: str
    durable: bool = True
    in_place: bool = False


class AbortRound(Round, frozen=True):
    """Empties the accumulators."""

    governed = False


class LeaveRound(Round, frozen=True):
    """Ends the followers' loops."""

    governed = False


AnyRound = (
    RestoreRound
    | HelpRound
    | MicroRound
    | CountRound
    | BalanceRound
    | CheckRound
    | InferRound
    | ReadRound
    | CreditRound
    | ChunksRound
    | EndEpisodesRound
    | HoldRound
    | EndHoldRound
    | AddRound
    | CommitRound
    | PublishRound
    | StagePartsRound
    | PublishPartsRound
    | SnapshotRound
    | AbortRound
    | LeaveRound
)


class Header(msgspec.Struct, frozen=True):
    """An announced round: its generation, its number within that, and the step attempt that is open."""

    generation: int
    number: int
    step: int
    attempt: int
    round: AnyRound
    images: dict[str, bytes] = {}
    """Of `packed`: files by digest."""


def packed(header: Header) -> Header:
    """The header with each image of its sequences once, whichever of them have it: as it travels."""
    images = {
        image.digest: image.data
        for rows in _works(header.round)
        for row in rows
        for sequence in row
        for image in sequence.images
    }
    if not images:
        return header
    return _with_data(msgspec.structs.replace(header, images=images), dict.fromkeys(images, b""))


def unpacked(header: Header) -> Header:
    """The header that was packed."""
    if not header.images:
        return header
    return _with_data(msgspec.structs.replace(header, images={}), header.images)


def _works(round: AnyRound) -> list[Rows]:
    if isinstance(round, MicroRound):
        return round.work
    return [round.work] if isinstance(round, CountRound | InferRound) else []


def _with_data(header: Header, data: dict[str, bytes]) -> Header:
    def of_sequence(sequence: Sample) -> Sample:
        images = tuple(Image(image.digest, data[image.digest]) for image in sequence.images)
        return msgspec.structs.replace(sequence, images=images) if images else sequence

    works = [[[of_sequence(each) for each in row] for row in rows] for rows in _works(header.round)]
    work = works if isinstance(header.round, MicroRound) else works[0]
    return msgspec.structs.replace(header, round=msgspec.structs.replace(header.round, work=work))
