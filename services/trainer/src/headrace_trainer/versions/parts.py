"""A version that no rank has whole: each gathers whole tensors from all shards, casts, hashes and serves them.

A rank's tensors follow each other in the body, so that a version is its parts one after another, with the digests that
it would have had from one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.weights import CheckpointNames
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import part_name

from headrace_trainer.backends._base import Owners
from headrace_trainer.backends.policies import Backends
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.step import Version
from headrace_trainer.versions.publishing import Layout, Publisher


def owners_of(layout: Layout, ranks: int) -> dict[str, int]:
    """Which rank has which tensor, in the order in which all take part in gathering them: the first of each rank's
    tensors, the second of each, and so on, so that ranks cast and hash at the same time.

    Ranks have tensors that follow each other, of about as many bytes; a small model's last ranks may have none.
    """
    sizes = [math.prod(shape) * getattr(torch, kind).itemsize for _, kind, shape in layout]
    total, before = sum(sizes), 0
    owned: list[list[str]] = [[] for _ in range(ranks)]
    for (name, _, _), size in zip(layout, sizes, strict=True):
        owned[min(ranks - 1, (2 * before + size) * ranks // (2 * total))].append(name)
        before += size
    longest = max(map(len, owned))
    return {
        names[place]: rank
        for place in range(longest)
        for rank, names in enumerate(owned)
        if place < len(names)
    }


class RankPart:
    """What one rank has of a run's versions: one staged, the current one and the one before."""

    def __init__(self, store: WeightStore, run: str, rank: int, ranks: int) -> None:
        self._store, self._name, self._rank, self._ranks = store, part_name(run), rank, ranks
        self._publisher: Publisher | None = None
        self._owners: Owners = {}

    def stage(
        self, backends: Backends, names: Callable[[], CheckpointNames], number: int
    ) -> common_pb2.WeightManifest:
        """Gathers and casts this rank's tensors of version `number`, unseen; all ranks call it, and all come out.

        The manifest is empty where the number is published already, with other weights. Raises Refusal and
        ServiceError as `Publisher.stage`, after the others have what is theirs.
        """
        if not self._owners:
            layout = backends.weight_layout()
            self._owners = owners_of(layout, self._ranks)
            own = [each for each in layout if self._owners[each[0]] == self._rank]
            self._publisher = Publisher(self._store, self._name, own, names=names()) if own else None
        weights = backends.weights(published=True, owners=self._owners)
        found = common_pb2.WeightManifest()
        try:
            if self._publisher is not None and self._publisher.stage(number, weights):
                found = self._publisher.manifest(number)
        finally:
            for _ in weights:
                pass
        return found

    def publish(self, version: Version) -> common_pb2.WeightSource | None:
        """Makes the staged part visible, and says where it is; None for a rank that has none."""
        if self._publisher is None:
            return None
        self._publisher.publish(version)
        return self._store.source(self._name, version.number)

    def close(self) -> None:
        """Drops everything of the run."""
        if self._publisher is not None:
            self._publisher.close()


def staged_parts(answers: Sequence[tuple[str, str, bytes]]) -> list[common_pb2.WeightManifest]:
    """The parts' manifests of what ranks answered (reason, message, manifest). Raises Refusal, naming the rank."""
    found = []
    for rank, (reason, message, manifest) in enumerate(answers):
        if reason:
            raise Refusal(
                reason, f"rank {rank}: {message}", "exhausted" if reason == "NO_SPACE" else "precondition"
            )
        found.append(common_pb2.WeightManifest.FromString(manifest))
    return found
