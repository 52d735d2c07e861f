"""The versions that a run publishes: whole weights, or adapters of frozen weights, which are published once: of several
policies, where all adapt one base.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.common.v1 import common_pb2
from headrace_modelkit.adapters import names_alone
from headrace_modelkit.weights import own_name
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import BASE_NUMBER, StoredWeights, base_name, joined
from torch import Tensor

from headrace_trainer.errors import invalid
from headrace_trainer.learning.step import Version
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.messages import Gathered
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.versions.parts import staged_parts
from headrace_trainer.versions.publishing import Publisher, Unread


@dataclass(frozen=True)
class Published:
    """A version that others can take from `source`; `cast_seconds` is what its cast took at the commit."""

    version: common_pb2.PolicyVersion
    manifest: common_pb2.WeightManifest
    source: common_pb2.WeightSource
    cast_seconds: float


class RunVersions:
    """Staged as a step commits, and published once the ledger has it. Raises Refusal INVALID, naming the key, where
    adapters cannot be published alone and the spec wants it.
    """

    def __init__(self, store: WeightStore, run: str, rank: Rank) -> None:
        names, layout = rank.kind.checkpoint_names(), rank.backends.weight_layout()
        self._scales = rank.config.adapter_scales()
        adapters = (
            rank.backends.adapter_layout() if self._scales and rank.config.weights.lora != "merged" else []
        )
        shapes = {name: shape for name, _, shape in layout}
        alone = names_alone(names, shapes, {name: shape for name, _, shape in adapters}) if adapters else None
        if alone is None and rank.config.weights.lora == "adapter":
            raise invalid(
                "weights.lora: not all that learns is adapters of linear layers of one base (experts, parts of robot "
                "policies and policies with other models are published whole); set weights.lora: auto",
                key="weights.lora",
            )
        self._store, self._run = store, run
        self._read = rank.config.installed
        """Whether somebody takes them."""
        self._by_ranks = rank.config.weights.publish == "ranks" and alone is None and self._read
        self._parts: dict[int, tuple[list[common_pb2.WeightManifest], float]] = {}
        """Versions of which each rank has a part, with the seconds that their cast took."""
        self._base: Publisher | Unread | None = None
        self._below: common_pb2.AdapterBase | None = None
        self._own: Publisher | Unread
        if not self._read:
            base = [each for each in layout if not own_name(each[0])[0]]
            self._base = None if alone is None else Unread(base, names)
            self._own = Unread(layout, names) if alone is None else Unread(adapters, alone)
        elif alone is None:
            self._own = Publisher(store, run, layout, names=names)
        else:
            base = [each for each in layout if not own_name(each[0])[0]]  # every policy's, once
            self._base = Publisher(store, base_name(run), base, kept=1, names=names)
            self._own = Publisher(store, run, adapters, names=alone)

    def stage(self, rounds: Rounds, number: int) -> str:
        """Casts the held weights as version `number`, unseen; their digest."""
        if self._by_ranks and rounds.rank.ranks.world_size > 1:
            return self._stage_parts(rounds, number)
        self._parts.pop(number, None)
        if self._base is None:
            return _staged(rounds, self._own, number, "merged")
        if self._below is None:
            shared = rounds.rank.backends.base
            if shared is not None:
                digest = self._adopted(shared)
            else:
                digest = _staged(rounds, self._base, BASE_NUMBER, "base")
                self._base.publish(Version(BASE_NUMBER, 0, 0, digest))
            self._below = common_pb2.AdapterBase(digest=digest, scales=self._scales)
        return _staged(rounds, self._own, number, "adapters", self._below)

    def _adopted(self, base: StoredWeights) -> str:
        """Holds frozen weights that lie in shared memory already; their digest."""
        name = base_name(self._run)
        assert base.path is not None
        self._store.keep(name, set())
        self._store.adopt(name, base.version, base.manifest, base.path, base.segment, base.body)
        return str(base.version.digest)

    def _stage_parts(self, rounds: Rounds, number: int) -> str:
        started = time.monotonic()
        parts = staged_parts(rounds.lead(messages.StagePartsRound(number)))
        if sum(len(part.entries) for part in parts) < self._own.tensors:
            return ""  # One is published already, of other weights.
        self._parts[number] = parts, time.monotonic() - started
        self._parts = dict(sorted(self._parts.items())[-2:])
        return str(joined(parts).digest)

    def publish(self, rounds: Rounds, version: Version) -> Published:
        """Makes a staged version visible."""
        if version.number not in self._parts:
            if isinstance(self._own, Unread):
                manifest, source = self._own.publish(version), common_pb2.WeightSource()
                return Published(_message(version, manifest), manifest, source, self._own.stage_seconds)
            stored = self._own.publish(version)
            source = self._store.source(self._run, version.number)
            return Published(stored.version, stored.manifest, source, self._own.stage_seconds)
        parts, seconds = self._parts[version.number]
        manifest = joined(parts)
        source = common_pb2.WeightSource(address=self._store.address, incarnation=self._store.incarnation)
        reason = "the version lies in parts at the trainer's ranks (weights.publish: ranks)"
        source.withheld.add(transport=common_pb2.WEIGHT_TRANSPORT_CUDA_IPC, reason=reason)
        held = [part for part in parts if part.entries]
        shown = messages.PublishPartsRound(version.number, version.parent, version.ordinal)
        sources = [common_pb2.WeightSource.FromString(own) for own in rounds.lead(shown) if own]
        for part, own in zip(held, sources, strict=True):
            source.parts.add(source=own, tensors=len(part.entries))
        return Published(_message(version, manifest), manifest, source, seconds)

    def close(self) -> None:
        """Drops everything of the run."""
        self._own.close()
        if self._base is not None:
            self._base.close()


def _message(version: Version, manifest: common_pb2.WeightManifest) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(
        number=version.number, parent=version.parent, ordinal=version.ordinal, digest=manifest.digest
    )


def _staged(
    rounds: Rounds,
    publisher: Publisher | Unread,
    number: int,
    what: Gathered,
    below: common_pb2.AdapterBase | None = None,
) -> str:
    digests: list[str] = []

    def collect(weights: Iterator[tuple[str, Tensor]]) -> None:
        digests.append(publisher.stage(number, weights, below))

    rounds.gather(collect, what, published=True)
    return digests[0]
