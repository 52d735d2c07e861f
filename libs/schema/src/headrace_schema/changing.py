"""What may be changed of a run while it works."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headrace_schema.sections.base import Processes, Section


class TrainerChange(Section):
    """The learning side."""

    ranks: Processes = Field(description="ranks of the trainer group from the next step on")


Tag = Annotated[str, Field(pattern=r"^[\w.:=/+@-]{1,40}$")]


class RunLabels(Section):
    """What people say of a run; a key that is absent stays as it is. Changes nothing of its work."""

    tags: list[Tag] | None = Field(
        default=None, max_length=20, description="words to find it by; [] removes all that it has"
    )
    note: str | None = Field(default=None, max_length=4000, description='a text; "" removes it')


class RunChange(Section):
    """Keys of a run's spec with other values."""

    trainer: TrainerChange
