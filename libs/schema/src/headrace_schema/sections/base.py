"""What all sections share: their strictness and the bounds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Strict: `true` and "8" are no numbers. Bounded: every count fits the wire's int32 (bytes: int64).
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Rate = Annotated[float, Field(gt=0, le=10)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**48)]
Share = Annotated[float, Field(ge=0, le=1)]
VariableName = Annotated[str, Field(pattern=r"^(?!HEADRACE_)[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
"""Of a service's environment, to be given to users' code. Those of the service's own settings never are."""
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


class Section(BaseModel):
    """A part of the spec; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
