"""Versions between a model and the weight store: cast into its memory, made visible, and read back as tensors.

Knows no steps: `session` says when.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping

import torch
from headrace.common.v1 import common_pb2
from headrace_modelkit.loading import DTYPES, load_model
from headrace_modelkit.weights import CheckpointNames, state_tensors, weight_layout
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import PendingWeights, StoredWeights, manifest_of
from torch import Tensor

from headrace_trainer.backends.shared.casting import DATA_TYPES, cast_into
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.learning.step import Version

TORCH_TYPES = {value: getattr(torch, name) for name, value in DATA_TYPES.items()}
Layout = list[tuple[str, str, tuple[int, ...]]]
OWN_NAMES = CheckpointNames({})
"""Tensors are published under the names that they have."""


class Publisher:
    """The versions of one run on this host: the current one, and beside it one that is staged (cast, unseen) or the one
    before. The one before goes as the next is staged: who has it takes the current one, whole or by its changes.

    `layout` and what is staged have the model's own names; a version is published under its checkpoint's, `names`.

    A helper's gradients are such versions too, under another name than the run's; `kept` of them stay.
    """

    def __init__(
        self,
        store: WeightStore,
        run: str,
        layout: Layout,
        *,
        kept: int = 2,
        names: CheckpointNames = OWN_NAMES,
    ) -> None:
        self._store = store
        self._run = run
        self._names = names
        self._layout = names.layout(layout)
        self.tensors = len(self._layout)
        """Of a version."""
        self._kept = kept
        self._types = {name: getattr(torch, data_type) for name, data_type, _ in self._layout}
        self._staged: tuple[int, PendingWeights, common_pb2.WeightManifest] | None = None
        self._published: list[int] = []
        self.stage_seconds = 0.0

    def stage(
        self, number: int, weights: Iterator[tuple[str, Tensor]], below: common_pb2.AdapterBase | None = None
    ) -> str:
        """Casts the weights into a new body; its manifest's digest. Raises ServiceError NO_SPACE.

        `below`: they are adapters of this base.

        A version has its digest from the commit on, and the cast is the publication's anyway. One that is published
        already is only compared.
        """
        started = time.monotonic()
        self.discard()
        if (held := self._store.find(self._run, number)) is not None:
            return self._same(held, weights)
        layout = [(name, DATA_TYPES[data_type], shape) for name, data_type, shape in self._layout]
        # The memory of what rollouts do not ask for any more is used again: two versions are there at most.
        if self._kept == 1:
            self._store.keep(self._run, {number})
        elif self._published:
            self._store.keep(self._run, {self._published[-1]})
        pending = self._store.begin(self._run, number, layout)
        try:
            digests: dict[str, str] = {}
            for parts in _named(self._names, weights):
                rooms = [(name, tensor, pending.buffer(name)) for name, tensor in parts]
                digests |= cast_into(rooms, self._types)
        except BaseException:
            pending.discard()
            raise
        manifest = pending.manifest(digests, below)
        self._staged = (number, pending, manifest)
        self.stage_seconds = time.monotonic() - started
        return str(manifest.digest)

    def manifest(self, number: int) -> common_pb2.WeightManifest:
        """Of a version that is staged or published."""
        if self._staged is not None and self._staged[0] == number:
            return self._staged[2]
        return self._store.get(self._run, number).manifest

    def _same(self, held: StoredWeights, weights: Iterator[tuple[str, Tensor]]) -> str:
        """The digest of a version that stays published, where these are its weights; empty where one differs."""
        digests = {entry.name: entry.digest for entry in held.manifest.entries}
        found = _digests(self._names, self._types, weights)
        return str(held.manifest.digest) if found.items() <= digests.items() else ""

    def publish(self, version: Version) -> StoredWeights:
        """Makes the staged version visible, drops all but it and the one before. A retry finds it."""
        found = self._store.find(self._run, version.number)
        if found is not None:
            return found
        if self._staged is None or self._staged[0] != version.number:
            raise Refusal("NOT_OPEN", f"version {version.number} is not staged: restore or commit it first")
        _, pending, manifest = self._staged
        message = common_pb2.PolicyVersion(
            number=version.number, parent=version.parent, ordinal=version.ordinal, digest=manifest.digest
        )
        stored = pending.publish(message, manifest)
        self._staged = None
        self._published = [*self._published, version.number][-self._kept :]
        self._store.keep(self._run, set(self._published))
        return stored

    def discard(self) -> None:
        """Throws away what is staged and not published."""
        if self._staged is not None:
            self._staged[1].discard()
            self._staged = None

    def close(self) -> None:
        """Drops everything of the run."""
        self.discard()
        self._store.keep(self._run, set())


class Unread:
    """The versions of a run that nobody takes: their digests are made, and nothing is kept of their bytes."""

    def __init__(self, layout: Layout, names: CheckpointNames) -> None:
        self._names, named = names, names.layout(layout)
        self._layout = [(name, DATA_TYPES[data_type], shape) for name, data_type, shape in named]
        self._types = {name: getattr(torch, data_type) for name, data_type, _ in named}
        self.tensors, self.stage_seconds = len(named), 0.0
        self._manifests: dict[int, common_pb2.WeightManifest] = {}
        """Of the last two that were staged."""

    def stage(
        self, number: int, weights: Iterator[tuple[str, Tensor]], below: common_pb2.AdapterBase | None = None
    ) -> str:
        """The digest that the weights would be published under."""
        started = time.monotonic()
        manifest = manifest_of(self._layout, _digests(self._names, self._types, weights), below)
        self._manifests = dict([*self._manifests.items(), (number, manifest)][-2:])
        self.stage_seconds = time.monotonic() - started
        return str(manifest.digest)

    def publish(self, version: Version) -> common_pb2.WeightManifest:
        """The manifest of one that is staged."""
        if (found := self._manifests.get(version.number)) is None:
            raise Refusal("NOT_OPEN", f"version {version.number} is not staged: restore or commit it first")
        return found

    def close(self) -> None:
        """Nothing is held."""


def _named(
    names: CheckpointNames, weights: Iterator[tuple[str, Tensor]]
) -> Iterator[list[tuple[str, Tensor]]]:
    """The parts that a checkpoint has of each of the model's tensors, which may hold until the next ones come."""
    for name, tensor in weights:
        yield [each for each in names.split(name, tensor) if each[1].numel()]


