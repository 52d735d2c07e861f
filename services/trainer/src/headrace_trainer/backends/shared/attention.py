"""Attention of segments that continue paths, by the kernel that a device has for it. Knows no model and no tree.

On a CPU torch's flash kernel computes each part and log-sum-exps put parts together. On a GPU it is torch's flash
kernel for sequences of many lengths, whose causal mask ends where queries and keys both end; where that cannot be,
a mask for few tokens and flex_attention for many. None of them has a dense mask of many tokens, and none repeats
keys for the query heads that share them.

Shapes as in `segments`; H query heads, G key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from headrace_trainer.learning.planning import Run
from headrace_trainer.learning.segments import Segments

WIDENED_TOKENS = 512
"""Sequences up to here are attended to in fp32 on a CPU, which loses nothing: torch's CPU kernel, forward and backward
together, is faster in it than in bf16 (twice at 120 tokens; as fast at 512)."""
DENSE_TOKENS = 2048
"""On a GPU whose flash kernel cannot take a model (fp32, wide heads), up to so many queries have a mask: 4 MiB."""
FLASH_HEAD = 256
FLASH_3 = "flash_attn_interface"
"""The module of FlashAttention 3's package (flash_attn_3)."""
GATHERED = 16
"""The flash kernel reads a path's keys one after another: so many copies of all keys at most, or flex_attention."""
BLOCK = 128
"""Queries and keys of one block of flex_attention."""


Kept = Callable[[Callable[[], Many[Tensor]]], Many[Tensor]]
"""Gives what is computed, or what the same forward has given before."""


