"""What an admin asks for: tokens and quotas."""

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


Few = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Much = Annotated[float, Field(ge=0, le=1e12)]


class QuotaRequest(Section):
    """What a user or team may use; a key that is absent has no limit. None at all removes the quota."""

    subject: Annotated[str, Field(pattern=r"^(user|team):([A-Za-z0-9][A-Za-z0-9._@+-]{0,63}|\*)$")] = Field(
        description="user:NAME or team:NAME; user:* and team:* are those of everybody who has none of their own"
    )
    runs: Few | None = Field(default=None, description="runs and evaluations that have not ended")
    devices: Few | None = Field(default=None, description="devices that they hold at the same time")
    device_hours: Much | None = Field(default=None, description="hours of devices in the last 30 days")
    disk_gb: Much | None = Field(
        default=None, description="of their runs, in 10^9 bytes; asked at submission"
    )
    streams: Few | None = Field(default=None, description="streams of events that are open")
    requests_per_minute: Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="requests to the API"
    )
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] | None = Field(
        default=None,
        description="the highest scheduling.priority; without it 0, with the scope operate 100; of users alone",
    )
