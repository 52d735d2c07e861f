"""A model whose answers have the lengths of a published run, whatever it is asked.

Its layers compute as those of any model of this size, and add nothing: each token has a direction of its own, and the
head says from it what comes next. The k-th token of an answer is always the same; after it the answer ends as often as
published answers of at least k tokens did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from streaming import CHARACTERS, wide_model

QUANTILES = {0.5: 60, 0.9: 111, 0.95: 127, 1.0: 260}
"""Tokens of an answer: the published quantiles, which are seconds there (a token a second)."""
FIRST = 0x4E00
"""The first character that stands for a number of tokens."""
NEVER = -40.0


def write_tail_model(directory: Path, width: int, layers: int) -> None:
    """A Qwen3 of this width and depth; answers have between 1 and 260 tokens."""
    import torch
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer

    ends = chances(QUANTILES)
    characters = CHARACTERS + "".join(chr(FIRST + index) for index in range(len(ends) - 1))
    tokenizer = character_tokenizer(characters)
    model = wide_model(len(tokenizer), width, layers)
    known = len(tokenizer) - (len(ends) - 1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        into, out = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.fill_(NEVER)
        into[:known, 0] = 1.0
        for made, end in enumerate(ends):
            if made:
                into[known + made - 1, made] = 1.0
            out[tokenizer.eos_token_id, made] = math.log(end) if end else NEVER
            if made + 1 < len(ends):
                out[known + made, made] = math.log1p(-end)
        out /= math.sqrt(width)  # the last norm makes a direction as long as that
    save_model(model, tokenizer, directory)


def chances(quantiles: Mapping[float, float]) -> Sequence[float]:
    """By the tokens that an answer has: how likely the next one ends it. Straight lines join the quantiles, from 0."""
    points = [(0.0, 0.0), *sorted((float(length), share) for share, length in quantiles.items())]

    def within(length: int) -> float:
        (a, low), (b, high) = next(pair for pair in pairwise(points) if length <= pair[1][0])
        return low + (high - low) * (length - a) / (b - a)

    longest = int(points[-1][0])
    return [
        (within(made + 1) - within(made)) / (1 - within(made)) if made + 1 < longest else 1.0
        for made in range(longest)
    ]
