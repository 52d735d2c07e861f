"""Keys and values of running sequences: each owns a slot of a bucket, filled from the left to its own length.

Shapes: R slots, H key/value heads, L tokens, D head dimension, N active rows, T prompt tokens.
Knows no tokens; it moves rows and remembers what a forward pass hands it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from headrace_modelkit.attending import Reach
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from headrace_rollout.engines.samples import CachedContext
from headrace_rollout.engines.transformers.attention import Parts, mask_of
from headrace_rollout.engines.transformers.buckets import (
    KEPT,
    WORTH,
    Bucket,
    Layer,
    arrange,
    moved,
    span,
    tokens_of,
)
from headrace_rollout.engines.transformers.states import PassStates, RowStates, States, row_of, stacked

FREE_BYTES = 8 << 20
"""What the cache takes as it comes: splitting so little into buckets would cost more than it saves."""
UNBOUNDED = 1 << 62
JOINED = 4
"""Buckets to which rows that join may add theirs: each one costs an attention of its own, all anew costs a copy."""


@dataclass
class PromptKeys:
    """A prompt's keys and values, per layer [H, T, D], and states: kept while members of its group wait for a row."""

    length: int
    layers: list[Layer] = field(default_factory=list)
    states: States = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillPlan:
    """Where a prefill pass goes: prompt `prompt_of_row[i]` of the batch into row `first_row + i`."""

    first_row: int
    prompt_of_row: Sequence[int]
    keep: Sequence[tuple[int, PromptKeys]]


@dataclass(frozen=True)
class DecodePlan:
    """A decode pass of T tokens a row: rows in the order that the cache wants, and the mask (N, 1, T, L) to pass on."""

    order: NDArray[np.int64]
    position_NT: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Write:
    """Where a prefill stores in one bucket: prompts `source` of the pass at `slots`."""

    bucket: Bucket
    slots: list[int] | slice
    source: Tensor


@dataclass(frozen=True)
class _Step:
    """One bucket's share of a decode pass: its rows' slots (N, 1), new positions (N, T), and the longest of them."""

    bucket: Bucket
    slots: Tensor
    position: Tensor
    visible: int


