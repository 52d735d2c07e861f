"""Sessions of an online run: which endpoint one is at, by the mark that its id begins with, and its own key."""

from __future__ import annotations

import hashlib
import hmac
import re

KEY = "sk-headrace-"
_MARK_BYTES = 3
_ID = r"[0-9a-f]{16}"
_IN_KEY = re.compile(rf"{KEY}({_ID})-.+")
_IN_ANSWER = re.compile(rf"(?:chatcmpl-|cmpl-|resp_)({_ID})[-_]\d{{1,9}}")


def mark_of(url: str) -> str:
    """What the ids of sessions at this address begin with.

    >>> len(mark_of("http://127.0.0.1:8000/v1"))
    6
    """
    return hashlib.blake2b(url.encode(), digest_size=_MARK_BYTES).hexdigest()


def is_at(session: str, url: str) -> bool:
    """Whether a session is at the endpoint with this address."""
    return session.startswith(mark_of(url))


def own_key(secret: str, session: str) -> str:
    """The key of one session, which only who has the `secret`, the run's key, can make.

    >>> session_of_key(own_key("secret", "0123456789abcdef"))
    '0123456789abcdef'
    """
    return f"{KEY}{session}-{hmac.digest(secret.encode(), session.encode(), 'sha256').hex()}"


def session_of_key(key: str) -> str:
    """The session whose own key this is; empty for any other key."""
    found = _IN_KEY.fullmatch(key)
    return found[1] if found else ""


def session_of_answer(id: str) -> str:
    """The session of an answer's id, such as chatcmpl-…-1; empty for what is no such id."""
    found = _IN_ANSWER.fullmatch(id)
    return found[1] if found else ""
