"""Who plays a role of a conversation: a model, the form in which it reads messages, and how its turns are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace_rollout.conversations.speaker import Speaker
from headrace_rollout.conversations.template import TurnTemplate
from headrace_rollout.engines.base import Engine
from headrace_rollout.engines.beside import FROZEN_NUMBER, Frozen
from headrace_rollout.engines.samples import Distribution, Stream

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


@dataclass(frozen=True)
class Player:
    """The policy, or a `frozen` model, in a role. What is None is as the stream has it."""

    engine: Engine
    codec: TextCodec
    template: TurnTemplate
    frozen: Frozen | None = None
    adapter: str = ""
    """Which of its engine's adapters it is, where that has several."""
    learns: bool = True
    temperature: float | None = None
    max_new_tokens: int | None = None
    stop: Sequence[str] | None = None

    def greedy(self, sample: bool) -> bool:
        """Whether its turns are the likeliest tokens, in a sample that is so or not."""
        return sample and self.temperature is None

    def speaker(self, stream: Stream) -> Speaker:
        """What asks its engine for turns of a stream's conversations."""
        own = replace(stream, adapter=self.adapter)
        if self.frozen is not None:
            own = replace(own, policy_number=FROZEN_NUMBER)
        if self.temperature is not None:
            own = replace(own, distribution=Distribution(temperature=self.temperature))
        if self.max_new_tokens is not None:
            own = replace(own, max_new_tokens=self.max_new_tokens)
        if self.stop is not None:
            own = replace(own, stop=tuple(self.stop))
        return Speaker(self.engine, own)
