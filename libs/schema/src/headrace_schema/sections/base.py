"""What all sections share: their strictness and the bounds of numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# Strict: `true` and "8" are no numbers. Bounded: every count fits the wire's int32 (bytes: int64).
Count = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
# Bounded by what is made of them: the coordinator has an entry for each.
Processes = Annotated[int, Field(strict=True, ge=1, le=4096)]
Helpers = Annotated[int, Field(strict=True, ge=0, le=4096)]
Thousands = Annotated[int, Field(strict=True, ge=1, le=2**16)]
FEW, MANY = 64, 4096
"""Most entries of a list or mapping each of which costs an import, a process or a file; and of others."""
Seconds = Annotated[float, Field(gt=0, le=366 * 86400)]
"""Of a wait: clocks and wires take no longer ones than a year."""
Tokens = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Rate = Annotated[float, Field(gt=0, le=10)]
Bytes = Annotated[int, Field(strict=True, ge=1, le=2**48)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]


def _of_users(name: str) -> str:
    if name.startswith("HEADRACE_"):
        raise ValueError(f"{name} is a setting of the service's own; name another variable")
    return name


VariableName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200), AfterValidator(_of_users)
]
"""Of a service's environment, to be given to users' code. Those of the service's own settings never are."""


class Section(BaseModel):
    """A part of the spec; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
