"""A tiny Qwen3 with a character tokenizer: `python -m headrace_modelkit.presets.tiny OUT_DIR`, with --experts a
mixture of experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace_modelkit.loading import save_model


def is_complete(directory: Path) -> bool:
    """Whether a directory holds a preset. It appears by one rename, so it is whole or not there."""
    return all(
        (directory / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json")
    )


PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789 =+->:,.?\nacdoprsty"
SHAPE: dict[str, Any] = {
    "vocab_size": len(CHARACTERS) + 3,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tiny(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> None:
    """Writes the model with random weights; about 103,000 parameters, 32 characters, context 512."""
    model: Any = tiny_model(seed, **overrides)
    save_model(model.to(dtype), character_tokenizer(), directory)


def write_tiny_moe(
    directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> None:
    """Writes the mixture of experts with random weights: 8 experts a layer, 2 of them for each token."""
    model: Any = tiny_moe(seed, **overrides)
    save_model(model.to(dtype), character_tokenizer(), directory)


def tiny_moe(seed: int = 0, **overrides: Any) -> Qwen3MoeForCausalLM:
    """As `tiny_model`, with experts; about 177,000 parameters. `overrides` are fields of Qwen3MoeConfig."""
    shape = {
        **SHAPE,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **overrides}))
    ready: Qwen3MoeForCausalLM = model.eval()
    return ready


def tiny_model(seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """The untrained model in fp32; `overrides` are fields of Qwen3Config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **overrides}))
    ready: Qwen3ForCausalLM = model.eval()
    return ready


def character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One id a character after <pad> = 0, <eos> = 1, <unk> = 2; the chat template is the plain contents."""
    vocabulary = {piece: index for index, piece in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=512
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="headrace_modelkit.presets.tiny", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--head-dim", type=int, default=16, help="vLLM's CPU build needs 32 or more")
    parser.add_argument("--experts", action="store_true", help="a Qwen3-MoE: 8 experts, 2 for each token")
    options = parser.parse_args(arguments)
    write = write_tiny_moe if options.experts else write_tiny
    if not is_complete(options.directory):
        write(options.directory, seed=options.seed, head_dim=options.head_dim)
    print(options.directory)


if __name__ == "__main__":
    main()
