"""Micro-batches: what samples have in common is computed once, and only trained positions reach the head.

The sequences of a row form a prefix tree: a node is a token in the context of its ancestors, its position is
its depth, and it attends to its ancestors and itself. A prompt shared by a group, and equal beginnings of
answers, are one path. This is exact: the same numbers as one row a sequence, summed in another order.

Attention has three exact forms: over a row's nodes with the tree's mask; causal along each path by itself, which is
cheaper where the sequences share little; or, with all trees one after another in one row, each sequence's own nodes
over the path that they end, which computes no pair twice and needs no mask. `Attends` says which a model takes.

Shapes: R rows, L nodes of the longest row, U distinct (node, next token) pairs, K trained tokens, S sequences, P nodes
of the longest path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch
from headrace_modelkit.devices import moved
from headrace_modelkit.families.mixtures import ExpertShape
from headrace_modelkit.families.routing import Routing
from headrace_modelkit.logprobs import Temperature
from headrace_modelkit.pictures import ImageReader
from headrace_modelkit.vision import Pictures
from headrace_servicekit.rpc.trajectories import unpack_top
from torch import Tensor

from headrace_trainer.learning.pictures import lay_out
from headrace_trainer.learning.planning import PrefixTree
from headrace_trainer.learning.samples import Rows, Sample
from headrace_trainer.learning.segments import Nodes, Segment, Segments

SHORT_NODES = 512
"""Rows up to here have no segments on a CPU: their mask is small, and one call of attention is faster than several."""
SEVERAL_CALLS = 1.1
"""What a pair of positions costs in calls for segments, in pairs of one call for all paths (at 1,041 nodes)."""


class Attends(Enum):
    """What a model's attention can be told about a tree."""

    MASK = "a mask of a row's nodes"
    CHEAPEST = "a mask, paths or segments"
    SEGMENTS = "segments alone: rows are never padded"
    PATHS = (
        "paths, whatever they cost: along each of them a key has the place that it has in an engine's cache"
    )


@dataclass(frozen=True)
class Paths:
    """The sequences of a micro-batch one by one, for attention that is causal along each of them.

    `nodes_SP` numbers nodes row by row (row times L plus node), with node 0 behind a path's end. `places_RL` says for
    each node where in `nodes_SP`, flattened, it stands; padding is anywhere.
    """

    nodes_SP: Tensor
    places_RL: Tensor

    @classmethod
    def of(cls, paths: Iterable[tuple[int, np.ndarray]], rows: int, length: int) -> Paths:
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


@dataclass(frozen=True)
class DraftPaths:
    """The sequences of a micro-batch one by one, for a head that drafts. Shapes: T nodes of the longest sequence.

    `nodes_ST` numbers nodes row by row, `next_ST` has the token behind each, and `rows_ST` says which of the
    micro-batch's pairs that token is, -1 where it is not trained. Behind a sequence's end: node 0, token 0, -1.
    """

    nodes_ST: Tensor
    next_ST: Tensor
    rows_ST: Tensor

    @classmethod
    def of(
        cls,
        paths: list[tuple[int, np.ndarray]],
        starts: Many[int],
        sequences: list[Sample],
        index_K: np.ndarray,
    ) -> DraftPaths:
        """Of (row, nodes in it) of each sequence, where rows start, and the pair of each trained token."""
        shape = len(paths), max(len(path) for _, path in paths)
        nodes_ST, next_ST, rows_ST = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
        first = 0
        for at, ((row, path), sequence) in enumerate(zip(paths, sequences, strict=True)):
            nodes_ST[at, : len(path)] = path + starts[row]
            next_ST[at, : len(path)] = sequence.tokens[1 : 1 + len(path)]
            trained = np.asarray(sequence.trained, np.int64)
            rows_ST[at, trained - 1] = index_K[first : first + len(trained)]
            first += len(trained)
        return cls(*map(torch.from_numpy, (nodes_ST, next_ST, rows_ST)))


@dataclass(frozen=True)
class MicroBatch:
    """One forward. Attention follows the one of `mask_R1LL`, `paths` and `segments` that is there. Without any of them
    it is causal along the rows; padding behind a row's end is no sequence of its own.

    `columns_K` are those of the infer pass, NaN for a sequence that has none of a name.
    """

    tokens_RL: Tensor
    positions_RL: Tensor
    mask_R1LL: Tensor | None
    paths: Paths | None
    segments: Segments | None
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
    mine_U: Tensor | None = None
    """Where ranks divide a row: numbers of the pairs that are here, of all `pairs` of the micro-batch."""
    pairs: int = 0
    pictures: Pictures | None = None
    """Images and positions, for a model that takes images."""
    drafts: DraftPaths | None = None
    """For a head that drafts and learns beside the model."""
    temperatures_U: Tensor | None = None
    """Those at which tokens were drawn, NaN where at the run's; None where all were."""
    teacher_ids_UM: Tensor | None = None
    """The words that a teacher finds likeliest where tokens are, and its log-probs of them, -inf of what is none."""
    teacher_log_probs_UM: Tensor | None = None

    @property
    def words_UM(self) -> Tensor:
        """Whose log-probs are wanted of each pair: its target, and what a teacher finds likeliest."""
        targets_U1 = self.targets_U[:, None]
        return targets_U1 if self.teacher_ids_UM is None else torch.cat([targets_U1, self.teacher_ids_UM], 1)

    def at(self, temperature: float) -> Temperature:
        """The temperature of each pair, where the run's is this one."""
        if self.temperatures_U is None:
            return temperature
        return self.temperatures_U.nan_to_num(nan=temperature)

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
        return self if device.type == "cpu" else moved(self, device)


