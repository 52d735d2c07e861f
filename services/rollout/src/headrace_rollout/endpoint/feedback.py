"""Bodies of the requests that are the endpoint's own: rewards, and groups of sessions. Knows no session."""

from __future__ import annotations

import json
import re

from headrace_rollout.endpoint.requests import Refusal

_COMPLETION = re.compile(r"(?:chatcmpl-|cmpl-|resp_)([0-9a-f]{16})[-_](\d{1,9})")


def read_group(body: bytes) -> str:
    """The group that a new session is of; empty for none. Raises Refusal."""
    try:
        given = json.loads(body or b"{}")
        group = given.get("group") or ""
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refusal(400, "invalid_request", 'the body: send {"group": NAME}, or nothing') from error
    if not isinstance(group, str):
        raise Refusal(400, "invalid_request", "group: give a text", "group")
    return group


def read_reward(body: bytes) -> tuple[float, bool | None, str, bool]:
    """Value, success, ID-NUMBER of the completion that is named, and whether it is the session's last reward."""
    try:
        given = json.loads(body)
        value, success = given["reward"], given.get("success")
        completion, final = given.get("completion") or "", given.get("final", True)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = 'reward: send {"reward": NUMBER}, and "success": true or false if you like'
        raise Refusal(400, "invalid_request", message, "reward") from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refusal(400, "invalid_request", f"reward: {str(value)[:80]!r} is no number", "reward")
    if not isinstance(success, bool | None):
        raise Refusal(
            400, "invalid_request", f"success: {str(success)[:80]!r}; give true or false", "success"
        )
    if not isinstance(final, bool):
        raise Refusal(400, "invalid_request", f"final: {str(final)[:80]!r}; give true or false", "final")
    found = _COMPLETION.fullmatch(str(completion))
    if completion and found is None:
        message = f"completion: {str(completion)[:80]!r} is no id of an answer, such as chatcmpl-…-1"
        raise Refusal(400, "invalid_request", message, "completion")
    return float(value), success, f"{found[1]}-{found[2]}" if found else "", final
