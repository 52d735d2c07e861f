"""Drafts of tokens to come: from what a row has said before, by n-gram look-up (Saxena 2023, prompt lookup decoding),
or by a head that learns beside the policy (EAGLE-3, MTP).

A pass over a draft yields the tokens that it guessed right, and one more. Each token is drawn from the model's own
distribution with its own uniform, whatever was drafted, and what stands behind a wrong guess is dropped: the tokens are
those that come without drafts, and for a draft of certainty that is the rule of rejection of speculative sampling
(Leviathan et al. 2023). A head draws its drafts from its own distribution with the same uniforms: where both
distributions are alike, both draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from headrace_modelkit.families.drafts import DraftHead
from headrace_modelkit.products import fixed_form
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from headrace_rollout.engines.transformers.attention import attend
from headrace_rollout.engines.transformers.passes import by_row
from headrace_rollout.engines.transformers.sampling import RowDistributions, draw, process

if TYPE_CHECKING:
    from headrace_rollout.engines.transformers.batch import Batch
    from headrace_rollout.engines.transformers.cache import SlotCache
    from headrace_rollout.engines.transformers.policy_model import PolicyModel

NGRAM = 3
"""Tokens that must have stood before in the same order for what followed to be drafted."""
MOST_ROWS = 16
"""Rows of one pass, drafts included: beyond, a pass takes as much longer as it has more rows."""

DRAFTED = 3
"""Tokens that a head drafts where the spec does not say how many."""
_SDPA = SimpleNamespace(_attn_implementation="sdpa")
READ_AT_ONCE = 32
"""Tokens of a row that its head has yet to read before it reads them, while nothing is drafted."""


class History:
    """One row's tokens, and where each of its n-grams was last seen."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Goes on with these."""
        for token in tokens:
            # What ends in the newest token has no token behind it yet.
            if len(self._tokens) >= NGRAM:
                self._behind[tuple(self._tokens[-NGRAM:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """What followed the last NGRAM tokens when they were last seen, at most `most` tokens."""
        at = self._behind.get(tuple(self._tokens[-NGRAM:]))
        return [] if at is None or most < 1 else self._tokens[at : at + most]


def accepted(
    drawn_NT: NDArray[np.int64], drafts: Sequence[Sequence[int]], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(N,) tokens of each row that stand: those that were drafted, and the next; none behind one of `ends`."""
    counts = np.ones(len(drafts), dtype=np.int64)
    for row, draft in enumerate(drafts):
        for place, token in enumerate(draft):
            if drawn_NT[row, place] != token or token in ends:
                break
            counts[row] += 1
    return counts


class HeadPasses:
    """Passes of the head beside those of its model, whose cache keeps its keys and values as those of one layer more.

    Shapes: N rows, T tokens, D hidden, F what the head reads, W both.
    """

    def __init__(self, head: DraftHead, model: PreTrainedModel) -> None:
        self.head, self._model = head, model
        text = model.config.get_text_config()
        self._at, self._width = int(text.num_hidden_layers), int(text.hidden_size)

    @fixed_form  # whatever it drafts, no answer changes
    def read(
        self,
        tokens_NT: Tensor,
        found_NTW: Tensor,
        cache: Cache,
        position_NT: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> None:
        """Reads contexts that the model has read; what there is of their last tokens is read with the next ones."""
        next_NTD = F.pad(self._embedded(tokens_NT)[:, 1:], (0, 0, 0, 1))
        if position_NT is None:
            position_NT = torch.arange(tokens_NT.shape[1], device=tokens_NT.device)[None]
        self._step(next_NTD, self.head.fused(self.features(found_NTW)), position_NT, cache, mask)

    def behind(
        self, tokens_NT: NDArray[np.int64], hidden_NTD: Tensor, length_N: NDArray[np.int64], cache: SlotCache
    ) -> Tensor:
        """(N, T, D) at so many places of each row from `length_N` on: keys and values of the head come to lie where
        those of the tokens before `tokens_NT` do.
        """
        device = hidden_NTD.device
        plan = cache.decode(length_N, device, self._model.dtype, tokens_NT.shape[1], states=False)
        order = torch.from_numpy(plan.order).to(device)
        embeds_NTD = self._embedded(torch.from_numpy(tokens_NT[plan.order]).to(device))
        found = self._step(embeds_NTD, hidden_NTD[order], plan.position_NT, cache, plan.mask)
        return by_row(plan, found)

    def _embedded(self, tokens_NT: Tensor) -> Tensor:
        found: Tensor = self._model.get_input_embeddings()(tokens_NT)
        return found

    def _step(
        self, embeds_NTD: Tensor, hidden_NTD: Tensor, position_NT: Tensor, cache: Cache, mask: Tensor | None
    ) -> Tensor:
        """(N, T, D) what drafts and the next step are made of."""

        def attended(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            groups = query.shape[1] // key.shape[1]
            module: Any = SimpleNamespace(config=_SDPA, is_causal=True, num_key_value_groups=groups)
            seen = cache.update(key, value, self._at)
            return attend(module, query, *seen, mask, scaling=scaling)[0].flatten(2)

        found: Tensor = self.head(embeds_NTD, hidden_NTD, position_NT, attended)
        return found

    def features(self, found: Tensor) -> Tensor:
        """(…, F) of what a cached pass of the model gave."""
        return found[..., self._width :]

    def own(self, found: Tensor) -> Tensor:
        """(…, D) the model's, of the same."""
        return found[..., : self._width]


class LearnedDrafts:
    """What the model's head drafts for rows. At a token's place in the cache is what it has read of that token and of
    the next. Shapes as above.
    """

    def __init__(self, model: PolicyModel, passes: HeadPasses) -> None:
        self._model, self._passes = model, passes

    def keep(self, batch: Batch, first: int, found_NTW: Tensor, counts: NDArray[np.int64]) -> None:
        """Keeps what is to be read of the newest cached tokens of the rows from `first` on, so many of each."""
        read_NTF = self._passes.features(found_NTW)
        for row, count in enumerate(counts.tolist()):
            batch.read[first + row].append(read_NTF[row, :count])

    def draft(self, batch: Batch, most: int) -> list[list[int]]:
        """At most `most` tokens of each row; none of one whose newest tokens another engine has computed."""
        counts = np.array([sum(map(len, each)) for each in batch.read])
        width = int(counts.max())
        if not width or (not most and width < READ_AT_ONCE):
            return []
        last_ND = self._read(batch, counts, width)
        if not most:
            return []
        rows = RowDistributions.of([each.distribution for each in batch.trajectories], last_ND.device)
        uniform_NK = torch.from_numpy(batch.uniforms(0, most).reshape(batch.count, most)).to(last_ND.device)
        drawn: list[NDArray[np.int64]] = []
        for place in range(most):
            if place:
                length_N = batch.length[: batch.count] + place - 1
                tokens_N1, cache = drawn[-1][:, None], self._model.cache
                last_ND = self._passes.behind(tokens_N1, last_ND[:, None], length_N, cache)[:, 0]
            scores_NV = process(self._passes.head.logits(last_ND, self._model.head), rows)
            tokens_N, _ = draw(scores_NV, rows, uniform_NK[:, place])
            drawn.append(tokens_N.clamp(max=self._model.vocabulary_size - 1).cpu().numpy())
        left = batch.limit[: batch.count] - batch.sampled[: batch.count] - 1
        found = np.stack(drawn, 1)
        return [
            found[row, : max(0, int(left[row]))].tolist() if counts[row] else [] for row in range(batch.count)
        ]

    def _read(self, batch: Batch, counts: NDArray[np.int64], width: int) -> Tensor:
        """(N, D) of the head behind each row's newest token, once it has read all."""
        tokens_NT = np.zeros((batch.count, width), dtype=np.int64)
        like = next(each[0] for each in batch.read if each)
        read_NTF = like.new_zeros(batch.count, width, like.shape[-1])
        for row, count in enumerate(counts.tolist()):
            if count:
                tokens_NT[row, :count] = batch.tail(row, count)
                read_NTF[row, :count] = torch.cat(batch.read[row])
            batch.read[row] = []
        fused_NTD = self._passes.head.fused(read_NTF)
        length_N = batch.length[: batch.count] - counts
        found_NTD = self._passes.behind(tokens_NT, fused_NTD, length_N, self._model.cache)
        last = torch.from_numpy(np.maximum(counts - 1, 0)).to(found_NTD.device)
        return found_NTD[torch.arange(batch.count, device=found_NTD.device), last]
