"""A version into a hosted engine: all of it, or the one before put back. Knows no samples and no leases."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.weights import weight_layout
from headrace_schema.sections.generating import ModelSection

from headrace_rollout.engines.base import Adapter, Policy, Refused, WeightEntry, Weights
from headrace_rollout.engines.hosted.backend import AdapterFile, Backend, Hung, within
from headrace_rollout.engines.hosts import BackendFailed

_Result = TypeVar("_Result")
Shapes = dict[str, tuple[int, ...]]


def shapes_of(model: ModelSection) -> Shapes:
    """Names and shapes of the tensors that a version of the model has. Raises ModelNotReadable."""
    empty = load_model(model, weights=False, device="meta")
    return {name: shape for name, _, shape in weight_layout(empty, DTYPES[model.dtype])}


def check_entries(own: Shapes, entries: tuple[WeightEntry, ...]) -> None:
    """Raises ValueError unless these are exactly the model's tensors."""
    given = {entry.name: entry.shape for entry in entries}
    problem = ""
    if missing := own.keys() - given.keys():
        problem = f"{len(missing)} missing, first {min(missing)}"
    elif extra := given.keys() - own.keys():
        problem = f"{len(extra)} unknown, first {min(extra)}"
    elif wrong := [name for name, shape in own.items() if given[name] != shape]:
        problem = f"{wrong[0]} has shape {given[wrong[0]]}, not {own[wrong[0]]}"
    if problem:
        raise ValueError(f"the weights are not this model's: {problem}")


class Installer:
    """The install session of a backend; it keeps the bytes of the last whole version, to put them back."""

    def __init__(self, backend: Backend, install_s: float) -> None:
        self._backend = backend
        self._install_s = install_s
        self._held: tuple[Policy, Weights] | None = None
        self._base = ""
        """Digest of the weights that the engine has whole below adapters."""
        self._beside: dict[str, tuple[object, ...]] = {}
        """What the engine has of each adapter, by name: its scale, and its tensors with their digests."""

    @property
    def holds(self) -> bool:
        """Whether there is a version to put back."""
        return self._held is not None

    def forget(self) -> None:
        """Nothing is installed any more; the bytes of the last version are freed."""
        self._held, self._base, self._beside = None, "", {}

    async def install(self, policy: Policy, weights: Weights) -> None:
        """Puts a version in.

        Raises Refused INSTALL_FAILED when the version before serves on, and BROKEN when the engine has half a
        version: a new process can take the one that is held.
        """
        begun = False
        try:
            if not self._has_base(weights):
                await self._call("begin_install", self._backend.begin_install(policy.number, weights.entries))
            begun = True
            await self._put(policy, weights)
        except BackendFailed as error:
            await self._repair(policy, error, begun=begun)
        self._held = (policy, weights)

    async def restore(self) -> None:
        """Puts the last version into a new engine process. Raises BackendFailed."""
        if self._held is not None:
            policy, weights = self._held
            self._base = ""
            await self._call("begin_install", self._backend.begin_install(policy.number, weights.entries))
            # Its file may have another name or none by now; the bytes are still mapped.
            beside = {name: _unnamed(adapter) for name, adapter in weights.beside.items()}
            own = _unnamed(weights.adapter) if weights.adapter else None
            await self._put(policy, replace(weights, path=None, lent=None, adapter=own, beside=beside))

    def _has_base(self, weights: Weights) -> bool:
        return bool(weights.beside and weights.digest and weights.digest == self._base)

    async def _put(self, policy: Policy, weights: Weights) -> None:
        if not self._has_base(weights):
            self._base, self._beside = "", {}
            await self._put_weights(policy, weights)
            self._base = weights.digest
        if weights.beside:
            await self._put_adapters(weights.beside)
        await self._call("reset_cache", self._backend.reset_cache())

    async def _put_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Those that the engine has as they are stay there."""
        parts = {name: (each.scale, each.weights.entries) for name, each in adapters.items()}
        changed = {name: each for name, each in adapters.items() if self._beside.get(name) != parts[name]}
        for name in changed:
            self._beside.pop(name, None)
        with ExitStack() as files:
            given = {name: files.enter_context(_adapter_file(each)) for name, each in changed.items()}
            await self._call("load_adapters", self._backend.load_adapters(given))
        self._beside |= {name: parts[name] for name in changed}

    async def _put_weights(self, policy: Policy, weights: Weights) -> None:
        with file_of(weights) as path, ExitStack() as files:
            adapter = files.enter_context(_adapter_file(weights.adapter)) if weights.adapter else None
            lent = weights.lent if weights.lent is not None and weights.lent.held else None
            if lent is not None:
                update = self._backend.update_lent(lent, path, weights.entries)
            else:
                update = self._backend.update(path, weights.entries, adapter)
            await self._call("update", update)
        if lent is not None and not lent.held:
            raise BackendFailed("the memory of the trainer's GPU was withdrawn while it was read")
        await self._call("finish_install", self._backend.finish_install(policy.number))

    async def _repair(self, policy: Policy, error: BackendFailed, *, begun: bool) -> None:
        reason = f"version {policy.number} was not installed: {error}"
        number = self._held[0].number if self._held is not None else 0
        # An engine that does not answer one call is not asked for another: it is killed.
        answers = self._backend.alive and not isinstance(error, Hung)
        if not begun and number and answers:
            raise Refused("INSTALL_FAILED", f"{reason}; version {number} serves on") from error
        if number and answers:
            try:
                await self.restore()
            except BackendFailed as second:
                reason += f"; version {number} could not be put back: {second}"
            else:
                raise Refused("INSTALL_FAILED", f"{reason}; version {number} serves on") from error
        raise Refused("BROKEN", f"{reason}; the engine is started again") from error

    async def _call(self, name: str, call: Awaitable[_Result]) -> _Result:
        return await within(self._install_s, f"{name} of {self._backend.name}", call)


def _unnamed(adapter: Adapter) -> Adapter:
    return replace(adapter, weights=replace(adapter.weights, path=None))


@contextmanager
def _adapter_file(adapter: Adapter) -> Iterator[AdapterFile]:
    with file_of(adapter.weights) as path:
        yield AdapterFile(path, adapter.weights.entries, adapter.scale)


@contextmanager
def file_of(weights: Weights) -> Iterator[Path]:
    """A file of this host with the body; where there is none, one in memory that other processes can open."""
    if weights.path is not None:
        yield weights.path
        return
    handle = os.memfd_create("headrace-weights")
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(weights.body)
        yield Path(f"/proc/{os.getpid()}/fd/{handle}")
    finally:
        os.close(handle)
