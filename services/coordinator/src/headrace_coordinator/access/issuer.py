"""Tokens of an OpenID Connect issuer: verified by its keys, and mapped to a name, teams and scopes.

The extra `oidc`. Keys are fetched from the issuer and kept; a token that names another key fetches them again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace_schema.access import NAME, Name, Scope
from headrace_schema.problems import explain
from headrace_schema.sections.base import Section
from headrace_schema.yaml_text import YamlProblem, read_yaml
from pydantic import Field, TypeAdapter, ValidationError

from headrace_coordinator.domain.access import RESERVED, Principal

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

log = logging.getLogger(__name__)
ALGORITHMS = [
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
]
"""Signatures by a private key alone: none, and none by a secret that a verifier shares."""
DISCOVERY = "/.well-known/openid-configuration"
FETCH_S, KEPT_S, AGAIN_S = 5.0, 300.0, 5.0
"""Deadline of a fetch; how long keys are kept; the least time between fetches for keys that are not known."""
MOST_BYTES, MOST_KNOWN, MOST_GROUPS = 1 << 20, 4096, 64
LEEWAY_S = 30
"""How far the issuer's clock may be from this one, in seconds."""
EVERYBODY = "*"


class IssuerConfig(Section):
    """Whose tokens are taken, and what they mean."""

    issuer: Annotated[str, Field(pattern=r"^https?://\S+$", description="its URL, the claim `iss`")]
    audience: Annotated[str, Field(min_length=1, description="what tokens must be for, the claim `aud`")]
    jwks_url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = Field(
        default="", description="where its keys are; empty: as its discovery document says"
    )
    name_claim: str = Field(default="sub", description="the claim that names the owner of runs")
    teams_claim: str = Field(default="groups", description="the claim that lists groups")
    teams: dict[str, Name] = Field(
        default={}, description="groups and the teams that they are; empty: each is one"
    )
    client_id: str = Field(
        default="", description="of the page, which then logs in there; empty: it does not"
    )
    client_secret_file: Path | None = Field(default=None, description="where the issuer wants a secret of it")
    login_scopes: str = Field(default="openid profile email", description="what a login asks for")
    page_url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = Field(
        default="", description="of the page, as the issuer knows it; empty: as the browser asked"
    )
    scopes: dict[Scope, list[str]] = Field(
        default={"read": [EVERYBODY], "submit": [EVERYBODY]},
        description="each scope and the groups that have it; `*` is everybody",
    )


class BadIssuer(ValueError):
    """A configuration that cannot be used; one sentence."""


