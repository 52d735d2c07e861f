"""What an admin asks for: tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace_schema.sections.base import Section

Scope = Literal["read", "submit", "operate", "admin"]
Visibility = Literal["private", "team", "fleet"]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]
YEARS_10 = 10 * 366 * 86400.0


class TokenRequest(Section):
    """A token that is to be made."""

    name: Name = Field(description="what lists, revoking and the audit call it")
    owner: Name | Literal[""] = Field(
        default="", description="whose runs it makes and sees; several tokens may have one; default: its name"
    )
    team: Name | Literal[""] = Field(default="", description="the team of its owner; empty: none")
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=4)] = Field(
        default=["read", "submit"], description="what it may do; `admin` is all of it"
    )
    expires_in_s: float | None = Field(
        default=None, gt=0, le=YEARS_10, description="seconds for which it is good; null: until it is revoked"
    )
