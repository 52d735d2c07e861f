"""Prefix trees: the distinct prefixes of some sequences, who attends to whom, and their paths one by one.

Knows no model. Shapes: R rows, L nodes of the longest row, S sequences, P nodes of the longest path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


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

    @property
    def branches(self) -> bool:
        """Whether some node has two children, so that plain causal attention would be wrong."""
        return any(parent != node - 1 for node, parent in enumerate(self.parents))


@dataclass(frozen=True)
class Paths:
    """The sequences of a micro-batch one by one, for attention that is causal along each of them.

    `nodes_SP` numbers nodes row by row (row times L plus node), with node 0 behind a path's end. `places_RL` says for
    each node where in `nodes_SP`, flattened, it stands; padding is anywhere.
    """

    nodes_SP: Tensor
    places_RL: Tensor

    @classmethod
    def of(cls, paths: Iterable[tuple[int, list[int]]], rows: int, length: int) -> Paths:
        """From (row, nodes in it) of each sequence; rows are padded to `length` nodes."""
        found = list(paths)
        longest = max(len(path) for _, path in found)
        nodes_SP = np.zeros((len(found), longest), dtype=np.int64)
        places_RL = np.zeros((rows, length), dtype=np.int64)
        for index, (row, path) in enumerate(found):
            nodes_SP[index, : len(path)] = path
            nodes_SP[index, : len(path)] += row * length
            places_RL[row, path] = index * longest + np.arange(len(path))
        return cls(torch.from_numpy(nodes_SP), torch.from_numpy(places_RL))

    def to(self, device: torch.device) -> Paths:
        """The same on `device`."""
        return Paths(*(value.to(device, non_blocking=True) for value in vars(self).values()))
