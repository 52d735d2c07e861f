"""Log-probs of given tokens under the installed policy, in passes of bounded size.

Shapes: S sequences, T tokens, N scored positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from headrace_modelkit.logprobs import CHUNK_ELEMENTS

from headrace_rollout.engines.base import Distribution, Refused
from headrace_rollout.engines.transformers.policy_model import PolicyModel, padded
from headrace_rollout.engines.transformers.sampling import RowDistributions, process

# Padded tokens of one pass.
PASS_TOKENS = 4096

Scored = tuple[Sequence[int], int]


def check_scored(
    sequences: Sequence[Scored], distribution: Distribution, context: int, vocabulary: int
) -> None:
    """Raises Refused(INVALID) on what cannot be scored."""
    if distribution.repetition_penalty != 1.0:
        raise Refused(
            "INVALID", "distribution.repetition_penalty: given tokens are scored without one; set 1"
        )
    for index, (ids, start) in enumerate(sequences):
        if not 1 <= start <= len(ids) or len(ids) > context:
            raise Refused(
                "INVALID",
                f"sequences[{index}]: {len(ids)} ids from {start}; start at 1 or later and at most {context}",
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise Refused("INVALID", f"sequences[{index}].token_ids: ids must lie below {vocabulary}")


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


@torch.inference_mode()
def score(model: PolicyModel, sequences: Sequence[Scored], distribution: Distribution) -> list[list[float]]:
    """Log-probs of one pass: for each sequence those of its ids from its start on."""
    lengths = [len(ids) for ids, _ in sequences]
    tokens_ST = padded([ids for ids, _ in sequences], model.device)
    hidden_STD = model.hidden(tokens_ST)
    counts = [length - start for length, (_, start) in zip(lengths, sequences, strict=True)]
    hidden_ND = torch.cat([hidden_STD[i, s - 1 : lengths[i] - 1] for i, (_, s) in enumerate(sequences)])
    tokens_N = torch.cat([tokens_ST[i, s : lengths[i]] for i, (_, s) in enumerate(sequences)])
    found: list[float] = []
    size = max(1, CHUNK_ELEMENTS // model.vocabulary_size)
    for begin in range(0, len(tokens_N), size):
        part_N = tokens_N[begin : begin + size]
        rows = RowDistributions.of([distribution] * len(part_N), model.device)
        scores_NV = process(model.head.logits(hidden_ND[begin : begin + size]), rows)
        found += (scores_NV.gather(-1, part_N[:, None])[:, 0] - scores_NV.logsumexp(-1)).tolist()
    return _split(found, counts)


def _split(values: list[float], counts: Sequence[int]) -> list[list[float]]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]