def pack(
    rows: Rows,
    *,
    shared: bool,
    attends: Attends = Attends.MASK,
    multiple: int = 1,
    experts: ExpertShape | None = None,
    images: ImageReader | None = None,
    drafts: bool = False,
) -> MicroBatch:
    """Tensors of a micro-batch. The trained tokens keep the order of rows, sequences and positions.

    `shared` says that sequences of a row may have a tree in common, `attends` what the model can be told about it.
    Segments are padded to a multiple of `multiple` nodes. `experts` are the model's, if it has any, and `images` reads
    those of its prompts, if it takes any. `drafts`: a head learns from it to draft.
    """
    trees = [PrefixTree() for _ in rows]
    sequences = [(row, sequence) for row, members in enumerate(rows) for sequence in members]
    own = [sequence for _, sequence in sequences]
    paths: list[tuple[int, np.ndarray]] = []
    nodes, targets = list[np.ndarray](), list[np.ndarray]()
    for row, sequence in sequences:
        tokens, trained = np.asarray(sequence.tokens, np.int64), np.asarray(sequence.trained, np.int64)
        path = trees[row].add(tokens[: trained[-1]] if len(trained) else tokens[:0])
        assert path is not None
        paths.append((row, path))
        nodes.append(path[trained - 1])
        targets.append(np.asarray(sequence.targets, np.int64) if sequence.targets else tokens[trained])
    counts = [len(sequence.trained) for sequence in own]
    rows_K = np.repeat([row for row, _ in sequences], counts)
    temperatures_K, kinds_K = _temperatures(own)
    (rows_U, nodes_U, targets_U, _), first_U, index_K = _distinct(
        np.stack([rows_K, np.concatenate(nodes), np.concatenate(targets), kinds_K])
    )
    laid_out = _laid_out(trees, paths, attends, shared=shared, multiple=multiple)
    shape = (laid_out.tokens_RL.shape[0], laid_out.tokens_RL.shape[1])
    pictures = None if images is None else lay_out(own, paths, laid_out.starts, laid_out.tokens_RL, images)
    return MicroBatch(
        tokens_RL=laid_out.tokens_RL,
        positions_RL=laid_out.positions_RL,
        mask_R1LL=laid_out.mask_R1LL,
        paths=laid_out.paths,
        segments=laid_out.segments,
        sources_U=torch.from_numpy(np.asarray(laid_out.starts, np.int64)[rows_U] + nodes_U),
        targets_U=torch.from_numpy(targets_U),
        index_K=torch.from_numpy(index_K),
        advantages_K=_of_tokens([s.advantages or np.zeros(len(s.trained)) for s in own]),
        weights_K=torch.from_numpy(np.repeat(np.array([s.weight for s in own], np.float32), counts)),
        engine_log_probs_K=_of_tokens([s.engine_log_probs for s in own]),
        sequences_K=torch.from_numpy(np.repeat(np.arange(len(own)), counts)),
        columns_K=_columns(own),
        nodes=Nodes.of(paths, own, laid_out.starts, shape, experts) if experts else None,
        pictures=pictures,
        drafts=DraftPaths.of(paths, laid_out.starts, own, index_K) if drafts else None,
        temperatures_U=None if temperatures_K is None else torch.from_numpy(temperatures_K[first_U]),
        **_teachers(own, first_U),
    )


def _teachers(sequences: list[Sample], first_U: np.ndarray) -> dict[str, Any]:
    if not any(sequence.teacher_top for sequence in sequences):
        return {}
    found = [unpack_top(each.teacher, len(each.trained), each.teacher_top) for each in sequences]
    ids_UM, log_probs_UM = (np.concatenate(kind)[first_U] for kind in zip(*found, strict=True))
    return {
        "teacher_ids_UM": torch.from_numpy(ids_UM.astype(np.int64)),
        "teacher_log_probs_UM": torch.from_numpy(log_probs_UM),
    }


def _temperatures(sequences: list[Sample]) -> tuple[np.ndarray | None, np.ndarray]:
    """Of each trained token, NaN for the run's (None: all are), and a small number for each that is another's."""
    if not any(sequence.temperatures for sequence in sequences):
        return None, np.zeros(sum(len(sequence.trained) for sequence in sequences), np.int64)
    found_K = np.concatenate([s.temperatures or np.full(len(s.trained), math.nan) for s in sequences])
    _, kinds_K = np.unique(found_K, return_inverse=True)
    return found_K.astype(np.float32), kinds_K


