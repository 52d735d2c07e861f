"""What towers that see and hear keep of a micro-batch, for a memory plan. Loads no weight, knows no layout.

A plan counts one file as large as the run lets it be, and no more than a micro-batch has tokens. No run bounds
the size of images and sounds: they are all of these. One block and two of a tower compute on a small file; what
autograd keeps is linear in the file's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from headrace_modelkit.loading import DTYPES, body_of, load_architecture, load_model
from headrace_modelkit.vision import vision_tower
from headrace_schema.images import READS, Kind
from headrace_schema.openings import TrainerConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel

_BLOCKS = ("blocks", "layers", "layer")
"""Last names of the lists in which towers have their blocks."""
_SIDE = 4
"""Tokens of the small image's height and width, where images may be of any size."""
_FRAME = (7, 10)
"""Those of a frame of Gemma 4."""
_SOUND_FRAMES = 200
_DENSE = ("gemma3", "internvl")
"""Families whose images are all of one size: shapes alone decide what is computed, so that no number is needed."""


@dataclass(frozen=True)
class Tower:
    """Bytes that autograd keeps of a micro-batch: of each block, of a block's input, and outside of blocks."""

    block: int
    inputs: int
    outside: int


def towers_of(config: TrainerConfig, tokens: int) -> dict[Kind, Tower]:
    """Of those that learn and get files, with so many tokens a micro-batch. Raises ModelNotReadable."""
    if config.trainer.freezes_vision or not config.sees:
        return {}
    with torch.device("meta"):
        model = load_model(config.model, weights=False, layers=1)
    if vision_tower(model) is None:
        return {}
    kinds, found = config.files or READS[model.config.model_type], dict[Kind, Tower]()
    for tower, blocks in blocks_of(model).items():
        own = [kind for kind in kinds if (kind == "audio") is (tower == "audio")]
        if own and blocks:
            most = max(min(tokens, _file_tokens(config, model.config, kind, tokens)) for kind in own)
            found[tower] = _measured(config, tower, most)
    return found


def blocks_of(model: PreTrainedModel) -> dict[Kind, list[nn.Module]]:
    """The blocks of each tower of a model."""
    found: dict[Kind, list[nn.Module]] = {"image": [], "audio": []}
    for name, each in _lists(model):
        found["audio" if "audio" in name else "image"] += list(each)
    return found


def saved_bytes(model: nn.Module, compute: Callable[[], object]) -> int:
    """What autograd keeps of a forward, without the weights."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            kept[storage._cdata] = tensor  # it must live, so that no other storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _lists(model: PreTrainedModel) -> list[tuple[str, nn.ModuleList]]:
    tower = vision_tower(model)
    named = tower.named_modules() if tower is not None else ()
    return [
        (name, each)
        for name, each in named
        if isinstance(each, nn.ModuleList) and name.rpartition(".")[2] in _BLOCKS
    ]


def _file_tokens(config: TrainerConfig, architecture: PreTrainedConfig, kind: Kind, tokens: int) -> int:
    """Of the largest file of a kind; `tokens` of one that no run bounds."""
    untyped: Any = architecture
    if kind != "video":
        return tokens
    video, tower = config.model.video, untyped.vision_config
    frames = min(video.frames or video.max_frames, video.max_frames)
    if hasattr(tower, "spatial_merge_size"):
        side = int(tower.patch_size) * int(tower.spatial_merge_size)
        return max(1, frames // int(tower.temporal_patch_size)) * (video.max_pixels // side**2)
    return frames * int(getattr(untyped, "image_seq_length", _FRAME[0] * _FRAME[1]))


def _measured(config: TrainerConfig, tower: Kind, tokens: int) -> Tower:
    (one, inputs, few), (two, _, _) = (_kept(config, tower, blocks) for blocks in (1, 2))
    times = tokens / few
    return Tower(round((two - one) * times), round(inputs * times), round((2 * one - two) * times))


def _kept(config: TrainerConfig, tower: Kind, blocks: int) -> tuple[int, int, int]:
    """Bytes that are kept of a small file and those of a block's input, and the file's tokens."""
    dense = tower == "image" and load_architecture(config.model).model_type in _DENSE
    with FakeTensorMode() if dense else nullcontext():
        with nullcontext() if dense else torch.device("meta"):
            model = load_model(config.model, weights=False, layers=1)
        for _, each in _lists(model):
            del each[blocks:]
        parts = vision_tower(model)
        assert parts is not None
        if not dense:
            parts.to_empty(device="cpu")
            with torch.no_grad():
                for value in (*parts.parameters(), *parts.buffers()):
                    value.zero_()
        inputs: list[int] = []
        blocks_of(model)[tower][0].register_forward_pre_hook(
            lambda _, args, given: inputs.append(_first(args, given).nbytes), with_kwargs=True
        )
        body: Any = body_of(model)
        compute = body.get_image_features if tower == "image" else body.get_audio_features
        example, found = _example(model.config, tower, DTYPES[config.model.dtype]), list[Any]()
        kept = saved_bytes(parts, lambda: found.append(compute(**example, return_dict=True)))
    heard = found[0].last_hidden_state.shape[-2] if tower == "audio" else 0
    return kept, inputs[0], int(heard) or _image_tokens(model.config)


def _first(args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
    """What a block computes from."""
    found: Tensor = args[0] if args else next(iter(given.values()))
    return found


def _example(architecture: PreTrainedConfig, tower: Kind, dtype: torch.dtype) -> dict[str, Tensor]:
    """A small file as its tower takes it, empty."""
    untyped: Any = architecture
    if tower == "audio":
        if untyped.model_type == "gemma4":
            bands = untyped.audio_config.subsampling_conv_channels[0]
            mask = torch.ones(1, _SOUND_FRAMES, dtype=torch.bool)
            return {
                "input_features": torch.zeros(1, _SOUND_FRAMES, bands, dtype=dtype),
                "input_features_mask": mask,
            }
        features = torch.zeros(1, untyped.audio_config.num_mel_bins, _SOUND_FRAMES, dtype=dtype)
        mask = torch.ones(1, _SOUND_FRAMES, dtype=torch.long)
        return {"input_features": features, "feature_attention_mask": mask}
    own = untyped.vision_config
    patch = own.patch_size
    if untyped.model_type in _DENSE:
        size = own.image_size
        high, wide = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.zeros(1, 3, high, wide, dtype=dtype)}
    if untyped.model_type == "gemma4":
        # Masks grow with an image's square, and are there where it is filled up, as frames mostly are.
        high, wide = (side * own.pooling_kernel_size for side in _FRAME)
        rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
        places = torch.stack([columns, rows], -1).view(1, -1, 2)
        places[:, -wide * own.pooling_kernel_size :] = -1
        values = torch.zeros(1, high * wide, 3 * patch**2, dtype=dtype)
        return {"pixel_values": values, "image_position_ids": places}
    side = _SIDE * own.spatial_merge_size
    return {
        "pixel_values": torch.zeros(side**2, 3 * own.temporal_patch_size * patch**2, dtype=dtype),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def _image_tokens(architecture: PreTrainedConfig) -> int:
    """Of the small image."""
    untyped: Any = architecture
    if untyped.model_type == "gemma4":
        return _FRAME[0] * _FRAME[1]
    if untyped.model_type not in _DENSE:
        return _SIDE**2
    return int(getattr(untyped, "image_seq_length", 0) or untyped.mm_tokens_per_image)
