"""What routers of experts know of a micro-batch's nodes. Shapes as in `packing`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from headrace_modelkit.experts import OWN, ExpertShape
from torch import Tensor

from headrace_trainer.learning.samples import Sequence


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
        sequences: list[Sequence],
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

    def to(self, device: torch.device) -> Nodes:
        """The same on `device`."""
        forced = None if self.routes_MNK is None else self.routes_MNK.to(device, non_blocking=True)
        return replace(self, visits_RL=self.visits_RL.to(device, non_blocking=True), routes_MNK=forced)

    def padded(self, more: int) -> Nodes:
        """The same with so many nodes of padding behind each row."""
        visits_RL = F.pad(self.visits_RL, (0, more))
        if self.routes_MNK is None:
            return replace(self, visits_RL=visits_RL)
        routes = self.routes_MNK.view(len(self.routes_MNK), *self.visits_RL.shape, -1)
        return replace(
            self, visits_RL=visits_RL, routes_MNK=F.pad(routes, (0, 0, 0, more), value=OWN).flatten(1, 2)
        )


def read_routes(routes: bytes, experts: ExpertShape) -> np.ndarray:
    """(tokens, layers, chosen) experts, of bytes as `Sequence.routes` has them. Raises ValueError for another size."""
    kind = np.dtype(np.uint8 if experts.experts <= 256 else "<u2")
    found = np.frombuffer(routes, dtype=kind)
    return found.reshape(-1, experts.layers, experts.chosen)