def attend_segments(
    query_NHD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    segments: Segments,
    scale: float | None = None,
    window: int | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """(N, H, D) softmax attention of each query over the keys that its segment lets it see. Differentiable.

    `segments` is on the device of the others. `scale` multiplies scores; default: 1 / sqrt(D). With a `window` a query
    sees so many of the last keys of its path, its own included.
    """
    query, key, value = of_one_width(query_NHD, key_MGD, value_MGD)
    window = window if window is not None and window < segments.longest_path else None
    kernel = choose_kernel(query, key, value, segments, window)
    if kept is not None and kernel is by_flash:
        kernel = partial(by_flash, kept=kept)
    found_NHD = kernel(query, key, value, segments, scale or query_NHD.shape[-1] ** -0.5, window)
    return found_NHD.narrow(-1, 0, value_MGD.shape[-1])


def of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers with zeros behind them, as kernels want all of one width."""
    widest = max(query.shape[-1], value.shape[-1])
    padded = [
        each if each.shape[-1] == widest else F.pad(each, (0, widest - each.shape[-1]))
        for each in (query, key, value)
    ]
    return padded[0], padded[1], padded[2]


def use_newest_flash(device: torch.device) -> None:
    """Lets torch's flash attention be FlashAttention 3 on a Hopper GPU where its package is installed; once a process.

    A model is tried with it as its weights are loaded, so that a kernel that computes something else ends the run.
    """
    there = device.type == "cuda" and torch.cuda.is_available()
    hopper = there and torch.cuda.get_device_capability(device)[0] == 9
    if hopper and find_spec(FLASH_3) is not None and current_flash_attention_impl() is None:
        activate_flash_attention_impl("FA3")


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float, int | None], Tensor]


def choose_kernel(
    query_NHD: Tensor, key_MGD: Tensor, value_MGD: Tensor, segments: Segments, window: int | None = None
) -> Kernel:
    """By device, type, width of heads, and by how many copies of the keys the flash kernel would read.

    A CPU's flash kernel knows no windows: there, and there alone, a mask has as many elements as there are pairs.
    """
    if query_NHD.device.type == "cpu":
        return on_cpu if window is None else by_mask
    fits = query_NHD.shape[-1] <= FLASH_HEAD and segments.seen <= GATHERED * len(key_MGD)
    if query_NHD.dtype != torch.float32 and fits and _has_flash(query_NHD.device):
        return by_flash
    return by_mask if len(query_NHD) <= DENSE_TOKENS and len(key_MGD) <= DENSE_TOKENS else by_flex


def _has_flash(device: torch.device) -> bool:
    """True for a device that is only imagined: a FakeTensorMode has no GPU to ask."""
    if not torch.cuda.is_available():
        return True
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(
        device
    ) >= (8, 0)


def on_cpu(
    query_NHD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Part by part, without a window."""
    assert window is None
    function: Any = _OnCpu
    found: Tensor = function.apply(query_NHD, key_MGD, value_MGD, segments, scale)
    return found


def by_flash(
    query_NHD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    *,
    kept: Kept | None = None,
) -> Tensor:
    """One call of the flash kernel for sequences of many lengths, whose keys are gathered where paths share them."""
    width = query_NHD.shape[-1]
    padded = [F.pad(each, (0, -width % 8)) for each in (query_NHD, key_MGD, value_MGD)]
    function: Any = _ByFlash
    found: Tensor = function.apply(*padded, segments, scale, window, kept)
    return found.narrow(-1, 0, width)


def by_mask(
    query_NHD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """torch's own attention with a dense mask: for few tokens. Heads are repeated, as its kernels want with a mask."""
    again = query_NHD.shape[1] // key_MGD.shape[1]
    key, value = (each.repeat_interleave(again, 1).transpose(0, 1)[None] for each in (key_MGD, value_MGD))
    if window not in segments.made:
        segments.made[window] = segments.visible.dense(window)  # for all layers of this window
    mask = segments.made[window]
    found = F.scaled_dot_product_attention(query_NHD.transpose(0, 1)[None], key, value, mask, scale=scale)
    return found[0].transpose(0, 1)


def by_flex(
    query_NHD: Tensor,
    key_MGD: Tensor,
    value_MGD: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """flex_attention with a mask of blocks, compiled where there is a GPU. On a CPU it has no backward pass."""
    mask = block_mask(segments, window)
    kernel: Any = _compiled_flex() if query_NHD.device.type == "cuda" else flex_attention
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query_NHD, key_MGD, value_MGD))
    found: Tensor = kernel(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return found[0].transpose(0, 1)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def block_mask(segments: Segments, window: int | None = None) -> BlockMask:
    """The blocks of queries and keys that see each other, made from a row of blocks at a time; kept for all layers."""
    made, key = segments.made, ("block_mask", window)
    if key not in made:
        made[key] = _block_mask(segments, window)
    found: BlockMask = made[key]
    return found


def _block_mask(segments: Segments, window: int | None) -> BlockMask:
    keys, visible, device = segments.keys, segments.visible, segments.query_ends.device
    columns = -(-keys // BLOCK)
    key_C = torch.arange(keys, device=device)
    some, every = [], []
    for first in range(0, segments.queries, BLOCK):
        query_B = torch.arange(first, min(first + BLOCK, segments.queries), device=device)
        sees = F.pad(visible(query_B[:, None], key_C[None, :], window), (0, columns * BLOCK - keys))
        blocks = sees.view(len(query_B), columns, BLOCK)
        every.append(blocks.all(-1).all(0))
        some.append(blocks.any(-1).any(0) & ~every[-1])
    return BlockMask.from_kv_blocks(
        *_counted(torch.stack(some)),
        *_counted(torch.stack(every)),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda _batch, _head, query, key: visible(query, key, window),
        seq_lengths=(segments.queries, keys),
    )


def _counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row of blocks are true, and their numbers before those of the others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


class _ByFlash(torch.autograd.Function):
    """aten's flash attention over gathered keys, which are gathered again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query_NHD: Tensor,
        key_MGD: Tensor,
        value_MGD: Tensor,
        segments: Segments,
        scale: float,
        window: int | None,
        kept: Kept | None,
    ) -> Tensor:
        def compute() -> Many[Tensor]:
            found: Many[Tensor] = torch.ops.aten._flash_attention_forward(
                query_NHD,
                *_gathered(key_MGD, value_MGD, segments),
                *_lengths(segments),
                0.0,
                True,
                False,
                scale=scale,
                window_size_left=_left(window),
            )[:4]
            return found

        learns = kept is not None and any(ctx.needs_input_grad)
        out_NHD, lse_HN, state, unused = kept(compute) if kept is not None and learns else compute()
        ctx.save_for_backward(query_NHD, key_MGD, value_MGD, out_NHD, lse_HN, state, unused)
        ctx.segments, ctx.scale, ctx.window = segments, scale, window
        found: Tensor = out_NHD
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given_NHD: Tensor) -> tuple[Tensor | None, ...]:
        query_NHD, key_MGD, value_MGD, out_NHD, lse_HN, state, unused = ctx.saved_tensors
        segments: Segments = ctx.segments
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            given_NHD.contiguous(),
            query_NHD,
            *_gathered(key_MGD, value_MGD, segments),
            out_NHD,
            lse_HN,
            *_lengths(segments),
            0.0,
            True,
            state,
            unused,
            scale=ctx.scale,
            window_size_left=_left(ctx.window),
        )
        return (
            of_query,
            _scattered(of_key, key_MGD, segments),
            _scattered(of_value, value_MGD, segments),
            *(None,) * 4,
        )


def _left(window: int | None) -> int | None:
    """Keys before a query's own: as its causal mask, the kernel's window ends where queries and keys both end."""
    return None if window is None else window - 1


def _lengths(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_ends, segments.key_ends, segments.longest_query, segments.longest_path


def _gathered(key_MGD: Tensor, value_MGD: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    if segments.keys_T is None:
        return key_MGD, value_MGD
    return key_MGD.index_select(0, segments.keys_T), value_MGD.index_select(0, segments.keys_T)


def _scattered(gradient_TGD: Tensor, like_MGD: Tensor, segments: Segments) -> Tensor:
    """The gradient of keys that several paths share, added up in fp32."""
    if segments.keys_T is None:
        return gradient_TGD
    sum_MGD = torch.zeros_like(like_MGD, dtype=torch.float32)
    return sum_MGD.index_add_(0, segments.keys_T, gradient_TGD.float()).to(like_MGD.dtype)


class _OnCpu(torch.autograd.Function):
    """Each part by itself; the backward pass of a part takes the output and the log-sum-exp of all parts together."""

    @staticmethod
    def forward(
        ctx: Any, query_NHD: Tensor, key_MGD: Tensor, value_MGD: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query_NHD, key_MGD, value_MGD))
        out = torch.empty_like(query_NHD).transpose(0, 1)[None]
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for queries, runs, causal in _cpu_calls(segments):
            own = query[:, :, slice(*queries)]
            found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                own, _keys(key, runs), _keys(value, runs), 0.0, causal, scale=scale
            )
            into, sums = out[:, :, slice(*queries)], lse[:, :, slice(*queries)]
            if causal:  # the first call of each query
                into.copy_(found)
                sums.copy_(total)
                continue
            both = torch.logaddexp(sums, total)
            share, rest = ((each - both).exp()[..., None] for each in (total, sums))
            into.copy_(into * rest + found * share)
            sums.copy_(both)
        ctx.save_for_backward(query_NHD, key_MGD, value_MGD, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out[0].transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, given_NHD: Tensor) -> tuple[Tensor | None, ...]:
        query_NHD, key_MGD, value_MGD, out, lse = ctx.saved_tensors
        query, key, value, given = (
            each.transpose(0, 1).unsqueeze(0) for each in (query_NHD, key_MGD, value_MGD, given_NHD)
        )
        sums = [
            torch.zeros_like(each, dtype=torch.float32).transpose(0, 1)[None]
            for each in (query_NHD, key_MGD, value_MGD)
        ]
        for queries, runs, causal in _cpu_calls(ctx.segments):
            place = slice(*queries)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                given[:, :, place],
                query[:, :, place],
                _keys(key, runs),
                _keys(value, runs),
                out[:, :, place],
                lse[:, :, place].contiguous(),
                0.0,
                causal,
                scale=ctx.scale,
            )
            sums[0][:, :, place] += found[0]
            for total, gradient in zip(sums[1:], found[1:], strict=True):
                first = 0
                for run in runs:
                    count = run[1] - run[0]
                    total[:, :, slice(*run)] += gradient[:, :, first : first + count]
                    first += count
        own = (each[0].transpose(0, 1).to(query_NHD.dtype) for each in sums)
        return *own, None, None


def _cpu_calls(segments: Segments) -> list[tuple[Run, tuple[Run, ...], bool]]:
    """(queries, runs of keys, whether causal) of each call: own keys first, then what neighbours have in common."""
    calls: list[tuple[Run, tuple[Run, ...], bool]] = [
        ((part.start, part.stop), (part.runs[-1],), True) for part in segments.parts
    ]
    for before, parts in groupby(segments.parts, lambda part: part.before):
        if before:
            listed = list(parts)
            calls.append(((listed[0].start, listed[-1].stop), before, False))
    return calls


def _keys(whole: Tensor, runs: tuple[Run, ...]) -> Tensor:
    """(1, G, K, D) of runs; a view of a single one."""
    found = [whole[:, :, slice(*run)] for run in runs]
    return found[0] if len(found) == 1 else torch.cat(found, 2)
