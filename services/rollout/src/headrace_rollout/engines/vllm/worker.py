"""What runs inside vLLM's workers: takes a version from a file of this host, by vLLM's own weight transfer.

vLLM imports this module in each worker (`worker_extension_cls`), which registers the transfer. Names and fused
layouts are mapped by vLLM's loader of the model. Knows no run and no version numbers.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from headrace_servicekit.rpc.digests import digest_bytes
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from headrace_rollout.engines.vllm.arguments import TRANSFER

warnings.filterwarnings("ignore", message="The given buffer is not writable")

Entry = list[Any]
"""[name, torch dtype's name, shape, offset, size], as it travels to a worker."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing is needed beforehand."""


@dataclass
class SharedFile(WeightTransferUpdateInfo):
    """A body and where its tensors lie."""

    path: str = ""
    entries: list[Entry] = field(default_factory=list)


class SharedMemoryTransfer(WeightTransferEngine[NoInit, SharedFile]):
    """Reads tensors from a mapped file; `arrived` has the digest of each as it was read here."""

    init_info_cls = NoInit
    update_info_cls = SharedFile

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arrived: dict[str, str] = {}

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """See WeightTransferEngine."""
        self.arrived = {}
        self._wanted = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See WeightTransferEngine; the base class waits for an accelerator that a CPU build does not have."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedFile) -> None:
        """Takes every tensor. Raises ValueError when parameters of the model got none."""
        with open(update_info.path, "rb") as file:
            # Closed with the last tensor over it: the loader keeps some until their layer is whole.
            body = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        taken = self.model.load_weights(self._tensors(body, update_info.entries))
        if taken is not None and (missing := self._wanted - set(taken)):
            raise ValueError(
                f"{len(missing)} parameters of the engine's model got no tensor, first {min(missing)}"
            )

    def finish_weight_update(self) -> None:
        """See WeightTransferEngine."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""

    def _tensors(self, body: mmap.mmap, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
        view = memoryview(body)
        for name, dtype, shape, offset, size in entries:
            part = view[offset : offset + size]
            self.arrived[name] = digest_bytes(part)
            kind = getattr(torch, dtype)
            tensor = torch.frombuffer(part, dtype=kind) if size else torch.empty(0, dtype=kind)
            yield name, tensor.view(shape)


WeightTransferEngineFactory.register_engine(TRANSFER, SharedMemoryTransfer)


class HeadraceWorker:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: SharedMemoryTransfer

    def headrace_arrived(self) -> dict[str, str]:
        """Digests of the tensors of the last update."""
        return self.weight_transfer_engine.arrived