def _distinct(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different columns of (4, K) in the order in which they come, where, and which of them each column is."""
    _, nodes, targets, kinds = columns + 1
    key = (columns[0] * nodes.max(initial=1) + columns[1]) * targets.max(initial=1) + columns[2]
    key = key * kinds.max(initial=1) + columns[3]
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return columns[:, first[order]], first[order], number[which]


@dataclass(frozen=True)
class _LaidOut:
    """The trees as rows; `starts` are the numbers of their first nodes, row by row."""

    tokens_RL: Tensor
    positions_RL: Tensor
    starts: list[int]
    mask_R1LL: Tensor | None = None
    paths: Paths | None = None
    segments: Segments | None = None


def _laid_out(
    trees: list[PrefixTree],
    paths: list[tuple[int, np.ndarray]],
    attends: Attends,
    *,
    shared: bool,
    multiple: int,
) -> _LaidOut:
    length = max(len(tree.tokens) for tree in trees)
    branched = shared and any(tree.branches for tree in trees)
    parts = [_parts(tree) for tree in trees] if branched or attends is Attends.SEGMENTS else []
    if attends is Attends.SEGMENTS or (
        attends is Attends.CHEAPEST and branched and length > SHORT_NODES and _segments_win(parts, paths)
    ):
        return _in_one_row(trees, parts, multiple)
    cheapest = attends is Attends.CHEAPEST
    along = attends is Attends.PATHS or (cheapest and _cheaper(paths, len(trees), length))
    return _LaidOut(
        _padded([tree.tokens for tree in trees], length, repeated=True),
        # A model takes a position that does not follow the one before it for the beginning of another sequence.
        _padded([tree.depths for tree in trees], length, rising=not branched),
        [row * length for row in range(len(trees))],
        _mask(parts, length) if branched and not along else None,
        Paths.of(paths, len(trees), length) if branched and along else None,
    )


def _parts(tree: PrefixTree) -> list[Segment]:
    """The nodes that each sequence has added to its tree, behind those that were there."""
    return [Segment(first, end, first, before) for (first, end), before in tree.pieces]


def _in_one_row(trees: list[PrefixTree], parts: list[list[Segment]], multiple: int) -> _LaidOut:
    tokens, depths = (
        np.concatenate(kind) for kind in ([tree.tokens for tree in trees], [tree.depths for tree in trees])
    )
    starts = [0, *np.cumsum([len(tree.tokens) for tree in trees]).tolist()]
    listed = [part.moved(start, start) for row, start in zip(parts, starts, strict=False) for part in row]
    if more := -len(tokens) % multiple:  # a sequence of its own that nothing looks at
        listed.append(Segment(len(tokens), len(tokens) + more, len(tokens)))
    return _LaidOut(
        _padded([tokens], len(tokens) + more, repeated=True),
        _padded([depths], len(tokens) + more),
        starts,
        segments=Segments.of(listed),
    )


def _cheaper(paths: list[tuple[int, np.ndarray]], rows: int, length: int) -> bool:
    """Whether attention along each path computes fewer pairs of positions than attention over whole rows."""
    return _pairs_along(paths) < rows * length**2


def _segments_win(parts: list[list[Segment]], paths: list[tuple[int, np.ndarray]]) -> bool:
    """Whether attention of segments takes less time on a CPU than along each path; causal kernels skip half of it."""
    pairs = sum(Segments.of(row).pairs for row in parts if row)
    return pairs * SEVERAL_CALLS < _pairs_along(paths) / 2


def _pairs_along(paths: list[tuple[int, np.ndarray]]) -> int:
    return len(paths) * max(len(path) for _, path in paths) ** 2


def _columns(sequences: list[Sample]) -> dict[str, Tensor]:
    names = sorted({name for sequence in sequences for name in sequence.columns})
    return {
        name: _of_tokens([s.columns.get(name) or np.full(len(s.trained), math.nan) for s in sequences])
        for name in names
    }


def _padded(rows: list[np.ndarray], length: int, *, rising: bool = False, repeated: bool = False) -> Tensor:
    out_RL = np.zeros((len(rows), length), dtype=np.int64)
    if rising:
        out_RL[:] = np.arange(length)
    for row, values in enumerate(rows):
        if repeated:  # the embedding of 0 may be 0, where some families have no gradient
            out_RL[row] = values[-1]
        out_RL[row, : len(values)] = values
    return torch.from_numpy(out_RL)


def _mask(parts: list[list[Segment]], length: int) -> Tensor:
    """Each node sees its ancestors and itself, padding sees itself."""
    mask_RLL = np.zeros((len(parts), length, length), dtype=np.bool_)
    places = np.arange(length)
    mask_RLL[:, places, places] = True
    causal_LL = np.tri(length, dtype=np.bool_)
    for seen_LL, own in zip(mask_RLL, parts, strict=True):
        for part in own:
            for first, end in part.before:
                seen_LL[part.start : part.stop, first:end] = True
            count = part.stop - part.start
            seen_LL[part.start : part.stop, part.own : part.own + count] = causal_LL[:count, :count]
    return torch.from_numpy(mask_RLL)[:, None]


def _of_tokens(parts: Many[list[float] | np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(values, np.float32) for values in parts]))
