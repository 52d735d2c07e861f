"""The parameters of one rank in Megatron's buffers: values, an fp32 gradient of one micro-batch, and slices of masters.

Megatron's DistributedDataParallel lays parameters out in buckets. A bucket's gradients are reduced to the ranks that
have the same parameters (replicas) while earlier layers go backward, and its values gathered from them while earlier
layers go forward. Here the reduced gradients of several micro-batches are added up, and the fp32 masters kept: of every
bucket one slice a rank, like Megatron's distributed optimizer. Knows no canonical names and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from headrace_megatron.gpt import ExpertLayer

BUCKET_PARAMETERS: int | None = None
"""Parameters of a bucket; None: as many as Megatron thinks best for the number of ranks."""


@dataclass
class _Slice:
    """This rank's share of a bucket: what is added up of its gradients, and masters of a model that is not in fp32."""

    buffer: Any
    bucket: Any
    reduced: Tensor
    masters: Tensor | None

    @property
    def group(self) -> ProcessGroup:
        """The ranks that have the bucket's parameters."""
        found: ProcessGroup = self.buffer.data_parallel_group
        return found

    def own(self, flat: Tensor) -> Tensor:
        """The share of the bucket's values or gradients."""
        return flat.chunk(self.group.size())[self.group.rank()]


@dataclass(frozen=True)
class _Place:
    """Where a parameter lies in its bucket."""

    slice: _Slice
    start: int
    shape: torch.Size

    @property
    def bounds(self) -> tuple[int, int]:
        """Begin and end of this rank's piece in the flat parameter."""
        length = len(self.slice.reduced)
        begin = self.slice.group.rank() * length - self.start
        first, last = (min(max(each, 0), self.shape.numel()) for each in (begin, begin + length))
        return first, last

    def piece(self, own: Tensor) -> Tensor:
        """The parameter's piece of a slice."""
        first, last = self.bounds
        begin = self.start + first - self.slice.group.rank() * len(own) if last > first else 0
        return own[begin : begin + last - first]


