"""One rank of a trainer group whose other ranks do not exist, and the modes in which its backend runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from headrace_modelkit import lora
from headrace_trainer.backends.fsdp import backend, experts
from headrace_trainer.backends.fsdp.attending.checking import FormCheck
from headrace_trainer.backends.fsdp.layouts.layout import GPUS_PER_HOST
from headrace_trainer.backends.shared import exchange
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from headrace_trainer.memory import Room, Rooms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes as outside
from transformers import masking_utils
from typing_extensions import override

from headrace_fake_world.device import NAME, fake_device
from headrace_fake_world.tracker import Tracker

CARD_BYTES = 80 * 10**9
"""Of a GPU of 80 GB."""
HOST_BYTES = 2 * 10**12
"""Of a host with eight of them."""


def rooms_of(room_bytes: int = CARD_BYTES) -> Rooms:
    """What a rank has where its GPU has so much memory."""
    return Rooms(Room("host memory", HOST_BYTES, HOST_BYTES), Room("GPU memory", room_bytes, room_bytes))


class FakeTrainerGroup(TrainerGroup):
    """Rank 0 of `world_size`, which follows, so that it reads no file. Whatever is asked of the others, all agree."""

    leads = False

    def __init__(self, world_size: int, device: torch.device, room_bytes: int) -> None:
        self.generation, self.rank, self.world_size, self.device = 1, 0, world_size, device
        self.mesh: DeviceMesh = init_device_mesh(device.type, (world_size,))
        self._meshes = {world_size: self.mesh}
        self._room_bytes = room_bytes

    @override
    def mesh_of(self, shard_ranks: int) -> DeviceMesh:
        with outside():
            return super().mesh_of(shard_ranks)

    @override
    def least_rooms(self) -> tuple[Rooms, int]:
        return rooms_of(self._room_bytes), min(self.world_size, GPUS_PER_HOST)

    @override
    def announce(self, data: bytes | Many[bytes] | None) -> bytes:
        own = data if isinstance(data, bytes | None) else data[0]
        return own or b""

    @override
    def all_true(self, flag: bool) -> bool:
        return flag

    @override
    def votes(self, *flags: bool) -> list[list[bool]]:
        return [list(flags)] * self.world_size

    @override
    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        return {name: value * self.world_size for name, value in values.items()}

    @override
    def maximum(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    @override
    def gather(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size

    def receive(self, source: int, tensor: Tensor) -> None:
        """Nothing comes, and what is there stands for it."""

    def note_connections(self) -> None:
        """There are none."""


@contextmanager
def fake_world(
    world_size: int, device: torch.device | None = None, *, room_bytes: int = CARD_BYTES
) -> Iterator[tuple[FakeTrainerGroup, Tracker]]:
    """A rank of so many on `device` (by default the imaginary GPU), and what measures it; ends the process group.

    The device has `room_bytes` of memory, of which all is free; eight ranks are on a host.

    Inside the body every tensor is fake. A process is in one at a time, and in no real trainer group.
    """
    where = device or fake_device()
    backend = f"cpu:fake,{NAME}:{NAME}_fake" if where.type == NAME else "fake"
    dist.init_process_group(backend, rank=0, world_size=world_size, store=FakeStore())
    try:
        group = FakeTrainerGroup(world_size, where, room_bytes)
        with (
            FakeTensorMode() as mode,
            Tracker() as tracker,
            _device_attention(where),
            _data_that_moves(mode),
            _packed(mode),
            _balanced_experts(),
            _first_blocks(),
            _forms_taken_as_right(),
            _end_of_backward(tracker),
        ):
            yield group, tracker
    finally:
        dist.destroy_process_group()


def _forms_taken_as_right() -> AbstractContextManager[object]:
    """No model is tried as it is loaded: what is compared there are values, which fake tensors have not."""
    return patch.multiple(FormCheck, _alone=lambda check: [], _problem=lambda check, alone, **forms: "")


@contextmanager
def _data_that_moves(mode: FakeTensorMode) -> Iterator[None]:
    """Lets `tensor.data = …` take a tensor of another device, as it may between the host and CUDA, and a module's
    parameters change places with fake ones, which the mode remembers by weak references.
    """
    untyped: Any = FakeTensor
    plain: Any = torch.Tensor.data
    utils: Any = torch.utils
    swap = utils.swap_tensors

    def swap_tensors(one: Tensor, other: Tensor) -> None:
        mode.fake_tensor_converter.tensor_memo.clear()
        swap(one, other)

    def assign(tensor: Tensor, value: Tensor) -> None:
        if tensor.device.type == value.device.type:
            plain.__set__(tensor, value)
            return
        taken: Any = value.detach()
        if isinstance(tensor, nn.Parameter):
            taken = nn.Parameter(taken, tensor.requires_grad)
        tensor.__dict__, taken.__dict__ = taken.__dict__, tensor.__dict__
        torch._C._swap_tensor_impl(tensor, taken)

    untyped.data = property(plain.__get__, assign)
    utils.swap_tensors = swap_tensors
    try:
        yield
    finally:
        del untyped.data
        utils.swap_tensors = swap


@contextmanager
def _packed(mode: FakeTensorMode) -> Iterator[None]:
    """Packs rows with real tensors, whose shapes hang on tokens, and goes on with fake ones."""
    untyped: Any = backend
    plain = untyped.pack

    def pack(*rows: Any, **options: Any) -> MicroBatch:
        with outside():
            batch = plain(*rows, **options)
        found: MicroBatch = faked(batch, mode)
        return found

    untyped.pack = pack
    try:
        yield
    finally:
        untyped.pack = plain


@contextmanager
def _end_of_backward(tracker: Tracker) -> Iterator[None]:
    """Calls the reduction of the root's gradients a moment of its own: no layer has a part in its peak."""
    group: Any = FSDPParamGroup
    plain = group.post_backward

    def post_backward(own: Any, *unused: Any) -> None:
        tracker.moment = "end" if "layers" not in (own._module_fqn or "") else ""
        plain(own, *unused)
        tracker.moment = ""

    group.post_backward = post_backward
    try:
        yield
    finally:
        group.post_backward = plain


