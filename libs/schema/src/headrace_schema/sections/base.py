"""What all sections share: their strictness and the bounds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Strict: `true` and "8" are no numbers. Bounded: every count fits the wire's int32 (bytes: int64).
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
# Bounded by what is made of them: the coordinator has an entry for each.
Processes = Annotated[int, Field(strict=True, ge=1, le=4096)]
Helpers = Annotated[int, Field(strict=True, ge=0, le=4096)]
Thousands = Annotated[int, Field(strict=True, ge=1, le=2**16)]
FEW, MANY = 64, 4096
"""Most entries of a list or mapping each of which costs an import, a process or a file; and of others."""
Tokens = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Rate = Annotated[float, Field(gt=0, le=10)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**48)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the spec; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
