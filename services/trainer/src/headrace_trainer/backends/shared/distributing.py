"""Takes tensors from where they are read to the ranks that own parts of them, one part at a time.

Where every rank can read, each reads its own parts and nothing else; where one cannot, the leader reads every part and
sends it. Knows no model and no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.model_files import ModelFiles, check_model, fingerprint, open_model
from headrace_modelkit.tensor_files import Box, TensorFiles, Tensors, volume
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace_trainer.group.group import TrainerGroup

Read = Callable[[str, Box], Tensor]
"""A box of a tensor by the tensor's name, on the CPU and contiguous."""


@dataclass(frozen=True)
class Place:
    """Which box of a named tensor a rank owns, in which type it travels, and who takes it."""

    name: str
    box: Box
    dtype: torch.dtype
    take: Callable[[Tensor], object]

    @property
    def key(self) -> tuple[str, Box]:
        """In what order places are filled."""
        return self.name, self.box


_Asked = tuple[str, Box, str]
"""Name, box and type of what a rank is to be sent."""


def distribute(ranks: TrainerGroup, places: Iterable[Place], read: Read | None) -> None:
    """Fills this rank's places; all ranks call it. `read` is None on a rank that cannot read; rank 0 always can."""
    own = sorted(places, key=lambda place: place.key)
    if not ranks.all_true(read is not None):
        asked = [(place.name, place.box, str(place.dtype)) for place in own if volume(place.box)]
        bodies = ranks.gather(msgspec.msgpack.encode(asked))
        if not ranks.leads:
            for place in own:
                _take(place, _receive(ranks, place))
            return
        assert read is not None
        _send(ranks, [msgspec.msgpack.decode(body, type=list[_Asked]) for body in bodies], read)
    assert read is not None
    for place in own:
        _take(place, read(place.name, place.box))


def _receive(ranks: TrainerGroup, place: Place) -> Tensor:
    found = torch.empty([end - first for first, end in place.box], dtype=place.dtype)
    if found.numel():
        ranks.receive(0, found)
    return found


def _send(ranks: TrainerGroup, asked: list[list[_Asked]], read: Read) -> None:
    """Tensor by tensor, so that one that has to be made of several is made once."""
    wanted = [(*each, rank) for rank, own in enumerate(asked) if rank for each in own]
    for name, box, dtype, rank in sorted(wanted):
        ranks.send(rank, read(name, box).to(getattr(torch, dtype.removeprefix("torch."))))


def _take(place: Place, value: Tensor) -> None:
    with torch.no_grad():
        place.take(value.to(place.dtype))


def open_source(ranks: TrainerGroup, section: ModelSection, model: PreTrainedModel) -> Tensors | None:
    """The weights of `model`, which `empty_model` made of `section`; None on ranks that have not the leader's files.

    All ranks call it. Raises ModelNotReadable on the leader.
    """
    return open_alike(ranks, section, lambda: open_model(section, model, cached=not ranks.leads))


def open_alike(ranks: TrainerGroup, section: ModelSection, opened: Callable[[], Tensors]) -> Tensors | None:
    """What `opened` opens on the leader, and on the others where they have the leader's files; else None there."""
    source = opened() if ranks.leads else None
    if ranks.world_size == 1:
        return source
    readable = not ranks.leads or isinstance(source, ModelFiles | TensorFiles)
    own = fingerprint(section) if readable else ""
    found = {body.decode() for body in ranks.gather(own.encode())}
    if ranks.leads or len(found) > 1 or not own:
        return source
    return opened()


def check_files(section: ModelSection, key: str = "model.path") -> None:
    """Opens a model's files, loads nothing. Raises ModelNotReadable, naming `key` and what is missing or damaged."""
    try:
        check_model(section)
    except ModelNotReadable as error:
        raise ModelNotReadable(str(error).replace("model.path", key, 1)) from error


def types_of(model: nn.Module) -> dict[str, torch.dtype]:
    """In which type each tensor of a model is read."""
    return {name: own.dtype for name, own in state_tensors(model)}


def weights_digest(source: Tensors, model: nn.Module) -> xxhash.xxh3_128:
    """Over names and bytes of all weights, in the model's order; one of them is in memory at a time."""
    digest = xxhash.xxh3_128()
    for name, _ in state_tensors(model):
        digest.update(name.encode())
        digest.update(memoryview(source.read(name).flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest
