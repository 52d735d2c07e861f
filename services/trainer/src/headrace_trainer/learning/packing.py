"""Micro-batches: what samples have in common is computed once, and only trained positions reach the head.

The sequences of a row form a prefix tree: a node is a token in the context of its ancestors, its position is
its depth, and it attends to its ancestors and itself. A prompt shared by a group, and equal beginnings of
answers, are one path. This is exact: the same numbers as one row a sequence, summed in another order.

Attention has two exact forms: over a row's nodes with the tree's mask, or causal along each path by itself, which is
cheaper where the sequences share little.

Shapes: R rows, L nodes of the longest row, U distinct (node, next token) pairs, K trained tokens, S sequences, P nodes
of the longest path.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from headrace_modelkit.experts import OWN, ExpertShape, Routing
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


def context(sequence: Sequence) -> list[int]:
    """The tokens that must be read to predict the trained ones: the last trained one has no successor."""
    return sequence.tokens[: sequence.trained[-1]] if sequence.trained else []


@dataclass(frozen=True)
class Nodes:
    """What routers of experts know of a micro-batch's nodes.

    `visits_RL` is how many sequences read a node, 0 for padding: what they have in common counts for each of them.
    `routes_MNK` are the experts that the engine sent the node's token to, in each of M layers (N = R * L nodes); `OWN`
    where it told none. None where no sequence brings any.
    """

    visits_RL: Tensor
    routes_MNK: Tensor | None
    idle: bool = False
    """No node counts: a rank takes part in the exchange of tokens with them."""

    @classmethod
    def of(
        cls,
        paths: list[tuple[int, list[int]]],
        sequences: list[Sequence],
        rows: int,
        length: int,
        experts: ExpertShape,
    ) -> Nodes:
        """From (row, nodes in it) of each sequence. Where two sequences were sent apart at a node, the first counts."""
        visits_RL = np.zeros((rows, length), dtype=np.int32)
        shape = (rows * length, experts.layers, experts.chosen)
        routes = np.full(shape, OWN, dtype=np.int32) if any(s.routes for s in sequences) else None
        for (row, path), sequence in zip(paths, sequences, strict=True):
            visits_RL[row, path] += 1
            if routes is not None and sequence.routes:
                told = read_routes(sequence.routes, experts)[: len(path)]
                nodes = row * length + np.asarray(path[: len(told)])
                fresh = routes[nodes, 0, 0] == OWN
                routes[nodes[fresh]] = told[fresh]
        forced = None if routes is None else torch.from_numpy(routes.transpose(1, 0, 2).copy()).long()
        return cls(torch.from_numpy(visits_RL), forced)

    def to(self, device: torch.device) -> Nodes:
        """The same on `device`."""
        forced = None if self.routes_MNK is None else self.routes_MNK.to(device, non_blocking=True)
        return replace(self, visits_RL=self.visits_RL.to(device, non_blocking=True), routes_MNK=forced)

    def padded(self, more: int) -> Nodes:
        """The same with so many nodes of padding behind each row."""
        visits_RL = F.pad(self.visits_RL, (0, more))
        if self.routes_MNK is None:
            return replace(self, visits_RL=visits_RL)
        routes = self.routes_MNK.unflatten(1, self.visits_RL.shape)
        return replace(
            self, visits_RL=visits_RL, routes_MNK=F.pad(routes, (0, 0, 0, more), value=OWN).flatten(1, 2)
        )


def read_routes(routes: bytes, experts: ExpertShape) -> np.ndarray:
    """(tokens, layers, chosen) experts, of bytes as `Sequence.routes` has them. Raises ValueError for another size."""
    kind = np.dtype(np.uint8 if experts.experts <= 256 else "<u2")
    found = np.frombuffer(routes, dtype=kind)
    return found.reshape(-1, experts.layers, experts.chosen)


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
    nodes: Nodes | None = None
    """What routers are told, for a model with experts."""

    def tell(self, routing: Routing) -> None:
        """Sets what the routers of a forward over this micro-batch are told of its nodes."""
        assert self.nodes is not None
        routing.visits_N, routing.forced_MNK = self.nodes.visits_RL.flatten(), self.nodes.routes_MNK

    @property
    def idle(self) -> bool:
        """Whether it is one of `uncounted`."""
        return self.nodes is not None and self.nodes.idle

    def unforced(self) -> MicroBatch:
        """The same, whose nodes go where the routers send them."""
        return self if self.nodes is None else replace(self, nodes=replace(self.nodes, routes_MNK=None))

    def uncounted(self) -> MicroBatch:
        """The same, of which no node counts: a rank without work takes part in the exchange of tokens with it."""
        if self.nodes is None:
            return self
        return replace(
            self, nodes=replace(self.nodes, visits_RL=torch.zeros_like(self.nodes.visits_RL), idle=True)
        )

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
        nodes = None if self.nodes is None else self.nodes.to(device)
        return replace(self, columns_K=columns_K, paths=paths, nodes=nodes, **moved)  # type: ignore[arg-type]


def pack(
    rows: Rows, *, shared: bool, by_paths: bool = False, experts: ExpertShape | None = None
) -> MicroBatch:
    """Tensors of a micro-batch. The trained tokens keep the order of rows, sequences and positions.

    `shared` says that the model follows a mask, `by_paths` that its attention takes paths. `experts` are the model's,
    if it has any.
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
        nodes=Nodes.of(paths, [s for _, s in sequences], len(trees), length, experts) if experts else None,
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


def plan_rounds(
    groups: Many[list[Sequence]], budget: int, *, replicas: int, shared: bool
) -> Iterator[tuple[list[Rows], set[int]]]:
    """(work of each replica, indices of the groups in it) of each round; no row has sequences of two groups."""
    rows = [
        (owner, length, [sequences[index] for index in members])
        for owner, sequences in enumerate(groups)
        for length, members in plan_rows(sequences, budget, shared=shared)
    ]
    batches = plan_even([length for _, length, _ in rows], budget, replicas)
    for first in range(0, len(batches), replicas):
        chosen = batches[first : first + replicas]
        work: list[Rows] = [[rows[row][2] for row in micro] for micro in chosen]
        work += [[] for _ in range(replicas - len(work))]
        yield work, {rows[row][0] for micro in chosen for row in micro}
