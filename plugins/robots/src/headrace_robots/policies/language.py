"""Instructions as ids, for policies that read language. Knows no environment; what is made here is never made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import Formatter
from typing import Any

from headrace_modelkit.errors import ModelNotReadable
from transformers import AutoTokenizer

from headrace_robots.policies.policy import PolicyConfig

Encode = Callable[[str], tuple[int, ...]]


def instruction_encoder(config: PolicyConfig, directory: str) -> Encode:
    """From a rendered instruction to a prompt's ids, by the tokenizer in the policy's `directory`.

    A policy that reads no language gets none. Raises ModelNotReadable where there is no tokenizer, or another one than
    the policy was made with.
    """
    if not config.reads:
        return _nothing
    if not directory:
        raise ModelNotReadable(
            f"model.policy: {config.kind} reads language and needs a tokenizer; give model.path, a directory with "
            "policy.json and a tokenizer"
        )
    tokenizer = read_tokenizer(directory)
    try:
        config.check_tokenizer(tokenizer)
    except ValueError as error:
        raise ModelNotReadable(
            f"model.path: the tokenizer in {directory!r} does not fit: {error}; put the one beside policy.json that "
            "the policy was made with"
        ) from error

    def encode(instruction: str) -> tuple[int, ...]:
        return config.prompt_ids(tokenizer, instruction)

    return encode


def read_tokenizer(directory: Path | str) -> Any:
    """The tokenizer in a directory. Raises ModelNotReadable."""
    try:
        return AutoTokenizer.from_pretrained(Path(directory), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotReadable(
            f"model.path: {str(directory)!r} holds no tokenizer that can be read ({str(error).splitlines()[0]}); put "
            "its tokenizer.json and tokenizer_config.json beside policy.json"
        ) from error


def rendered(template: str, task: str) -> str:
    """`data.prompt.template` of a task: the coordinator has checked its places, and all of them tell the task."""
    return "".join(
        literal + ("" if name is None else task) for literal, name, _, _ in Formatter().parse(template)
    )


def _nothing(instruction: str) -> tuple[int, ...]:
    return ()
