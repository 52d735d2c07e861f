"""Settled groups as the trainer sees them, answers or episodes, and as ranks get them in rounds. No wire, no torch.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action; N chunks of all episodes of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
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


class Turn(NamedTuple):
    """A turn of the policy: what was sampled and earned in it, whose it is, and when it was, from 0."""

    tokens: int
    reward: float
    role: str = ""
    place: int = 0


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A branch as it is learned from: a line of tokens that was read as one context.

    `trained` are positions in `tokens`, each ≥ 1. `engine_log_probs` (NaN where the engine told none) and, where they
    are there, `advantages`, `columns`, `versions` and `temperatures` have a value for each of them, and `weight`
    applies to each. Ranks get samples without `versions` and `turns`.
    """

    tokens: list[int]
    trained: list[int]
    engine_log_probs: list[float]
    advantages: list[float] = []
    """None at all where no loss needs them."""
    weight: float = 0.0
    columns: Columns = {}
    """What the infer pass found, and returns."""
    routes: bytes = b""
    """The experts that the engine sent each token to but the last, (tokens - 1, layers, chosen) in C order, one byte
    each where a layer has at most 256 experts, else two, little-endian; empty where it told none."""
    images: tuple[Image, ...] = ()
    """Each that it has, once; their tokens are numbers below 0, by which two of them are told apart
    (`vision.place_number`)."""
    temperatures: list[float] = []
    """At which the trained tokens were drawn; empty: at the run's."""
    versions: list[int] = []
    """Which sampled them."""
    turns: tuple[Turn, ...] = ()
    """Where credit goes by turn or by role: they have the trained tokens, in order."""
    cut: bool = False
    """A limit has cut it."""
    slot: tuple[int, int] = (-1, -1)
    """Prompt ordinal and sample index; ranks are told them."""
    targets: list[int] = []
    """Ids whose log-probs are taken where `trained` are; empty: those that stand there."""
    teacher: bytes = b""
    """The `teacher_top` words that a teacher finds likeliest in each trained token's place, as `Branch.teacher_top`."""
    teacher_top: int = 0

    @property
    def role(self) -> str:
        """Where each role learns by its own rewards: whose it is."""
        return self.turns[0].role if self.turns else ""


Rows = list[list[Sample]]
"""The rows of one micro-batch; the samples of a row may share what they have in common."""


@dataclass(frozen=True)
class Trajectory:
    """A finished one, with its reward, which its samples share."""

    sample_index: int
    attempt: int
    body_digest: str
    reward: float
    samples: tuple[Sample, ...] = ()
    truncated: bool = False
    masked: bool = False
    following: float = 0.0
    """The value of the end of what was cut, where a critic bootstraps."""

    @property
    def size(self) -> int:
        """Tokens, those of the prompt included: an upper bound of the work."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(sample.trained) for sample in self.samples)

    @property
    def versions(self) -> list[int]:
        """Which version sampled each of them."""
        return [version for sample in self.samples for version in sample.versions]

    @property
    def turns(self) -> list[Turn]:
        """Those of all samples, in the order of their tokens."""
        return [turn for sample in self.samples for turn in sample.turns]

    def problem(self) -> str:
        """What is not finite; empty where all is."""
        if not math.isfinite(self.reward):
            return f"the reward is {self.reward}"
        rewards = [turn.reward for turn in self.turns]
        if not all(map(math.isfinite, rewards)):
            return f"the rewards by turn are {rewards}"
        told = (value for sample in self.samples for value in sample.engine_log_probs)
        return "an engine log-prob is infinite" if any(map(math.isinf, told)) else ""


@dataclass(frozen=True, kw_only=True)
class EpisodeMember(Trajectory):
    """A finished episode of a robot policy, all of one version. `instruction` are the ids of what it was told."""

    instruction: list[int]
    policy_number: int
    episode: Episode

    @property
    def size(self) -> int:
        """Executed actions."""
        return self.episode.steps

    @property
    def versions(self) -> list[int]:
        """Which version sampled each executed action."""
        return [self.policy_number] * self.episode.steps

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
    members: tuple[Trajectory, ...]
    digest: str
    rated: bool = False
    """The commit says what the new version makes of its tokens."""

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

    `unseen` has the shape of each picture that another rank has. `outcome` is what an algorithm learns from beside it,
    by name.
    """

    key: EpisodeKey
    prompt: list[int]
    observation: dict[str, Packed]
    sampled: dict[str, Packed]
    valid_TC: Packed
    final: dict[str, Packed]
    unseen: dict[str, tuple[int, ...]] = {}
    outcome: dict[str, Packed] = {}

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
