"""Settled groups as the trainer sees them, answers or episodes, and as ranks get them in rounds. No wire, no torch.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action; N chunks of all episodes of a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from headrace_servicekit.rpc.episodes import IMAGE, Episode

MemberKey = tuple[int, int, int, str]
"""(prompt ordinal, sample index, attempt, body digest)."""


Columns = dict[str, list[float]]
"""Name of a column, such as old_log_probs → a value for each trained token of a sequence."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt or a message: its file, and that one's digest."""

    digest: str
    data: bytes


class Sequence(msgspec.Struct, frozen=True, array_like=True):
    """One token sequence as a rank works on it.

    `trained` are positions in `tokens`, each ≥ 1; `engine_log_probs` has one value for each of them, NaN
    where the engine gave none. `advantages` has one for each of them too, or none at all where no loss needs them.
    `weight` applies to each trained token. `columns` are what the infer pass found, and has a value for each of them.
    `routes` are the experts that the engine sent each token to but the last, (tokens - 1, layers, chosen) in C order,
    one byte each where a layer has at most 256 experts, else two, little-endian; empty where it told none. `images`:
    each that it has, once; their tokens are numbers below 0, by which two of them are told apart
    (`vision.place_number`).
    `temperatures` are those that the trained tokens were drawn at; empty: at the run's.
    """

    tokens: list[int]
    trained: list[int]
    engine_log_probs: list[float]
    advantages: list[float] = []
    weight: float = 0.0
    columns: Columns = {}
    routes: bytes = b""
    images: tuple[Image, ...] = ()
    temperatures: list[float] = []


Rows = list[list[Sequence]]
"""The rows of one micro-batch; the sequences of a row may share what they have in common."""


class Line(NamedTuple):
    """One of the siblings of a trajectory, the `number`-th of all, from 0: `trained` are positions in its own `tokens`,
    `part` those of the whole's.
    """

    tokens: list[int]
    trained: list[int]
    part: slice
    number: int = 0


