"""What a scorer is. Knows no process: third parties import this module and `headrace_servicekit.registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Score = float | Mapping[str, float]


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

    Of a conversation with an environment: all that was said in it, calls and answers of tools among it.
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
    episode: Mapping[str, Any] | None = None
    """Of a conversation with an environment: `return`, `success`, `steps` and `rewards`, one a turn."""


class Scorer(Protocol):
    """Judges answers; built once per child process."""

    def score(self, answer: Answer) -> Score:
        """Returns a finite number, or finite numbers by name: `score` is the total, else they are summed.

        It may be a coroutine. None abstains: the weights apply to the other scorers' scores alone. A scorer with a
        method `score_batch(answers)`, which returns a list of the same, is asked about many answers at once.

        An exception means that this answer cannot be judged; when every probe of the same
        question raises too, the scorer counts as broken.
        """
        ...


class ScorerError(Exception):
    """A scorer cannot be made; `field` is the key below `scorers[i]` that has to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
