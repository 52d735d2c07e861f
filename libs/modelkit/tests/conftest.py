"""Tiny real models and tokenizers built on the spot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from headrace_modelkit.presets.tiny import write_tiny
from headrace_schema.sections.generating import ModelSection
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(directory)
    return directory


@pytest.fixture
def tiny_config(tiny_directory) -> ModelSection:
    return ModelSection(path=str(tiny_directory), dtype="float32")


@pytest.fixture
def byte_tokenizer():
    """A byte-level tokenizer without merges: ids of its special tokens first, then one a byte."""

    def build(
        specials: list[str], template: str, *, bos: str | None = None, **roles
    ) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {piece: index for index, piece in enumerate([*specials, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(piece, special=True, normalized=False) for piece in specials]
        )
        if bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, specials.index(bos))]
            )
            roles["bos_token"] = bos
        built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
        built.chat_template = template
        return built

    return build
