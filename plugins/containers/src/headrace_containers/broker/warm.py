"""Containers that are started before they are asked for, of the specs that were asked for lately."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace_containers.provider import Container, ContainerError, Network, Provider, Spec

IDLE_S = 300.0
"""How long containers of a spec that nobody asks for are kept."""


class WarmProvider(Provider, Protocol):
    """A provider that can start containers ahead."""

    def start_ahead(self, spec: Spec) -> WarmContainer:
        """Starts a container that somebody may want, of a spec whose network is told with `begin`."""
        ...


class WarmContainer(Container, Protocol):
    """A container that was started ahead."""

    def begin(self, spec: Spec) -> None:
        """Hands it over to who has this spec: its time runs, and its network is that one's."""
        ...

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...


@dataclass
class _Shelf:
    """Of one kind of container."""

    ready: list[WarmContainer] = field(default_factory=list)
    making: int = 0
    waiting: int = 0
    """How many wait for one of those."""
    asked_at: float = 0.0


class Warm:
    """The warm containers of one provider."""

    def __init__(self, provider: WarmProvider, has_room: Callable[[], bool]) -> None:
        self._provider, self._has_room = provider, has_room
        self._shelves: dict[str, _Shelf] = {}
        self._lock, self._is_closed = threading.Condition(), False

    def start(self, spec: Spec, ahead: int) -> Container:
        """A container that is ready where there is one, and `ahead` others for those who ask next.

        Raises as `Provider.start`.
        """
        kind = _kind(spec)
        with self._lock:
            shelf = self._shelves.setdefault(_name(kind), _Shelf())
            shelf.asked_at = time.monotonic()
        container = self._taken(shelf) or self._provider.start_ahead(kind)
        self.fill(spec, ahead)
        try:
            container.begin(spec)
        except BaseException:
            container.close()
            raise
        return container

    def fill(self, spec: Spec, ahead: int) -> None:
        """Starts containers in the background until `ahead` of a kind are ready."""
        kind = _kind(spec)
        with self._lock:
            shelf = self._shelves.setdefault(_name(kind), _Shelf(asked_at=time.monotonic()))
            missing = 0 if self._is_closed else ahead - len(shelf.ready) - shelf.making
            shelf.making += max(0, missing)
        for _ in range(max(0, missing)):
            threading.Thread(target=self._make, args=(kind, shelf), daemon=True).start()

    def count(self) -> int:
        """How many are ready, or are being made."""
        with self._lock:
            return sum(len(shelf.ready) + shelf.making for shelf in self._shelves.values())

    def close(self) -> None:
        """Ends all, those that are being made too."""
        with self._lock:
            self._is_closed = True
            ready = [each for shelf in self._shelves.values() for each in shelf.ready]
            self._shelves.clear()
        for container in ready:
            container.close()

    def drop(self, idle_s: float = IDLE_S) -> None:
        """Ends those of kinds that nobody has asked for in so many seconds."""
        before = time.monotonic() - idle_s
        with self._lock:
            old = [
                kind for kind, shelf in self._shelves.items() if shelf.asked_at <= before and not shelf.making
            ]
            ready = [each for kind in old for each in self._shelves.pop(kind).ready]
        for container in ready:
            container.close()

    def _taken(self, shelf: _Shelf) -> WarmContainer | None:
        while True:
            with self._lock:
                while not shelf.ready:
                    if shelf.making <= shelf.waiting:
                        return None
                    shelf.waiting += 1
                    self._lock.wait()
                    shelf.waiting -= 1
                container = shelf.ready.pop(0)
            if container.is_alive():
                return container
            container.close()

    def _make(self, kind: Spec, shelf: _Shelf) -> None:
        made: WarmContainer | None = None
        try:
            if self._has_room():
                with suppress(ContainerError):  # who asks next is told
                    made = self._provider.start_ahead(kind)
        finally:
            with self._lock:
                shelf.making -= 1
                kept = made is not None and self._shelves.get(_name(kind)) is shelf
                if kept and made is not None:
                    shelf.ready.append(made)
                self._lock.notify_all()
        if made is not None and not kept:
            made.close()


def _name(kind: Spec) -> str:
    return f"{kind!r} {hashlib.sha256(kind.context).hexdigest()}"


def _kind(spec: Spec) -> Spec:
    """What containers have in common that can stand in for each other."""
    network = Network() if spec.network.is_off else Network(endpoint="any:1")
    return replace(spec, env={}, network=network)