class SlotCache(PassStates, Cache):  # type: ignore[misc]  # transformers is not annotated
    """A Hugging Face cache over rows. Set `prefill` or `decode` before each forward pass, and call `end_pass` after it.

    Where every row's last length fits (see `fits`), `size_bytes` stays within `budget_bytes`, but for one layer that
    is there twice while rows move. `split` false: the model's attention cannot take rows of several tensors.
    `reaches`: of each layer, if it does not see all earlier tokens.
    """

    def __init__(
        self, *, split: bool, reaches: Sequence[Reach | None] = (), free_bytes: int = FREE_BYTES
    ) -> None:
        PassStates.__init__(self)
        Cache.__init__(self, layers=[])
        self.states = RowStates()
        self.reaches = reaches if any(reaches) else ()
        self._plan: PrefillPlan | None = None
        self._order: Tensor | None = None
        self._rows: list[int] = []
        self._sources: list[int] = []
        self.budget_bytes = UNBOUNDED
        self.free_bytes = free_bytes
        self.buckets: list[Bucket] = []
        self.split = split
        self._like: list[Layer] = []
        self.token_bytes = 0
        """What one token takes in all layers; 0 before `learn`."""
        self._place: dict[int, int] = {}
        """Of each layer that has keys, which one of those it is."""
        self._learning = False
        self._writes: list[_Write] = []
        self._keep: Sequence[tuple[int, PromptKeys]] = ()
        self._steps: list[_Step] = []
        self._masks: dict[Reach | None, list[Tensor]] = {}

    @property
    def size_bytes(self) -> int:
        """Memory of all buckets, and of the rows' states."""
        rows = sum(len(bucket.rows) for bucket in self.buckets)
        return sum(bucket.tokens for bucket in self.buckets) * self.token_bytes + rows * self.states.row_bytes

    @property
    def stateful(self) -> bool:
        """Whether layers have states beside keys and values."""
        return bool(self.states.like)

    @property
    def budget_tokens(self) -> int:
        """Tokens that the budget has room for."""
        return self.budget_bytes // self.token_bytes

    def fits(self, lengths: Sequence[int], kept: int = 0) -> bool:
        """Whether rows may grow to these lengths beside a kept prompt, with some room for padding."""
        needed = sum(lengths) if self.split else len(lengths) * max(lengths, default=0)
        states = len(lengths) * self.states.row_bytes / self.token_bytes
        return needed * KEPT + kept + states <= self.budget_tokens

    def learn(self) -> None:
        """The next pass, over one token, tells how large a token is; nothing of it is kept."""
        self._learning, self._like, self.token_bytes, self.passing = True, [], 0, {}

    def join(self, lengths: Sequence[int], contexts: Sequence[int]) -> None:
        """Makes room for rows of `contexts` tokens behind the rows of `lengths` tokens that are there."""
        homeless = []
        for row, context in enumerate(contexts, len(lengths)):
            open_ones = [b for b in self.buckets if len(b.rows) < b.slots and b.capacity > context]
            if open_ones:
                min(open_ones, key=lambda bucket: bucket.capacity).rows.append(row)
            else:
                homeless.append(row)
        if homeless and not self._add(homeless, [contexts[row - len(lengths)] for row in homeless]):
            self._rebuild([*lengths, *contexts])

    def prefill(self, plan: PrefillPlan, device: torch.device) -> None:
        """The next pass computes prompts from their first token."""
        self._learning, self._steps, self._plan = False, [], plan
        self.narrow(sorted(set(plan.prompt_of_row)), device)

    def narrow(self, prompts: Sequence[int], device: torch.device) -> None:
        """The next pass computes these prompts alone of the plan's."""
        plan = self._plan
        assert plan is not None
        place = {prompt: at for at, prompt in enumerate(prompts)}
        goes = {
            row: place[prompt]
            for row, prompt in enumerate(plan.prompt_of_row, plan.first_row)
            if prompt in place
        }
        self._keep = [(place[prompt], keys) for prompt, keys in plan.keep if prompt in place]
        self._writes, self.passing, self._order, self.behind = [], {}, None, []
        self._rows, self._sources = list(goes), list(goes.values())
        for bucket in self.buckets:
            slots = [slot for slot, row in enumerate(bucket.rows) if row in goes]
            if slots:
                source = torch.tensor([goes[bucket.rows[slot]] for slot in slots], device=device)
                self._writes.append(_Write(bucket, span(slots), source))

    def decode(
        self,
        length_N: NDArray[np.int64],
        device: torch.device,
        dtype: torch.dtype,
        tokens: int = 1,
        *,
        states: bool = True,
    ) -> DecodePlan:
        """The next pass adds `tokens` to every row; rows hold `length_N` tokens.

        Where it adds several, `states.stand` must be told how many are right. `states` false: no layer with states
        is in the pass.
        """
        self._fit(length_N + tokens - 1)
        used = [bucket for bucket in self.buckets if bucket.rows]
        order = np.concatenate([np.asarray(bucket.rows) for bucket in used])
        position_NT = torch.from_numpy(length_N[order][:, None] + np.arange(tokens)).to(device)
        start = 0
        self._learning, self._steps = False, []
        for bucket in used:
            end = start + len(bucket.rows)
            visible = int(length_N[bucket.rows].max()) + tokens
            slots = torch.arange(end - start, device=device)[:, None]
            self._steps.append(_Step(bucket, slots, position_NT[start:end], visible))
            start = end
        self._masks = {
            reach: [mask_of(step.position, step.visible, dtype, reach) for step in self._steps]
            for reach in set(self.reaches or (None,))
        }
        if self.stateful and states:
            self._order = torch.from_numpy(order)
            self.passing = self.states.of(self._order)
            self.behind = [{} for _ in range(tokens)] if tokens > 1 else []
        return DecodePlan(order, position_NT, next(iter(self._masks.values()))[0])

    def end_pass(self) -> None:
        """Stores what the rows' states are behind a pass."""
        if self._learning:
            self.states.learn(self.passing)
        elif self._order is not None:
            self.states.passed(self._order, self.passing, self.behind)
        elif self.passing and self._rows:
            found = {key: tensor[self._sources] for key, tensor in self.passing.items()}
            self.states.store(torch.tensor(self._rows, device="cpu"), found)
            for prompt, keys in self._keep:
                keys.states = row_of(self.passing, prompt)
        self.passing, self._order, self.behind = {}, None, []

    def place(self, first_row: int, prompts: Sequence[PromptKeys]) -> None:
        """Copies kept prompts into rows from `first_row` on."""
        where = {row: (bucket, slot) for bucket in self.buckets for slot, row in enumerate(bucket.rows)}
        for row, prompt in enumerate(prompts, first_row):
            bucket, slot = where[row]
            for kept, layer in zip(prompt.layers, bucket.layers, strict=True):
                for side in (0, 1):
                    layer[side][slot, :, : prompt.length] = kept[side]
        if self.stateful and prompts:
            found = stacked([prompt.states for prompt in prompts])
            self.states.store(torch.arange(first_row, first_row + len(prompts), device="cpu"), found)

    def context_of(self, row: int, length: int, digest: str) -> CachedContext:
        """A row's first `length` tokens, all that it has, for another engine with the weights of `digest`.

        Per layer keys and values, each [H, length, D]; then the states.
        """
        bucket, slot = next((b, b.rows.index(row)) for b in self.buckets if row in b.rows)
        parts = [each[slot, :, :length] for layer in bucket.layers for each in layer]
        parts += self._states_of(row).values()
        data = torch.cat([each.reshape(-1).view(torch.uint8) for each in parts]).cpu().numpy().data
        return CachedContext(self._form(digest), length, data)

    def _states_of(self, row: int) -> States:
        return row_of(self.states.of(torch.tensor([row], device="cpu")), 0)

    def kept(self, row: int, length: int) -> PromptKeys:
        """A copy of a row's first `length` tokens; of a model with states, all that it has."""
        bucket, slot = next((b, b.rows.index(row)) for b in self.buckets if row in b.rows)
        layers = [
            (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for keys, values in bucket.layers
        ]
        return PromptKeys(length, layers, self._states_of(row))

    def keys_of(self, context: CachedContext, digest: str) -> PromptKeys | None:
        """What `context_of` of another engine made; None where its weights, its form or its size are others."""
        length, data = context.tokens, context.data
        size = length * self.token_bytes + self.states.row_bytes
        if context.form != self._form(digest) or len(data) != size:
            return None
        whole, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0

        def read(like: Tensor, *shape: int) -> Tensor:
            nonlocal start
            end = start + math.prod(shape) * like.element_size()
            # A copy: another type's part may begin anywhere.
            found = whole[start:end].clone().view(like.dtype).view(shape)
            start = end
            return found

        kept = PromptKeys(length)
        for layer in self._like:
            keys, values = (read(like, like.shape[1], length, like.shape[3]) for like in layer)
            kept.layers.append((keys, values))
        kept.states = {key: read(like, *like.shape[1:]) for key, like in self.states.like.items()}
        return kept

    def _form(self, digest: str) -> str:
        """How `context_of` lays bytes out: the layers' key and value heads x dimension, their type, the weights."""
        layers = [" + ".join(f"{like.shape[1]}x{like.shape[3]}" for like in layer) for layer in self._like]
        kinds = layers[:1] if len(set(layers)) == 1 else layers
        states = [f"{like.dtype} {list(like.shape[1:])}" for like in self.states.like.values()]
        beside = f" and states {', '.join(states)}" if states else ""
        return f"{len(layers)} layers of {', '.join(kinds)} {self._like[0][0].dtype}{beside}, {digest}"

    def remove(self, gone: Sequence[int], renamed: dict[int, int]) -> None:
        """Drops rows; `renamed` leads from rows to their new numbers. The last row's end gives all memory back."""
        for bucket in self.buckets:
            bucket.remove(set(gone), renamed)
        self.states.remove(renamed)
        if not any(bucket.rows for bucket in self.buckets):
            self.clear()

    def clear(self) -> None:
        """Gives the rows' memory back. What comes next is arranged as if nothing had been there."""
        self.buckets, self._steps, self._writes, self._masks, self._keep = [], [], [], {}, ()
        self.states.clear()

    def free(self) -> None:
        """Gives all memory back, and forgets what `learn` found."""
        self.clear()
        self._like, self.states.like, self.token_bytes = [], {}, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Stores a layer's new keys and values; returns what its attention sees: tensors or Parts."""
        new = (key_states, value_states)
        if self._learning:
            self._place[layer_idx] = len(self._like)
            self._like.append((key_states[:0, :, :0].clone(), value_states[:0, :, :0].clone()))
            self.token_bytes += key_states[0, :, 0].nbytes + value_states[0, :, 0].nbytes
        elif not self._steps:
            self._store_prompts(self._place[layer_idx], new)
        else:
            keys, values = self._store_tokens(self._place[layer_idx], new)
            if len(keys) == 1 and not self.reaches:
                return keys[0], values[0]
            masks = self._masks[self.reaches[layer_idx] if self.reaches else None]
            return Parts(keys, masks), Parts(values, masks)
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a prefill starts at the first token, a decode is given its positions."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0, as the sequence length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """A prefill attends to itself alone; a decode brings its own mask."""
        return query_length, 0

    def _store_prompts(self, layer: int, new: Layer) -> None:
        for write in self._writes:
            length = min(write.bucket.capacity, new[0].shape[2])
            for kept, states in zip(write.bucket.layers[layer], new, strict=True):
                kept[write.slots, :, :length] = states[:, :, :length].index_select(0, write.source)
        for prompt, keys in self._keep:
            keys.layers.append(
                (new[0][prompt, :, : keys.length].clone(), new[1][prompt, :, : keys.length].clone())
            )

    def _store_tokens(self, layer: int, new: Layer) -> tuple[list[Tensor], list[Tensor]]:
        seen: tuple[list[Tensor], list[Tensor]] = ([], [])
        start = 0
        for step in self._steps:
            end = start + len(step.slots)
            for side, kept in enumerate(step.bucket.layers[layer]):
                kept[step.slots, :, step.position] = new[side][start:end].transpose(1, 2)
                seen[side].append(kept[: end - start, :, : step.visible])
            start = end
        return seen

    def _fit(self, length_N: NDArray[np.int64]) -> None:
        """Arranges rows anew where one has no room for a token more, or where too much is kept."""
        if any(b.rows and int(length_N[b.rows].max()) >= b.capacity for b in self.buckets):
            self._rebuild(length_N.tolist())
            return
        taken = sum(bucket.tokens for bucket in self.buckets)
        if taken > max(self.free_bytes // self.token_bytes, KEPT * int(length_N.sum())):
            self._rebuild(length_N.tolist(), below=WORTH * taken)

    def _add(self, rows: Sequence[int], contexts: Sequence[int]) -> bool:
        """New buckets for rows, beside the others, which stay where they are. False where all are better put anew."""
        taken, free = sum(bucket.tokens for bucket in self.buckets), self.free_bytes // self.token_bytes
        shapes = arrange(contexts, free=free, budget=self.budget_tokens - taken, split=self.split)
        together, small = taken + tokens_of(shapes), min(free, self.budget_tokens)
        if not self.split or len(self.buckets) + len(shapes) > JOINED or together > self.budget_tokens:
            return False
        if together <= small:
            return False
        for shape in shapes:
            shape.rows[:] = [rows[index] for index in shape.rows]
        self.buckets += moved((), shapes, self._like)
        return True

    def _rebuild(self, lengths: Sequence[int], below: float = UNBOUNDED) -> None:
        free = self.free_bytes // self.token_bytes
        shapes = arrange(lengths, free=free, budget=self.budget_tokens, split=self.split)
        if tokens_of(shapes) < below:
            self.buckets = moved(self.buckets, shapes, self._like)