class Weights:
    """The parameters of a model that does not learn, by name."""

    def __init__(self, chunks: nn.ModuleList) -> None:
        self._parameters = dict(chunks.named_parameters())
        for parameter in self._parameters.values():
            parameter.requires_grad_(False)
        self.modules: list[nn.Module] = list(chunks)
        """What Megatron's schedules call, a chunk of layers each."""

    def values(self) -> dict[str, Tensor]:
        """Each parameter, whole and in the type that it is computed in."""
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each parameter."""
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all that it keeps."""
        return sum(value.nbytes for value in self.values().values())

    def fill(self, name: str, value: Tensor) -> None:
        """Sets a whole parameter, and this rank's piece of its master where there is one."""
        self._parameters[name].data.copy_(value)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes everything elsewhere; nothing runs until it is back on the device."""
        for parameter in self._parameters.values():
            parameter.data = move(parameter.data)


class Shards(Weights):
    """The parameters of a model that learns. `apart` says of which ones the expert-parallel ranks have their own."""

    def __init__(
        self, chunks: nn.ModuleList, config: TransformerConfig, apart: Callable[[str], bool], *, overlap: bool
    ) -> None:
        self._parameters = dict(chunks.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(True)
            parameter.allreduce = not apart(name)  # type: ignore[attr-defined]
        self._home = next(iter(self._parameters.values())).device
        self._chunks = [
            DistributedDataParallel(config, _buckets(overlap=overlap), chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        for chunk in self._chunks:  # `spread` has begun all of them by then.
            chunk.overlap_param_gather_with_optimizer_step = True
            for layer in chunk.modules():  # Its parameters are those of modules that nobody calls.
                if isinstance(layer, ExpertLayer):
                    layer.register_forward_pre_hook(self._settle_experts)
        self.modules = list(self._chunks)
        # A schedule lets the last part alone send gradients off.
        waits = [chunk.no_sync for chunk in self._chunks]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
        self._slices: list[_Slice] = []
        self._places: dict[str, _Place] = {}
        names = {parameter: name for name, parameter in self._parameters.items()}
        for buffer in self._buffers():
            for bucket in buffer.buckets:
                length = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                of_slice = torch.zeros(length, dtype=torch.float32, device=self._home)
                # A model in fp32 computes with its masters themselves.
                masters = None if buffer.param_dtype is torch.float32 else of_slice.clone()
                self._slices.append(found := _Slice(buffer, bucket, of_slice, masters))
                for parameter in bucket.params_list:
                    start = buffer.param_index_map[parameter][0] - bucket.offset
                    self._places[names[parameter]] = _Place(found, start, parameter.shape)

    def masters(self) -> dict[str, Tensor]:
        """This rank's fp32 masters, flat, by parameter; after writing to them call `spread`."""
        self.settle()
        return self._pieces(lambda of: of.own(of.bucket.param_data) if of.masters is None else of.masters)

    def gradients(self) -> dict[str, Tensor]:
        """As `masters`, of the gradient that `keep` has added up."""
        return self._pieces(lambda of: of.reduced)

    def fresh(self) -> dict[str, Tensor]:
        """As `masters`, of the gradient that `finish` has reduced."""
        return self._pieces(lambda of: of.own(of.bucket.grad_data))

    def group_of(self, name: str) -> ProcessGroup:
        """The ranks that have the same parameter."""
        return self._places[name].slice.group

    def piece(self, name: str, value: Tensor) -> Tensor:
        """This rank's piece of a tensor that is shaped like a parameter."""
        first, last = self._places[name].bounds
        return value.flatten()[first:last]

    def whole(self, name: str, piece: Tensor) -> Tensor:
        """A tensor shaped like a parameter, 0 but for this rank's piece of it."""
        place = self._places[name]
        first, last = place.bounds
        found = piece.new_zeros(place.shape.numel())
        found[first:last] = piece
        return found.view(place.shape)

    def finish(self) -> None:
        """Waits until the gradient of the micro-batch that went backward last is reduced."""
        for chunk in self._chunks:
            chunk.finish_grad_sync()
        for group in self._bucket_groups():  # Values are gathered when they change, not after each reduction.
            group.param_gather_dispatched = True

    def keep(self) -> None:
        """Adds the reduced gradient to those of the micro-batches before it."""
        for each in self._slices:
            each.reduced += each.own(each.bucket.grad_data)
        self.drop_fresh()

    def drop_fresh(self) -> None:
        """Forgets the gradient of the micro-batch that went backward last."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def drop_gradients(self) -> None:
        """Forgets all that was added up."""
        for each in self._slices:
            each.reduced.zero_()

    def spread(self) -> None:
        """Makes the values of all ranks those of the masters; what computes with one waits for its bucket."""
        self.settle()
        for each in self._slices:
            if each.masters is not None:
                each.own(each.bucket.param_data).copy_(each.masters)
        for chunk in self._chunks:
            chunk.start_param_sync(force_dispatch=True)

    def settle(self, parameter: nn.Parameter | None = None) -> None:
        """Waits for the values of a parameter, or of all."""
        for chunk in self._chunks:
            if not chunk.ddp_config.overlap_param_gather:
                continue
            found = chunk.param_to_bucket_group
            for group in dict.fromkeys(
                found.values() if parameter is None else filter(None, [found.get(parameter)])
            ):
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _settle_experts(self, layer: nn.Module, _: object) -> None:
        for parameter in layer.parameters():
            self.settle(parameter)

    def values(self) -> dict[str, Tensor]:
        self.settle()
        return super().values()

    @property
    def size_bytes(self) -> int:
        found = [each.reduced for each in self._slices]
        found += [each.masters for each in self._slices if each.masters is not None]
        found += [flat for buffer in self._buffers() for flat in (buffer.param_data, buffer.grad_data)]
        return sum(tensor.nbytes for tensor in found)

    def fill(self, name: str, value: Tensor) -> None:
        super().fill(name, value)
        place = self._places[name]
        if place.slice.masters is not None:
            place.piece(place.slice.masters).copy_(self.piece(name, value))

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Gradients of a micro-batch do not go along: there are none between two of them."""
        self.settle()
        for buffer in self._buffers():
            buffer.param_data = move(buffer.param_data)
            home = buffer.param_data.device == self._home
            buffer.grad_data.untyped_storage().resize_(buffer.numel * 4 if home else 0)
            if home:
                buffer.grad_data.zero_()
            for bucket in buffer.buckets:
                end = bucket.offset + bucket.grad_data.numel()
                bucket.param_data = buffer.param_data[bucket.offset : end]
            for parameter, (start, end, _) in buffer.param_index_map.items():
                parameter.data = buffer.param_data[start:end].view(parameter.shape)
        for group in self._bucket_groups():
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
        for each in self._slices:
            each.reduced = move(each.reduced)
            each.masters = None if each.masters is None else move(each.masters)

    def _pieces(self, of: Callable[[_Slice], Tensor]) -> dict[str, Tensor]:
        own = {id(each): of(each) for each in self._slices}
        return {
            name: self._places[name].piece(own[id(self._places[name].slice)]) for name in self._parameters
        }

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from (*chunk.buffers, *chunk.expert_parallel_buffers)

    def _bucket_groups(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def add_up(pieces: Iterable[Tensor], group: ProcessGroup) -> None:
    """Adds up equal pieces of several ranks, in one message."""
    found = [piece for piece in pieces if piece.numel()]
    if not found:
        return
    flat = torch.cat(found)
    torch.distributed.all_reduce(flat, group=group)
    begin = 0
    for piece in found:
        piece.copy_(flat[begin : begin + piece.numel()])
        begin += piece.numel()


def _buckets(*, overlap: bool) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=BUCKET_PARAMETERS,
    )