def read_issuer(path: Path) -> Issuer:
    """The issuer that a YAML file describes; raises BadIssuer, which names the key and the fix."""
    try:
        config = IssuerConfig.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, YamlProblem) as error:
        raise BadIssuer(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = explain(error, IssuerConfig)[0]
        raise BadIssuer(f"{path}: {first.key}: {first.problem}; {first.fix}") from error
    try:
        import joserfc  # noqa: F401

        if config.client_id:
            import authlib  # noqa: F401
    except ImportError as error:
        raise BadIssuer(
            f"{path}: tokens of an issuer need pip install 'headrace-coordinator[oidc]'"
        ) from error
    return Issuer(config)


def looks_issued(secret: str) -> bool:
    """Whether a token has the form of a signed JWT."""
    return secret.count(".") == 2 and secret.startswith("ey") and len(secret) <= 16384


class Issuer:
    """Verifies tokens. `now` is the wall clock, in seconds since the epoch."""

    def __init__(self, config: IssuerConfig, now: Callable[[], float] = time.time) -> None:
        self.config = config
        self._now = now
        self._keys: KeySet | None = None
        self._fetched = self._tried = float("-inf")
        self._fetching = asyncio.Lock()
        self._metadata: tuple[float, dict[str, Any]] = float("-inf"), {}
        self._known: OrderedDict[str, tuple[Principal, str]] = OrderedDict()
        """By the token's SHA-256: whose it is, and by which key."""
        self._name: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(pattern=NAME)])

    def holds(self, digest: str) -> bool:
        """Whether a token that was verified is still good."""
        found = self._known.get(digest)
        return found is not None and found[0].expires_at > self._now()

    async def principal(self, secret: str) -> Principal | None:
        """Whose a token is; None for one that is not good, whatever the reason: the log has it."""
        digest = hashlib.sha256(secret.encode()).hexdigest()
        await self._refresh()
        if self.holds(digest):
            self._known.move_to_end(digest)
            return self._known[digest][0]
        from joserfc import errors

        try:
            found, key = await self._verified(secret, digest)
        except (errors.JoseError, ValueError) as error:
            log.warning("a token of %s is refused: %s", self.config.issuer, error)
            return None
        self._known[digest] = found, key
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return found

    async def _verified(self, secret: str, digest: str) -> tuple[Principal, str]:
        from joserfc import errors, jwt

        key = str(_header(secret).get("kid", ""))
        if key and key not in self._key_ids():
            await self._refresh(unknown=True)
        if self._keys is None:
            raise ValueError(f"its keys cannot be fetched from {self.config.jwks_url or self.config.issuer}")
        decoded = jwt.decode(secret, self._keys, algorithms=ALGORITHMS)
        jwt.JWTClaimsRegistry(
            now=lambda: int(self._now()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": self.config.issuer},
            aud={"essential": True, "value": self.config.audience},
            exp={"essential": True},
        ).validate(decoded.claims)
        if not isinstance(decoded.claims["exp"], int | float):
            raise errors.InvalidClaimError("exp")
        return self._mapped(decoded.claims, digest), key

    def _mapped(self, claims: dict[str, Any], digest: str) -> Principal:
        config = self.config
        name = claims.get(config.name_claim)
        try:
            name = self._name.validate_python(name)
        except ValidationError as error:
            raise ValueError(f"its claim {config.name_claim} is no name: {str(name)[:60]!r}") from error
        if name in RESERVED:
            raise ValueError(f"its claim {config.name_claim} is {name}, which is the fleet's own name")
        given = claims.get(config.teams_claim) or []
        groups = [str(group) for group in ([given] if isinstance(given, str) else given)][:MOST_GROUPS]
        teams = [config.teams[group] for group in groups if group in config.teams] if config.teams else groups
        scopes = {
            scope
            for scope, having in config.scopes.items()
            if EVERYBODY in having or not set(having).isdisjoint(groups)
        }
        expires_at = float(claims["exp"]) + LEEWAY_S
        return Principal(name, tuple(dict.fromkeys(teams)), frozenset(scopes), "", digest, expires_at)

    def _key_ids(self) -> set[str]:
        return {str(key.kid) for key in self._keys.keys} if self._keys is not None else set()

    async def _refresh(self, *, unknown: bool = False) -> None:
        """Fetches the keys where they are old, or one is not known; tokens whose key has gone are good no more."""
        async with self._fetching:
            passed = time.monotonic() - (self._tried if unknown or self._keys is None else self._fetched)
            if passed < (AGAIN_S if unknown or self._keys is None else KEPT_S):
                return
            self._tried = time.monotonic()
            try:
                self._keys = await self._fetch()
            except (OSError, ValueError, KeyError) as error:
                log.warning("the keys of %s cannot be fetched: %s", self.config.issuer, error)
                return
            self._fetched = time.monotonic()
            left = self._key_ids()
            for digest, (_, key) in list(self._known.items()):
                if key and key not in left:
                    del self._known[digest]

    async def metadata(self) -> dict[str, Any]:
        """Its discovery document, at most KEPT_S old. Raises OSError or ValueError."""
        fetched, found = self._metadata
        if time.monotonic() - fetched < KEPT_S:
            return found
        found = await _get(self.config.issuer.rstrip("/") + DISCOVERY)
        if found.get("issuer") != self.config.issuer:
            raise ValueError(f"its discovery document is of {str(found.get('issuer'))[:100]!r}")
        self._metadata = time.monotonic(), found
        return found

    async def _fetch(self) -> KeySet:
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        url = self.config.jwks_url
        if not url:
            url = str((await self.metadata())["jwks_uri"])
        try:
            return KeySet.import_key_set(await _get(url))  # type: ignore[arg-type]
        except (JoseError, TypeError) as error:
            raise ValueError(f"{url} holds no set of keys: {error}") from error


async def _get(url: str) -> dict[str, Any]:
    """A JSON object; raises OSError or ValueError."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=FETCH_S, trust_env=True) as client:
            found = await client.get(url)
            found.raise_for_status()
    except httpx.HTTPError as error:
        raise OSError(f"{url}: {error}") from error
    if len(found.content) > MOST_BYTES or not isinstance(document := found.json(), dict):
        raise ValueError(f"{url} is no JSON object of at most {MOST_BYTES} bytes")
    return document


def _header(secret: str) -> dict[str, Any]:
    """The header of a JWT, which nothing has verified yet."""
    import json
    from base64 import urlsafe_b64decode

    part = secret.partition(".")[0]
    header = json.loads(urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header
