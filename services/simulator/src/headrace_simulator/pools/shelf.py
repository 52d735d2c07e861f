"""Observations by reference: large tensors of a pool's newest outcomes, kept as blobs while they may be asked for."""

from __future__ import annotations

from headrace.common.v1 import common_pb2
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.blobs import BlobStore
from headrace_servicekit.rpc.errors import ServiceError

_logger = get_logger("headrace.simulator")


class Shelf:
    """Keeps the tensors of at least `blob_bytes` of each environment's last outcome; 0 keeps none."""

    def __init__(self, blobs: BlobStore, blob_bytes: int) -> None:
        self._blobs, self._blob_bytes = blobs, blob_bytes
        self._kept: dict[int, list[common_pb2.BlobRef]] = {}

    def place(self, outcome: simulator_pb2.EnvironmentOutcome) -> None:
        """Replaces large tensors by references, and releases those of the environment's outcome before."""
        if not self._blob_bytes:
            return
        self._release(outcome.environment)
        kept = self._kept[outcome.environment] = []
        for tensors in (outcome.observation, outcome.final_observation):
            for tensor in tensors.values():
                if len(tensor.data) < self._blob_bytes:
                    continue
                try:
                    reference = self._blobs.put(tensor.data)
                except ServiceError as error:  # the tmpfs is full: inline tensors need none
                    _logger.warning("an observation travels inline", extra={"why": error.message})
                    return
                kept.append(reference)
                tensor.blob.CopyFrom(reference)

    def clear(self) -> None:
        """Releases everything."""
        for environment in list(self._kept):
            self._release(environment)

    def _release(self, environment: int) -> None:
        for reference in self._kept.pop(environment, []):
            self._blobs.release(reference)