def _digests(
    names: CheckpointNames, types: Mapping[str, torch.dtype], weights: Iterator[tuple[str, Tensor]]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for parts in _named(names, weights):
        found |= cast_into([(name, tensor, None) for name, tensor in parts], types)
    return found


def published_tensors(manifest: common_pb2.WeightManifest, body: memoryview) -> dict[str, Tensor]:
    """Views of a verified body, by name; they are only read, and keep the body in memory.

    Raises Refusal INVALID for an element type that is none of the trainer's.
    """
    found: dict[str, Tensor] = {}
    for entry in manifest.entries:
        if entry.data_type not in TORCH_TYPES:
            raise invalid(f"{entry.name}: its element type {entry.data_type} is not known")
        shape, dtype = tuple(entry.shape), TORCH_TYPES[entry.data_type]
        if not entry.size_bytes:
            found[entry.name] = torch.empty(shape, dtype=dtype)
            continue
        part = body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a buffer that is read-only: it is only read
            found[entry.name] = torch.frombuffer(part, dtype=dtype).view(shape)
    return found


def own_weights(reader: StateReader, section: ModelSection) -> StateReader:
    """A version's weights by the model's own names. Raises Refusal WEIGHTS_MISMATCH for one of another model."""
    model = load_model(section, weights=False)
    published = weight_layout(model, DTYPES[section.dtype])
    own = {name: shape for name, _, shape in published}
    given = reader.weight_shapes()
    if own != given:
        name = min(set(own.items()) ^ set(given.items()))[0]
        raise Refusal(
            "WEIGHTS_MISMATCH",
            f"model.path: {name} has shape {given.get(name, 'none')} in the version and {own.get(name, 'none')} in "
            f"{section.path!r}; the helper was opened with another model",
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(model)}
    if shapes == given:
        return reader
    tensors = {name: reader.weight(name) for name in given}
    return StateReader.of_version(CheckpointNames.of(model).join(tensors, shapes))
