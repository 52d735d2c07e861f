"""What may be changed of a run while it works."""

from __future__ import annotations

from pydantic import Field

from headrace_schema.sections.base import Count, Section


class TrainerChange(Section):
    """The learning side."""

    ranks: Count = Field(description="ranks of the trainer group from the next step on")


class RunChange(Section):
    """Keys of a run's spec with other values."""

    trainer: TrainerChange
