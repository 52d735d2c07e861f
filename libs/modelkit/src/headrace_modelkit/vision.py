"""Files of prompts in a forward: placed among tokens, positions behind them, features of the towers.

Rollout and trainer place features by the places of a file's tokens and never by token id: a policy may sample the id of
an image token.

Shapes: R rows, L tokens, N tokens of an image, M tokens with a feature, S of them seen ones, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from headrace_schema.images import Kind
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from headrace_modelkit.attending import window_of
from headrace_modelkit.pictures import ImageReader, Pixels, Span

Placed = tuple[NDArray[np.int64], Pixels]
"""Where the tokens of an image stand among R times L, and the image."""


@dataclass(frozen=True)
class Pictures:
    """The files of a forward over (R, L) tokens, each computed once however often it stands there.

    `inputs` are those of each tower. Feature `features_M[i]`, counted over those of all towers, goes to token
    `places_M[i]` of R times L. `blocks_RL` is below 0 but for the tokens with a feature, where these look ahead: they
    have a number in common with those they see.
    """

    inputs: Mapping[Kind, Mapping[str, Tensor]]
    places_M: Tensor
    features_M: Tensor
    positions_3RL: Tensor | None
    blocks_RL: Tensor | None

    @classmethod
    def of(cls, spans: Iterable[Placed], positions_3RL: NDArray[np.int64], reader: ImageReader) -> Pictures:
        """From the files' places; a tower without any computes a blank one, which stands nowhere."""
        placed = list(spans)
        own = {image.digest: image for _, image in placed}.values()
        by_tower = {tower: [image for image in own if image.tower == tower] for tower in reader.towers}
        for tower, images in by_tower.items():
            if not images or (tower == "audio" and reader.pads_sounds):
                images.append(reader.blank(tower))
        firsts, total = dict[str, int](), 0
        for image in (image for images in by_tower.values() for image in images):
            firsts[image.digest] = total
            total += len(image.slots)
        blocks_N = np.full(positions_3RL[0].size, -1, np.int64)
        places, features = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        blocks = 0
        for tokens, image in placed:
            places.append(tokens[image.slots])
            features.append(firsts[image.digest] + np.arange(len(image.slots)))
            if image.tower == "image":  # what is heard looks back, as words do
                runs_M = np.cumsum(np.diff(image.slots, prepend=image.slots[:1] - 2) > 1)
                blocks_N[places[-1]] = blocks + runs_M
                blocks += len(image.slots)
        plain = by_tower["image"][0].positions_3N is None
        return cls(
            {
                tower: inputs_of_all([image.tower_inputs for image in images])
                for tower, images in by_tower.items()
            },
            torch.from_numpy(np.concatenate(places)),
            torch.from_numpy(np.concatenate(features)),
            None if plain else torch.from_numpy(positions_3RL),
            torch.from_numpy(blocks_N).view(positions_3RL.shape[1:]) if reader.looks_ahead else None,
        )

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[Span]],
        length: int,
        reader: ImageReader,
        known: Sequence[int] | None = None,
    ) -> Pictures:
        """From the files of R contexts, of which a row has `length` tokens behind the first `known` ones, or from the
        first on.
        """
        placed = list[Placed]()
        positions_3RL = np.zeros((3, len(rows), length), np.int64)
        for row, (spans, before) in enumerate(zip(rows, known or [0] * len(rows), strict=True)):
            positions_3RL[:, row] = rope_positions(before + length, spans)[:, before:]
            for span in spans:
                if span.start >= before:
                    first = row * length + span.start - before
                    placed.append((np.arange(span.image.tokens) + first, span.image))
        return cls.of(placed, positions_3RL, reader)


def inputs_of_all(files: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Inputs of several files by name, each filled up to the longest in sounds and in patches of an image."""
    found = {}
    for name in dict.fromkeys(name for file in files for name in file):
        values = [file[name] for file in files if name in file]
        most = torch.tensor([value.shape[1:] for value in values]).amax(0).tolist()
        empty = -1 if name.endswith("position_ids") else 0
        found[name] = torch.cat([_filled(value, most, empty) for value in values])
    return found


def _filled(value: Tensor, most: Sequence[int], empty: int) -> Tensor:
    """With the sizes `most` behind the first one."""
    behind = [(0, size - own) for own, size in zip(value.shape[1:], most, strict=True)]
    return nn.functional.pad(value, [each for pair in reversed(behind) for each in pair], value=empty)


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
    """What `body.language_model` is called with: embeddings with the files' features in them, positions, masks.

    `trained`: gradients go into the towers.
    """
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        found = body.get_image_features(**pictures.inputs["image"], return_dict=True)
        features = [_joined(found.pooler_output)]
        if (sounds := pictures.inputs.get("audio")) is not None:
            heard = body.get_audio_features(**sounds, return_dict=True)
            mask = getattr(heard, "attention_mask", None)  # of what Gemma 4 fills up
            features.append(heard.last_hidden_state if mask is None else heard.pooler_output[mask])
    features_MD = torch.cat(features)[pictures.features_M]
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
        seen_M = pictures.features_M < len(features[0])  # those behind are of sounds
        places_S, features_S = places_M[seen_M], pictures.features_M[seen_M]
        order = places_S.argsort()
        mask = torch.zeros(tokens_RL.numel(), dtype=torch.bool, device=tokens_RL.device)
        mask[places_S] = True
        inputs["visual_pos_masks"] = mask.view_as(tokens_RL)
        inputs["deepstack_visual_embeds"] = [torch.cat(list(layer))[features_S][order] for layer in layers]
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
