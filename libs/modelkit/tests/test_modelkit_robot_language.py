"""Prompts of policies that read language."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.robot.language import instruction_encoder


def policy(kind):
    return SimpleNamespace(kind=kind)


def test_openvla_reads_llamas_empty_token_behind_its_prompt(tmp_path):
    character_tokenizer("abc▁").save_pretrained(tmp_path)
    assert instruction_encoder(policy("openvla"), str(tmp_path))("ab") == (3, 4, 6)
    assert instruction_encoder(policy("openvla_oft"), str(tmp_path))("ab▁") == (3, 4, 6)
    assert instruction_encoder(policy("pi0"), str(tmp_path))("ab") == (3, 4)


def test_a_tokenizer_without_that_token_adds_nothing(tmp_path):
    character_tokenizer("abc").save_pretrained(tmp_path)
    assert instruction_encoder(policy("openvla"), str(tmp_path))("ab") == (3, 4)


def test_small_policies_read_no_language():
    assert instruction_encoder(policy("mlp"), "")("push the cube") == ()


def test_what_has_no_prompt_of_its_own_is_refused(tmp_path):
    with pytest.raises(ModelNotReadable, match="pi05 reads the state in its prompt"):
        instruction_encoder(policy("pi05"), str(tmp_path))
    with pytest.raises(ModelNotReadable, match="holds no tokenizer"):
        instruction_encoder(policy("pi0"), str(tmp_path))
