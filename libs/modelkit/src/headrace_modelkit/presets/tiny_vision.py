"""A tiny vision-language model: `python -m headrace_modelkit.presets.tiny_vision OUT_DIR`, a Qwen2.5-VL, or with
--family another one, whose tokenizer has a token for a character.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from headrace_schema.images import READS, VISION_FAMILIES, Kind
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessorPil,
    Glm4vImageProcessorPil,
    Glm46VImageProcessorPil,
    GotOcr2ImageProcessorPil,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    WhisperFeatureExtractor,
)

from headrace_modelkit.loading import save_model
from headrace_modelkit.pictures import ImageReader, Pixels, Span
from headrace_modelkit.presets.families import FAMILIES
from headrace_modelkit.presets.tiny import character_tokenizer, is_complete
from headrace_modelkit.vision import inputs_of_all, rope_positions

_Configs: Any = CONFIG_MAPPING
_Models: Any = AutoModelForImageTextToText
_Extractor: Any = WhisperFeatureExtractor
_GemmaExtractor: Any = Gemma4AudioFeatureExtractor

START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
BEGIN_SOUND, SOUND, END_SOUND = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
_OF_GEMMA = "<|video|>"
_OF_GLM = ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
"""That processors of Gemma 4 and GLM-V write by these names, whatever a tokenizer's are."""
CHARACTERS = f"0123456789 =+->:,.?\n{string.ascii_lowercase}"
OMNI, OMNI_3 = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"
MELS = 16
"""Bands of a sound's spectrum."""
PATCH, MERGE = 4, 2
"""Pixels of a patch's side, and patches of an image token's: an image of 16 x 16 pixels has four tokens."""
_SIDE = 16
"""Pixels of an image's side where a family makes all images as large."""
CHAT_TEMPLATE = (
    "{%% for message in messages %%}{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}"
    "%s"
    "{%% elif part['type'] == 'video' %%}"
    "%s"
    "{%% elif part['type'] == 'audio' %%}"
    "%s"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}{%% endfor %%}"
)
_WRITTEN = {
    "gemma3": (START, ""),
    "gemma4": (IMAGE, _OF_GEMMA, SOUND),
    "internvl": (IMAGE, VIDEO),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm46v"), (f"{START}{IMAGE}{END}", f"{_OF_GLM[2]}{VIDEO}{_OF_GLM[3]}")
    ),
}
"""What a family's template writes for an image, a video and a sound, if it is not the three tokens of each."""
_GEMMA = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_NAMED = {
    "image_token": IMAGE,
    "context_image_token": IMAGE,
    "video_token": VIDEO,
    "boi_token": START,
    "eoi_token": END,
    "start_image_token": START,
    "end_image_token": END,
    "audio_token": SOUND,
    "boa_token": BEGIN_SOUND,
    "eoa_token": END_SOUND,
    "vision_bos_token": START,
    "vision_eos_token": END,
    "audio_bos_token": BEGIN_SOUND,
    "audio_eos_token": END_SOUND,
}
"""As processors of the families ask for them."""


def write_tiny_vision(
    directory: Path,
    *,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    frames: int = 1,
    **overrides: Any,
) -> None:
    """Writes the model with random weights; about 190,000 parameters, context 512. `frames` of a video make a patch."""
    model: Any = tiny_vision_model(family, seed, frames=frames, **overrides)
    save = partial(_save_processor, family, frames)
    save_model(model.to(dtype), vision_tokenizer(family), directory, beside=save)


