"""Failures in words for users: what failed first stands first. Knows no service and no key of a spec."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed has it for macOS alone

from headrace_schema.references import redacted


def cause_first(cause: str, effect: str, key: str = "") -> str:
    """A failure: its `cause`, then what that did, then the `key` of the spec that bounds it.

    >>> cause_first("the arm fell off", "5 of 16 answers are missing", "evaluation.max_unanswered")
    'the arm fell off; 5 of 16 answers are missing (evaluation.max_unanswered)'
    """
    bound = f" ({key})" if key else ""
    return "; ".join(filter(None, (cause.rstrip().rstrip(".;"), effect))) + bound


def first_of(error: BaseException) -> BaseException:
    """The exception that others were raised from, or while it was handled; of a group, the first one's."""
    seen = {id(error)}
    for cause in _behind(error):
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    return error


def raised(error: BaseException, most: int = 500) -> str:
    """What other people's code raised, and where; the first cause begins, then what it was raised again as.

    Of each exception at most `most` characters.
    """
    first = first_of(error)
    if first is error or isinstance(error, BaseExceptionGroup):
        return _told(first, most)
    return f"{_told(first, most)}, and then {_told(error, most)}"


def proxied(url: str) -> str:
    """Of a connection that failed: through which proxy it went, and how to go round it; empty where there was none."""
    asked = urlsplit(url)
    host = asked.hostname or ""
    if (
        not host
        or proxy_bypass_environment(asked.netloc.rpartition("@")[2])
        or proxy_bypass_environment(host)
    ):
        return ""
    for name in (f"{asked.scheme}_proxy", "all_proxy"):
        variable = next((each for each in (name, name.upper()) if os.environ.get(each)), "")
        if variable:
            found = os.environ[variable]
            proxy = urlsplit(found if "://" in found else f"http://{found}").netloc.rpartition("@")[2]
            return f", through the proxy {proxy} of {variable}; to go round it: no_proxy={host}"
    return ""


def _behind(error: BaseException) -> Iterator[BaseException]:
    """The exceptions behind one, from near to far."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, BaseExceptionGroup):
            at = at.exceptions[0]
        else:
            at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
        if not isinstance(at, Exception):  # such as the CancelledError behind a TimeoutError
            return
        yield at


def _told(error: BaseException, most: int) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    said = redacted(str(error))[:most]  # before it is cut: a part of a secret would not be found
    # No message, log or file takes halves of surrogate pairs.
    return f"{type(error).__name__}: {said}".encode("utf-8", "replace").decode().rstrip(": ") + where
