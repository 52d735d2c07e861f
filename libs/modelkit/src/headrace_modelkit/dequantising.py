"""Files with quantised weights, as if they had been written before: each weight is computed when it is asked for, and
no more of it than that.

What is read is fp8 as DeepSeek, GLM, MiniMax, Qwen and Mistral publish it (`weight_scale_inv`; a scale for a block, or
one for all), with DeepSeek V4's experts of packed FP4 (`scale`), and MXFP4 as gpt-oss is published (`_blocks`,
`_scales`). Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, TornTensor, whole

METHODS = ("fp8", "mxfp4")
"""Of `quantization_config.quant_method`."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What four bits of E2M1 say."""
_GROUP = 32
"""Numbers with a scale of their own in MXFP4."""
_BIAS = 127
"""Of an exponent that is a byte."""
_LIKE_WEIGHT = (".scale", ".qscale_weight")
"""How DeepSeek V4 and Mistral call what others call `.weight_scale_inv`."""
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class _Blocks:
    """A weight of fp8, or of two FP4 a byte, with a scale for each block of its last two dimensions."""

    weight: str
    scale: str
    shape: tuple[int, ...]
    rows: int
    columns: int

    def read(self, files: TensorFiles, box: Box) -> Tensor:
        *outer, (top, bottom), (left, right) = box
        packed = 2 if files.kind(self.weight) == "I8" else 1
        places = (left // packed, -(-right // packed))
        numbers = files.read(self.weight, (*outer, (top, bottom), places))
        if packed == 2:
            numbers = _unpacked(numbers)[..., left - left // 2 * 2 :][..., : right - left]
        if not files.shape(self.scale) or files.shape(self.scale) == (1,):
            return numbers.float() * _exponents(files.read(self.scale))
        grid = (
            (top // self.rows, -(-bottom // self.rows)),
            (left // self.columns, -(-right // self.columns)),
        )
        scales = _exponents(files.read(self.scale, (*outer, *grid)))
        for dim, size, first, end in ((-2, self.rows, top, bottom), (-1, self.columns, left, right)):
            wide = scales.repeat_interleave(size, dim)
            scales = wide.narrow(dim, first - first // size * size, end - first)
        return numbers.float() * scales


@dataclass(frozen=True)
class _Groups:
    """Experts of MXFP4: (E, outputs, groups, 16) bytes and (E, outputs, groups) exponents are (E, inputs, outputs)."""

    blocks: str
    scales: str
    shape: tuple[int, ...]

    def read(self, files: TensorFiles, box: Box) -> Tensor:
        experts, (first, end), outputs = box
        groups = (first // _GROUP, -(-end // _GROUP))
        packed = files.read(self.blocks, (experts, outputs, groups, (0, _GROUP // 2)))
        scales = _exponents(files.read(self.scales, (experts, outputs, groups)))
        numbers = (_unpacked(packed) * scales[..., None]).flatten(-2)
        return numbers[..., first - groups[0] * _GROUP :][..., : end - first].transpose(1, 2)


class Dequantised(Tensors):
    """The tensors of files of this `quantization_config`, in `dtype` where they were quantised.

    Raises TornTensor for a weight whose scales are missing or do not fit.
    """

    def __init__(self, files: TensorFiles, scheme: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._files, self._dtype = files, dtype
        names = set(files.names())
        size = scheme.get("weight_block_size") or (0, 0)
        self._made: dict[str, _Blocks | _Groups] = {}
        used: set[str] = set()
        for name in sorted(names):
            made: _Blocks | _Groups | None = None
            if name.endswith(_BLOCKS) and files.kind(name) == "U8":
                name = name.removesuffix(_BLOCKS)
                made = _groups(files, names, name)
                used |= {made.blocks, made.scales}
            elif files.kind(name).startswith("F8_E4M3") or files.kind(name) == "I8":
                made = _blocks(files, names, name, size)
                used |= {made.scale}
            if made is not None:
                self._made[name] = made
        self._names = [*self._made, *sorted(names - used - self._made.keys())]

    @override
    def names(self) -> Iterable[str]:
        return self._names

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._made[name].shape if name in self._made else self._files.shape(name)

    def kind(self, name: str) -> str:
        """As `TensorFiles.kind`."""
        return "F32" if name in self._made else self._files.kind(name)

    @override
    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name not in self._made:
            return self._files.read(name, box)
        made = self._made[name]
        return made.read(self._files, whole(made.shape) if box is None else box).to(self._dtype).contiguous()


def _blocks(files: TensorFiles, names: set[str], name: str, size: Any) -> _Blocks:
    stem = name.removesuffix(".weight")
    others = [f"{stem}{each}" for each in _LIKE_WEIGHT] if name.endswith(".weight") else []
    scale = next((each for each in (f"{name}_scale_inv", *others) if each in names), None)
    if scale is None:
        raise TornTensor(f"{name} is quantised ({files.kind(name)}), and no {name}_scale_inv is beside it")
    shape, grid = files.shape(name), files.shape(scale)
    if files.kind(name) == "I8":
        shape = (*shape[:-1], 2 * shape[-1])
    if not grid or grid == (1,):
        return _Blocks(name, scale, shape, 0, 0)
    fits = len(grid) == len(shape) and grid[:-2] == shape[:-2]
    rows, columns = size
    if (
        fits
        and rows
        and tuple(-(-own // each) for own, each in zip(shape[-2:], size, strict=True)) == grid[-2:]
    ):
        return _Blocks(name, scale, shape, rows, columns)
    even = fits and not any(own % count for own, count in zip(shape[-2:], grid[-2:], strict=True) if count)
    if even and all(grid) and (files.kind(name) == "I8" or not rows):  # FP4 has blocks of its own
        return _Blocks(name, scale, shape, shape[-2] // grid[-2], shape[-1] // grid[-1])
    raise TornTensor(
        f"{scale} has the shape {list(grid)}, which is not that of {name} {list(shape)} in blocks of "
        f"weight_block_size {list(size)}"
    )


def _groups(files: TensorFiles, names: set[str], name: str) -> _Groups:
    blocks, scales = f"{name}{_BLOCKS}", f"{name}{_SCALES}"
    if scales not in names:
        raise TornTensor(f"{blocks} is quantised, and no {scales} is beside it")
    shape = files.shape(blocks)
    if len(shape) != 4 or shape[-1] != _GROUP // 2 or files.shape(scales) != shape[:-1]:
        raise TornTensor(
            f"{blocks} has the shape {list(shape)} and {scales} {list(files.shape(scales))}, where (experts, outputs, "
            f"groups, {_GROUP // 2}) and (experts, outputs, groups) are MXFP4's"
        )
    experts, outputs, groups, _ = shape
    return _Groups(blocks, scales, (experts, groups * _GROUP, outputs))


def _unpacked(packed: Tensor) -> Tensor:
    """Twice as wide: the lower four bits come first."""
    codes = packed.view(torch.uint8)
    both = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).int()
    return torch.tensor(FP4)[both]


def _exponents(scales: Tensor) -> Tensor:
    """fp32 scales; bytes are exponents of two."""
    return (scales.float() - _BIAS).exp2() if scales.dtype is torch.uint8 else scales.float()
