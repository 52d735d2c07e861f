"""Frozen weights that processes of one host share: a file on a tmpfs, written by whoever needs it first.

A base is a directory beside those of the stores, with its file and its manifest. Whoever has the file mapped holds a
shared lock on it: where nobody does, also because all were killed, `reap_dead_stores` removes it. Knows no model.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from headrace.common.v1 import common_pb2

from headrace_servicekit.memory.segments import (
    BASE_FILE,
    Segment,
    lock_new_directory,
    make_segment,
    raise_no_space,
    reap_dead_stores,
)
from headrace_servicekit.weights.versions import (
    BASE_NUMBER,
    Layout,
    PendingWeights,
    StoredWeights,
    entries_of,
    unavailable,
)

Write = Callable[[PendingWeights], Mapping[str, str]]
"""Fills the buffers of a base; returns the digest of each tensor."""
MANIFEST = "manifest"
WRITE_S = 900.0
"""How long one process may write what others wait for."""
POLL_S = 0.05


class Bases:
    """The bases below the root of a host's stores, as one process takes them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._taken: WeakSet[Segment] = WeakSet()

    def has(self, mark: str) -> bool:
        """Whether a base that was taken with this mark is resident."""
        return bool(mark) and any(self._root.glob(f"base-*/{mark}.mark"))

    def take(
        self, key: str, layout: Layout, write: Write, *, mark: str = "", wait_s: float = WRITE_S
    ) -> StoredWeights:
        """The base `key`, read-only; `write` fills it where no process of this host has it.

        It stays resident for as long as anybody references its body. `mark` is what `has` finds it by. Raises
        ServiceError NO_SPACE, what `write` raises, and WEIGHTS_UNAVAILABLE where another process is still
        writing it.
        """
        directory, end = self._root / f"base-{key}", time.monotonic() + wait_s
        while (found := self._mapped(directory)) is None:
            with self._turn(directory.with_suffix(".turn")) as mine:
                if mine and not directory.exists():
                    found = self._written(directory, layout, write)
            if found is not None:
                break
            if time.monotonic() > end:
                raise unavailable(
                    f"{directory}: another process has not written this base within {wait_s:g} s; look at the other "
                    "trainers of this host"
                )
            time.sleep(POLL_S)
        if mark:
            (directory / f"{mark}.mark").touch()
        return found

    def reap(self) -> None:
        """Removes what nobody of this host uses."""
        reap_dead_stores(self._root)

    def close(self) -> None:
        """This process shares nothing any more: what it alone had taken is removed. What is mapped stays valid."""
        for segment in list(self._taken):
            fcntl.flock(segment.handle, fcntl.LOCK_UN)
        self._taken.clear()
        self.reap()

    @contextmanager
    def _turn(self, path: Path) -> Iterator[bool]:
        """Whether this process may write; the file goes with who had the turn."""
        handle, mine = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        try:
            yield mine
        finally:
            if mine:
                path.unlink(missing_ok=True)
            os.close(handle)

    def _mapped(self, directory: Path) -> StoredWeights | None:
        """None where it is not there, or is being removed."""
        path = directory / BASE_FILE
        try:
            manifest = common_pb2.WeightManifest.FromString((directory / MANIFEST).read_bytes())
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            segment = Segment(handle, manifest.size_bytes, writable=False)
            body = segment.lend()
            there = os.stat(path).st_ino == os.fstat(handle).st_ino
        except (FileNotFoundError, BlockingIOError):
            return None
        if not there:
            return None
        self._taken.add(segment)
        version = common_pb2.PolicyVersion(number=BASE_NUMBER, digest=manifest.digest)
        return StoredWeights(version, manifest, body, path, segment)

    def _written(self, directory: Path, layout: Layout, write: Write) -> StoredWeights | None:
        """Written aside, and seen whole."""
        aside = self._root / f"{directory.name}.{secrets.token_hex(4)}"
        lock = lock_new_directory(aside)
        try:
            path, entries = aside / BASE_FILE, entries_of(layout)
            size = sum(entry.size_bytes for entry in entries)
            try:
                segment = make_segment(path, size)
            except OSError as error:
                raise_no_space(error, self._root, size)
            pending = PendingWeights(BASE_NUMBER, entries, segment, path, lambda stored: stored)
            manifest = pending.manifest(write(pending))
            (aside / MANIFEST).write_bytes(manifest.SerializeToString())
            pending.publish(common_pb2.PolicyVersion(number=BASE_NUMBER, digest=manifest.digest), manifest)
            with suppress(OSError):  # Another process was first.
                aside.rename(directory)
            return self._mapped(directory)  # Under the lock, so that nobody reaps what nobody has mapped yet.
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(lock)
