"""Keys and values of running sequences: each owns a row, filled from the left to its own length.

Shapes: R rows, H key/value heads, L capacity in tokens, D head dimension, N active rows, T prompt tokens.
Knows no tokens; it moves rows and remembers what a forward pass hands it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

LENGTH_STEP = 64
ROW_STEP = 8


@dataclass
class PromptKeys:
    """A prompt's keys and values, per layer [H, T, D], kept while members of its group wait for a row."""

    length: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PrefillPlan:
    """Where a prefill pass goes: prompt `prompt_of_row[i]` of the batch into row `first_row + i`."""

    first_row: int
    prompt_of_row: Tensor
    keep: Sequence[tuple[int, PromptKeys]]


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not annotated
    """A Hugging Face cache over rows. Set `prefill` or `decode` before each forward pass."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows = 0
        self._capacity = 0
        self._plan: PrefillPlan | None = None
        self._row_index: Tensor | None = None
        self._position: Tensor | None = None
        self._visible = 0

    @property
    def size_bytes(self) -> int:
        """Memory of all rows."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for `rows` rows of `length` tokens; what they hold stays."""
        if rows <= self._rows and length <= self._capacity:
            return
        if rows > self._rows:
            self._rows = -(-rows // ROW_STEP) * ROW_STEP
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity * 5 // 4) // LENGTH_STEP) * LENGTH_STEP
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._grown(old)

    def prefill(self, plan: PrefillPlan) -> None:
        """The next pass computes prompts from their first token."""
        self._plan = plan

    def decode(self, position_N: Tensor, visible: int) -> None:
        """The next pass adds one token to each active row at its position; `visible`: the longest length."""
        self._plan = None
        known = self._row_index
        if known is None or known.device != position_N.device or len(known) != len(position_N):
            self._row_index = torch.arange(position_N.shape[0], device=position_N.device)
        self._position = position_N
        self._visible = visible

    def place(self, first_row: int, prompts: Sequence[PromptKeys]) -> None:
        """Copies kept prompts into rows from `first_row` on."""
        for layer in range(len(self.keys)):
            for row, prompt in enumerate(prompts, first_row):
                self.keys[layer][row, :, : prompt.length] = prompt.keys[layer]
                self.values[layer][row, :, : prompt.length] = prompt.values[layer]

    def move(self, targets: Sequence[int], sources: Sequence[int], length: int) -> None:
        """Copies rows over others, up to `length` tokens."""
        for tensors in (self.keys, self.values):
            for tensor in tensors:
                tensor[targets, :, :length] = tensor[sources, :, :length]

    def free(self) -> None:
        """Gives all memory back."""
        self.keys, self.values = [], []
        self._rows = self._capacity = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values; returns what its attention sees."""
        if layer_idx == len(self.keys):
            self.keys.append(self._empty(key_states))
            self.values.append(self._empty(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._plan is not None:
            return self._store_prompts(self._plan, keys, values, key_states, value_states)
        assert self._row_index is not None and self._position is not None
        keys[self._row_index, :, self._position] = key_states[:, :, 0]
        values[self._row_index, :, self._position] = value_states[:, :, 0]
        count = key_states.shape[0]
        return keys[:count, :, : self._visible], values[:count, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a prefill starts at the first token, a decode is given its positions."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as the sequence length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """A prefill attends to itself alone; a decode brings its own mask."""
        return query_length, 0

    def _store_prompts(
        self, plan: PrefillPlan, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = slice(plan.first_row, plan.first_row + plan.prompt_of_row.shape[0])
        length = new_keys.shape[2]
        keys[rows, :, :length] = new_keys.index_select(0, plan.prompt_of_row)
        values[rows, :, :length] = new_values.index_select(0, plan.prompt_of_row)
        for prompt, kept in plan.keep:
            kept.keys.append(new_keys[prompt, :, : kept.length].clone())
            kept.values.append(new_values[prompt, :, : kept.length].clone())
        return new_keys, new_values

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: a masked position must still be finite, 0 x inf would be NaN.
        return like.new_zeros((self._rows, like.shape[1], self._capacity, like.shape[3]))

    def _grown(self, old: Tensor) -> Tensor:
        new = self._empty(old)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new
