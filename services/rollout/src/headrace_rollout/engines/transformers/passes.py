"""What a model's passes are made of: its cache, padded ids, and which sequences are scored together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from headrace_modelkit.attending import reach_of, without_cache
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.mixtures import ExpertShape
from headrace_modelkit.families.routing import Routing
from headrace_schema.sections.generating import ModelSection
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headrace_rollout.engines.trajectory import Scored
from headrace_rollout.engines.transformers.attention import attend_by_parts
from headrace_rollout.engines.transformers.cache import DecodePlan, SlotCache

# Padded tokens of one scoring pass.
PASS_TOKENS = 4096


class Routes:
    """The experts that tokens of the last pass were sent to; of no model, or one that is told nothing, none.

    Recorded as (tokens, chosen) of each layer; said as the bytes of each token.
    """

    def __init__(self, routing: Routing | None, shape: ExpertShape | None) -> None:
        self._routing = routing if shape is not None and shape.routed else None
        self._type = np.dtype(np.uint8 if shape is None or shape.experts <= 256 else "<u2")
        records = shape is not None and self._routing is not None
        self.width = shape.layers * shape.chosen * self._type.itemsize if records and shape else 0
        """Bytes of a token's routes; 0 where none are recorded."""
        self.order: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Of the rows of the last decode."""
        self.whole: list[bytes] = []
        """Of a prefill that was made in several passes."""

    def begin(self) -> None:
        """Before a pass."""
        if self._routing is not None:
            self._routing.recorded = []

    def prefilled(self, contexts: Sequence[Sequence[int]]) -> list[bytes]:
        """Of each context's tokens in the last prefill; empty where none are recorded."""
        if self.whole:
            found, self.whole = self.whole, []
            return found if all(found) else []
        if (by_token := self._recorded()) is None:
            return []
        by_prompt = by_token.reshape(len(contexts), max(map(len, contexts)), -1)
        return [by_prompt[row, : len(context)].tobytes() for row, context in enumerate(contexts)]

    def decoded(self) -> list[bytes]:
        """Of each row's token in the last decode; empty where none are recorded."""
        if (by_token := self._recorded()) is None:
            return []
        return [row.tobytes() for row in by_token[np.argsort(self.order)].reshape(len(self.order), -1)]

    def _recorded(self) -> NDArray[Any] | None:
        """(tokens, layers, chosen)."""
        layers = [each.cpu().numpy() for each in (self._routing and self._routing.recorded) or ()]
        return np.stack(layers, 1).astype(self._type) if layers else None


def passes(sequences: Sequence[Scored]) -> Iterator[list[int]]:
    """Indices of the sequences of each pass: similar lengths together, bounded in padded tokens."""
    chosen: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index][0])):
        if chosen and len(sequences[index][0]) * (len(chosen) + 1) > PASS_TOKENS:
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


def padded(contexts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(N, T) token ids, filled up with 0 behind each context."""
    tokens_NT = np.zeros((len(contexts), max(map(len, contexts))), dtype=np.int64)
    for row, context in enumerate(contexts):
        tokens_NT[row, : len(context)] = context
    return torch.from_numpy(tokens_NT).to(device)


def by_row(plan: DecodePlan, found_NTW: Tensor) -> Tensor:
    """What a decode pass gave, in the order of the rows that asked for it."""
    if (np.diff(plan.order) == 1).all():
        return found_NTW
    return found_NTW.index_select(0, torch.from_numpy(np.argsort(plan.order)).to(found_NTW.device))


def positions(plan: DecodePlan, shift_N: NDArray[np.int64] | None) -> Tensor:
    """Of a decode pass's tokens; where images shift a row's, of each of the three axes."""
    if shift_N is None or not shift_N.any():
        return plan.position_NT
    shifted_NT = plan.position_NT + torch.from_numpy(shift_N[plan.order]).to(plan.position_NT.device)[:, None]
    return shifted_NT[None].expand(3, -1, -1)


def new_cache(
    model: PreTrainedModel,
    config: ModelSection,
    architecture: PreTrainedConfig,
    limit: int,
    *,
    drafts: bool = False,
) -> SlotCache:
    """The cache for a model whose contexts have up to `limit` tokens; `drafts`: a head has a layer behind the others.

    Raises ModelNotReadable for layers that keep something else than keys, values and states, or see the last tokens
    alone in a way that cannot be followed.
    """
    layers = range(int(architecture.get_text_config().num_hidden_layers))
    reaches = [reach_of(architecture, layer, limit) for layer in layers]
    reaches += [None] if drafts else []
    reason, by_parts = without_cache(architecture), attend_by_parts(model)
    if not reason and any(reaches) and not by_parts:
        reason = "the model has layers that see the last tokens alone, by an attention of their own"
    if reason:
        raise ModelNotReadable(
            f"model.path: {config.path!r}: {reason}, which rollout.engine: transformers cannot run; choose another "
            "engine"
        )
    return SlotCache(split=by_parts, reaches=reaches)


def split(values: list[float], counts: Sequence[int]) -> list[list[float]]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
