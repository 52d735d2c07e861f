"""Images in prompts: read as the model's processor reads them, placed among tokens, and positions behind them.

A prompt has as many image tokens for an image as the vision tower makes of it. Rollout and trainer place features by
these numbers and never by token id: a policy may sample the id of an image token.

Shapes: R rows, L tokens, I distinct images, P patches, C numbers of a patch, M image tokens, D hidden size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from headrace_schema.sections.generating import ModelSection
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoImageProcessor

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, reading, reads_images, trusted
from headrace_modelkit.pictures import decode_image

KEPT_BYTES = 256 << 20
"""Of images that were read and are kept, as pixels."""
_Processors: Any = AutoImageProcessor  # its functions are not annotated


_DIGITS = 15
"""Hexadecimal ones of a digest that a number is made of: it fits into 64 bits with its sign."""


def place_number(digest: str) -> int:
    """The number below 0 that stands for each token of an image where contexts are told apart."""
    return -1 - int(digest[:_DIGITS], 16)


@dataclass(frozen=True, eq=False)
class Pixels:
    """One image as a vision tower takes it: `values_PC` in fp32, and its grid of patches (time, height, width)."""

    digest: str
    values_PC: Tensor
    grid: tuple[int, int, int]
    merge: int

    @property
    def merged(self) -> tuple[int, int, int]:
        """The grid of image tokens."""
        frames, height, width = self.grid
        return frames, height // self.merge, width // self.merge

    @property
    def tokens(self) -> int:
        """Image tokens that stand for it."""
        frames, height, width = self.merged
        return frames * height * width


class ImageReader:
    """Image files as a model's processor reads them. Any thread may ask."""

    def __init__(self, processor: Any, token: int, merge: int, family: str) -> None:
        self.token = token
        """Id of the token that stands for a part of an image."""
        self.family = family
        """The model's type."""
        self._processor, self._merge = processor, merge
        self._known: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, data: bytes) -> Pixels:
        """The pixels of an image file. Raises ValueError for one that cannot be read."""
        digest = str(xxhash.xxh3_128_hexdigest(data))
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
        found = self._process(digest, decode_image(data))
        with self._lock:
            if digest not in self._known:
                self._known[digest] = found
                self._bytes += found.values_PC.nbytes
            while self._bytes > KEPT_BYTES and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].values_PC.nbytes
        return found

    def blank(self) -> Pixels:
        """The smallest image: computed where a micro-batch has none, so that all ranks compute the same layers."""
        with self._lock:
            if "" not in self._known:
                side = self._merge * int(self._processor.patch_size)
                values = np.zeros((side, side, 3), np.uint8)
                self._known[""] = self._process("", _image_of(values))
            self._known.move_to_end("")
            return self._known[""]

    def expand(self, ids: Sequence[int], images: Sequence[Pixels]) -> list[int]:
        """Ids in which the one token that a template writes for an image stands as often as the image has tokens.

        Raises ValueError unless there are as many such tokens as images.
        """
        found = list(ids).count(self.token)
        if found != len(images):
            raise ValueError(
                f"the prompt has {found} image tokens for {len(images)} images; the model's chat template must write "
                "one for each, and no text may hold it"
            )
        expanded: list[int] = []
        coming = iter(images)
        for token in ids:
            expanded += [token] * (next(coming).tokens if token == self.token else 1)
        return expanded

    def starts(self, ids: Sequence[int], images: Sequence[Pixels]) -> list[int]:
        """Where the tokens of each image begin in what `expand` made. Raises ValueError where they do not add up."""
        places = np.flatnonzero(np.asarray(ids, np.int64) == self.token)
        ends = np.cumsum([0, *(image.tokens for image in images)]).tolist()
        if ends[-1] != len(places):
            raise ValueError(f"{len(places)} image tokens, and the {len(images)} images have {ends[-1]}")
        found = []
        for image, (first, end) in zip(images, pairwise(ends), strict=True):
            start = int(places[first])
            if int(places[end - 1]) != start + image.tokens - 1:
                raise ValueError("the tokens of an image do not follow each other")
            found.append(start)
        return found

    def span(self, ids: Sequence[int], start: int, data: bytes) -> Span:
        """An image file whose tokens begin at `start`. Raises ValueError where they are not its tokens."""
        image = self.read(data)
        if any(token != self.token for token in ids[start : start + image.tokens]) or (
            start + image.tokens > len(ids)
        ):
            raise ValueError(f"the {image.tokens} tokens from {start} on are not those of an image")
        return Span(start, image)

    def collapse(self, ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """`expand` undone: ids of a context with one token for each image, which are in order."""
        found = list(ids)
        for span in reversed(spans):
            del found[span.start + 1 : span.start + span.image.tokens]
        return found

    def save(self, directory: Path) -> None:
        """Writes what `load_images` reads beside a model."""
        self._processor.save_pretrained(directory)

    def _process(self, digest: str, image: Any) -> Pixels:
        found = self._processor(images=[image], return_tensors="pt")
        frames, height, width = found["image_grid_thw"][0].tolist()
        return Pixels(digest, found["pixel_values"].float(), (frames, height, width), self._merge)


@dataclass(frozen=True, eq=False)
class Span:
    """An image and the place of its first token in a sequence."""

    start: int
    image: Pixels


@dataclass(frozen=True)
class Pictures:
    """The images of a forward over (R, L) tokens, each computed once however often it stands there.

    Feature `features_M[i]`, counted over the image tokens of all I images, goes to token `places_M[i]` of R times L.
    """

    pixels_PC: Tensor
    grids_I3: Tensor
    places_M: Tensor
    features_M: Tensor
    positions_3RL: Tensor

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[NDArray[np.int64], Pixels]],
        positions_3RL: NDArray[np.int64],
        blank: Pixels,
    ) -> Pictures:
        """From (places among R times L, image) of each; without any, `blank` is computed and stands nowhere."""
        firsts: dict[str, int] = {}
        images: list[Pixels] = []
        places, features = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        total = 0
        for own, image in spans:
            if image.digest not in firsts:
                firsts[image.digest] = total
                images.append(image)
                total += image.tokens
            places.append(own)
            features.append(firsts[image.digest] + np.arange(image.tokens))
        images = images or [blank]
        return cls(
            torch.cat([image.values_PC for image in images]),
            torch.tensor([image.grid for image in images]),
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.concatenate(features)),
            torch.from_numpy(positions_3RL),
        )

    def to(self, device: torch.device) -> Pictures:
        """The same on `device`."""
        return Pictures(*(value.to(device, non_blocking=True) for value in vars(self).values()))


