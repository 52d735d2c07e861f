"""Turns an engine's refusals into errors of the interface."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.engines.base import Refused


@contextmanager
def refusals() -> Iterator[None]:
    """FAILED_PRECONDITION with the engine's reason; INVALID_ARGUMENT for INVALID."""
    try:
        yield
    except Refused as error:
        code = grpc.StatusCode.FAILED_PRECONDITION
        if error.reason == "INVALID":
            code = grpc.StatusCode.INVALID_ARGUMENT
        raise ServiceError(code, error.reason, str(error)) from error
