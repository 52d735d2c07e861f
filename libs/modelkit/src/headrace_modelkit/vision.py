"""Images in prompts: read as the model's processor reads them, placed among tokens, and positions behind them.

A prompt has for an image what the family's processor writes in place of its placeholder: tokens that take a feature of
the vision tower each, and others around them. Rollout and trainer place features by these places and never by token id:
a policy may sample the id of an image token.

Shapes: R rows, L tokens, N tokens of an image, M image tokens, D hidden size.
"""

from __future__ import annotations

import inspect
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from headrace_schema.sections.generating import ModelSection
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.utils.hub import cached_file

from headrace_modelkit.attending import looks_ahead, window_of
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, location, reading, reads_images, trusted
from headrace_modelkit.pictures import decode_image

KEPT_BYTES = 256 << 20
"""Of images that were read and are kept, as pixels."""
_ImageProcessors: Any = AutoImageProcessor  # its functions are not annotated
_Tokenizers: Any = AutoTokenizer
_Processors: Any = PROCESSOR_MAPPING
_Bodies: Any = MODEL_MAPPING
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Of a processor, beside a model."""
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
"""What a processor gives besides what its model's towers take."""
_DIGITS = 15
"""Hexadecimal ones of a digest that a number is made of: it fits into 64 bits with its sign."""


def place_number(digest: str) -> int:
    """The number below 0 that stands for each token of an image where contexts are told apart."""
    return -1 - int(digest[:_DIGITS], 16)


@dataclass(frozen=True, eq=False)
class Pixels:
    """One image as a model takes it: `inputs` of its tower by name, and what stands for it in a prompt."""

    digest: str
    inputs: Mapping[str, Tensor]
    text: str
    """In place of its placeholder in a prompt's text."""
    ids: tuple[int, ...]
    """Of `text`, from the first token to the last that are none of the vocabulary's own."""
    slots: NDArray[np.int64]
    """Which of `ids` take the features, in their order."""
    positions_3N: NDArray[np.int64] | None
    """In time, height and width, from 0 on; None where a token's position is the number of those before it."""
    extent: int
    """Positions from its first token to the one that follows it."""

    @property
    def tokens(self) -> int:
        """Tokens that stand for it."""
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(value.nbytes for value in self.inputs.values())


