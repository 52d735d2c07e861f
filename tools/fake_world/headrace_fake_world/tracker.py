"""Counts bytes that are alive by device and kind, and what collectives move. Knows no model.

A storage has the kind that `label` gave it; before that it is "work": activations, buffers and what operations pass on.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

WORK = "work"
_COLLECTIVES = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "scatter": "scatter",
}


@dataclass
class _Entry:
    device: str
    size: int
    kind: str = WORK


@dataclass
class Phase:
    """What happened in one part of a step: the most bytes that were alive, and collectives.

    `moved` are the bytes of whole tensors (what an all-gather gives, what a reduce-scatter takes), on this rank;
    `carried` those that go from a device to another one of the same rank, such as "cpu to gpu".
    """

    moments: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    """Of each moment in turn, by device and moment: see `Tracker.moment`."""
    calls: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    carried: Counter[str] = field(default_factory=Counter)
    on_host: Counter[str] = field(default_factory=Counter)
    """Operations that computed with a tensor of the host, by name."""

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Bytes by kind at each device's peak."""
        found: dict[str, dict[str, int]] = {}
        for (device, _), own in self.moments.items():
            if sum(own.values()) >= sum(found.get(device, {}).values()):
                found[device] = own
        return found

    def peak(self, device: str) -> int:
        """Bytes at this device's peak."""
        return sum(self.peaks.get(device, {}).values())


class Tracker(TorchDispatchMode):
    """Sees every operation inside its body. Values do not exist: where code asks for one, it gets 1, or True."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries: Any = WeakIdKeyDictionary()
        self._live: dict[str, Counter[str]] = defaultdict(Counter)
        self._totals: Counter[str] = Counter()
        self._tops: Counter[tuple[str, str]] = Counter()
        self.moment = ""
        """A part of a phase whose peak grows otherwise with a model's layers than that of the rest."""
        self.phases: dict[str, Phase] = {}
        self._phase = Phase()
        self._resize: Any = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what happens in the body under a name; a second time takes the place of the first."""
        self._phase = self.phases[name] = Phase()
        self._tops.clear()
        self.moment = ""
        for device in list(self._live):
            self._note(device)
        yield
        self._phase = Phase()

    def label(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Says what these tensors are, from now on."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            entry = self._entries.get(local.untyped_storage())
            if entry is not None and entry.kind != kind:
                self._live[entry.device][entry.kind] -= entry.size
                entry.kind = kind
                self._live[entry.device][kind] += entry.size

    def alive(self, device: str) -> dict[str, int]:
        """Bytes by kind at the moment."""
        return {kind: size for kind, size in self._live[device].items() if size}

    def __enter__(self) -> Tracker:
        self._resize = torch.UntypedStorage.resize_
        entries, resize, changed = self._entries, self._resize, self._changed

        def resize_(storage: Any, size: int) -> None:
            resize(storage, size)
            entry = entries.get(storage)
            if entry is not None:
                changed(entry, size)

        untyped: Any = torch.UntypedStorage
        untyped.resize_ = resize_  # fully_shard frees and takes whole parameters so: no mode sees it
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        untyped: Any = torch.UntypedStorage
        untyped.resize_ = self._resize

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it becomes operations on shards, which come by here
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            name = ""  # a factory, or the tensor of a mesh, which is real
        if name == "_local_scalar_dense":
            return _one(args[0])
        if name in ("index", "index_put", "index_put_") and _has_mask(args[1]):
            args = (args[0], [each for index in args[1] for each in _everywhere(index)], *args[2:])
        if name == "nonzero":
            return torch.zeros((args[0].numel(), args[0].dim()), dtype=torch.int64, device=args[0].device)
        if name == "_pin_memory":  # fake tensors have none
            return torch.empty_like(args[0])
        if name == "_to_copy" and isinstance(args[0], FakeTensor):
            args[
                0
            ].constant = None  # torch would move the values of `torch.tensor([…])`, and this device has none
        self._count(func, args)
        found = func(*args, **kwargs)
        self._carry(name, args, found)
        self._note_host(name, args, found)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        return found

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in ("c10d", "_c10d_functional"):
            return
        kind = next((kind for part, kind in _COLLECTIVES.items() if part in name), None)
        if kind is None:
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        size = max(tensor.nbytes for tensor in tensors)
        if name == "all_gather_into_tensor" and namespace == "_c10d_functional":
            size *= args[1]  # of these only the shard is an argument
        self._phase.calls[kind] += 1
        self._phase.moved[kind] += size

    def _carry(self, name: str, args: tuple[Any, ...], found: Any) -> None:
        if name not in ("_to_copy", "copy_") or not isinstance(found, Tensor):
            return
        source = args[1] if name == "copy_" else args[0]
        ways = source.device.type, found.device.type
        if ways[0] != ways[1] and "meta" not in ways:
            self._phase.carried[" to ".join(ways)] += source.nbytes

    def _note_host(self, name: str, args: tuple[Any, ...], found: Any) -> None:
        if name in ("_to_copy", "copy_", "_pin_memory", "device", ""):
            return
        tensors = [leaf for leaf in tree_leaves((args, found)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self._phase.on_host[name] += 1

    def _track(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or isinstance(tensor, DTensor):
            return
        storage = tensor.untyped_storage()
        if storage in self._entries:
            return
        entry = _Entry(tensor.device.type, storage.nbytes())
        self._entries[storage] = entry
        weakref.finalize(storage, self._changed, entry, 0)
        self._add(entry, entry.size)

    def _changed(self, entry: _Entry, size: int) -> None:
        more, entry.size = size - entry.size, size
        self._add(entry, more)

    def _add(self, entry: _Entry, size: int) -> None:
        self._live[entry.device][entry.kind] += size
        self._totals[entry.device] += size
        if size > 0:
            self._note(entry.device)

    def _note(self, device: str) -> None:
        key = device, self.moment
        if self._totals[device] > self._tops[key]:
            self._tops[key] = self._totals[device]
            self._phase.moments[key] = self.alive(device)


def _one(tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)


def _everywhere(index: Any) -> list[Any]:
    """What a mask that is true everywhere chooses: an index of each of its dimensions."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool:
        return [index]
    return [torch.zeros(math.prod(index.shape), dtype=torch.int64, device=index.device)] * index.dim()
