"""Logs a browser in at the fleet's OpenID Connect issuer: the authorisation code flow with PKCE, by Authlib.

What belongs to one login is in a cookie of that browser: nothing of strangers is kept here.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from typing import Any

from headrace_coordinator.access.issuer import FETCH_S, Issuer, looks_issued

BEGIN, END = "/login", "/login/done"
COOKIE, LIFE_S = "headrace-login", 600
"""Holds state, verifier and nonce of a login that has begun, so many seconds."""
MOST = 8
"""Codes that the issuer is asked about at the same time: whoever reaches the page can have it asked."""


class LoginRefused(Exception):
    """Nobody is logged in; one sentence says why."""


class Login:
    """Logins at an issuer whose configuration has a `client_id`."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._config = issuer, issuer.config
        self._asking = asyncio.Semaphore(MOST)

    async def begin(self, page: str) -> tuple[str, str]:
        """Where the browser of a page is led, and its cookie. Raises LoginRefused where the issuer does not answer."""
        state, verifier, nonce = (secrets.token_urlsafe(32) for _ in range(3))
        where = await self._endpoint("authorization_endpoint")
        async with self._client(page) as client:
            url, _ = client.create_authorization_url(where, state=state, code_verifier=verifier, nonce=nonce)
        return str(url), f"{state}.{verifier}.{nonce}"

    async def finish(self, page: str, cookie: str, given: Mapping[str, str]) -> str:
        """The token that the issuer gives for what its redirect brought. Raises LoginRefused."""
        from authlib.common.errors import AuthlibBaseError
        from httpx import HTTPError

        state, verifier, nonce = [*cookie.split("."), "", ""][:3]
        if not state or not hmac.compare_digest(state.encode(), given.get("state", "").encode()):
            raise LoginRefused(
                "this login was not begun in this browser, or took too long; begin again at /login"
            )
        if given.get("iss", self._config.issuer) != self._config.issuer:
            raise LoginRefused("this answer is another issuer's")
        if "code" not in given:
            said = f"{given.get('error', 'no code')} {given.get('error_description', '')}"
            raise LoginRefused(f"{self._config.issuer} refused: {said[:200].strip()}")
        if self._asking.locked():
            raise LoginRefused("too many log in at this moment; begin again at /login")
        where = await self._endpoint("token_endpoint")
        try:
            async with self._asking, self._client(page) as client:
                found = await client.fetch_token(
                    where, grant_type="authorization_code", code=given["code"], code_verifier=verifier
                )
        except (AuthlibBaseError, HTTPError, ValueError) as error:
            raise LoginRefused(f"{self._config.issuer} gives no token for this login: {error}") from error
        return await self._good(found, nonce)

    async def _good(self, found: Mapping[str, Any], nonce: str) -> str:
        """The access token where the API takes it, else the ID token, which must be of this login."""
        access, identity = str(found.get("access_token", "")), str(found.get("id_token", ""))
        if looks_issued(access) and await self._issuer.principal(access):
            return access
        if looks_issued(identity) and await self._issuer.principal(identity):
            if _claims(identity).get("nonce") == nonce:
                return identity
            raise LoginRefused("this token is that of another login; begin again at /login")
        raise LoginRefused(
            f"{self._config.issuer} gave no token that this fleet takes: one must be a JWT for the audience "
            f"{self._config.audience!r} (the coordinator's log has the reason); set `audience`, or `login_scopes`"
        )

    async def _endpoint(self, name: str) -> str:
        try:
            return str((await self._issuer.metadata())[name])
        except (OSError, ValueError, KeyError) as error:
            raise LoginRefused(f"{self._config.issuer} cannot be asked where to log in: {error}") from error

    def _client(self, page: str) -> Any:
        from authlib.integrations.httpx_client import AsyncOAuth2Client

        config = self._config
        secret = config.client_secret_file.read_text().strip() if config.client_secret_file else None
        return AsyncOAuth2Client(
            config.client_id,
            secret,
            token_endpoint_auth_method="client_secret_basic" if secret else "none",
            scope=config.login_scopes,
            redirect_uri=(config.page_url or page).rstrip("/") + END,
            code_challenge_method="S256",
            timeout=FETCH_S,
        )


def _claims(secret: str) -> dict[str, Any]:
    """The claims of a JWT that was verified."""
    part = secret.split(".")[1]
    claims: dict[str, Any] = json.loads(urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return claims
