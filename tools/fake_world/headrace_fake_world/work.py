"""Counts what a phase computes: products, bytes of memory, kernels, waits of the host; and its seconds on a roofline.

Every operation of the trainer's own step is seen, forward and backward. Its time is that of its products or of its
bytes, whichever takes longer. Assumes that all rows of a micro-batch are equally long. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

NANO = 10**9


@dataclass(frozen=True)
class Roof:
    """What a GPU reaches. Defaults: H100 SXM, dense bf16, as its data sheet says and as kernels are known to reach."""

    peak: float = 989e12
    """Products and sums of bf16 a second."""
    matmul: float = 0.70
    """Part of the peak that large matrix products reach."""
    grouped: float = 0.55
    """Part of the peak that products of experts reach."""
    flash_forward: float = 0.36
    flash_backward: float = 0.30
    """Parts of the peak that FlashAttention 2 reaches, causal, at heads of 128; FlashAttention 3 about 0.6 and 0.5."""
    fp32: float = 60e12
    """Products and sums of fp32 a second, without TF32."""
    memory: float = 3.35e12 * 0.85
    """Bytes a second."""
    links: float = 320e9
    """Bytes a second of a collective within a host (NVLink), or over several (eight NICs of 50 GB/s a host)."""
    launch_s: float = 6e-6
    """Of the host's time for a kernel, eager."""

    def lines(self) -> list[str]:
        """Each figure, for people."""
        return [f"{name} = {value:g}" for name, value in vars(self).items()]


VIEWS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "squeeze", "unsqueeze"),
        *("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "detach", "alias"),
        *("as_strided", "diagonal", "view_as", "empty", "empty_like", "empty_strided", "new_empty"),
        *("new_empty_strided", "lift_fresh", "is_same_size", "resize_", "set_", "record_stream"),
        *("_local_scalar_dense", "unsafe_split", "device"),
    )
)
"""Operations that launch nothing."""
_BLAS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0, "baddbmm": 1}
"""Products of two matrices, and where the first one stands among the tensors."""
_FLASH = {"_flash_attention_forward": 1.0, "_flash_attention_backward": 2.5}
_FLASH |= {"_scaled_dot_product_flash_attention": 1.0, "_scaled_dot_product_flash_attention_backward": 2.5}
_MOVES = frozenset(
    (
        *("index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_"),
        *("sort", "topk", "cumsum"),
        *("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"),  # fully_shard's own
    )
)
"""Kernels of their own also where layers are compiled."""
_GATHERS = frozenset(("index", "index_select", "gather", "embedding"))
"""Read as many elements of their first tensor as they give, each from its place: the tensor must be written."""


_FILLS = frozenset(("fill_", "zero_"))


@dataclass(frozen=True)
class _Unwritten:
    """What a fused operation has made."""

    backward: bool
    """Whether a backward made it."""
    origins: dict[Any, int]
    """Storages, with the bytes of them, of which it can be made again element by element; none of sums and gathers."""


