"""What the adapter needs of an engine, and the deadlines of its calls.

All calls come from one thread's event loop; none may block it.

The adapter gives every call a deadline and serialises all but `generate`, `abort` and `score`. A call raises
BackendFailed with a sentence when the engine refuses it; when it cannot answer any more, `alive` turns False.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace_rollout.engines.base import Capabilities, Lent, Likeliest, Scope, WeightEntry
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.samples import Distribution, ImageAt, Routes

if TYPE_CHECKING:
    import torch


_Result = TypeVar("_Result")


class Hung(BackendFailed):
    """A call was not answered in time."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds: starting with an empty model; one command; one install; without a token while requests run."""

    start_s: float = 600.0
    command_s: float = 60.0
    install_s: float = 300.0
    silence_s: float = 120.0


@dataclass(frozen=True)
class Start:
    """What the engine's process computes on: the lease's devices, and threads on the host; `relays`: where its workers
    listen for broadcasts.
    """

    devices: tuple[torch.device, ...]
    threads: int
    relays: str = ""


@dataclass(frozen=True)
class AdapterFile:
    """A file of this host with adapters of weights in another one."""

    path: Path
    entries: Sequence[WeightEntry]
    scale: float

    def as_json(self) -> dict[str, Any]:
        """As it travels to the engine's processes."""
        return {"path": str(self.path), "entries": rows_of(self.entries), "scale": self.scale}


def rows_of(entries: Sequence[WeightEntry]) -> list[list[Any]]:
    """[name, dtype, shape, offset, size, digest] of each, as they travel to the engine's processes."""
    return [
        [each.name, each.dtype, list(each.shape), each.offset, each.size, each.digest] for each in entries
    ]


def version_key(entries: Sequence[WeightEntry], adapter: AdapterFile | None = None) -> str:
    """What all hosts of an engine call the bytes of one version."""
    rows = [rows_of(entries), rows_of(adapter.entries) if adapter else []]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True)
class Request:
    """One sample: continue `token_ids` by at most `max_new_tokens`, up to and with the first of `eos_ids`.

    Temperature 0 takes the likeliest token. `seed` is the sample's own. Tokens of requests with another
    `cache_salt` (the digest of the installed weights) must not be served from the prefix cache.
    """

    request_id: str
    token_ids: Sequence[int]
    max_new_tokens: int
    distribution: Distribution
    seed: int
    eos_ids: Sequence[int]
    cache_salt: str
    interval: int = 1
    """Tokens after which new ones are handed out, where the engine can; an end is told at once."""
    adapter: str = ""
    """Which of `EngineConfig.adapters` it is of; another one's tokens must not be served from the prefix cache."""
    images: tuple[ImageAt, ...] = ()
    """In the order of their tokens."""


@dataclass(frozen=True)
class Tokens:
    """New tokens of a request, with their log-probs under the processed distribution.

    `policy_number` is the version that made them all; None: the one that is installed.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    policy_number: int | None = None
    routes: Routes | None = None
    """Of the request's whole context, with the last tokens of one that ended, where they are asked for."""


class Backend(Protocol):
    """One engine, started again after `stop`."""

    name: str
    maps_device_memory: bool = False
    """Whether there is an `update_lent`."""
    ends_between_leases: bool = False
    """Whether it cannot sleep without a lease: its memory on other hosts is not seen from here."""
    capabilities: Capabilities

    @property
    def death(self) -> str:
        """Why it is not alive, where it knows more than that its process ended."""
        return ""

    @property
    def alive(self) -> bool:
        """Whether the engine's process runs and answers; False before `start` and after its death."""

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values its cache holds; 0: it does not say."""
        return 0

    @property
    def pids(self) -> Sequence[int]:
        """The engine's processes, for their memory and cores."""

    async def start(self, start: Start) -> None:
        """Makes the engine without weights worth using (no file of weights is read)."""

    async def stop(self) -> None:
        """Ends the engine's processes, by SIGKILL if need be, and returns when they have ended."""

    def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        """New tokens as they come; ends behind the last one, and after `abort`. Closing it aborts the request."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; unknown ones are ignored."""

    async def score(self, token_ids: Sequence[int], start: int, distribution: Distribution) -> list[float]:
        """Log-probs of the ids from `start` on, without the prefix cache."""

    async def likeliest(self, token_ids: Sequence[int], start: int, top: int) -> list[Likeliest]:
        """As `TellsLikeliest`, of one sequence; called with `Capabilities.likeliest` alone."""
        raise RuntimeError("the engine's capabilities do not have it")

    async def freeze(self) -> None:
        """Stands still and keeps its requests and their tokens (for an in-flight install)."""

    async def thaw(self) -> None:
        """Goes on after `freeze`."""

    async def begin_install(self, number: int, entries: Sequence[WeightEntry]) -> None:
        """Gets ready to take a version; nothing is lost if it is refused here."""

    async def update(
        self, path: Path, entries: Sequence[WeightEntry], adapter: AdapterFile | None = None
    ) -> None:
        """Takes tensors from a file of this host, whose bytes are verified, in every process.

        With `adapter` the tensors are frozen ones, and what is taken is both merged, by `files.read_tensors`.
        """

    async def update_lent(self, lent: Lent, path: Path, entries: Sequence[WeightEntry]) -> None:
        """As `update`, from memory that is lent on a GPU where it can be had; with `maps_device_memory`."""
        await self.update(path, entries)

    async def load_adapters(self, adapters: Mapping[str, AdapterFile]) -> None:
        """Takes adapters in the place of those of the same names, with `Capabilities.lora`, in every process. Requests
        go on with the new ones.
        """
        raise BackendFailed("the engine computes with no adapters beside its model")

    async def finish_install(self, number: int) -> None:
        """Makes the version whole; BackendFailed names what is missing."""

    async def reset_cache(self) -> None:
        """Forgets all cached prefixes."""

    async def sleep(self) -> None:
        """Frees the memory of weights and cache; nothing runs."""

    async def use_threads(self, threads: int) -> None:
        """Sets the number of cores that the lease has now; an engine that cannot follow keeps its own."""

    async def wake(self, scope: Scope) -> None:
        """Takes memory again; WEIGHTS comes before KV_CACHE."""


async def within(seconds: float, what: str, call: Awaitable[_Result]) -> _Result:
    """The call's result. Raises Hung, naming the call, when it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except TimeoutError as error:
        raise Hung(f"{what} was not answered within {seconds:g} s") from error
