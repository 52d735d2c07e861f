"""Moments in a byte an element: codes of a table, and a scale for each block (8-bit optimizers, arXiv 2110.02861).

Values that were decoded give the same codes again, so that a state is saved as fp32 and resumed to the last bit. The
second moment is coded by its root: its small values would be 0 where the first moment's are not, and a step divides.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

BLOCK = 256
"""Elements with one scale."""
_EXPONENTS = 7


def coded_bytes(elements: int) -> int:
    """Of a tensor's codes and scales."""
    return elements + 4 * -(-elements // BLOCK)


def encode(values: Tensor, *, squared: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of fp32 values: uint8 of their shape, and an fp32 for each block of the flat tensor.

    `squared`: of values that are squares, by their roots.
    """
    flat = (values.sqrt() if squared else values).flatten()
    blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
    _, middles = _table(squared, values.device)
    codes = torch.bucketize(blocks / scales[:, None], middles, out_int32=True).to(torch.uint8)
    return codes.flatten()[: flat.numel()].view(values.shape), scales


def decode(codes: Tensor, scales: Tensor, *, squared: bool) -> Tensor:
    """The fp32 values that `encode` kept."""
    table, _ = _table(squared, codes.device)
    flat = table[codes.flatten().int()]
    blocks = nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK) * scales[:, None]
    found = blocks.flatten()[: flat.numel()].view(codes.shape)
    return found.square() if squared else found


def _table(squared: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """256 values in order, dense around 0 (dynamic exponents), with 1 and, of signed ones, -1; and their middles."""
    table = torch.tensor(_values(squared), dtype=torch.float32, device=device)
    return table, (table[:-1] + table[1:]) / 2


@cache
def _values(squared: bool) -> list[float]:
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2 ** (exponent + squared)
        means = [0.1 + 0.9 * (place + 0.5) / count for place in range(count)]
        own = [mean * 10.0 ** (exponent + 1 - _EXPONENTS) for mean in means]
        found += own if squared else [sign * mean for mean in own for sign in (1, -1)]
    found.sort()
    if not squared:
        found[0] = -1.0
    return found
