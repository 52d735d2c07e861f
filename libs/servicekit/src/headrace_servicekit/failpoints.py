"""Scripted faults: named places in the code where a test may kill, stop, delay or fail the process.

HEADRACE_FAILPOINTS="name=kill@3;other=delay:0.5@9+;third=error" arms them; `@n` acts on the n-th pass only, `@n+` on it
and all later ones, without it every pass acts. Actions: kill (SIGKILL), stop (SIGSTOP), delay:SECONDS, error; and skip,
at the places that ask `skips`: what stands there is left out, and nobody is told.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass

import grpc

from headrace_servicekit.rpc.errors import ServiceError

VARIABLE = "HEADRACE_FAILPOINTS"
_RULE = re.compile(
    r"(?P<name>[\w.-]+)=(?P<action>kill|stop|error|skip|delay:(?P<delay>\d+(\.\d+)?))(@(?P<nth>[1-9]\d*)(?P<later>\+)?)?"
)


@dataclass
class _Rule:
    action: str
    delay_s: float
    nth: int | None
    later: bool = False
    passes: int = 0

    def due(self) -> bool:
        self.passes += 1
        if self.later:
            return self.nth is not None and self.passes >= self.nth
        return self.nth is None or self.passes == self.nth


_rules: dict[str, _Rule] | None = None


def arm(script: str) -> None:
    """Replaces all rules by those of `script`; empty disarms. Raises ValueError naming a malformed rule."""
    global _rules
    rules: dict[str, _Rule] = {}
    for text in filter(None, (part.strip() for part in script.split(";"))):
        match = _RULE.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{VARIABLE}: {text!r} is no rule; write name=kill|stop|error|skip|delay:SECONDS[@n[+]]"
            )
        action = match["action"].partition(":")[0]
        rules[match["name"]] = _Rule(
            action,
            float(match["delay"] or 0),
            int(match["nth"]) if match["nth"] else None,
            bool(match["later"]),
        )
    _rules = rules


async def failpoint(name: str) -> None:
    """A place where a fault may be scripted. Raises ServiceError FAILPOINT for the action `error`."""
    rule = _due(name)
    if rule is not None:
        _act(name, rule)
        await asyncio.sleep(rule.delay_s)


def failpoint_sync(name: str) -> None:
    """`failpoint` for code outside an event loop; a delay blocks the thread."""
    rule = _due(name)
    if rule is not None:
        _act(name, rule)
        time.sleep(rule.delay_s)


def skips(name: str) -> bool:
    """A place that a test may have left out."""
    rule = _due(name)
    return rule is not None and rule.action == "skip"


def _due(name: str) -> _Rule | None:
    if _rules is None:
        arm(os.environ.get(VARIABLE, ""))
    assert _rules is not None
    rule = _rules.get(name)
    return rule if rule is not None and rule.due() else None


def _act(name: str, rule: _Rule) -> None:
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rule.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rule.action == "error":
        raise ServiceError(grpc.StatusCode.INTERNAL, "FAILPOINT", f"failpoint {name} is armed with error")
