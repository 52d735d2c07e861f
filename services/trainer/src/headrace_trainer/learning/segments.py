"""Which keys each query of a packed micro-batch sees, without a mask: segments of queries that continue a path of keys.

Knows no tree and no kernel; what routers of experts know of a micro-batch's nodes is here too.

Shapes: N queries, M keys, S segments, P pieces of the keys, T keys that the segments see, one segment after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from headrace_modelkit.devices import moved
from headrace_modelkit.families.mixtures import ExpertShape
from headrace_modelkit.families.routing import OWN
from torch import Tensor

from headrace_trainer.learning.planning import Run
from headrace_trainer.learning.samples import Sample


@dataclass(frozen=True)
class Segment:
    """Queries `start` to `stop`. Each sees all keys of the runs `before`, and of those from `own` on as many as there
    are queries up to itself: the queries are the end of the path `before` + own.
    """

    start: int
    stop: int
    own: int
    before: tuple[Run, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The whole path's."""
        return (*self.before, (self.own, self.own + self.stop - self.start))

    def moved(self, queries: int, keys: int) -> Segment:
        """The same, so many queries and keys further on."""
        before = tuple((first + keys, end + keys) for first, end in self.before)
        return Segment(self.start + queries, self.stop + queries, self.own + keys, before)


@dataclass(frozen=True)
class Segments:
    """All queries of a micro-batch, segment by segment, as kernels for sequences of many lengths take them.

    `query_ends` and `key_ends` are (S + 1,) int32, from 0. `keys_T` has what each segment sees; None: the keys as they
    lie. Nothing here has N times M elements but `dense`.
    """

    parts: tuple[Segment, ...]
    query_ends: Tensor
    key_ends: Tensor
    keys_T: Tensor | None
    longest_query: int
    longest_path: int
    keys: int

    @classmethod
    def of(cls, given: Iterable[Segment], keys: int = 0) -> Segments:
        """From segments that follow each other without a gap; `keys` is M where the last keys are seen by none."""
        parts = tuple(given)
        lengths = [part.stop - part.start for part in parts]
        paths = [
            length + sum(end - first for first, end in part.before)
            for part, length in zip(parts, lengths, strict=True)
        ]
        plain = all(not part.before and part.own == part.start for part in parts)
        keys_T = None if plain else np.concatenate([np.arange(*run) for part in parts for run in part.runs])
        return cls(
            parts,
            torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            torch.tensor([0, *np.cumsum(paths)], dtype=torch.int32),
            None if keys_T is None else torch.from_numpy(keys_T),
            max(lengths),
            max(paths),
            max([keys, *(part.runs[-1][1] for part in parts)]),
        )

    def to(self, device: torch.device) -> Segments:
        """The same on `device`."""
        return moved(self, device)

    @property
    def queries(self) -> int:
        """N."""
        return self.parts[-1].stop

    @property
    def seen(self) -> int:
        """T."""
        return sum(end - first for part in self.parts for first, end in part.runs)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        found = 0
        for part in self.parts:
            length = part.stop - part.start
            found += length * sum(end - first for first, end in part.before) + length * (length + 1) // 2
        return found

    @cached_property
    def visible(self) -> Visible:
        """The same as a rule about one query and one key, on the device of the others."""
        return Visible.of(self.parts, self.keys, self.query_ends.device)

    @cached_property
    def made(self) -> dict[Any, Any]:
        """What a kernel has made of them, for the layers that follow."""
        return {}


@dataclass(frozen=True)
class Visible:
    """Tells of queries and keys by number whether one sees the other; made of tables that are short in one dimension.

    `segment_N` is a query's segment, `piece_M` a key's piece: keys between two ends of runs are one piece. `before_SP`
    says whether a segment sees the whole of a piece; `start_S` and `own_S` are those of `Segment`. A key of a piece
    stands `places_SP` further along a segment's path than its number says; `length_S` keys stand before the own ones.
    """

    segment_N: Tensor
    piece_M: Tensor
    before_SP: Tensor
    start_S: Tensor
    own_S: Tensor
    places_SP: Tensor
    length_S: Tensor

    @classmethod
    def of(cls, parts: tuple[Segment, ...], keys: int, device: torch.device) -> Visible:
        """On `device`."""
        ends = np.unique([0, keys, *(edge for part in parts for run in part.runs for edge in run)])
        before_SP = np.zeros((len(parts), len(ends) - 1), dtype=np.bool_)
        places_SP = np.zeros(before_SP.shape, dtype=np.int64)
        length_S = np.zeros(len(parts), dtype=np.int64)
        for index, part in enumerate(parts):
            for first, end in part.before:
                pieces = slice(np.searchsorted(ends, first), np.searchsorted(ends, end))
                before_SP[index, pieces], places_SP[index, pieces] = True, length_S[index] - first
                length_S[index] += end - first
        lengths = [part.stop - part.start for part in parts]
        tables = (
            np.repeat(np.arange(len(parts)), lengths),
            np.repeat(np.arange(len(ends) - 1), np.diff(ends)),
            before_SP,
            np.array([part.start for part in parts]),
            np.array([part.own for part in parts]),
            places_SP,
            length_S,
        )
        return cls(*(torch.from_numpy(table).to(device) for table in tables))

    def __call__(self, query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
        """Whether queries see keys, elementwise; both broadcast. With a window, of the last ones of a path alone."""
        segment = self.segment_N[query]
        own, piece, since = self.own_S[segment], self.piece_M[key], query - self.start_S[segment]
        causal = (key >= own) & (key - own <= since)
        before = self.before_SP[segment, piece]
        if window is None:
            return before | causal
        behind = self.length_S[segment] + since - key - self.places_SP[segment, piece]
        return (before & (behind < window)) | (causal & (since - (key - own) < window))

    def dense(self, window: int | None = None) -> Tensor:
        """(N, M), for short ones."""
        device = self.segment_N.device
        queries, keys = (torch.arange(len(each), device=device) for each in (self.segment_N, self.piece_M))
        return self(queries[:, None], keys[None, :], window)


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
        paths: list[tuple[int, np.ndarray]],
        sequences: list[Sample],
        starts: list[int],
        shape: tuple[int, int],
        experts: ExpertShape,
    ) -> Nodes:
        """From (tree, nodes in it) of each sequence; `starts` are the numbers of the trees' first nodes among R * L.

        Where two sequences were sent apart at a node, the first counts.
        """
        visits_N = np.zeros(shape[0] * shape[1], dtype=np.int32)
        all_routes = (len(visits_N), experts.layers, experts.chosen)
        routes = np.full(all_routes, OWN, dtype=np.int32) if any(s.routes for s in sequences) else None
        for (tree, path), sequence in zip(paths, sequences, strict=True):
            nodes = starts[tree] + np.asarray(path, dtype=np.int64)
            visits_N[nodes] += 1
            if routes is not None and sequence.routes:
                told = read_routes(sequence.routes, experts)[: len(path)]
                seen = nodes[: len(told)]
                fresh = routes[seen, 0, 0] == OWN
                routes[seen[fresh]] = told[fresh]
        forced = None if routes is None else torch.from_numpy(routes.transpose(1, 0, 2).copy()).long()
        return cls(torch.from_numpy(visits_N.reshape(shape)), forced)


def read_routes(routes: bytes, experts: ExpertShape) -> np.ndarray:
    """(tokens, layers, chosen) experts, of bytes as `Sequence.routes` has them. Raises ValueError for another size."""
    kind = np.dtype(np.uint8 if experts.experts <= 256 else "<u2")
    found = np.frombuffer(routes, dtype=kind)
    return found.reshape(-1, experts.layers, experts.chosen)
