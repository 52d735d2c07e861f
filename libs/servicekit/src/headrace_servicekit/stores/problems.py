"""What a store's refusal means, in one sentence with a fix. Knows errors of stores by codes and names alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "abfs": "azure"}
"""Extra of headrace-servicekit that has a scheme's package."""
_RENEW = "renew them where the service that uses it runs, and restart it if they are in its environment"


class StoreProblem(Exception):
    """A store, or a path in it, cannot be used. `lasting`: the same would be said again; `code` is for programs."""

    def __init__(self, reason: str, fix: str, *, lasting: bool = True, code: str = "") -> None:
        super().__init__(f"{reason}; {fix}")
        self.reason, self.fix, self.lasting, self.code = reason, fix, lasting, code
        self.key = ""
        """Of the spec, where that is known."""


@dataclass(frozen=True)
class _Meaning:
    codes: frozenset[str]
    reason: str
    fix: str
    lasting: bool = True


def _means(codes: str, reason: str, fix: str, *, lasting: bool = True) -> _Meaning:
    return _Meaning(frozenset(codes.split()), reason, fix, lasting)


_MEANINGS = (
    _means(
        "RequestTimeTooSkewed",
        "{url}: this host's clock and the store's are too far apart",
        "set the host's clock by a time server (NTP)",
    ),
    _means(
        "ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired TokenRetrievalError "
        "UnauthorizedSSOTokenError SSOTokenLoadError RefreshError ExpiredAuthenticationToken",
        "{url}: the credentials have expired",
        _RENEW,
    ),
    _means(
        "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound "
        "DefaultCredentialsError ClientAuthenticationError",
        "{url}: there are no credentials for it here",
        "give them to the service by the store's own conventions: its variables, or its files of profiles",
    ),
    _means(
        "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken AuthFailure AuthenticationFailed InvalidSecurity 401",
        "{url}: the store does not know the credentials",
        "check the key and its secret where the service that uses it runs",
    ),
    _means(
        "NoSuchBucket ContainerNotFound",
        "{url}: there is no such bucket",
        "create the bucket, or name another one",
    ),
    _means(
        "AccessDenied AllAccessDisabled Forbidden AuthorizationFailure AuthorizationPermissionMismatch "
        "AccountProblem PermissionError 403",
        "{url}: the store refuses to {verb} there with the credentials of this service",
        "give them the right to {verb} there, or name another place",
    ),
    _means(
        "SlowDown ServiceUnavailable InternalError RequestTimeout ServerBusy Throttling 500 502 503 504 429",
        "{url}: the store is too busy or fails",
        "try again later",
        lasting=False,
    ),
    _means(
        "EndpointConnectionError ConnectTimeoutError ReadTimeoutError ConnectionClosedError ConnectionError "
        "ClientConnectorError ClientConnectorDNSError HTTPClientError ConnectionResetError ConnectionRefusedError "
        "ServiceRequestError ServerDisconnectedError ClientPayloadError TimeoutError ServerTimeoutError "
        "IncompleteRead ResponseStreamingError",
        "{url}: the store cannot be reached",
        "check the address of the store, such as AWS_ENDPOINT_URL, and the network",
        lasting=False,
    ),
    _means("NoSuchKey FileNotFoundError 404", "{url}: there is nothing of that name", "check the path"),
)


def explain(error: BaseException, url: str, verb: str = "read") -> StoreProblem:
    """What an error of fsspec or of a store's package means for `url`, of which one wanted to `verb`."""
    if isinstance(error, StoreProblem):
        return error
    if isinstance(error, ImportError):
        extra = EXTRAS.get(url.partition("://")[0], "s3")
        fix = f"pip install 'headrace-servicekit[{extra}]' where it is used"
        return StoreProblem(f"{url}: the package for this kind of store is not installed ({error})", fix)
    causes = [*_causes(error)]
    codes = [code for each in causes for code in _codes(each)]
    for meaning in _MEANINGS:
        if found := next((code for code in codes if code in meaning.codes), ""):
            said = {"url": url, "verb": verb}
            return StoreProblem(
                meaning.reason.format(**said), meaning.fix.format(**said), lasting=meaning.lasting, code=found
            )
    words = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return StoreProblem(f"{url}: {words}", f"make it possible to {verb} there", lasting=False)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(8):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _codes(error: BaseException) -> Iterator[str]:
    """Codes of an error: botocore's `response`, Google's `code`, Azure's `error_code`; then its classes' names."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for name in ("error_code", "code", "status_code"):
        if isinstance(code := getattr(error, name, None), str | int):
            yield str(getattr(code, "value", code))
    yield from (each.__name__ for each in type(error).__mro__)
