"""Instructions as ids, for policies that read language. Knows no environment; what is made here is never made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from headrace_modelkit.errors import ModelNotReadable

if TYPE_CHECKING:
    from headrace_modelkit.robot.directory import AnyConfig

BLIND = ("mlp", "cnn")
"""Kinds that read no language."""
SPACE = "▁"
"""Llama's empty token, which OpenVLA reads behind its prompt (predict_action of modeling_prismatic.py)."""

Encode = Callable[[str], tuple[int, ...]]


def instruction_encoder(config: AnyConfig, directory: str) -> Encode:
    """From a rendered instruction to a prompt's ids, by the tokenizer in the policy's `directory`.

    A policy that reads no language gets none. Raises ModelNotReadable where there is no tokenizer, and for a kind whose
    prompt is no whole episode's.
    """
    if config.kind in BLIND:
        return _nothing
    if config.kind == "pi05":
        raise ModelNotReadable(
            "model.path: pi05 reads the state in its prompt, another one for each chunk, and an episode has one "
            "prompt; use pi0"
        )
    if not directory:
        raise ModelNotReadable(
            f"model.policy: {config.kind} reads language and needs a tokenizer; give model.path, a directory with "
            "policy.json and a tokenizer"
        )
    tokenizer = _tokenizer(directory)
    space = tokenizer.convert_tokens_to_ids(SPACE) if config.kind != "pi0" else None
    ending = [] if space in (None, tokenizer.unk_token_id) else [space]

    def encode(instruction: str) -> tuple[int, ...]:
        ids = list(tokenizer.encode(instruction, add_special_tokens=True))
        return tuple(ids if ids[-1:] == ending else [*ids, *ending])

    return encode


def _nothing(instruction: str) -> tuple[int, ...]:
    return ()


def _tokenizer(directory: str) -> Any:
    path = Path(directory)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotReadable(
            f"model.path: {directory!r} holds no tokenizer that can be read ({str(error).splitlines()[0]}); put its "
            "tokenizer.json and tokenizer_config.json beside policy.json"
        ) from error
