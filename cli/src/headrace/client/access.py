"""The part of the client that is about who uses the fleet: callers, tokens, usage, quotas. See `Client.access`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from headrace_schema.resources.access import MeView, NewTokenView, QuotaView, TokenView, UsageView

if TYPE_CHECKING:
    from headrace.client.transport import Transport


class Access:
    """Every method raises `HeadraceError` as those of `Client` do."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def me(self) -> MeView:
        """Whose token this client has, and what it may do."""
        return MeView.from_json(self._transport.get("/v1/me"))

    def tokens(self) -> Sequence[TokenView]:
        """Tokens that are not revoked, without their secrets."""
        return [TokenView.from_json(each) for each in self._transport.get("/v1/tokens")["tokens"]]

    def create_token(
        self,
        name: str,
        *,
        owner: str = "",
        team: str = "",
        scopes: Sequence[str] = ("read", "submit"),
        expires_in_s: float | None = None,
    ) -> NewTokenView:
        """Makes a token; its secret (`token`) is in this answer and nowhere else."""
        body: dict[str, Any] = {"name": name, "owner": owner, "team": team, "scopes": [*scopes]}
        body |= {"expires_in_s": expires_in_s} if expires_in_s else {}
        return NewTokenView.from_json(self._transport.post("/v1/tokens", body))

    def revoke_token(self, name: str) -> None:
        """Ends a token, and what is open under it."""
        self._transport.post(f"/v1/tokens/{quote(name, safe='')}:revoke")

    def usage(self) -> Sequence[UsageView]:
        """What I and my teams use and may use; of everybody for those who operate the fleet."""
        return [UsageView.from_json(each) for each in self._transport.get("/v1/usage")["usage"]]

    def quotas(self) -> Sequence[QuotaView]:
        """All quotas that are set."""
        return [QuotaView.from_json(each) for each in self._transport.get("/v1/quotas")["quotas"]]

    def set_quota(self, subject: str, limits: Mapping[str, float]) -> QuotaView:
        """Sets what `user:NAME` or `team:NAME` may use, in place of what was set before; nothing: no quota."""
        return QuotaView.from_json(self._transport.post("/v1/quotas", {"subject": subject, **limits}))
