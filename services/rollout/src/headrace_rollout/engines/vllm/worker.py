"""What runs inside vLLM's workers: takes a version from a file of this host, by vLLM's own weight transfer.

vLLM imports this module in each worker (`worker_extension_cls`), which registers the transfer. Names and fused
layouts are mapped by vLLM's loader of the model. Knows no run and no version numbers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from headrace_modelkit.broadcasting import Broadcasts
from headrace_modelkit.device_memory import DeviceMaps, Handle, tensor_at
from torch import Tensor
from typing_extensions import override
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import register_kernels

from headrace_rollout.engines.hosted.files import LOADER_ERRORS, read_tensors, taken
from headrace_rollout.engines.hosted.relaying import listen
from headrace_rollout.engines.hosts import FILES
from headrace_rollout.engines.vllm.arguments import OWNER, TRANSFER

OWNER_S = 1.0


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Nothing is needed beforehand."""


@dataclass
class SharedFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A body and where its tensors lie, and adapters that change them; see `read_tensors`."""

    path: str = ""
    entries: list[list[Any]] = field(default_factory=list)
    adapter: dict[str, Any] | None = None
    handle: dict[str, Any] = field(default_factory=dict)
    """Of the same body in the memory of a GPU, with the sums of its tensors; empty where none is lent."""
    sums: list[int] = field(default_factory=list)
    version: str = ""
    """Name of the body among the versions of a host whose part of the engine another one leads."""


class SharedMemoryTransfer(WeightTransferEngine[NoInit, SharedFile]):  # type: ignore[misc]
    """Reads tensors from a mapped file; what broke is in `problem`, and nothing is raised."""

    init_info_cls = NoInit
    update_info_cls = SharedFile

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        listen(Broadcasts(lambda: self.device))
        self.problem = ""
        """What broke the session that runs, or the last one; the rest of its calls do nothing."""
        self._half = False
        self._wrapped: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        """Layers with adapters that are out of the model while an update runs: owner, name and layer."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    @override
    def start_weight_update(self) -> None:
        """A problem in a worker whose layers hold parts of two versions."""
        self.problem = ""
        if self._half:
            self.problem = "an update broke off while it was loaded; this worker must be started again"
        self._attempt(self._begin)

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class waits for an accelerator that a CPU build does not have."""
        self._attempt(lambda: self.receive_weights(self.parse_update_info(update_info)))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SharedFile) -> None:
        """Takes every tensor. Raises ValueError, before anything is loaded where a worker cannot have the bytes."""
        path, adapter = update_info.path, update_info.adapter
        if files := os.environ.get(FILES):
            path = f"{files}/{update_info.version}"
            adapter = adapter and {**adapter, "path": f"{path}.adapter"}
        tensors = self._lent(update_info) or read_tensors(
            path, update_info.entries, adapter, self.device, get_tp_group()
        )
        self._half = True
        loaded = taken(self.model.load_weights, tensors)
        if loaded is not None and (missing := self._wanted - set(loaded)):
            raise ValueError(
                f"{len(missing)} parameters of the engine's model got no tensor, first {min(missing)}"
            )

    def _lent(self, update_info: SharedFile) -> Iterator[tuple[str, Tensor]] | None:
        """The tensors in the memory of the trainer's GPU, with the source's sums; None where they cannot be had."""
        if not update_info.handle:
            return None
        entries = update_info.entries
        places = [(offset, size) for _, _, _, offset, size, _ in entries]
        try:
            handle = Handle(**update_info.handle)
            flat = DeviceMaps(lambda: self.device).open(handle, places, update_info.sums)
        except (RuntimeError, ValueError) as error:
            warnings.warn(f"weights: cuda_ipc: {error}; the mapped file is read", stacklevel=1)
            return None
        assert flat is not None
        return ((n, tensor_at(flat, d, s, o, size)) for n, d, s, o, size, _ in entries)

    @override
    def finish_weight_update(self) -> None:
        self._attempt(self._finish)
        for owner, name, layer in self._wrapped:
            setattr(owner, name, layer)
        self._wrapped = []

    def _begin(self) -> None:
        self._wrapped = self._wrapped or _without_lora(self.model)
        if self.device.type == "cpu":
            _pack_experts_anew(self.model)
        initialize_layerwise_reload(self.model)
        # As the loader fills them: of a quantised layer the weight, and not the scales that are made of it.
        self._wanted = {name for name, _ in self.model.named_parameters()}

    def _finish(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_heads(self.model)
        self._half = False

    def _attempt(self, act: Callable[[], None]) -> None:
        if self.problem:
            return
        try:
            act()
        except LOADER_ERRORS as error:
            self.problem = f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        """Nothing is held."""


def _without_lora(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Puts the model's own layers where vLLM has wrapped them for adapters, as its loader knows them.

    Returns owner, name and wrapper of each.
    """
    found = [
        (owner, name, layer)
        for owner in list(model.modules())
        for name, layer in owner.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for owner, name, layer in found:
        setattr(owner, name, layer.base_layer)
    return found


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Has the reload pack experts for the CPU's kernels, which vLLM 0.32 does at the first load alone.

    The second would put tensors that are not packed in the place of packed ones.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_heads(model: torch.nn.Module) -> None:
    """Packs output heads for the CPU's kernels again.

    A head that is tied to the embedding gets no tensor of its own, so that the reload leaves its packed copy as it was.
    """
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


def _expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,  # as vLLM calls it
) -> None:
    """A value a request as one for each of its drafted tokens, on a CPU.

    vLLM 0.32 writes them to a copy there: drafts would be checked against temperatures that nobody has set.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.repeat_interleave(counts))


def _end_with_owner() -> None:
    """An instance that is killed takes its engine along, whose processes would keep the devices."""
    parent = os.getppid()
    owner = int(os.environ.get(OWNER, parent))

    def watch() -> None:
        while os.getppid() == parent and Path(f"/proc/{owner}").exists():
            time.sleep(OWNER_S)
        if os.getppid() == parent != owner:
            os.kill(parent, signal.SIGKILL)  # vLLM's engine core, between the instance and its workers
        os._exit(1)

    threading.Thread(target=watch, name="watch owner", daemon=True).start()


_end_with_owner()
if current_platform.is_cpu() and not HAS_TRITON:
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})
WeightTransferEngineFactory.register_engine(TRANSFER, SharedMemoryTransfer)


def _take_adapter(manager: Any, number: int, tensors: dict[str, Tensor], scale: float) -> None:
    """Loads and activates an adapter, by vLLM's own manager. Raises ValueError for layers that it adapts not."""
    named, rank = {}, 1
    for name, tensor in tensors.items():
        weight, _, part = name.rpartition(".")
        rank = tensor.shape[0] if part == "lora_A" else rank
        # A copy: vLLM multiplies B in its place, and the file is not to be written.
        named[f"base_model.model.{weight.removesuffix('.weight')}.{part}.weight"] = tensor.clone()
    own = manager._adapter_manager
    mapper = getattr(own.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        number,
        named,
        PEFTHelper(r=rank, lora_alpha=scale * rank, target_modules=[]),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    known = {*own.modules, *(part for parts in own.packed_modules.values() for part in parts)}
    if unknown := lora.loras.keys() - known:
        raise ValueError(f"vLLM computes with no adapter of {min(unknown)}")
    own.remove_adapter(number)
    own.add_adapter(lora)
    own.activate_adapter(number)


class HeadraceWorker:
    """Mixed into vLLM's worker class."""

    weight_transfer_engine: SharedMemoryTransfer
    model_runner: Any

    def headrace_session(self) -> str:
        """What broke the session of an update, or an empty text."""
        return self.weight_transfer_engine.problem

    def headrace_adapters(self, adapters: list[dict[str, Any]]) -> str:
        """Takes adapters in the place of those of their ids; what broke, or an empty text."""
        try:
            for each in adapters:
                tensors = dict(read_tensors(each["path"], each["entries"], None))
                _take_adapter(self.model_runner.lora_manager, each["id"], tensors, each["scale"])
        except LOADER_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def headrace_threads(self, count: int) -> None:
        """Sets the number of threads; vLLM's CPU worker has put a function that does nothing in torch's place."""
        torch._C.set_num_threads(count)
