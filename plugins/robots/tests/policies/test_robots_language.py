"""Prompts of policies that read language."""

from __future__ import annotations

import pytest
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.tiny import CHARACTERS, tiny_fields


def policy(kind):
    return policy_config(tiny_fields(kind, 2, state=0 if kind.startswith("openvla") else 1))


def test_openvla_reads_llamas_empty_token_behind_its_prompt(tmp_path):
    character_tokenizer("abc▁").save_pretrained(tmp_path)
    assert instruction_encoder(policy("openvla"), str(tmp_path))("ab") == (3, 4, 6)
    assert instruction_encoder(policy("openvla_oft"), str(tmp_path))("ab▁") == (3, 4, 6)


def test_a_tokenizer_without_that_token_adds_nothing(tmp_path):
    character_tokenizer("abc").save_pretrained(tmp_path)
    assert instruction_encoder(policy("openvla"), str(tmp_path))("ab") == (3, 4)


def test_small_policies_read_no_language():
    mlp = policy_config({"kind": "mlp", "state_size": 1, "bounds": {"low": [0], "high": [1]}})
    assert instruction_encoder(mlp, "")("push the cube") == ()


def test_pi0_reads_a_line_and_pi05_what_stands_before_the_state(tmp_path):
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.save_pretrained(tmp_path)
    for kind, text in {"pi0": "put it\n", "smolvla": "put_it\n", "pi05": "Task: put it, State:"}.items():
        encode = instruction_encoder(policy(kind), str(tmp_path))
        assert encode("put_it") == encode("put_it\n") == tuple(tokenizer.encode(text))


def test_a_policy_without_its_tokenizer_is_refused(tmp_path):
    character_tokenizer(CHARACTERS[::-1]).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelNotReadable, match=r"does not fit: .* another tokenizer made"):
        instruction_encoder(policy("pi05"), str(tmp_path / "other"))
    with pytest.raises(ModelNotReadable, match="holds no tokenizer"):
        instruction_encoder(policy("pi0"), str(tmp_path))
