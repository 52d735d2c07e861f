"""What a scorer is. Knows no process: third parties import this module and `headrace_servicekit.registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Score = float | Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer to judge."""

    prompt: str
    completion: str
    reference: str = ""
    """The expected answer; empty where there is none."""
    metadata: Mapping[str, Any] | None = None
    """The data item's further fields."""
    token_count: int = 0
    """Number of sampled tokens."""
    messages: Sequence[Mapping[str, str]] = ()
    """The data item's conversation, {role, content}, whose last turn is `prompt`; empty where it is plain text.

    Of a conversation with an environment: all that was said in it, calls and answers of tools among it; with several
    roles, each with its `party`.
    """
    finish_reason: str = ""
    """Why generation ended: stop, length, …"""
    raw_prompt: str = ""
    """The prompt as the model read it, with its special tokens. This and the next three: `reward.give: [tokens]`."""
    raw_completion: str = ""
    """The answer with its special tokens."""
    prompt_ids: Sequence[int] = ()
    """Ids of the prompt's tokens."""
    completion_ids: Sequence[int] = ()
    """Ids of the sampled tokens, and in an exchange of those between them."""
    group: Sequence[str] = ()
    """All answers to the prompt, by sample: with `reward.give: [group]`, in a stage that waits for whole groups."""
    pictures: Mapping[str, Any] | None = None
    """Of a robot's training episode, with `reward.pictures`: uint8 arrays (N, height, width, channels) by camera, in
    their order. `metadata` has `instruction` then, what the task asks for, or "".
    """
    episode: Mapping[str, Any] | None = None
    """Of a conversation with an environment: `return`, `success`, `steps` and `rewards`, one a turn; with several
    roles, `roles`, who took each turn.
    """


BLANK = Answer(prompt="", completion="", reference="", metadata={}, prompt_ids=[0], group=[""])
"""What a scorer is tried with as it is loaded."""


class Scorer(Protocol):
    """Judges answers; built once per child process."""

    def score(self, answer: Answer) -> Score:
        """Returns a finite number, or finite numbers by name: `score` is the total, else they are summed.

        `turns` of a dict is a list with a number for each of the policy's turns, which add up to the score.

        It may be a coroutine. None abstains: the weights apply to the other scorers' scores alone. A scorer with a
        method `score_batch(answers)`, which returns a list of the same, is asked about many answers at once.

        An exception means that this answer cannot be judged; when every probe of the same
        question raises too, the scorer counts as broken. AnswerFailed, ScorerError and Unavailable say whose fault it
        is, and nothing is probed.

        What else it may have: `longest_s`, the seconds that one answer may take; `needs_group`, that answers come with
        their group; `needs_pictures`, that episodes come with theirs; `one_process`, that it is too large for more than
        one child of a run.
        """
        ...


class ScorerError(Exception):
    """A scorer cannot be made; `field` is the key below `scorers[i]` that has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class Unavailable(ScorerError):
    """What a scorer stands on cannot be reached now; `field` is the key that leads to it. The answer is kept."""


class AnswerFailed(Exception):
    """This answer cannot be judged, and others can."""