def tiny_vision_model(
    family: str = "qwen2_5_vl", seed: int = 0, *, frames: int = 1, **overrides: Any
) -> PreTrainedModel:
    """The untrained model in fp32; `overrides` are fields of its language part's configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = _Models.from_config(_config(family, frames, overrides)).eval()
        for value in model.parameters():  # what a class begins with at 0 would hide what it does
            if family not in ("qwen2_5_vl", "qwen3_vl") and not value.any():
                torch.nn.init.normal_(value, std=0.2)
    return model


def _config(family: str, frames: int, overrides: dict[str, Any]) -> PreTrainedConfig:
    tokens = vision_tokenizer(family)
    text: dict[str, Any] = {
        "vocab_size": len(tokens),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": tokens.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokens.eos_token_id,
        **overrides,
    }
    head = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    tower: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": PATCH,
    }
    ids: dict[str, Any] = {
        f"{name}_token_id": tokens.convert_tokens_to_ids(piece)
        for name, piece in (("image", IMAGE), ("video", VIDEO), ("vision_start", START), ("vision_end", END))
    }
    more: dict[str, Any] = {"tie_word_embeddings": False}
    if family == "internvl":
        text |= {"model_type": "qwen3", "head_dim": head}
        tower |= {"image_size": [_SIDE, _SIDE], "patch_size": [PATCH, PATCH]}
        more |= {"image_seq_length": (_SIDE // PATCH // MERGE) ** 2}
    elif family in ("gemma3", "gemma4"):
        text |= _GEMMA | {"head_dim": head, "global_head_dim": head, "query_pre_attn_scalar": head}
        tower |= {"image_size": _SIDE, "num_key_value_heads": 4, "head_dim": 16, "pooling_kernel_size": MERGE}
        more |= {"mm_tokens_per_image": (_SIDE // PATCH // MERGE) ** 2}
        if family == "gemma4":
            text = {
                "use_bidirectional_attention": "vision",
                **text,
                "vocab_size_per_layer_input": len(tokens),
            }
            more |= {
                "audio_config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "subsampling_conv_channels": [MELS, 4],
                    "output_proj_dims": 48,
                }
            }
            tower["position_embedding_size"] = 64
            for name, piece in (("video", _OF_GEMMA), ("audio", SOUND)):
                ids[f"{name}_token_id"] = tokens.convert_tokens_to_ids(piece)
        more["tie_word_embeddings"] = True
    else:
        tower |= {
            "temporal_patch_size": frames,
            "spatial_merge_size": MERGE,
            "out_hidden_size": text["hidden_size"],
        }
        tower |= {"depth": tower.pop("num_hidden_layers"), "num_heads": tower.pop("num_attention_heads")}
        text["rope_parameters"] = _rope(family, head)
        if family.startswith("qwen3"):
            text.setdefault("head_dim", head)
            tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        if family.startswith("qwen3_5"):
            text |= FAMILIES["qwen3_5_text"]
            del tower["deepstack_visual_indexes"]
        if family.startswith("glm"):
            tower |= {"image_size": _SIDE}
        if "_moe" in family:
            text |= FAMILIES["glm4_moe" if family.startswith("glm") else "qwen3_moe"]
        if family in ("qwen2_5_vl", OMNI):
            tower |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [1]}
        if family in (OMNI, OMNI_3):
            heard = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
            more["audio_config"] = heard | {
                "num_mel_bins": MELS,
                "output_dim": text["hidden_size"],
                "max_source_positions": 500,
                **(
                    {"n_window": 25}
                    if family == OMNI
                    else {"n_window_infer": 200, "downsample_hidden_size": 8}
                ),
            }
            ids["audio_token_id"] = tokens.convert_tokens_to_ids(SOUND)
            ids["audio_start_token_id"] = tokens.convert_tokens_to_ids(BEGIN_SOUND)
            ids["audio_end_token_id"] = tokens.convert_tokens_to_ids(END_SOUND)
    made: PreTrainedConfig = _Configs[family](text_config=text, vision_config=tower, **ids, **more)
    return made


def _rope(family: str, head: int) -> dict[str, Any]:
    """Of time, height and width."""
    found = {"rope_type": "default", "rope_theta": 10_000.0}
    if family in ("qwen2_5_vl", OMNI):
        side = 3 * head // 16
    else:
        side = head // 6  # in turns, as published ones have it
        found |= {"mrope_interleaved": True} if family.startswith("qwen3") else {}
        found |= {"partial_rotary_factor": 1.0}
    return found | {"mrope_section": [head // 2 - 2 * side, side, side]}


def vision_tokenizer(family: str = "qwen2_5_vl") -> PreTrainedTokenizerFast:
    """A token for each of CHARACTERS, and behind them those around and for images."""
    tokenizer: Any = character_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    if not family.startswith("qwen") or family in (OMNI, OMNI_3):
        more = [SOUND, BEGIN_SOUND, END_SOUND, _OF_GEMMA, *(_OF_GLM if family.startswith("glm") else ())]
        tokenizer.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO, *more]})
        tokenizer._set_model_specific_special_tokens(_NAMED)
    own = (f"{START}{IMAGE}{END}", f"{START}{VIDEO}{END}", f"{BEGIN_SOUND}{SOUND}{END_SOUND}")
    written = _WRITTEN.get(family, own)
    tokenizer.chat_template = CHAT_TEMPLATE % (*written, *own[len(written) :])
    ready: PreTrainedTokenizerFast = tokenizer
    return ready


def plain_inputs(
    reader: ImageReader, ids_BL: torch.Tensor, images: Sequence[Pixels], kinds_BL: torch.Tensor | None = None
) -> dict[str, Any]:
    """What transformers' own forward takes beside `ids_BL` to read these images, as the family's processor gives it.

    `kinds_BL`: 1 for the images' tokens, where the policy may have sampled such a token too.
    """
    if not images:
        return {}
    found: dict[str, Any] = inputs_of_all([image.inputs for image in images])
    if reader.family in (OMNI, OMNI_3):
        return found | {"attention_mask": torch.ones_like(ids_BL)}
    if "pixel_values_videos" in found and "second_per_grid_ts" in found:
        # Its class lets a text behind a video begin within the video's times, and decodes behind their end.
        ids = ids_BL[0].tolist()
        spans = [Span(start, image) for start, image in zip(reader.starts(ids, images), images, strict=True)]
        found["position_ids"] = torch.from_numpy(rope_positions(len(ids), spans))[:, None]
    if reader.family != "internvl":
        kinds = "token_type_ids" if reader.family == "gemma3" else "mm_token_type_ids"
        found[kinds] = kinds_of(reader, ids_BL, images) if kinds_BL is None else kinds_BL
    return found


def kinds_of(reader: ImageReader, ids_BL: torch.Tensor, images: Sequence[Pixels]) -> torch.Tensor:
    """1 for the tokens of images, 2 for those of videos, where there are any: a policy may sample such a token."""
    found_BL = torch.zeros_like(ids_BL)
    seen: tuple[Kind, ...] = ("image", "video")
    for number, kind in enumerate(seen, 1):
        if any(image.kind == kind for image in images):
            found_BL[ids_BL == reader.tokens[kind]] = number
    return found_BL


def _save_processor(family: str, frames: int, directory: Path) -> None:
    smallest = (PATCH * MERGE) ** 2
    patches: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": frames}
    sizes: dict[str, Any] = {"size": {"shortest_edge": smallest, "longest_edge": 64 * smallest}}
    fixed: dict[str, Any] = {"size": {"height": _SIDE, "width": _SIDE}}
    processor: Any
    if family == "internvl":
        processor = GotOcr2ImageProcessorPil(**fixed, max_patches=2)
    elif family == "gemma3":
        processor = Gemma3ImageProcessorPil(**fixed)
    elif family == "gemma4":
        processor = Gemma4ImageProcessorPil(patch_size=PATCH, pooling_kernel_size=MERGE, max_soft_tokens=70)
    elif family == "glm46v":
        processor = Glm46VImageProcessorPil(**patches, **sizes)
    elif family.startswith("glm"):
        processor = Glm4vImageProcessorPil(**patches, **sizes)
    else:
        processor = Qwen2VLImageProcessorPil(**patches, **sizes)
    processor.save_pretrained(directory)
    if "video" in READS[family]:
        many = 8 if ("3" in family or family.startswith("glm")) and family != OMNI_3 else 1
        video = {"size": {"shortest_edge": smallest, "longest_edge": 64 * smallest * many}}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    if "audio" in READS[family]:
        file = directory / "preprocessor_config.json"
        if family == "gemma4":
            heard = _GemmaExtractor(feature_size=MELS)
        else:
            heard = _Extractor(feature_size=MELS, n_fft=64, hop_length=160, chunk_length=4)
        file.write_text(json.dumps(json.loads(heard.to_json_string()) | json.loads(file.read_text())))
    if family in ("gemma3", "internvl"):
        told = {"image_seq_length": (_SIDE // PATCH // MERGE) ** 2}
        (directory / "processor_config.json").write_text(json.dumps(told))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="headrace_modelkit.presets.tiny_vision", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--family", choices=VISION_FAMILIES, default=VISION_FAMILIES[0])
    options = parser.parse_args(arguments)
    if not is_complete(options.directory):
        write_tiny_vision(options.directory, family=options.family, seed=options.seed)
    print(options.directory)


if __name__ == "__main__":
    main()
