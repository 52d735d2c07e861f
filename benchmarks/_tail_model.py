"""A model whose answers have the lengths of a published run, and the prompts that say how long.

Its layers compute as those of any model of this size, with one head of keys and values for all of its queries (a 7B
model has one for seven), and add nothing: each token has a direction of its own, and the
head says from it what comes next. The first token of an answer tells how many follow, and the others count down. A
prompt's last character gives its answers a band of the published lengths: with as many bands as prompts, the answers of
a group are alike, and each step has all lengths once; with one band they are independent.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from _rewards import ALIKE, MIXED
from streaming import CHARACTERS, PROMPT, wide_model

QUANTILES = {0.5: 60, 0.9: 111, 0.95: 127, 1.0: 260}
"""Tokens of an answer: the published quantiles, which are seconds there (a token a second)."""
LONGEST = int(QUANTILES[1.0])
FIRST, BAND = 0x4E00, 0x3400
"""The first character that counts tokens, and the first that stands for a band of lengths."""
NEVER = -40.0


def write_tail_model(directory: Path, width: int, layers: int, bands: int) -> None:
    """A Qwen3 of this width and depth; answers have between 1 and 260 tokens. ValueError when it is too narrow."""
    import torch
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer

    if width < LONGEST + bands:
        raise ValueError(f"width {width}: {bands} bands need a model of at least {LONGEST + bands}")
    count = "".join(chr(FIRST + left) for left in range(1, LONGEST))
    tokenizer = character_tokenizer(CHARACTERS + "".join(map(_band, range(bands))) + count)
    model = wide_model(len(tokenizer), width, layers, key_heads=1)
    known = len(tokenizer) - LONGEST

    def followed_by(left: int) -> int:
        return known + left if left else int(tokenizer.eos_token_id)

    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        into, out = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.fill_(NEVER)
        for left in range(1, LONGEST):
            into[followed_by(left), left] = 1.0
            out[followed_by(left - 1), left] = 0.0
        for band in range(bands):
            into[tokenizer.convert_tokens_to_ids(_band(band)), LONGEST + band] = 1.0
            for left, share in enumerate(shares(band, bands)):
                if share:
                    out[followed_by(left), LONGEST + band] = math.log(share)
        out /= math.sqrt(width)  # the last norm makes a direction as long as that
    save_model(model, tokenizer, directory)


def write_tail_prompts(path: Path, count: int, bands: int, every: int) -> None:
    """Random prompts, a group each, with the bands in turn; the middle one of `every` neighbours is learned from."""
    rng, rows = random.Random(0), []
    for at in range(count):
        question = "".join(rng.choices(CHARACTERS, k=PROMPT - 1)) + _band(at % bands)
        answer = MIXED if at % every == every // 2 else ALIKE
        rows.append(json.dumps({"question": question, "answer": answer}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def shares(band: int, bands: int, quantiles: Mapping[float, float] = QUANTILES) -> Sequence[float]:
    """How likely an answer of a band is to have 1, 2, … tokens. Straight lines join the quantiles, from 0."""
    points = [(0.0, 0.0), *sorted((float(length), share) for share, length in quantiles.items())]

    def below(length: int) -> float:
        (a, low), (b, high) = next(pair for pair in pairwise(points) if length <= pair[1][0])
        share = low + (high - low) * (length - a) / (b - a)
        return min(max(share * bands - band, 0.0), 1.0)

    return [below(length + 1) - below(length) for length in range(int(points[-1][0]))]


def _band(index: int) -> str:
    return chr(BAND + index)
