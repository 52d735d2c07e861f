"""The section of a second policy that answers the one that learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schema.sections.base import Count, Section, Tokens

MAX_REPLIES = 64


class ReplySection(Section):
    """What answers the policy in the middle of a trajectory: a frozen model, or the policy itself.

    A trajectory is the prompt, an answer, a reply, an answer … and ends with an answer. Replies are context: they carry
    no loss. Both read the same ids, so both have one tokenizer.
    """

    path: str = Field(
        default="",
        description="local directory or Hugging Face id of a frozen model with the policy's tokenizer, such as what "
        "another run exported; empty: the policy itself replies",
    )
    revision: str | None = Field(default=None, description="revision of a Hugging Face id")
    instances: Count = Field(
        default=1,
        description="rollout instances that reply on the devices of placement.reply, where it names some",
    )
    turns: Annotated[int, Field(ge=1, le=MAX_REPLIES)] = Field(
        default=1, description="replies in a trajectory; there is one more answer"
    )
    before: str = Field(
        default="",
        description="text between an answer and its reply, such as the head of a user's turn in the chat template",
    )
    after: str = Field(default="", description="text between a reply and the next answer")
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="temperature of replies; 0: the likeliest token each time"
    )
    max_new_tokens: Tokens = Field(default=64, description="longest reply in tokens")
    stop: list[str] = Field(default_factory=list, description="texts that end a reply and are cut off")
    scored: Literal["exchange", "last"] = Field(
        default="exchange",
        description="what scorers judge: everything behind the prompt, or the last answer alone",
    )
