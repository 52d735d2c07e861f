"""Ids of Tinker's things, and what they stand for here. Pure.

A model `SESSION:train:N` is the session run whose id begins with `SESSION-N-`. A sampler and a promise have in their
ids what they need.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_schema.problems import problem
from pydantic_core import from_json, to_json

from headrace_coordinator.api.refusal import Refused

SESSION = re.compile(r"tk-[0-9a-f]{12}")
MODEL = re.compile(r"(tk-[0-9a-f]{12}):train:(\d{1,9})")
SAMPLER = re.compile(r"(tk-[0-9a-f]{12}):sample:(\d{1,9}):([\w-]+)")
PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
LOADED = "-loaded"
"""Ends the name of a run whose first call loaded weights that Tinker's client counts as none of its own."""


def new_session() -> str:
    """An id for a client's session."""
    return f"tk-{secrets.token_hex(6)}"


def run_name(model: str) -> str:
    """The name of the run of a model, which its id begins with. Raises Refused."""
    if (found := MODEL.fullmatch(model)) is None:
        raise Refused("NOT_FOUND", f"there is no model {model[:80]!r}; create_model gives its id")
    return f"{found[1]}-{int(found[2])}"


def session_of(model: str) -> str:
    """The client's session that a model is of."""
    return model.partition(":")[0]


class Path(NamedTuple):
    """A checkpoint as Tinker names it: `tinker://MODEL/weights/NAME`, or of `sampler_weights`."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"

    @property
    def saved_as(self) -> str:
        """Its name in the session run: both kinds may have one of the same name."""
        return f"{self.kind}.{self.name}"


def parse_path(path: str) -> Path:
    """The parts of a path. Raises Refused."""
    if (found := PATH.fullmatch(path)) is None:
        reason = f"{path[:120]!r} is no checkpoint"
        fix = "write tinker://MODEL/weights/NAME, or …/sampler_weights/NAME"
        raise Refused("INVALID", f"{reason}; {fix}", [problem("path", reason, fix)])
    return Path(found[1], found[2], found[3])


def of_run(model: str, saved_as: str) -> Path | None:
    """The path of a checkpoint of a model's run; None for one that no client of Tinker saved."""
    kind, dot, name = saved_as.partition(".")
    return Path(model, kind, name) if dot and kind in ("weights", "sampler_weights") else None


@dataclass(frozen=True)
class Sampler:
    """What a client samples from: weights of a model's run, or of a base model alone.

    `weights` is as in `headrace_schema.sessions.Sample`, of the run of `model` where there is one.
    """

    session: str
    number: int
    base_model: str
    model: str = ""
    weights: str = "base"

    @property
    def id(self) -> str:
        """Its id, from which `parse_sampler` makes it again."""
        return f"{self.session}:sample:{self.number}:{_packed([self.base_model, self.model, self.weights])}"

    @property
    def path(self) -> str | None:
        """Its checkpoint as Tinker names it, where it has one."""
        found = of_run(self.model, self.weights)
        return None if found is None else str(found)


def parse_sampler(sampler: str) -> Sampler:
    """The sampler of an id. Raises Refused."""
    if found := SAMPLER.fullmatch(sampler):
        parts = _unpacked(found[3])
        if parts is not None and len(parts) == 3 and all(isinstance(part, str) for part in parts):
            return Sampler(found[1], int(found[2]), *parts)
    raise Refused("NOT_FOUND", f"there is no sampler {sampler[:80]!r}; create_sampling_session gives its id")


class Promise(NamedTuple):
    """What a client waits for: the `future` of a session run, and what its answer says beside the result."""

    kind: str
    future: str
    model: str = ""
    extra: str = ""

    @property
    def id(self) -> str:
        """Its id, from which `parse_promise` makes it again."""
        return _packed(list(self))


def parse_promise(promise: str) -> Promise:
    """The promise of an id. Raises Refused."""
    parts = _unpacked(promise)
    if parts is None or len(parts) != 4 or not all(isinstance(part, str) for part in parts):
        raise Refused("NOT_FOUND", f"there is no request {promise[:80]!r}")
    return Promise(*parts)


def _packed(parts: list[str]) -> str:
    return base64.urlsafe_b64encode(to_json(parts)).decode().rstrip("=")


def _unpacked(text: str) -> list[Any] | None:
    try:
        found = from_json(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        return None
    return found if isinstance(found, list) else None
