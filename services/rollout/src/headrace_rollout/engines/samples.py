"""What an engine is asked for and what comes of it: samples of groups, and the updates of their trajectories.

Knows no tensors, no gRPC and no run: only prompts as ids, distributions and versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from headrace_modelkit.pictures import ImageReader


@dataclass(frozen=True)
class Distribution:
    """What tokens are sampled from; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def greedy(self) -> Distribution:
        """The same at temperature 0."""
        return replace(self, temperature=0.0)

    @property
    def whole(self) -> bool:
        """Whether any token may be drawn, by the model's own logits: a trainer can compute its log-probs."""
        return self.temperature > 0 and self == Distribution(self.temperature)


class Finish(Enum):
    """Why a sample ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    PROMPT_TOO_LONG = "prompt_too_long"
    ERROR = "error"
    TERMINATED = "terminated"
    """Of a conversation: its environment ended it."""
    TRUNCATED = "truncated"
    """A conversation has reached its limit of turns."""
    TIMED_OUT = "timed_out"
    """A conversation has reached its limit of seconds."""


@dataclass(frozen=True)
class SlotKey:
    """The slot that a sample fills."""

    prompt_ordinal: int
    sample_index: int


GIVEN = 0
"""In place of a version's number in spans: tokens that others said."""


@dataclass(frozen=True)
class Prefix:
    """Tokens that were sampled elsewhere, with their original log-probs and the versions that made them.

    `routes` are the experts that prompt and tokens but the last were sent to, as `Branch.routed_experts` before it is
    compressed; empty where the run does not ask for them.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: Sequence[tuple[int, int]]
    routes: bytes = b""


@dataclass(frozen=True)
class Routes:
    """Experts of a context's tokens from the first one on, `width` bytes each."""

    data: bytes
    width: int

    def behind(self, before: bytes, tokens: int) -> bytes:
        """Those of the first `tokens` tokens; `before` are those that came with the sample, maybe of other weights."""
        return (before + self.data[len(before) :])[: tokens * self.width]


@dataclass(frozen=True)
class CachedContext:
    """Keys and values of a context's first `tokens`; `form` names the layout of `data` and the weights."""

    form: str
    tokens: int
    data: bytes | memoryview


@dataclass(frozen=True)
class Sample:
    """One sample to make."""

    sample_index: int
    attempt: int
    prefix: Prefix | None = None
    greedy: bool = False
    """The likeliest token each time, whatever the stream's temperature."""
    cache: CachedContext | None = None
    """The cache of prompt and prefix that another engine made, of any form."""


@dataclass(frozen=True)
class ImageAt:
    """An image file, and where the first of its tokens stands in a context: as many as the model makes of it."""

    start: int
    data: bytes

    def behind(self, tokens: int) -> ImageAt:
        """The same image in a context that has more tokens before it."""
        return ImageAt(self.start + tokens, self.data)


@dataclass(frozen=True)
class Group:
    """Samples of one prompt."""

    prompt_ordinal: int
    prompt_ids: Sequence[int]
    samples: Sequence[Sample]
    images: tuple[ImageAt, ...] = ()
    """In the order in which `prompt_ids` has them."""


class Message(NamedTuple):
    """What one side of a conversation said; `content` has a mark where each of the images stands."""

    role: str
    content: str
    images: tuple[bytes, ...] = ()
    keys_json: str = ""
    """Whatever else chat templates read of it, as in a ChatMessage."""
    party: str = ""
    """With several roles, who said it or is told it."""
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON) of the calls of tools, where messages are compared."""

    def same(self, other: Message) -> bool:
        """Whether both say the same; blanks around what the policy said may be lost, and clients write keys anew."""
        mine, theirs = self.content, other.content
        if self.role == "assistant":
            mine, theirs = mine.strip(), theirs.strip()
        return (self.role, mine, self.calls, self.images) == (other.role, theirs, other.calls, other.images)


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
class Branch:
    """A line of ids that is read as one context: the prompt, then what was sampled and what was given, in order.

    `tokens` are those behind the prompt; `spans` say how many of them each version sampled, or were GIVEN; `drawn` has
    what each span was sampled from, None for the stream's distribution. `images` are those of prompt and tokens.
    """

    prompt_ids: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    drawn: list[Distribution | None] = field(default_factory=list)
    images: list[ImageAt] = field(default_factory=list)
    spoken: Sequence[int] = ()
    """Ids of the policy's last turn."""

    @property
    def context(self) -> list[int]:
        """What the policy reads next."""
        return [*self.prompt_ids, *self.tokens]

    def reads(self, given: Given) -> None:
        """Adds the prompt, and later ids between two turns: context, without loss."""
        if not self.prompt_ids:
            self.prompt_ids, self.images = given.ids, [*given.images]
        elif given.ids:
            length = len(self.prompt_ids) + len(self.tokens)
            self.images += [image.behind(length) for image in given.images]
            self.tokens += given.ids
            self.log_probs += [0.0] * len(given.ids)
            self.spans.append((GIVEN, len(given.ids)))
            self.drawn.append(None)

    def spoke(self, whole: Prefix, drawn: Distribution | None = None) -> int:
        """Adds a turn of the policy, sampled from `drawn` (None: as the stream says); its tokens that carry loss.

        All of them, or none where what it was drawn from is not whole: a trainer cannot compute its log-probs.
        """
        self.spoken = whole.token_ids
        if drawn is not None and not drawn.whole:
            self.reads(Given(whole.token_ids))
            return 0
        self.tokens += whole.token_ids
        self.log_probs += whole.log_probs
        self.spans += whole.spans
        self.drawn += [drawn] * len(whole.spans)
        return len(whole.token_ids)


