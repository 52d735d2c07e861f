"""States of layers that have one for each row instead of keys: of convolutions, delta rules and Mamba.

They stand beside keys and values: a row's states belong to all tokens that it has, and cannot be cut at fewer. A pass
whose last tokens are guesses therefore remembers the states behind each of its tokens. Knows no tokens; transformers'
layers ask and update them through their cache.

Shapes: R rows, N rows of a pass, T its tokens, K width of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

Key = tuple[int, str, int]
"""Layer, kind and number of a state."""
States = dict[Key, Tensor]
CONVOLUTION, RECURRENT = "convolution", "recurrent"


class PassStates:
    """The states of one pass, as transformers' layers ask for them: the methods of its `Cache`."""

    def __init__(self) -> None:
        self.passing: States = {}
        self.behind: list[States] = []
        """Of a pass with guesses, what the states are behind each of its tokens."""
        self._running: list[nn.Module] = []
        self._mixers: dict[nn.Module, set[int]] = {}

    @contextmanager
    def finding_mixers(self, model: nn.Module) -> Iterator[None]:
        """The pass in the body tells which modules of `model` keep states: those compute guesses token by token."""

        def leave(*_: Any) -> None:
            self._running.pop()

        hooks: list[Any] = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(lambda own, _: self._running.append(own)))
            hooks.append(module.register_forward_hook(leave))
        known = set(self._mixers)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running.clear()
        for mixer in self._mixers.keys() - known:
            untyped: Any = mixer
            untyped.forward = partial(self._token_by_token, mixer, untyped.forward)

    def _token_by_token(self, mixer: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
        """What a module that mixes tokens gives; `behind` remembers its states behind each token of a guess."""
        if not self.behind:
            return forward(*args, **named)
        hidden_NTD, *rest = args or (named.pop("hidden_states"),)
        found = []
        for states, hidden_N1D in zip(self.behind, hidden_NTD.split(1, 1), strict=True):
            found.append(forward(hidden_N1D, *rest, **named))
            for key, state in self.passing.items():
                if key[0] in self._mixers[mixer]:
                    states[key] = state.clone()  # layers may write into it
        return torch.cat(found, 1)

    def _note_mixer(self, layer: int) -> None:
        if self._running:
            self._mixers.setdefault(self._running[-1], set()).add(layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(N, …, K) inputs before the pass, or None; layers may write into it."""
        return self.passing.get((layer_idx, CONVOLUTION, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keeps the newest K inputs; returns those before the pass and all new ones."""
        self._note_mixer(layer_idx)
        key = (layer_idx, CONVOLUTION, state_idx)
        before = self.passing.get(key)
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        width = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if (short := width - whole.shape[-1]) > 0:
            whole = F.pad(whole, (short, 0))
        self.passing[key] = whole[..., -width:]
        return whole

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(N, …) before the pass, or None; layers may write into it."""
        return self.passing.get((layer_idx, RECURRENT, state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Keeps what a layer's state is behind the pass."""
        self._note_mixer(layer_idx)
        key = (layer_idx, RECURRENT, state_idx)
        before = self.passing.get(key)
        self.passing[key] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return self.passing[key]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the pass goes on from states."""
        return any(layer_idx in (None, layer) and state_idx in (None, at) for layer, _, at in self.passing)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Never: what is taken back, `behind` remembers."""
        return False


class RowStates:
    """Of all running rows, by their numbers."""

    def __init__(self) -> None:
        self._kept: States = {}
        self.like: States = {}
        """Each state with no row in it."""
        self._guessed: tuple[Tensor, list[States]] | None = None

    @property
    def row_bytes(self) -> int:
        """What the states of one row take; 0 for a model that has none."""
        return sum(like[0:0].new_empty(like.shape[1:]).nbytes for like in self.like.values())

    def learn(self, found: States) -> None:
        """Takes the shapes of a pass."""
        self.like = {key: tensor[:0].clone() for key, tensor in found.items()}

    def clear(self) -> None:
        """Gives the rows' memory back."""
        self._kept = {}

    def of(self, order: Tensor) -> States:
        """The states of these rows in this order, which a pass may write into; copies unless they lie so."""
        if _in_order(order):
            return {key: tensor[: len(order)] for key, tensor in self._kept.items()}
        return {key: tensor.index_select(0, order.to(tensor.device)) for key, tensor in self._kept.items()}

    def store(self, rows: Tensor, found: States) -> None:
        """Row `rows[i]` has the states i from now on."""
        for key, tensor in found.items():
            like = self.like[key]
            self._room(key, int(rows.max()) + 1).index_copy_(0, rows.to(like.device), tensor.to(like))

    def passed(self, rows: Tensor, found: States, behind: list[States]) -> None:
        """All running rows, in this order, have gone through a pass; where there are states `behind` each of its
        tokens, `stand` says behind which rows go on.
        """
        if behind:
            self._guessed = rows, behind
            return
        back = slice(None) if _in_order(rows) else rows.argsort()
        self._kept = {key: tensor.to(self.like[key])[back] for key, tensor in found.items()}

    def stand(self, counts_N: NDArray[np.int64]) -> None:
        """So many tokens of each row of the last pass stand; the next one writes over the others."""
        if self._guessed is None:
            return
        rows, behind = self._guessed
        last, row = torch.from_numpy(counts_N)[rows] - 1, torch.arange(len(rows))
        self._guessed = None
        found = {key: torch.stack([each[key] for each in behind])[last, row] for key in behind[0]}
        self.passed(rows, found, [])

    def remove(self, renamed: dict[int, int]) -> None:
        """`renamed` leads from rows to their new numbers."""
        sources, targets = list(renamed), list(renamed.values())
        for tensor in self._kept.values() if renamed else ():
            tensor[targets] = tensor[sources]

    def _room(self, key: Key, rows: int) -> Tensor:
        own = self._kept.get(key, self.like[key])
        if len(own) < rows:
            more = own.new_zeros(max(rows, 2 * len(own)) - len(own), *own.shape[1:])
            own = self._kept[key] = torch.cat([own, more])
        return own


def _in_order(rows: Tensor) -> bool:
    return torch.equal(rows, torch.arange(len(rows), device=rows.device))


def stacked(several: Sequence[States]) -> States:
    """(N, …) of single rows' states."""
    return {key: torch.stack([each[key] for each in several]) for key in several[0]}


def row_of(states: States, row: int) -> States:
    """A copy of one row's states."""
    return {key: tensor[row].clone() for key, tensor in states.items()}
