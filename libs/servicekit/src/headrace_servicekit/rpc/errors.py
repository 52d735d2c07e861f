"""Errors as part of the interface: a code, a machine-readable reason and a sentence.

On the wire an error is a google.rpc.Status with one ErrorInfo. Knows nothing of servers or clients.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "headrace"
MAX_MESSAGE_BYTES = 3000
"""Most bytes of a message on the wire: gRPC's trailers, which carry it twice, may hold 8 KiB."""
_MAX_METADATA_BYTES = 300
_DETAILS_KEY = "grpc-status-details-bin"
_NO_RETRY = ("grpc-retry-pushback-ms", b"-1")
"""Memory and disks do not come back so soon that the same call would be tried again, as after gRPC's own refusals."""


class ServiceError(Exception):
    """A refusal or failure that a caller can act on; handlers raise it, the server sends it.

    `reason` is an upper-case constant such as EPOCH_STALE; `message` a sentence that says what to do. What
    callers sent may be quoted in it: what is too long for the wire is cut, what is no text is escaped.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, **metadata: str) -> None:
        self.code = code
        self.reason = reason
        self.message = _sendable(message, MAX_MESSAGE_BYTES)
        self.metadata = {key: _sendable(value, _MAX_METADATA_BYTES) for key, value in metadata.items()}
        super().__init__(f"{reason}: {self.message}")

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status that goes on the wire."""
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=[detail])

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Trailers that carry the status, for `context.abort`."""
        status = (_DETAILS_KEY, self.to_status().SerializeToString())
        return (status, _NO_RETRY) if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED else (status,)


def invalid(message: str) -> ServiceError:
    """The refusal of a request that contradicts itself or its contract."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


def reason_of(error: BaseException) -> str | None:
    """Reason of a ServiceError or of an RPC error that carries one; else None."""
    if isinstance(error, ServiceError):
        return error.reason
    info = _error_info(error)
    return info.reason if info else None


def metadata_of(error: BaseException) -> dict[str, str]:
    """Metadata of a ServiceError or of an RPC error that carries it; else empty."""
    if isinstance(error, ServiceError):
        return dict(error.metadata)
    info = _error_info(error)
    return dict(info.metadata) if info else {}


def message_of(error: BaseException) -> str:
    """The sentence of a ServiceError or RPC error, without codes and wrappers."""
    if isinstance(error, ServiceError):
        return error.message
    if isinstance(error, grpc.RpcError):
        details = getattr(error, "details", None)
        return str(details() or "") if callable(details) else ""
    return str(error)


def _sendable(text: str, limit: int) -> str:
    """`text` without lone surrogates, cut to `limit` bytes as gRPC percent-encodes them."""
    encoded = text.encode("utf-8", "backslashreplace")
    left = limit
    for cut, byte in enumerate(encoded):
        left -= 1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3
        if left < 0:
            return encoded[:cut].decode("utf-8", "ignore") + " …"
    return encoded.decode()


def _error_info(error: BaseException) -> error_details_pb2.ErrorInfo | None:
    trailers = getattr(error, "trailing_metadata", None)
    if not isinstance(error, grpc.RpcError) or not callable(trailers):
        return None
    for key, value in trailers() or ():
        if key == _DETAILS_KEY:
            status = status_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    return info
    return None
