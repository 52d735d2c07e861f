"""Images, videos and sounds of prompts as a model's processor reads them, and what stands for each in a prompt.

A prompt has for a file what the family's processor writes in place of its placeholder: tokens that take a feature of a
tower each, and others around them. Pillow and PyAV are extras, imported when a file comes.

Shapes: N tokens of an image.
"""

from __future__ import annotations

import copy
import inspect
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from headrace_schema.clips import BadClip, Video, samples_of
from headrace_schema.images import IMAGE_FORMATS, MOST_IMAGE_PIXELS, NOUNS, READS, Kind, kind_of, why_not_rgb
from headrace_schema.sections.generating import VideoSection
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PreTrainedConfig

from headrace_modelkit.attending import looks_ahead
from headrace_modelkit.frames import Frames

KEPT_BYTES = 256 << 20
"""Of files that were read and are kept, as what towers take."""
_Bodies: Any = MODEL_MAPPING
_OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
"""What a processor gives besides what its model's towers take."""
_AS_IMAGES = {
    "pixel_values_videos": "pixel_values",
    "video_grid_thw": "image_grid_thw",
    "video_position_ids": "image_position_ids",
}
"""Names of what a tower takes of a video, which it reads as images."""
_OF_POSITIONS = {"second_per_grid_ts", "video_second_per_grid", "num_audio_tokens", "num_frames_per_video"}
"""What a processor gives besides, which no tower takes."""
_FRAMES_ARE_IMAGES = ("glm4v", "glm4v_moe", "glm46v", "internvl")
"""Families in whose prompts a frame of a video has the tokens of an image."""
_BLANK_FRAMES = 10
_TYPES = {"image": 1, "video": 2}
"""Of the tokens that take features, as classes that compute positions are told."""
_DIGITS = 15
"""Hexadecimal ones of a digest that a number is made of: it fits into 64 bits with its sign."""


def place_number(digest: str) -> int:
    """The number below 0 that stands for each token of an image where contexts are told apart."""
    return -1 - int(digest[:_DIGITS], 16)


@dataclass(frozen=True, eq=False)
class Pixels:
    """One file as a model takes it: `inputs` of its tower by name, and what stands for it in a prompt."""

    kind: Kind
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

    @property
    def tower(self) -> Kind:
        """Which of the model's towers computes its features: that of images does those of videos too."""
        return "audio" if self.kind == "audio" else "image"

    @property
    def tower_inputs(self) -> dict[str, Tensor]:
        """What `get_{tower}_features` takes: a video as so many images."""
        found = {
            _AS_IMAGES.get(name, name): value
            for name, value in self.inputs.items()
            if name not in _OF_POSITIONS
        }
        if (grids := self.inputs.get("video_grid_thw")) is not None:
            found["image_grid_thw"] = nn.functional.pad(grids[:, 1:], (1, 0), value=1).repeat_interleave(
                grids[:, 0], 0
            )
        return found


@dataclass(frozen=True)
class Span:
    """An image and the place of its first token in a sequence."""

    start: int
    image: Pixels


