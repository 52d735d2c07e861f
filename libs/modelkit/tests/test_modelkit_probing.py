"""The ids that a model is tried with: some of its vocabulary; how many are asked for does not change their order."""

from types import SimpleNamespace

import pytest
from headrace_modelkit.probing import probe_tokens

NAMED = {"eos_token_id": [1, 2], "image_token_id": 5, "pad_token_id": None}


def architecture(size):
    text = SimpleNamespace(vocab_size=size, to_dict=lambda: NAMED)
    return SimpleNamespace(get_text_config=lambda: text, to_dict=lambda: {"bos_token_id": 3})


@pytest.mark.parametrize("size", [100, 151_936])
def test_ids_are_different_without_named_ones_and_the_first_of_more(size):
    many = probe_tokens(architecture(size), 60)
    assert len(set(many)) == 60 and not {1, 2, 3, 5} & set(many) and max(many) < size
    assert [probe_tokens(architecture(size), count) for count in (1, 7)] == [many[:1], many[:7]]


def test_a_vocabulary_that_is_too_small_repeats():
    many = probe_tokens(architecture(7), 8)
    assert sorted(many[:3]) == [0, 4, 6] and many == (many[:3] * 3)[:8]