def rope_positions(length: int, spans: Sequence[Span]) -> NDArray[np.int64]:
    """(3, length) positions of a sequence in time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Text goes on in all three; an image takes a grid, and what follows begins behind its longer side.
    """
    found = np.empty((3, length), np.int64)
    at = position = 0
    for span in spans:
        found[:, at : span.start] = np.arange(span.start - at) + position
        position += span.start - at
        frames, height, width = span.image.merged
        at = span.start + span.image.tokens
        found[:, span.start : at] = np.indices((frames, height, width)).reshape(3, -1) + position
        position += max(height, width)
    found[:, at:] = np.arange(length - at) + position
    return found


def rope_shift(spans: Sequence[Span]) -> int:
    """What is added to the index of a token behind all images to get its position."""
    return sum(max(span.image.merged[1:]) - span.image.tokens for span in spans)


def language_inputs(
    body: Any, tokens_RL: Tensor, pictures: Pictures, *, trained: bool = False
) -> dict[str, Any]:
    """What `body.language_model` is called with: embeddings with the images' features in them, and positions.

    `trained`: gradients go into the vision tower.
    """
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        found = body.get_image_features(pictures.pixels_PC, pictures.grids_I3, return_dict=True)
    features_MD = torch.cat(list(found.pooler_output))[pictures.features_M]
    embedded_RLD = body.get_input_embeddings()(tokens_RL)
    placed = embedded_RLD.flatten(0, 1).index_copy(0, pictures.places_M, features_MD.to(embedded_RLD.dtype))
    inputs = {"inputs_embeds": placed.view_as(embedded_RLD), "position_ids": pictures.positions_3RL}
    if (layers := getattr(found, "deepstack_features", None)) is not None:
        order = pictures.places_M.argsort()
        mask = torch.zeros(tokens_RL.numel(), dtype=torch.bool, device=tokens_RL.device)
        mask[pictures.places_M] = True
        inputs["visual_pos_masks"] = mask.view_as(tokens_RL)
        inputs["deepstack_visual_embeds"] = [
            torch.cat(list(layer))[pictures.features_M][order] for layer in layers
        ]
    return inputs


def vision_tower(model: nn.Module) -> nn.Module | None:
    """The part of a vision-language model that turns pixels into features, its projection included; else None."""
    untyped: Any = model
    body = getattr(untyped, "base_model", untyped)
    tower: nn.Module | None = getattr(body, "visual", None)
    return tower


def freeze_vision(model: nn.Module, dtype: torch.dtype) -> None:
    """The vision tower learns nothing and is computed in `dtype`. A model without one stays as it is."""
    if (tower := vision_tower(model)) is not None:
        tower.requires_grad_(False)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(dtype)


def load_images(config: ModelSection) -> ImageReader | None:
    """What reads images for a model; None for one that takes none. Raises ModelNotReadable."""
    architecture = load_architecture(config)
    if not reads_images(architecture):
        return None
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ModelNotReadable(
            f"model.path: {config.path!r} reads images, which needs Pillow: pip install 'headrace-modelkit[vision]'"
        ) from error
    with reading(config):
        # Pillow's resizing everywhere: torchvision's differs from it in the last bits.
        processor = _Processors.from_pretrained(config.path, backend="pil", **trusted(config))
    untyped: Any = architecture
    merge = int(untyped.vision_config.spatial_merge_size)
    if int(processor.merge_size) != merge or int(processor.patch_size) != int(
        untyped.vision_config.patch_size
    ):
        raise ModelNotReadable(
            f"model.path: preprocessor_config.json of {config.path!r} has other patches than its config.json; put the "
            "processor that the model was trained with beside it"
        )
    return ImageReader(processor, int(untyped.image_token_id), merge, architecture.model_type)


def _image_of(values: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(values)
