"""What the HTTP API shows of those who use it: callers and tokens."""

from __future__ import annotations

from pydantic import Field

from headrace_schema.resources.resource import Resource


class MeView(Resource):
    """Who makes this request."""

    name: str = Field(description="whose runs it makes and sees")
    teams: list[str] = Field(description="its teams; its runs belong to the first")
    scopes: list[str] = Field(description="read, submit, operate, admin")
    token: str = Field(description="name of its token; empty: the API's own one, or none is asked for")
    expires_at: float | None = Field(description="seconds since the epoch; null: it does not expire")


class TokenView(Resource):
    """A token, without its secret."""

    name: str
    owner: str = Field(description="whose runs it makes and sees")
    team: str = Field(description="empty: none")
    scopes: list[str]
    created_at: float = Field(description="seconds since the epoch")
    expires_at: float | None = Field(description="seconds since the epoch; null: it does not expire")
    expired: bool


class NewTokenView(TokenView):
    """A token that was just made."""

    token: str = Field(description="its secret, which is shown this once")


class TokenListView(Resource):
    """All tokens that are not revoked."""

    tokens: list[TokenView]


class RevokedView(Resource):
    """A token that was revoked."""

    name: str


class QuotaView(Resource):
    """What a user or team may use."""

    subject: str = Field(description="user:NAME, team:NAME, user:* or team:*")
    limits: dict[str, float] = Field(
        description="runs, devices, device_hours, disk_gb, streams, requests_per_minute, priority; {}: no limit"
    )


class QuotaListView(Resource):
    """All quotas that are set."""

    quotas: list[QuotaView]


class UsageView(Resource):
    """What a user or team uses now, beside what it may use."""

    subject: str = Field(description="user:NAME or team:NAME")
    runs: int = Field(description="runs and evaluations that have not ended")
    queued: int = Field(description="of them: runs that wait for devices or for a quota")
    devices: int = Field(description="devices that they hold")
    device_hours: float = Field(description="in the last 30 days")
    disk_gb: float = Field(description="of its runs, in 10^9 bytes, at most a minute old")
    streams: int = Field(description="streams of events that are open")
    limits: dict[str, float] = Field(description="its quotas, or those of everybody; {}: no limit")


class UsageListView(Resource):
    """What users and teams use."""

    usage: list[UsageView]
