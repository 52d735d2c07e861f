"""Micro-batches: what samples have in common is computed once, and only trained positions reach the head.

The sequences of a row form a prefix tree: a node is a token in the context of its ancestors, its position is
its depth, and it attends to its ancestors and itself. A prompt shared by a group, and equal beginnings of
answers, are one path. This is exact: the same numbers as one row a sequence, summed in another order.

Shapes: R rows, L nodes of the longest row, U distinct (node, next token) pairs, K trained tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace_trainer.learning.samples import Rows, Sequence


@dataclass
class PrefixTree:
    """The distinct prefixes of a row's sequences, parents before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: list[int]) -> list[int]:
        """The node of each token, making those that are not there yet."""
        path: list[int] = []
        node = -1
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                child = len(self.tokens)
                self._children[node, token] = child
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(len(path))
            path.append(child)
            node = child
        return path

    def growth(self, tokens: list[int]) -> int:
        """How many nodes `add` would make."""
        node = -1
        for depth, token in enumerate(tokens):
            child = self._children.get((node, token))
            if child is None:
                return len(tokens) - depth
            node = child
        return 0

    def attention(self, out_LL: np.ndarray) -> None:
        """Fills a zeroed mask: each node sees its ancestors and itself, padding sees itself."""
        np.fill_diagonal(out_LL, True)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                out_LL[node, : parent + 1] = out_LL[parent, : parent + 1]


def context(sequence: Sequence) -> list[int]:
    """The tokens that must be read to predict the trained ones: the last trained one has no successor."""
    return sequence.tokens[: sequence.trained[-1]] if sequence.trained else []


@dataclass(frozen=True)
class MicroBatch:
    """One forward. `mask_R1LL` is None when plain causal attention is right (no row branches).

    `columns_K` are those of the infer pass, NaN for a sequence that has none of a name.
    """

    tokens_RL: Tensor
    positions_RL: Tensor
    mask_R1LL: Tensor | None
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
            name: None if value is None else value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if name != "columns_K"
        }
        return MicroBatch(columns_K=columns_K, **moved)  # type: ignore[arg-type]


def pack(rows: Rows, *, shared: bool) -> MicroBatch:
    """Tensors of a micro-batch. The trained tokens keep the order of rows, sequences and positions."""
    trees = [PrefixTree() for _ in rows]
    pairs: dict[tuple[int, int, int], int] = {}
    index: list[int] = []
    sequences = [(row, sequence) for row, members in enumerate(rows) for sequence in members]
    for row, sequence in sequences:
        path = trees[row].add(context(sequence))
        for position in sequence.trained:
            pair = (row, path[position - 1], sequence.tokens[position])
            index.append(pairs.setdefault(pair, len(pairs)))
    length = max(len(tree.tokens) for tree in trees)
    return MicroBatch(
        tokens_RL=_padded([tree.tokens for tree in trees], length),
        positions_RL=_padded([tree.depths for tree in trees], length),
        mask_R1LL=_mask(trees, length) if shared else None,
        sources_U=torch.tensor([row * length + node for row, node, _ in pairs], dtype=torch.long),
        targets_U=torch.tensor([token for _, _, token in pairs], dtype=torch.long),
        index_K=torch.tensor(index, dtype=torch.long),
        advantages_K=_of_tokens([s.advantages or [0.0] * len(s.trained) for _, s in sequences]),
        weights_K=_of_tokens([[s.weight] * len(s.trained) for _, s in sequences]),
        engine_log_probs_K=_of_tokens([s.engine_log_probs for _, s in sequences]),
        sequences_K=torch.repeat_interleave(torch.tensor([len(s.trained) for _, s in sequences])),
        columns_K=_columns([s for _, s in sequences]),
    )


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