class ImageReader:
    """Files of prompts as a model's processor reads them. Any thread may ask."""

    def __init__(
        self, processor: Any, architecture: PreTrainedConfig, video: VideoSection, bounds: Mapping[str, int]
    ) -> None:
        self.family = architecture.model_type
        """The model's type."""
        self.kinds = tuple(
            kind for kind in READS[self.family] if kind != "audio" or architecture.audio_config is not None
        )
        """What the model reads; the larger ones of Gemma 4 hear nothing."""
        named = {kind: kind for kind in self.kinds} | (
            {"video": "image"} if self.family in _FRAMES_ARE_IMAGES else {}
        )
        self.tokens = {kind: int(getattr(architecture, f"{named[kind]}_token_id")) for kind in self.kinds}
        """Ids of the tokens that take a feature each."""
        self.looks_ahead = looks_ahead(architecture)
        """Whether the tokens of an image see those of it behind them."""
        self.towers: tuple[Kind, ...] = ("image", "audio") if "audio" in self.kinds else ("image",)
        self.pads_sounds = self.family == "qwen3_omni_moe_thinker"
        """Whether its tower pads the chunks of all sounds to the longest: with a whole one among them all are alike."""
        self._processor = processor
        self._special = set(processor.tokenizer.get_added_vocab().values())
        body: Any = _Bodies[type(architecture)]
        self._rope = body if hasattr(body, "get_rope_index") else None
        self._architecture = architecture
        self._video, self._bounds = video, bounds
        self._known: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def token(self) -> int:
        """Id of the tokens that take a feature of an image each."""
        return self.tokens["image"]

    @property
    def placeholders(self) -> dict[Kind, str]:
        """What chat templates write for a file, by its kind."""
        return {kind: str(getattr(self._processor, f"{kind}_token")) for kind in self.kinds}

    def read(self, data: bytes) -> Pixels:
        """What a model takes of a file. Raises ValueError for one that cannot be read, or is not by this model."""
        digest, kind = str(xxhash.xxh3_128_hexdigest(data)), kind_of(data)
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
        if kind not in self.kinds:
            raise ValueError(
                f"{NOUNS[kind]} is not read by {self.family}, which reads: {', '.join(self.kinds)}"
            )
        found = self._process(digest, kind, data)
        with self._lock:
            if digest not in self._known:
                self._known[digest] = found
                self._bytes += found.nbytes
            while self._bytes > KEPT_BYTES and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].nbytes
        return found

    def blank(self, tower: Kind) -> Pixels:
        """The least that a tower computes: where a micro-batch has nothing for it, as all ranks compute the same."""
        with self._lock:
            if tower not in self._known:
                self._known[tower] = self._process_as(tower, tower, self._least(tower))
            self._known.move_to_end(tower)
            return self._known[tower]

    def _least(self, tower: Kind) -> dict[str, Any]:
        if tower == "audio":
            untyped: Any = self._architecture
            frames = 2 * untyped.audio_config.n_window if self.pads_sounds else _BLANK_FRAMES
            hop = int(self._processor.feature_extractor.hop_length)
            return {"audio": [np.zeros(frames * hop, np.float32)]}
        from PIL import Image

        own = self._processor.image_processor
        side = int(getattr(own, "patch_size", 0) or 16) * int(getattr(own, "merge_size", 1))
        return {"images": [Image.fromarray(np.zeros((side, side, 3), np.uint8))]}

    def expand(self, text: str, images: Sequence[Pixels]) -> str:
        """A rendered prompt with what stands for each file in place of the placeholder that its template wrote.

        Raises ValueError unless there is one placeholder for each file, of its kind and in their order.
        """
        kinds = {placeholder: kind for kind, placeholder in self.placeholders.items()}
        parts = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
        written, given = [kinds[each] for each in parts[1::2]], [image.kind for image in images]
        if written != given:
            if len(written) == len(given):
                what = f"{' and '.join(written)} where {' and '.join(given)} come"
            else:
                what = f"{len(written)} image tokens for {len(given)} images"
            raise ValueError(
                f"the prompt has {what}; the model's chat template must write one for each, and no text may hold it"
            )
        return parts[0] + "".join(image.text + part for image, part in zip(images, parts[2::2], strict=True))

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
        count = sum(map(list(ids).count, {*self.tokens.values()}))
        if count != (own := sum(len(image.slots) for image in images)):
            raise ValueError(f"{count} image tokens, and the {len(images)} images have {own}")
        return found

    def span(self, ids: Sequence[int], start: int, data: bytes) -> Span:
        """An image file whose tokens begin at `start`. Raises ValueError where they are not its tokens."""
        image = self.read(data)
        if tuple(ids[start : start + image.tokens]) != image.ids:
            raise ValueError(f"the {image.tokens} tokens from {start} on are not those of an image")
        return Span(start, image)

    def _process(self, digest: str, kind: Kind, data: bytes) -> Pixels:
        try:
            if kind == "video":
                return self._process_video(digest, Video.of(data))
            if kind == "audio":
                return self._process_as(kind, digest, {"audio": [self._samples(data)]})
        except BadClip as error:
            raise ValueError(f"{NOUNS[kind]} {error}") from error
        except ImportError as error:
            raise ValueError(
                f"{NOUNS[kind]} needs PyAV ({error}): pip install 'headrace-modelkit[media]'"
            ) from error
        return self._process_as(kind, digest, {"images": [decode_image(data)]})

    def _samples(self, data: bytes) -> NDArray[np.float32]:
        """Raises BadClip for a sound that is longer than what the family's processor hears of one."""
        own = self._processor
        samples: NDArray[np.float32] = samples_of(data, rate := int(own.feature_extractor.sampling_rate))
        most = getattr(own, "audio_seq_length", 0) * getattr(own, "audio_ms_per_token", 0) / 1000
        if most and len(samples) > most * rate:
            reason = f"of {len(samples) / rate:.1f} s, and {self.family} hears {most:g} s"
            raise BadClip(reason, f"cut it: ffmpeg -i IN -t {most:g} OUT")
        return samples

    def _process_video(self, digest: str, video: Video) -> Pixels:
        frames = Frames(self._processor.image_processor, self._architecture, self._video, self._bounds, video)
        whole = copy.copy(self._processor)
        whole.video_processor = frames
        counted = np.zeros((frames.count, 1, 1, 3), np.uint8)  # alone: `frames` has what is read
        given = {"videos": [counted], "videos_kwargs": {"fps": frames.rate}}
        return self._process_as("video", digest, given, whole)

    def _process_as(self, kind: Kind, digest: str, given: Mapping[str, Any], processor: Any = None) -> Pixels:
        found = (processor or self._processor)(
            **given,
            text=[self.placeholders[kind]],
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
            if name not in _OF_TEXT and isinstance(value, Tensor)
        }
        if kind == "audio":  # extractors make all sounds as long
            inputs = _shortened(inputs)
        kinds_N[ids_N == self.tokens[kind]] = _TYPES.get(kind, 0)
        positions_3N, extent = self._positions(kind, ids_N, kinds_N, inputs)
        return Pixels(
            kind,
            digest,
            inputs,
            found["text_replacement_offsets"][0][0]["replacement"],
            tuple(ids_N.tolist()),
            np.flatnonzero(ids_N == self.tokens[kind]),
            positions_3N,
            extent,
        )

    def _positions(
        self, kind: Kind, ids_N: NDArray[np.int64], kinds_N: NDArray[np.int64], inputs: Mapping[str, Tensor]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """By the model's own class, which needs no weights for that."""
        length = len(ids_N)
        if self._rope is None:
            return None, length
        if kind == "audio":
            return np.tile(np.arange(length), (3, 1)), length
        body = self._rope.__new__(self._rope)
        nn.Module.__init__(body)
        body.config = config = self._architecture
        told: dict[str, Any] = {name: value for name, value in inputs.items() if name.endswith("_grid_thw")}
        if "second_per_grid_ts" in inputs:
            told["second_per_grid_ts"] = inputs["second_per_grid_ts"]
        if not hasattr(config, "vision_start_token_id") or "mm_token_type_ids" in _arguments(self._rope):
            told["mm_token_type_ids"] = torch.from_numpy(kinds_N)[None]
            positions, shift = body.get_rope_index(torch.from_numpy(ids_N)[None], **told)
            return positions[:, 0].numpy(), int(shift) + length
        untyped: Any = config  # Qwen-Omni looks for the tokens around it
        body.spatial_merge_size = untyped.vision_config.spatial_merge_size
        around = torch.tensor([[untyped.vision_start_token_id, *ids_N.tolist(), untyped.vision_end_token_id]])
        told["second_per_grids"] = inputs.get("video_second_per_grid")
        positions, shift = body.get_rope_index(around, attention_mask=torch.ones_like(around), **told)
        return positions[:, 0, 1:-1].round().long().numpy() - 1, round(float(shift)) + length


def _arguments(body: Any) -> Mapping[str, Any]:
    return inspect.signature(body.get_rope_index).parameters


def _shortened(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an extractor gives of a sound without what it is filled up with."""
    mask = next(value for name, value in inputs.items() if name.endswith("mask"))
    axis, length = (1 if "input_features_mask" in inputs else -1), int(mask.sum())
    return {
        name: value if name in _OF_POSITIONS else value.narrow(axis, 0, length).clone()
        for name, value in inputs.items()
    }


def decode_image(data: bytes) -> Any:
    """An RGB image of Pillow, turned as its EXIF orientation says.

    Raises ValueError for what is no image, for one that is too large, and for one that does not say what it is in RGB.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > MOST_IMAGE_PIXELS:
            raise ValueError(f"an image of {image.width} x {image.height} pixels is too large")
        image.load()
        if (why_not := why_not_rgb(image)) is not None:
            raise ValueError(f"an image {'; '.join(why_not)}")
        return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
