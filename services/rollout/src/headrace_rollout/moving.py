"""Cached contexts of samples that move between instances: kept for another one, or taken from it.

A cache that cannot be had costs time alone: the engine computes the context again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from headrace.common.v1 import common_pb2
from headrace_servicekit.memory.blobs import BlobReader, BlobStore
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.engines.samples import CachedContext

KEPT_S = 60.0
"""How long another instance may take a cache."""
FREE_SHARE = 0.25
"""Largest share of the tmpfs' room that all caches may take together; published weights lie there too."""
TAKE_S = 5.0
"""Longest wait for an instance to send a cache; one that takes longer is not asked again."""
_log = logging.getLogger(__name__)


class MovedCaches:
    """The caches of one instance. `directory` holds its blobs, below the host's SHM_DIR."""

    def __init__(self, directory: Path, token: str | None) -> None:
        self.blobs = BlobStore(directory)
        self._directory, self._kept_bytes = directory, 0
        self._reader = BlobReader(directory.parent, token)
        self._silent: set[str] = set()

    def keep(self, cache: CachedContext) -> common_pb2.CachedContext | None:
        """Keeps a cache for KEPT_S and returns a reference to it; None where there is no room. Needs an event loop."""
        taken, free = self._kept_bytes + len(cache.data), shutil.disk_usage(self._directory).free
        if taken > FREE_SHARE * (free + self._kept_bytes):
            return None
        try:
            blob = self.blobs.put(cache.data)
        except ServiceError as error:
            _log.warning("a moved sample is computed again: %s", error.message)
            return None
        self._kept_bytes = taken
        asyncio.get_running_loop().call_later(KEPT_S, self._drop, blob)
        return common_pb2.CachedContext(blob=blob, form=cache.form, tokens=cache.tokens)

    def _drop(self, blob: common_pb2.BlobRef) -> None:
        self._kept_bytes -= blob.size_bytes
        self.blobs.release(blob)

    async def take(self, state: common_pb2.ResumeState) -> CachedContext | None:
        """The cache that a state refers to; None where it names none, or where that one cannot be had."""
        producer = state.cache.blob.incarnation
        if not state.HasField("cache") or producer in self._silent:
            return None
        try:
            async with asyncio.timeout(TAKE_S):
                data = await self._reader.read(state.cache.blob)
        except ServiceError as error:
            _log.info("a moved sample is computed again: %s", error.message)
            return None
        except TimeoutError:
            self._silent.add(producer)
            _log.warning(
                "moved samples of %s are computed again: it did not send one in %s s", producer, TAKE_S
            )
            return None
        return CachedContext(state.cache.form, state.cache.tokens, memoryview(data))

    async def close(self) -> None:
        """Closes the connections to other instances."""
        await self._reader.close()
