"""Which part of a text each token is."""

import pytest
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.tokenizer import TextCodec, TokenLengths
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def pieces(codec, ids):
    """The bytes of each id."""
    text, lengths = codec.decode_with_lengths(ids)
    assert len(lengths) == len(ids) and sum(lengths) == len(text.encode())
    rest, found = text.encode(), []
    for length in lengths:
        found.append(rest[:length])
        rest = rest[length:]
    return found


def test_bytes_of_one_character_stay_apart_and_special_tokens_are_empty(byte_tokenizer):
    tokenizer = byte_tokenizer(["</s>"], "", eos_token="</s>")
    codec = TextCodec(tokenizer, frozenset({0}), 0)
    ids = [*tokenizer.encode("a é", add_special_tokens=False), 0]
    assert pieces(codec, ids) == [b"a", b" ", b"\xc3", b"\xa9", b""]


def test_a_character_is_as_long_as_its_text():
    codec = TextCodec(character_tokenizer("abé"), frozenset({1}), 0)
    assert pieces(codec, [3, 5, 4, 1]) == [b"a", "é".encode(), b"b", b""]


@pytest.fixture
def sentence_piece():
    vocabulary = {"<unk>": 0, "\u2581Hello": 1, "\u2581you": 2, "<0xF0>": 3, "!": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_the_first_space_of_sentence_piece_is_left_out(sentence_piece):
    codec = TextCodec(sentence_piece, frozenset({0}), 0)
    assert pieces(codec, [1, 2, 4]) == [b"Hello", b" you", b"!"]


def test_what_does_not_add_up_is_unknown(sentence_piece):
    # A byte alone is shown as a replacement character of three bytes.
    text, lengths = TextCodec(sentence_piece, frozenset({0}), 0).decode_with_lengths([1, 3])
    assert text.startswith("Hello") and lengths == []
    assert TokenLengths(sentence_piece).of([4], "something else") == []