@dataclass(eq=False)
class Turn:
    """A turn that is learned from, the `number`-th of its session: its message, and its `tokens` in its branch."""

    number: int
    message: Message
    branch: Branch
    tokens: int
    reward: float = 0.0


@dataclass(eq=False)
class Conversation:
    """What a session said: all messages, those of the prompt first, and the policy's turns in time.

    `opened` is what was read before the first turn where there is none; `cut` the branch that a limit has cut;
    `failure` says why there is nothing to learn from; `figures` are what an agent says of itself, by name.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    opened: Branch = field(default_factory=Branch)
    cut: Branch | None = None
    success: bool = False
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def branches(self) -> list[Branch]:
        """Those that the policy has spoken in, in the order of its first turns there; else what it read."""
        return [*dict.fromkeys(turn.branch for turn in self.turns)] or [self.opened]

    def ended(
        self, key: SlotKey, attempt: int, number: int, finish: Finish, *, greedy: bool = False
    ) -> TrajectoryUpdate:
        """The whole conversation as what fills a slot."""
        first, *others = branches = self.branches
        behind = [token for branch in others for token in branch.context]
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
            images=tuple(image for branch in branches for image in branch.images),
            talk=self,
        )


@dataclass(frozen=True)
class TrajectoryUpdate:
    """What happened to a sample: new tokens, its end, or its stop from outside.

    `token_ids` and `log_probs` begin at `offset` and hold what was not sent before; all are of version
    `policy_number` (with stop strings, a few that they held back may be of the one before). An end (`finish`) or a
    stop (`stopped`) carries the whole answer in `whole`, with the version of each token as spans.
    """

    key: SlotKey
    attempt: int
    offset: int
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    policy_number: int
    prompt_ids: Sequence[int]
    finish: Finish | None = None
    stopped: bool = False
    whole: Prefix | None = None
    greedy: bool = False
    cache: CachedContext | None = None
    """The cache of a stopped sample whose stream is `moving`, where the engine hands it out."""
    talk: Conversation | None = None
    """Of a conversation that has ended."""
    images: tuple[ImageAt, ...] = ()
    """Of the prompt; of a conversation, all that it was computed with, in the order of their tokens."""
    teacher_top: bytes = b""
    """As `Branch.teacher_top`, of one that ended."""

    @classmethod
    def untouched(cls, key: SlotKey, attempt: int, number: int) -> TrajectoryUpdate:
        """A conversation that was stopped: it begins anew elsewhere, so nothing of it goes with it."""
        return cls(key, attempt, 0, [], [], number, [], stopped=True, whole=Prefix([], [], []))


@dataclass(frozen=True, eq=False)
class Stream:
    """Where outputs go and what holds for all samples of one Generate call.

    `sink` and `holds` are called from the engine's thread; they must not block. `holds` says whether the
    stream's lease is held: without it no token is made, and its samples come back as partial outputs.
    """

    policy_number: int
    distribution: Distribution
    max_new_tokens: int
    seed: int
    sink: Callable[[list[TrajectoryUpdate]], None]
    failed: Callable[[str], None]
    stop: tuple[str, ...] = ()
    chunk_tokens: int = 0
    holds: Callable[[], bool] = lambda: True
    adapter: str = ""
    """Which of `EngineConfig.adapters` its tokens are of."""
    goes_on: bool = False
    """Whether later samples of a slot begin with what its earlier ones came to, as turns of a conversation do."""
    moving: threading.Event = field(default_factory=threading.Event)
    """Set when its samples go on elsewhere: updates of those that stop may carry their caches."""