@dataclass(frozen=True)
class Member:
    """One finished trajectory with its reward. `versions` has the sampling version of each trained token.

    A session whose requests did not all extend each other has several lines, which stand behind each other: they share
    its reward, and none is read with another one's tokens. A conversation of several roles has a line for each.
    """

    sample_index: int
    attempt: int
    body_digest: str
    reward: float
    tokens: list[int]
    trained: list[int]
    engine_log_probs: list[float]
    versions: list[int]
    truncated: bool = False
    masked: bool = False
    routes: bytes = b""
    """As `Sequence.routes`."""
    images: tuple[Image, ...] = ()
    """As `Sequence.images`."""
    turn_rewards: tuple[float, ...] = ()
    """Where credit goes by turn: reward of each turn, which add up to the reward; empty elsewhere."""
    turn_tokens: tuple[int, ...] = ()
    """Sampled tokens of each of these turns, which are in the order of `tokens`."""
    turn_roles: tuple[str, ...] = ()
    """Where each role learns by its own rewards: who took each of these turns; empty elsewhere."""
    turn_places: tuple[int, ...] = ()
    """Of a session of several lines: the place in time of each of these turns; empty: they are in the order of time."""
    siblings: tuple[int, ...] = ()
    """Where in `tokens` each line but the first begins."""
    cut_line: int = 0
    """Which line a limit has cut, of one that is `truncated`; -1 for none of these."""
    temperatures: tuple[float, ...] = ()
    """Of each trained token, where some were drawn at another temperature than the run's; empty elsewhere."""

    @property
    def size(self) -> int:
        """Tokens, those of the prompt included: an upper bound of the work."""
        return len(self.tokens)

    def lines(self, trained: list[int]) -> list[Line]:
        """The lines that hold some of these positions in `tokens`, in order."""
        if not self.siblings:
            return [Line(self.tokens, trained, slice(None))] if trained else []
        found, bounds = [], [0, *self.siblings, len(self.tokens)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            part = slice(bisect_left(trained, start), bisect_left(trained, end))
            if own := [position - start for position in trained[part]]:
                found.append(Line(self.tokens[start:end], own, part, number))
        return found

    def problem(self) -> str:
        """What is not finite; empty where all is."""
        if not math.isfinite(self.reward):
            return f"the reward is {self.reward}"
        if not all(map(math.isfinite, self.turn_rewards)):
            return f"the rewards by turn are {list(self.turn_rewards)}"
        return "an engine log-prob is infinite" if any(map(math.isinf, self.engine_log_probs)) else ""


@dataclass(frozen=True, kw_only=True)
class EpisodeMember(Member):
    """A finished episode of a robot policy. `tokens` are the ids of its instruction, of which none is trained.

    `versions` has the sampling version of each executed action.
    """

    episode: Episode

    @property
    def size(self) -> int:
        """Executed actions."""
        return self.episode.steps

    def problem(self) -> str:
        """What is not finite; empty where all is."""
        if not math.isfinite(self.reward):
            return f"the reward is {self.reward}"
        named = {"rewards": self.episode.rewards_TC, "log_probs": self.episode.log_probs_TCA}
        for kind in ("observation", "sampled", "final_observation"):
            named |= {f"{kind} {name!r}": array for name, array in getattr(self.episode, kind).items()}
        wrong = [
            name
            for name, array in named.items()
            if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all()
        ]
        return f"{wrong[0]} is not finite" if wrong else ""


@dataclass(frozen=True)
class Group:
    """All members of one prompt. `digest` is the set digest over the members."""

    prompt_ordinal: int
    members: tuple[Member, ...]
    digest: str

    def keys(self) -> list[MemberKey]:
        """What a set digest is computed over."""
        return [(self.prompt_ordinal, m.sample_index, m.attempt, m.body_digest) for m in self.members]

    def token_count(self) -> int:
        """Sizes of all members."""
        return sum(member.size for member in self.members)

    def problem(self) -> str:
        """Why the group's values cannot be learned from; empty when they are finite."""
        for member in self.members:
            if problem := member.problem():
                return f"sample {member.sample_index} of prompt {self.prompt_ordinal}: {problem}"
        return ""


@dataclass(frozen=True)
class LearnItem:
    """One message of a Learn stream. `authority` raises Refusal when its lease is not held any more."""

    step: int
    attempt: int
    groups: list[Group]
    authority: Callable[[], None] = lambda: None


class Disposition(Enum):
    """What became of a group."""

    ACCUMULATED = "accumulated"
    NONFINITE = "nonfinite"
    STALE = "stale"


@dataclass(frozen=True)
class GroupRecord:
    """What a step attempt remembers of a group; counts are 0 unless it is accumulated.

    `tokens` and `trained_sequences` are what carries loss; `sequences` counts every member. `weighed_tokens` counts
    tokens as their lines weigh; None: they all weigh 1.
    """

    prompt_ordinal: int
    digest: str
    keys: tuple[MemberKey, ...]
    disposition: Disposition
    detail: str = ""
    sequences: int = 0
    trained_sequences: int = 0
    tokens: int = 0
    weighed_tokens: float | None = None
    staleness: int = 0
    all_equal: bool = False
    tokens_by_version: Counter[int] = field(default_factory=Counter)
    rewards: tuple[float, ...] = ()
    answer_lengths: tuple[int, ...] = ()
    advantages: tuple[float, ...] = ()
    """Mean over each member's trained tokens, for people; empty where they are made at the commit."""
    helper: str = ""
    """Which helper's contribution the gradient came with; empty where the owners made it."""


EpisodeKey = tuple[int, int]
"""(prompt ordinal, sample index)."""


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """An array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> Packed:
        """A copy of an array."""
        whole = np.ascontiguousarray(array)
        return cls(whole.dtype.str, array.shape, whole.tobytes())

    def array(self) -> np.ndarray:
        """The array, writable."""
        return np.frombuffer(bytearray(self.data), dtype=np.dtype(self.dtype)).reshape(self.shape)


class EpisodeData(msgspec.Struct, frozen=True):
    """What a policy scores of an episode. `final` is the observation behind the last action of one that was cut.

    `unseen` has the shape of each picture that another rank has.
    """

    key: EpisodeKey
    prompt: list[int]
    observation: dict[str, Packed]
    sampled: dict[str, Packed]
    valid_TC: Packed
    final: dict[str, Packed]
    unseen: dict[str, tuple[int, ...]] = {}

    def without_pictures(self) -> EpisodeData:
        """What ranks have of it that neither score it nor own its pictures."""
        pictures = {name: array for name, array in self.observation.items() if name.startswith(IMAGE)}
        if not pictures:
            return self
        return msgspec.structs.replace(
            self,
            observation={name: array for name, array in self.observation.items() if name not in pictures},
            final={},
            unseen={name: array.shape[1:] for name, array in pictures.items()},
        )


class LentPictures(msgspec.Struct, frozen=True):
    """Pictures of chunks whose episode another rank owns: (L, H, W, channels) by name, in the order of `chunks`."""

    chunks: list[int] = []
    pictures: dict[str, Packed] = {}


class EpisodeScores(msgspec.Struct, frozen=True):
    """An episode under the weights of the moment: (T, C, A) log-probs, (T,) values, the value of a cut one's end."""

    key: EpisodeKey
    log_probs_TCA: Packed
    values_T: Packed
    final_value: float


class CreditData(msgspec.Struct, frozen=True):
    """What a step's chunks are worth, in the order of `keys` and, within an episode, of time.

    `advantages` is (N, C), (N, 1) at level chunk. `mask_NC` is true at actions that are learned from. Returns and old
    values are (N,); `returns_N` is None without a critic. `weights_N` is what each unit of a chunk weighs in the sum.
    """

    keys: list[EpisodeKey]
    old_log_probs_NCA: Packed
    engine_log_probs_NCA: Packed
    values_N: Packed
    advantages: Packed
    mask_NC: Packed
    weights_N: Packed
    returns_N: Packed | None = None


def packed(arrays: Mapping[str, np.ndarray]) -> dict[str, Packed]:
    """Arrays by name."""
    return {name: Packed.of(array) for name, array in arrays.items()}