@contextmanager
def _balanced_experts() -> Iterator[None]:
    """Gives each rank that divides experts as many rows as each other one: where tokens go is not known."""
    untyped: Any = exchange
    own: Any = experts
    plain, made = untyped._moved, own.init_device_mesh

    def moved(rows_SD: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        each, more = divmod(len(rows_SD), len(sent))
        even = [each + (rank < more) for rank in range(len(sent))]
        found_SD: Tensor = plain(rows_SD, even, even, group)
        return found_SD

    def mesh(*shape: Any, **options: Any) -> DeviceMesh:
        with outside():
            found: DeviceMesh = made(*shape, **options)
            return found

    def most(self: Any, sent: int, device: torch.device) -> int:
        return sent  # as many as each other rank sends

    padded, asked = untyped.PaddedAllToAll, untyped.PaddedAllToAll._most
    untyped._moved, own.init_device_mesh, padded._most = moved, mesh, most
    try:
        yield
    finally:
        untyped._moved, own.init_device_mesh, padded._most = plain, made, asked


@contextmanager
def _first_blocks() -> Iterator[None]:
    """Merges an adapter into the first block of a weight's rows alone: others need the same, and 70B has 65,000."""
    untyped: Any = lora
    plain = untyped._merge

    def merge(found_OI: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        rows = slice(max(1, lora.BLOCK_ELEMENTS // weight_OI.shape[1]))
        plain(found_OI[rows], weight_OI[rows], a_RI, b_OR[rows], scale)

    untyped._merge = merge
    try:
        yield
    finally:
        untyped._merge = plain


def faked(value: Any, mode: FakeTensorMode) -> Any:
    """The value with fake tensors for real ones, also within dicts and dataclasses."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, dict):
        return {name: faked(entry, mode) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {entry.name: faked(getattr(value, entry.name), mode) for entry in fields(value)}
        return replace(value, **parts)
    return value


@contextmanager
def _device_attention(device: torch.device) -> Iterator[None]:
    """Attention as a GPU's kernels have it: torch would take the plain one, which makes the scores, for this device."""
    if device.type == "cpu":
        yield
        return
    plain: Any = F.scaled_dot_product_attention
    untyped: Any = F
    untyped.scaled_dot_product_attention = _attend
    # transformers takes rows of fake tensors for packed ones, because it cannot read their positions.
    masks: Any = masking_utils
    find = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda positions: None
    try:
        yield
    finally:
        untyped.scaled_dot_product_attention = plain
        masks.find_packed_sequence_indices = find


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(R, H, L, D) by the flash kernel, or by the memory-efficient one where there is a mask."""
    operations: Any = torch.ops.aten
    if attn_mask is None and query.dtype is not torch.float32:
        found: Tensor = operations._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return found
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = _repeated(key, times), _repeated(value, times)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            zero = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = zero.masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    masked: Tensor = operations._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return masked


def _repeated(tensor_RHLD: Tensor, times: int) -> Tensor:
    rows, heads, length, size = tensor_RHLD.shape
    return tensor_RHLD[:, :, None].expand(rows, heads, times, length, size).reshape(rows, -1, length, size)
