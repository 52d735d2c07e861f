"""A tiny vision-language model: `python -m headrace_modelkit.presets.tiny_vision OUT_DIR`, a Qwen2.5-VL, or with
--family a Qwen3-VL, whose tokenizer has a token for a character.
"""

from __future__ import annotations

import argparse
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from headrace_schema.images import VISION_FAMILIES
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, is_complete

START, IMAGE, END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
CHARACTERS = f"0123456789 =+->:,.?\n{string.ascii_lowercase}"
PATCH, MERGE = 4, 2
"""Pixels of a patch's side, and patches of an image token's: an image of 16 x 16 pixels has four tokens."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{START}{IMAGE}{END}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_tiny_vision(
    directory: Path,
    *,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> None:
    """Writes the model with random weights; about 190,000 parameters, context 512."""
    model: Any = tiny_vision_model(family, seed, **overrides)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=1,
        size={"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
    )
    save_model(model.to(dtype), vision_tokenizer(), directory, beside=partial(_save, processor))


def tiny_vision_model(family: str = "qwen2_5_vl", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The untrained model in fp32; `overrides` are fields of its language part's configuration."""
    tokens = vision_tokenizer()
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
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [head // 2 - 2 * (3 * head // 16), 3 * head // 16, 3 * head // 16],
    }
    if family == "qwen3_vl":
        side = head // 6  # of time, height and width in turns, as published ones have it
        text["rope_parameters"] |= {
            "mrope_section": [head // 2 - 2 * side, side, side],
            "mrope_interleaved": True,
        }
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "spatial_merge_size": MERGE,
        "out_hidden_size": text["hidden_size"],
    }
    ids: dict[str, Any] = {
        f"{name}_token_id": tokens.convert_tokens_to_ids(piece)
        for name, piece in (("image", IMAGE), ("video", VIDEO), ("vision_start", START), ("vision_end", END))
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        if family == "qwen3_vl":
            text.setdefault("head_dim", head)
            tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
            model = Qwen3VLForConditionalGeneration(
                Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
            )
        else:
            tower |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [1]}
            model = Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
            )
    ready: PreTrainedModel = model.eval()
    return ready


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of CHARACTERS, and behind them those around and for images."""
    tokenizer: Any = character_tokenizer(CHARACTERS)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, END, IMAGE, VIDEO]})
    tokenizer.chat_template = CHAT_TEMPLATE
    ready: PreTrainedTokenizerFast = tokenizer
    return ready


def _save(processor: Any, directory: Path) -> None:
    processor.save_pretrained(directory)


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
