"""What engines have computed of samples that move to another instance: kept there for a while, and taken here.

Whatever goes wrong costs time alone: the engine computes the context again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.blobs import BlobReader, BlobStore
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.engines.samples import CachedContext

KEPT_S = 60.0
"""How long another instance may take a cache."""
FREE_SHARE = 0.25
"""Of the tmpfs' room, where weights are published too, the most that caches may take together."""
TAKE_S = 5.0
"""How long an instance may take to send one; it is asked for no other afterwards."""
_log = logging.getLogger(__name__)


class MovedCaches:
    """Those of one instance. `directory`: where its blobs lie, below the host's SHM_DIR."""

    def __init__(self, directory: Path, token: str | None) -> None:
        self.blobs = BlobStore(directory)
        self._directory, self._kept_bytes = directory, 0
        self._reader = BlobReader(directory.parent, token)
        self._silent: set[str] = set()

    def keep(self, cache: CachedContext) -> common_pb2.CachedContext | None:
        """A reference, for KEPT_S; None where there is no room. Needs an event loop."""
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
        """What a state refers to; None for nothing, or where it cannot be had any more."""
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
        return CachedContext(state.cache.form, state.cache.tokens, data)

    async def close(self) -> None:
        """Closes what was opened to other instances."""
        await self._reader.close()