@dataclass
class Work:
    """What is told to `Tracker.watch`. With `fuses`, operations element by element and along rows are computed with
    their neighbours, as torch.compile does within a layer: what none but they read is never written,
    a kernel reads a tensor once, and a backward makes again what it can of what is written. What has the `vocabulary`
    as a dimension is outside of layers, and not fused.
    """

    roof: Roof = field(default_factory=Roof)
    fuses: bool = False
    vocabulary: int = 0
    _pending: Any = field(default_factory=WeakIdKeyDictionary)
    """Storages that are not written yet: `_Unwritten`."""
    _seen: Any = field(default_factory=WeakIdKeyDictionary)
    """Storages that the operations since the last kernel of its own have read: fused ones read them once."""

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Any
    ) -> Iterator[tuple[str, int]]:
        """(kind, count) of what one operation adds to its phase."""
        name = func._schema.name.rpartition("::")[2]
        if func._schema.name.startswith(("c10d", "_c10d")):
            return
        if name == "_local_scalar_dense" and args[0].device.type != "cpu":
            yield "waits", 1
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = [each for each in (*made, *read) if each.device.type not in ("cpu", "meta")]
        if name in VIEWS or not device:
            return
        backward = torch._C._current_graph_task_id() != -1
        # A forward that is computed again is a graph of its own, whose results a backward reads.
        graph = backward and not torch.is_grad_enabled()
        flops, reaches = self._products(name, func, args, kwargs, found)
        own = self.fuses and not flops and name not in _MOVES and not self._outside(made, read)
        if name == "all_gather_copy_in":  # which gives the place for the others' shards, too
            read, made = list(args[0]), list(args[0])
        size, launches = self._bytes(name, read, made, fused=own, backward=graph)
        seconds = max(flops / reaches if flops else 0.0, size / self.roof.memory)
        yield "flops" if not backward else "flops in backward", flops
        yield "bytes", size
        yield "kernels", launches if own else max(1, launches)
        kind = "attention" if name in _FLASH else "products" if flops else "memory"
        yield f"nanoseconds of {kind}", round(seconds * NANO)

    def _outside(self, made: list[Tensor], read: list[Tensor]) -> bool:
        return any(self.vocabulary in each.shape for each in (*made, *read))

    def _products(self, name: str, func: Any, args: Any, kwargs: Any, found: Any) -> tuple[int, float]:
        """Products and sums, and how many a second there are."""
        roof = self.roof
        if name in _FLASH:
            return self._attention(name, args, kwargs)
        if name == "_grouped_mm":
            one, other = args[0], args[1]
            inner = one.shape[-1]
            rows, columns = (one.shape[0], other.shape[-1])
            return 2 * rows * inner * columns, roof.peak * roof.grouped
        if name in _BLAS:
            one, other = [each for each in args if isinstance(each, Tensor)][_BLAS[name] :][:2]
            flops = 2 * one.numel() * other.shape[-1]
            return flops, roof.fp32 if one.dtype is torch.float32 else roof.peak * roof.matmul
        return 0, 1.0

    def _attention(self, name: str, args: Any, kwargs: Any) -> tuple[int, float]:
        """Causal: half of the pairs of each row."""
        back = name.endswith("backward")
        query = args[1] if back else args[0]
        key = args[2] if back else args[1]
        if query.dim() == 3:  # rows behind each other, all equally long
            longest = int(args[8] if back else args[5])
            pairs = query.shape[0] * (longest + 1) // 2
            heads, width = query.shape[1:]
        else:
            pairs = query.shape[0] * query.shape[2] * (key.shape[2] + 1) // 2
            heads, width = query.shape[1], query.shape[3]
        reaches = self.roof.flash_backward if back else self.roof.flash_forward
        return round(4 * heads * width * pairs * _FLASH[name]), self.roof.peak * reaches

    def _bytes(
        self, name: str, read: list[Tensor], made: list[Tensor], *, fused: bool, backward: bool
    ) -> tuple[int, int]:
        """Bytes that are read and written, and kernels that write what was left to be."""
        size = kernels = 0
        if not fused:
            self._seen.clear()
        known = {each.untyped_storage()._cdata: each for each in read}
        origins: dict[Any, int] = {}
        for place, each in enumerate(known.values()):
            storage, own = each.untyped_storage(), _read(each)
            gathered = name in _GATHERS and not place
            waits = self._pending.get(storage)
            if waits is not None and (not fused or gathered or waits.backward != backward):
                # Somebody else reads it: it is written. A backward may make it again of what it was made of.
                again = sum(count for origin, count in waits.origins.items() if origin not in self._seen)
                if fused and not gathered and waits.origins and again < 2 * own:
                    size += again
                    self._seen.update(dict.fromkeys(waits.origins, True))
                    continue
                size += own
                kernels += 1
                del self._pending[storage]
                waits = None
            if waits is not None:
                origins |= waits.origins or {storage: own}
                continue
            origins[storage] = own
            if gathered or storage not in self._seen:
                size += made[0].nbytes if gathered else own
                self._seen[storage] = True
        widest = max((each.numel() for each in read), default=0)
        for each in made:
            storage = each.untyped_storage()
            if fused and (storage._cdata not in known or name in _FILLS or storage in self._pending):
                again = {} if name in _GATHERS or each.numel() < widest else origins
                self._pending[storage] = _Unwritten(backward, again)
            else:
                size += _read(each)
        return size, kernels


def _read(tensor: Tensor) -> int:
    """Bytes of a tensor: of an expanded one those that there are."""
    return min(tensor.numel() * tensor.element_size(), max(1, tensor.untyped_storage().nbytes()))


def seconds_of(work: Counter[str]) -> dict[str, float]:
    """Of the device, by kind."""
    head = "nanoseconds of "
    return {name.removeprefix(head): count / NANO for name, count in work.items() if name.startswith(head)}
