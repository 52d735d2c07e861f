"""Micro-batches: what samples have in common is computed once, and only trained positions reach the head.

The sequences of a row form a prefix tree: a node is a token in the context of its ancestors, its position is
its depth, and it attends to its ancestors and itself. A prompt shared by a group, and equal beginnings of
answers, are one path. This is exact: the same numbers as one row a sequence, summed in another order.

Attention has two exact forms: over a row's nodes with the tree's mask, or causal along each path by itself, which is
cheaper where the sequences share little.

Shapes: R rows, L nodes of the longest row, U distinct (node, next token) pairs, K trained tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace_trainer.learning.packing.trees import Paths, PrefixTree
from headrace_trainer.learning.samples import Rows, Sequence


def context(sequence: Sequence) -> list[int]:
    """The tokens that must be read to predict the trained ones: the last trained one has no successor."""
    return sequence.tokens[: sequence.trained[-1]] if sequence.trained else []


@dataclass(frozen=True)
class MicroBatch:
    """One forward. Without `mask_R1LL` attention is causal: along `paths`, or along the rows where none branches.

    `columns_K` are those of the infer pass, NaN for a sequence that has none of a name.
    """

    tokens_RL: Tensor
    positions_RL: Tensor
    mask_R1LL: Tensor | None
    paths: Paths | None
    sources_U: Tensor
    targets_U: Tensor
    index_K: Tensor
    advantages_K: Tensor
    weights_K: Tensor
    engine_log_probs_K: Tensor
    sequences_K: Tensor
    columns_K: dict[str, Tensor]

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        if device.type == "cpu":
            return self
        columns_K = {name: value.to(device, non_blocking=True) for name, value in self.columns_K.items()}
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        paths = None if self.paths is None else self.paths.to(device)
        return replace(self, columns_K=columns_K, paths=paths, **moved)  # type: ignore[arg-type]


def pack(rows: Rows, *, shared: bool, by_paths: bool = False) -> MicroBatch:
    """Tensors of a micro-batch. The trained tokens keep the order of rows, sequences and positions.

    `shared` says that the model follows a mask, `by_paths` that its attention takes paths.
    """
    trees = [PrefixTree() for _ in rows]
    pairs: dict[tuple[int, int, int], int] = {}
    index: list[int] = []
    sequences = [(row, sequence) for row, members in enumerate(rows) for sequence in members]
    paths: list[tuple[int, list[int]]] = []
    for row, sequence in sequences:
        path = trees[row].add(context(sequence))
        paths.append((row, path))
        for position in sequence.trained:
            pair = (row, path[position - 1], sequence.tokens[position])
            index.append(pairs.setdefault(pair, len(pairs)))
    length = max(len(tree.tokens) for tree in trees)
    branched = shared and any(tree.branches for tree in trees)
    along = by_paths and _cheaper(paths, len(trees), length)
    return MicroBatch(
        tokens_RL=_padded([tree.tokens for tree in trees], length),
        positions_RL=_padded([tree.depths for tree in trees], length),
        mask_R1LL=_mask(trees, length) if branched and not along else None,
        paths=Paths.of(paths, len(trees), length) if branched and along else None,
        sources_U=torch.tensor([row * length + node for row, node, _ in pairs], dtype=torch.long),
        targets_U=torch.tensor([token for _, _, token in pairs], dtype=torch.long),
        index_K=torch.tensor(index, dtype=torch.long),
        advantages_K=_of_tokens([s.advantages or [0.0] * len(s.trained) for _, s in sequences]),
        weights_K=_of_tokens([[s.weight] * len(s.trained) for _, s in sequences]),
        engine_log_probs_K=_of_tokens([s.engine_log_probs for _, s in sequences]),
        sequences_K=torch.repeat_interleave(torch.tensor([len(s.trained) for _, s in sequences])),
        columns_K=_columns([s for _, s in sequences]),
    )


def _cheaper(paths: list[tuple[int, list[int]]], rows: int, length: int) -> bool:
    """Whether attention along each path computes fewer pairs of positions than attention over whole rows."""
    return len(paths) * max(len(path) for _, path in paths) ** 2 < rows * length**2


def _columns(sequences: list[Sequence]) -> dict[str, Tensor]:
    names = sorted({name for sequence in sequences for name in sequence.columns})
    return {
        name: _of_tokens([s.columns.get(name) or [math.nan] * len(s.trained) for s in sequences])
        for name in names
    }


def _padded(rows: list[list[int]], length: int) -> Tensor:
    out_RL = np.zeros((len(rows), length), dtype=np.int64)
    for row, values in enumerate(rows):
        out_RL[row, : len(values)] = values
    return torch.from_numpy(out_RL)


def _mask(trees: list[PrefixTree], length: int) -> Tensor:
    mask_RLL = np.zeros((len(trees), length, length), dtype=np.bool_)
    for row, tree in enumerate(trees):
        tree.attention(mask_RLL[row])
    return torch.from_numpy(mask_RLL)[:, None]


def _of_tokens(parts: list[list[float]]) -> Tensor:
    return torch.tensor([value for values in parts for value in values], dtype=torch.float32)


def plan_rows(sequences: list[Sequence], budget: int, *, shared: bool) -> list[tuple[int, list[int]]]:
    """Splits one group's sequences into rows of at most `budget` nodes: (nodes, indices of sequences).

    A sequence longer than the budget gets a row of its own. Sequences without trained tokens are left out.
    """
    rows: list[tuple[PrefixTree, list[int]]] = []
    for index, sequence in enumerate(sequences):
        tokens = context(sequence)
        if not tokens:
            continue
        fits = shared and rows and len(rows[-1][0].tokens) + rows[-1][0].growth(tokens) <= budget
        if not fits:
            rows.append((PrefixTree(), []))
        rows[-1][0].add(tokens)
        rows[-1][1].append(index)
    return [(len(tree.tokens), members) for tree, members in rows]


def plan_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Puts rows into micro-batches of at most `budget` padded nodes, longest first to pad little."""
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def plan_even(lengths: list[int], budget: int, ranks: int) -> list[list[int]]:
    """As `plan_batches`, in whole rounds of `ranks` micro-batches where there are rows for them, and even ones.

    A round takes as long as its largest micro-batch: no more of them than rounds need, and the largest is smallest.
    """
    least = plan_batches(lengths, budget)
    wanted = min(-(-len(least) // ranks) * ranks, len(lengths))
    if ranks == 1 or not least:
        return least
    enough = bisect_left(range(budget), True, key=lambda size: len(plan_batches(lengths, size)) <= wanted)
    return plan_batches(lengths, enough)
