"""Keys and values of conversations between two turns: the next turn computes only what is new behind them.

Shapes: N contexts, H key/value heads, D head dimension, P tokens of the longest known context, T new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from headrace_modelkit.attending import Reach
from torch import Tensor
from transformers.cache_utils import Cache

from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.engines.transformers.attention import Parts, mask_of
from headrace_rollout.engines.transformers.buckets import Layer
from headrace_rollout.engines.transformers.cache import PromptKeys
from headrace_rollout.engines.transformers.states import PassStates, row_of, stacked

Owner = tuple[str, SlotKey]
"""The adapter that computed it, and the slot that it is of."""


class KeptContexts:
    """By adapter, slot and exact ids; beyond `budget_bytes` those go that were used longest ago."""

    def __init__(self) -> None:
        self.budget_bytes = 0
        self._size = 0
        self._kept: OrderedDict[tuple[Owner, tuple[int, ...]], PromptKeys] = OrderedDict()
        self._of_slot: dict[Owner, list[tuple[int, ...]]] = {}

    def clear(self) -> None:
        """Other weights are there, or the memory is wanted."""
        self._kept.clear()
        self._of_slot.clear()
        self._size = 0

    def keep(self, key: Owner, ids: Sequence[int], keys: PromptKeys) -> None:
        """Keeps a context of an owner, in place of those that it begins with."""
        known = tuple(ids)
        for other in list(self._of_slot.get(key, ())):
            if known[: len(other)] == other:
                self._drop(key, other)
        self._kept[key, known] = keys
        self._of_slot.setdefault(key, []).append(known)
        self._size += _bytes(keys)
        while self._size > self.budget_bytes:
            self._drop(*next(iter(self._kept)))

    def find(self, key: Owner, ids: Sequence[int]) -> PromptKeys | None:
        """The longest context of the owner that these ids begin with, and go on from."""
        begins = [
            each
            for each in self._of_slot.get(key, ())
            if len(each) < len(ids) and tuple(ids[: len(each)]) == each
        ]
        if not begins:
            return None
        longest = max(begins, key=len)
        self._kept.move_to_end((key, longest))
        return self._kept[key, longest]

    def _drop(self, key: Owner, ids: tuple[int, ...]) -> None:
        self._size -= _bytes(self._kept.pop((key, ids)))
        self._of_slot[key].remove(ids)
        if not self._of_slot[key]:
            del self._of_slot[key]


class Extension(PassStates, Cache):  # type: ignore[misc]  # transformers is not annotated
    """The cache of one pass over new tokens, each row's behind its known context: a key lies where its token does."""

    def __init__(
        self, known: Sequence[PromptKeys], device: torch.device, reaches: Sequence[Reach | None] = ()
    ) -> None:
        PassStates.__init__(self)
        Cache.__init__(self, layers=[])
        if known[0].states:
            self.passing = {
                key: own.to(device) for key, own in stacked([each.states for each in known]).items()
            }
        self._lengths, self._longest = [each.length for each in known], max(each.length for each in known)
        self._device, self._reaches = device, reaches
        self._masks: dict[Reach | None, Tensor] = {}
        self._past = [
            tuple(self._padded([each.layers[layer][side] for each in known]) for side in (0, 1))
            for layer in range(len(known[0].layers))
        ]
        self._new: list[Layer] = []
        self._place_NT = torch.zeros(0, 0, dtype=torch.int64, device=device)

    def inputs(self, lengths: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions (N, T) of that many new tokens of each context, and what they may see: (N, 1, T, P + T)."""
        past_N = torch.tensor(self._lengths, device=self._device)
        self._place_NT = past_N[:, None] + torch.arange(max(lengths), device=self._device)
        visible = self._longest + max(lengths)
        self._masks = {
            reach: mask_of(self._place_NT, visible, dtype, reach) for reach in {None, *self._reaches}
        }
        return self._place_NT, self._masks[None]

    def keys(self, lengths: Sequence[int]) -> list[PromptKeys]:
        """Each context with its new tokens behind it."""
        found = []
        for row, (known, new) in enumerate(zip(self._lengths, lengths, strict=True)):
            whole = PromptKeys(known + new, states=row_of(self.passing, row))
            for past, made in zip(self._past, self._new, strict=True):
                sides = [
                    torch.cat([past[side][row, :, :known], made[side][row, :, :new]], 1) for side in (0, 1)
                ]
                whole.layers.append((sides[0], sides[1]))
            found.append(whole)
        return found

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """What a layer's attention sees: of each row the known keys and values, then the new ones."""
        self._new.append((key_states, value_states))
        past = self._past[len(self._new) - 1]
        seen = [self._behind(*pair) for pair in zip(past, (key_states, value_states), strict=True)]
        if not self._reaches:
            return seen[0], seen[1]
        masks = [self._masks[self._reaches[layer_idx]]]
        return Parts([seen[0]], masks), Parts([seen[1]], masks)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as the sequence length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The pass brings its own mask."""
        return self._longest + query_length, 0

    def _behind(self, past: Tensor, new: Tensor) -> Tensor:
        whole = F.pad(past, (0, 0, 0, new.shape[2]))
        rows = torch.arange(len(new), device=new.device)[:, None]
        whole[rows, :, self._place_NT] = new.transpose(1, 2)
        return whole

    def _padded(self, several: Sequence[Tensor]) -> Tensor:
        heads, _, width = several[0].shape
        found = several[0].new_zeros(len(several), heads, self._longest, width)
        for row, each in enumerate(several):
            found[row, :, : each.shape[1]] = each
        return found


def _bytes(keys: PromptKeys) -> int:
    tensors = [*(side for layer in keys.layers for side in layer), *keys.states.values()]
    return sum(each.numel() * each.element_size() for each in tensors)