class ImageReader:
    """Image files as a model's processor reads them. Any thread may ask."""

    def __init__(self, processor: Any, architecture: PreTrainedConfig) -> None:
        untyped: Any = architecture
        self.token = int(untyped.image_token_id)
        """Id of the tokens that take a feature of an image each."""
        self.family = architecture.model_type
        """The model's type."""
        self.looks_ahead = looks_ahead(architecture)
        """Whether the tokens of an image see those of it behind them."""
        self._processor = processor
        self._special = set(processor.tokenizer.get_added_vocab().values())
        body: Any = _Bodies[type(architecture)]
        self._rope = body if hasattr(body, "get_rope_index") else None
        self._architecture = architecture
        self._known: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def placeholder(self) -> str:
        """What chat templates write for an image."""
        return str(self._processor.image_token)

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
                self._bytes += found.nbytes
            while self._bytes > KEPT_BYTES and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].nbytes
        return found

    def blank(self) -> Pixels:
        """The smallest image: computed where a micro-batch has none, so that all ranks compute the same layers."""
        with self._lock:
            if "" not in self._known:
                own = self._processor.image_processor
                side = int(getattr(own, "patch_size", 0) or 16) * int(getattr(own, "merge_size", 1))
                self._known[""] = self._process("", _image_of(np.zeros((side, side, 3), np.uint8)))
            self._known.move_to_end("")
            return self._known[""]

    def expand(self, text: str, images: Sequence[Pixels]) -> str:
        """A rendered prompt with what stands for each image in place of the placeholder that its template wrote.

        Raises ValueError unless there are as many placeholders as images.
        """
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(images):
            raise ValueError(
                f"the prompt has {len(parts) - 1} image tokens for {len(images)} images; the model's chat template "
                "must write one for each, and no text may hold it"
            )
        return parts[0] + "".join(image.text + part for image, part in zip(images, parts[1:], strict=True))

    def starts(self, ids: Sequence[int], images: Sequence[Pixels]) -> list[int]:
        """Where the tokens of each image begin in ids of what `expand` made. Raises ValueError where they do not."""
        found, at = list[int](), 0
        for image in images:
            starts = (
                place
                for place in range(at, len(ids) - image.tokens + 1)
                if ids[place] == image.ids[0] and tuple(ids[place : place + image.tokens]) == image.ids
            )
            if (start := next(starts, None)) is None:
                raise ValueError(
                    f"the {image.tokens} tokens of image {len(found) + 1} of {len(images)} are not there"
                )
            found.append(start)
            at = start + image.tokens
        if (count := list(ids).count(self.token)) != (own := sum(len(image.slots) for image in images)):
            raise ValueError(f"{count} image tokens, and the {len(images)} images have {own}")
        return found

    def span(self, ids: Sequence[int], start: int, data: bytes) -> Span:
        """An image file whose tokens begin at `start`. Raises ValueError where they are not its tokens."""
        image = self.read(data)
        if tuple(ids[start : start + image.tokens]) != image.ids:
            raise ValueError(f"the {image.tokens} tokens from {start} on are not those of an image")
        return Span(start, image)

    def collapse(self, ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """`expand` undone: ids of a context with one placeholder for each image, which are in order."""
        found = list(ids)
        token = int(self._processor.tokenizer.convert_tokens_to_ids(self.placeholder))
        for span in reversed(spans):
            found[span.start : span.start + span.image.tokens] = [token]
        return found

    def _process(self, digest: str, image: Any) -> Pixels:
        found = self._processor(
            images=[image],
            text=[self.placeholder],
            return_tensors="pt",
            add_special_tokens=False,
            return_mm_token_type_ids=True,
            return_text_replacement_offsets=True,
        )
        ids_N = found["input_ids"][0].numpy()
        kinds_N = found.get("mm_token_type_ids", found.get("token_type_ids"))[0].numpy()
        own = np.flatnonzero(np.isin(ids_N, list(self._special)))
        ids_N, kinds_N = ids_N[own[0] : own[-1] + 1], kinds_N[own[0] : own[-1] + 1]
        inputs = {
            name: value.float() if value.is_floating_point() else value
            for name, value in found.items()
            if name not in _OF_TEXT
        }
        positions_3N, extent = self._positions(ids_N, kinds_N, inputs)
        return Pixels(
            digest,
            inputs,
            found["text_replacement_offsets"][0][0]["replacement"],
            tuple(ids_N.tolist()),
            np.flatnonzero(ids_N == self.token),
            positions_3N,
            extent,
        )

    def _positions(
        self, ids_N: NDArray[np.int64], kinds_N: NDArray[np.int64], inputs: Mapping[str, Tensor]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """By the model's own class, which needs no weights for that."""
        if self._rope is None:
            return None, len(ids_N)
        body = self._rope.__new__(self._rope)
        nn.Module.__init__(body)
        body.config = self._architecture
        grids = {name: value for name, value in inputs.items() if name.endswith("_grid_thw")}
        positions, shift = body.get_rope_index(
            torch.from_numpy(ids_N)[None], mm_token_type_ids=torch.from_numpy(kinds_N)[None], **grids
        )
        return positions[:, 0].numpy(), int(shift) + len(ids_N)


@dataclass(frozen=True)
class Span:
    """An image and the place of its first token in a sequence."""

    start: int
    image: Pixels


Placed = tuple[NDArray[np.int64], Pixels]
"""Where the tokens of an image stand among R times L, and the image."""


@dataclass(frozen=True)
class Pictures:
    """The images of a forward over (R, L) tokens, each computed once however often it stands there.

    Feature `features_M[i]`, counted over those of all images, goes to token `places_M[i]` of R times L. `blocks_RL` is
    below 0 but for the tokens with a feature, where these look ahead: they have a number in common with those they see.
    """

    inputs: dict[str, Tensor]
    places_M: Tensor
    features_M: Tensor
    positions_3RL: Tensor | None
    blocks_RL: Tensor | None

    @classmethod
    def of(cls, spans: Iterable[Placed], positions_3RL: NDArray[np.int64], reader: ImageReader) -> Pictures:
        """From the images' places; without any, a blank one is computed and stands nowhere."""
        firsts: dict[str, int] = {}
        images: list[Pixels] = []
        blocks_N = np.full(positions_3RL[0].size, -1, np.int64)
        places, features = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        total = 0
        blocks = 0
        for own, image in spans:
            if image.digest not in firsts:
                firsts[image.digest] = total
                images.append(image)
                total += len(image.slots)
            places.append(own[image.slots])
            features.append(firsts[image.digest] + np.arange(len(image.slots)))
            runs_M = np.cumsum(np.diff(image.slots, prepend=image.slots[:1] - 2) > 1)
            blocks_N[places[-1]] = blocks + runs_M
            blocks += len(image.slots)
        images = images or [reader.blank()]
        return cls(
            {name: torch.cat([image.inputs[name] for image in images]) for name in images[0].inputs},
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.concatenate(features)),
            None if images[0].positions_3N is None else torch.from_numpy(positions_3RL),
            torch.from_numpy(blocks_N).view(positions_3RL.shape[1:]) if reader.looks_ahead else None,
        )

    def to(self, device: torch.device) -> Pictures:
        """The same on `device`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, inputs={name: value.to(device) for name, value in self.inputs.items()}, **moved)


def rope_positions(length: int, spans: Sequence[Span]) -> NDArray[np.int64]:
    """(3, length) positions of a sequence in time, height and width (Qwen2-VL, arXiv 2409.12191, section 2.1).

    Text goes on in all three; an image has its own, and what follows begins behind it.
    """
    found = np.empty((3, length), np.int64)
    at = position = 0
    for span in spans:
        found[:, at : span.start] = np.arange(span.start - at) + position
        position += span.start - at
        at = span.start + span.image.tokens
        own_3N = span.image.positions_3N
        found[:, span.start : at] = (np.arange(span.image.tokens) if own_3N is None else own_3N) + position
        position += span.image.extent
    found[:, at:] = np.arange(length - at) + position
    return found


def rope_shift(spans: Sequence[Span]) -> int:
    """What is added to the index of a token behind all images to get its position."""
    return sum(span.image.extent - span.image.tokens for span in spans)


def language_inputs(
    body: Any, tokens_RL: Tensor, pictures: Pictures, *, trained: bool = False
) -> dict[str, Any]:
    """What `body.language_model` is called with: embeddings with the images' features in them, positions, masks.

    `trained`: gradients go into the vision tower.
    """
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        found = body.get_image_features(**pictures.inputs, return_dict=True)
    features_MD = _joined(found.pooler_output)[pictures.features_M]
    text, places_M = body.config.get_text_config(), pictures.places_M
    inputs: dict[str, Any] = {}
    if getattr(text, "hidden_size_per_layer_input", 0):  # Gemma 4 E: an image's tokens have what padding has
        tokens_RL = tokens_RL.flatten().index_fill(0, places_M, text.pad_token_id).view_as(tokens_RL)
        inputs["per_layer_inputs"] = body.language_model.get_per_layer_inputs(tokens_RL, None)
    embedded_RLD = body.get_input_embeddings()(tokens_RL)
    placed = embedded_RLD.flatten(0, 1).index_copy(0, places_M, features_MD.to(embedded_RLD.dtype))
    inputs["inputs_embeds"] = placed.view_as(embedded_RLD)
    if pictures.positions_3RL is not None:
        inputs["position_ids"] = pictures.positions_3RL
    if pictures.blocks_RL is not None:
        inputs["attention_mask"] = _masks(text, pictures.blocks_RL, embedded_RLD.dtype)
    if (layers := getattr(found, "deepstack_features", None)) is not None:
        order = places_M.argsort()
        mask = torch.zeros(tokens_RL.numel(), dtype=torch.bool, device=tokens_RL.device)
        mask[places_M] = True
        inputs["visual_pos_masks"] = mask.view_as(tokens_RL)
        inputs["deepstack_visual_embeds"] = [
            torch.cat(list(layer))[pictures.features_M][order] for layer in layers
        ]
    return inputs


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images one behind the other, as families give them: (I, N, D), or (N, D) of each."""
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def _masks(text: PreTrainedConfig, blocks_RL: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """(R, 1, L, L) of each kind of layer: a token sees those before it and those of its image, both in its window.

    In Gemma 4 those of its image in layers with windows alone.
    """
    place_L = torch.arange(blocks_RL.shape[1], device=blocks_RL.device)
    back_LL = place_L[:, None] - place_L
    same_RLL = (blocks_RL[:, :, None] == blocks_RL[:, None]) & (blocks_RL[:, None] >= 0)
    untyped: Any = text
    found = {}
    for layer, kind in enumerate(untyped.layer_types):
        if kind not in found:
            window = window_of(text, layer)
            seen_RLL = (back_LL >= 0).expand_as(same_RLL)
            if window or untyped.model_type == "gemma3_text":
                seen_RLL = seen_RLL | same_RLL
            if window:
                seen_RLL = seen_RLL & (back_LL < window)
            hidden_RLL = torch.zeros(seen_RLL.shape, dtype=dtype, device=seen_RLL.device)
            found[kind] = hidden_RLL.masked_fill_(~seen_RLL, float("-inf"))[:, None]
    return found


def vision_tower(model: nn.Module) -> nn.ModuleDict | None:
    """The parts of a vision-language model that turn pixels into features, projections included; else None.

    By their names in the model's body.
    """
    untyped: Any = model
    body = getattr(untyped, "base_model", untyped)
    if not hasattr(body, "language_model") or not hasattr(body, "get_image_features"):
        return None
    return nn.ModuleDict({name: part for name, part in body.named_children() if name != "language_model"})


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
        processor = _processor(config, architecture)
    tower: Any = architecture.vision_config
    own = processor.image_processor
    if hasattr(own, "merge_size") and hasattr(tower, "spatial_merge_size"):
        patches = int(own.merge_size), int(own.patch_size)
        if patches != (int(tower.spatial_merge_size), int(tower.patch_size)):
            raise ModelNotReadable(
                f"model.path: preprocessor_config.json of {config.path!r} has other patches than its config.json; put "
                "the processor that the model was trained with beside it"
            )
    return ImageReader(processor, architecture)


def _processor(config: ModelSection, architecture: PreTrainedConfig) -> Any:
    """The family's processor without its parts for videos and sounds, some of which need torchvision."""
    family = _Processors[type(architecture)]
    whole = type(family.__name__, (family,), {"check_argument_for_proper_class": lambda *_: None})
    parts = dict.fromkeys(family.get_attributes()) | {
        # Pillow's resizing everywhere: torchvision's differs from it in the last bits.
        "image_processor": _ImageProcessors.from_pretrained(config.path, backend="pil", **trusted(config)),
        "tokenizer": _Tokenizers.from_pretrained(config.path, **trusted(config)),
    }
    told, _ = family.get_processor_dict(config.path, **location(config))
    known = inspect.signature(family.__init__).parameters
    return whole(**{name: value for name, value in told.items() if name in known} | parts)


def copy_processor(config: ModelSection, directory: Path) -> None:
    """Writes what `load_images` reads beside a model."""
    for name in _FILES:
        found = cached_file(
            config.path, name, _raise_exceptions_for_missing_entries=False, **location(config)
        )
        if found:
            shutil.copyfile(found, directory / name)


def _image_of(values: NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.fromarray(values)
