"""Published weights in a host's memory: written once, verified by digest, shared by mapping.

Bodies are files on a tmpfs, one flock'ed directory per incarnation, so that whoever comes next can reap
the directories of the dead. The file of a dropped version is kept for the next one. Knows nothing of models or
of who may install what.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import grpc
from headrace.common.v1 import common_pb2

from headrace_servicekit.memory.segments import (
    MappedSegments,
    Segment,
    lock_new_directory,
    make_private,
    make_segment,
    raise_no_space,
    reap_dead_stores,
)
from headrace_servicekit.rpc.digests import digest_bytes
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights.arrivals import Arrival, forget_turns
from headrace_servicekit.weights.bases import Bases
from headrace_servicekit.weights.delta import Changes
from headrace_servicekit.weights.versions import Layout, LentMemory, PendingWeights, StoredWeights, entries_of


class WeightStore:
    """The versions that one process holds and serves.

    `root` is a directory on a tmpfs that the host's instances share; `address` (host:port) is where a
    WeightServicer serves this store, empty for none. Reaps dead incarnations' directories at its start.
    """

    def __init__(self, root: Path, incarnation: str, address: str = "") -> None:
        self.incarnation = incarnation
        self.address = address
        self.listen = ""
        """The host that broadcasts listen at; empty: that of `address`."""
        self._stored: dict[tuple[str, int], StoredWeights] = {}
        self._changes: dict[tuple[str, int], list[Changes]] = {}
        self._arriving: dict[tuple[str, int], Arrival] = {}
        self.ways: dict[common_pb2.WeightTransport, Callable[[], str]] = {}
        """Transports that are served beside the bytes, each with why it cannot be offered now ("": it can)."""
        self.lent: dict[tuple[str, int], LentMemory] = {}
        """What is mapped of other processes' GPUs, beside the versions' bytes."""
        self._mapped = MappedSegments()
        self._spare: tuple[Segment, Path] | None = None
        make_private(root)
        reap_dead_stores(root)
        self._root = root
        self.bases = Bases(root)
        """Frozen weights that it shares with other processes of the host."""
        self._directory = root / incarnation
        self._lock = lock_new_directory(self._directory)
        self._nonce = secrets.token_hex(16)
        (self._directory / "nonce").write_text(self._nonce)

    @property
    def directory(self) -> Path:
        """The directory of this incarnation, locked while the store is open."""
        return self._directory

    def begin(self, run: str, number: int, layout: Layout) -> PendingWeights:
        """Reserves memory for a version's body; its bytes are written through `PendingWeights.buffer`.

        Raises ServiceError CONFLICT when the version exists, INVALID for an impossible layout and
        RESOURCE_EXHAUSTED (reason NO_SPACE) when the tmpfs is full.
        """
        if (run, number) in self._stored:
            raise ServiceError(
                grpc.StatusCode.ALREADY_EXISTS,
                "CONFLICT",
                f"version {number} of {run} is published and immutable",
            )
        entries = entries_of(layout)
        path = self._new_path(run, number)
        segment = self._reserve(path, sum(entry.size_bytes for entry in entries))
        return PendingWeights(number, entries, segment, path, partial(self._publish, run))

    def get(self, run: str, number: int) -> StoredWeights:
        """A held version. Raises ServiceError NOT_FOUND."""
        found = self.find(run, number)
        if found is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "NOT_FOUND",
                f"version {number} of {run} is not in this weight store",
            )
        return found

    def find(self, run: str, number: int) -> StoredWeights | None:
        """A held version, or None."""
        return self._stored.get((run, number))

    def versions(self, run: str) -> list[StoredWeights]:
        """Every held version of a run."""
        return [stored for (name, _), stored in list(self._stored.items()) if name == run]

    def changes(self, run: str, number: int, base_digest: str) -> Changes:
        """What has changed in a held version against another of its run.

        Raises ServiceError NOT_FOUND, with reason BASE_NOT_HELD for changes that cannot be told here.
        """
        stored, known = self.get(run, number), self._changes.setdefault((run, number), [])
        for changes in known:
            if changes.base_digest == base_digest:
                return changes
        for base in self.versions(run):
            if base.version.digest == base_digest and len(base.body) == len(stored.body):
                known.append(Changes(stored.manifest, stored.body, base.body, base_digest, base.manifest))
                return known[-1]
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "BASE_NOT_HELD",
            f"version {number} of {run} is held, but no version with digest {base_digest} to tell its changes from",
        )

    def keep_changes(self, run: str, number: int, changes: Changes) -> None:
        """Serves changes that a version was made of."""
        self._changes.setdefault((run, number), []).append(changes)

    def arriving(self, run: str, number: int) -> Arrival | None:
        """A version that this process is receiving, or None."""
        return self._arriving.get((run, number))

    @contextmanager
    def arrives(self, run: str, number: int, arrival: Arrival) -> Iterator[None]:
        """Shows an arrival to those who read along."""
        self._arriving[run, number] = arrival
        try:
            yield
        finally:
            del self._arriving[run, number]

    def turn_path(self, run: str, number: int) -> Path:
        """The file whose lock says which instance of this host pulls a version."""
        return self._root / f"{_short(run)}-{number}.turn"

    def source(self, run: str, number: int) -> common_pb2.WeightSource:
        """Where others can take a held version from. Raises ServiceError NOT_FOUND."""
        stored = self.get(run, number)
        source = common_pb2.WeightSource(address=self.address, incarnation=self.incarnation)
        if stored.path is not None:
            source.shm_path = str(stored.path)
            source.shm_nonce_path = str(self._directory / "nonce")
            source.shm_nonce = self._nonce
            source.transports.append(common_pb2.WEIGHT_TRANSPORT_SHM)
        if self.address:
            source.transports.append(common_pb2.WEIGHT_TRANSPORT_GRPC)
            source.delta_bases.extend(self._bases(run, stored))
            for way, why_not in self.ways.items():
                if reason := why_not():
                    source.withheld.add(transport=way, reason=reason)
                else:
                    source.transports.append(way)
        return source

    def _bases(self, run: str, stored: StoredWeights) -> list[str]:
        """Digests of the versions from which the way to this one is known or can be found."""
        known = self._changes.get((run, stored.version.number), ())
        found = [changes.base_digest for changes in known]
        found += [
            other.version.digest
            for other in self.versions(run)
            if other is not stored and len(other.body) == len(stored.body)
        ]
        return [digest for digest in dict.fromkeys(found) if digest != stored.version.digest]

    def keep(self, run: str, numbers: set[int]) -> None:
        """Drops the run's other versions. Bodies that are still referenced or mapped elsewhere stay valid."""
        self._forget_beside(run, numbers)
        for key in [key for key in self._stored if key[0] == run and key[1] not in numbers]:
            stored = self._stored.pop(key)
            if stored.path is not None:
                self._set_aside(stored.segment, stored.path)
        least = min(numbers, default=None)
        turns = self._root.glob(f"{_short(run)}-*.turn")
        forget_turns([p for p in turns if least is None or int(p.stem.rpartition("-")[2]) < least])
        if not numbers:
            self._drop_spare()
            self._mapped.forget()
            self.bases.reap()

    def _forget_beside(self, run: str, numbers: set[int]) -> None:
        """Gives lent memory back and drops the changes of versions that go; those against them that were not asked for
        are found no more.
        """
        for key in [key for key in self.lent if key[0] == run and key[1] not in numbers]:
            self.lent.pop(key).end()
        kept = {held.version.digest for held in self.versions(run) if held.version.number in numbers}
        for key in [key for key in self._changes if key[0] == run]:
            if key[1] not in numbers:
                del self._changes[key]
            else:
                self._changes[key] = [
                    each for each in self._changes[key] if each.base is None or each.base_digest in kept
                ]

    def release(self, run: str) -> None:
        """Drops the run's versions that are mapped from other stores: nothing in this process holds their pages."""
        self._forget_beside(run, set())
        for key in [key for key in self._stored if key[0] == run and not self._stored[key].segment.own]:
            path = self._stored.pop(key).path
            if path is not None:
                path.unlink(missing_ok=True)
        self._mapped.forget()

    def map_shared(self, path: Path, size: int) -> Segment:
        """Another store's file. Raises OSError or ValueError; see `adopt`."""
        return self._mapped.open(path, size)

    def adopt(
        self,
        run: str,
        version: common_pb2.PolicyVersion,
        manifest: common_pb2.WeightManifest,
        path: Path,
        segment: Segment,
        body: memoryview,
    ) -> StoredWeights:
        """Holds a verified body of another store, lent by `segment`; a hard link keeps it for others."""
        own: Path | None = self._new_path(run, version.number)
        try:
            os.link(path, own)  # type: ignore[arg-type]
        except OSError:
            own = None  # another file system, or the producer dropped it: the mapping stays good
        return self._publish(run, StoredWeights(version, manifest, body, own, segment))

    def close(self) -> None:
        """Drops everything and removes the directory; repeated calls do nothing."""
        for stored in self._stored.values():
            if not stored.segment.own:
                stored.segment.written()
        self._stored.clear()
        self._changes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            self.bases.close()

    def _publish(self, run: str, stored: StoredWeights) -> StoredWeights:
        found = self._stored.setdefault((run, stored.version.number), stored)
        if found is not stored and stored.path is not None:
            stored.path.unlink(missing_ok=True)
        return found

    def _reserve(self, path: Path, size: int) -> Segment:
        """The spare file when it has the size and is not in use, else a new one."""
        if self._spare is not None and self._spare[0].size == size and self._spare[0].take():
            segment, before = self._spare
            self._spare = None
            with suppress(FileNotFoundError):
                before.rename(path)
                return segment
        self._drop_spare()
        try:
            return make_segment(path, size)
        except OSError as error:
            raise_no_space(error, path.parent, size)

    def _set_aside(self, segment: Segment, path: Path) -> None:
        """Keeps a dropped version's file for the next one, under a name that no source offers."""
        if not segment.own:
            path.unlink(missing_ok=True)
            return
        self._drop_spare()
        spare = self._directory / f"spare-{secrets.token_hex(4)}"
        try:
            path.rename(spare)
        except FileNotFoundError:
            return  # the file was removed: its bytes are in the mapping alone
        self._spare = (segment, spare)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare[1].unlink(missing_ok=True)
            self._spare = None

    def _new_path(self, run: str, number: int) -> Path:
        # The run's name may hold any character; the file's name tells people which version it is.
        return self._directory / f"{_short(run)}-{number}-{secrets.token_hex(4)}.weights"


def _short(run: str) -> str:
    return digest_bytes(run.encode())[:8]
