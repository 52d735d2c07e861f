"""Tokenizers of five families: with and without BOS, pad and a chat template, by bytes and by SentencePiece."""

from dataclasses import dataclass

import pytest
from headrace_modelkit.tokenizer import TextCodec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEXT = "Grüße: 1 + 1 = 2 😀"


def sentence_piece(specials, template, *, leading_space, bos, **roles):
    """Characters and bytes in SentencePiece's way; `leading_space`: one is put before every text, as Llama 2 does."""
    letters = sorted({*map(chr, range(33, 127)), "\u2581", "\n", "ü", "ß"})
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=specials[0], byte_fallback=True))
    first = [normalizers.Prepend("\u2581")] if leading_space else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    last = [decoders.Strip(" ", 1, 0)] if leading_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, specials.index(bos))]
    )
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, unk_token=specials[0], **roles)
    built.chat_template = template
    return built


@dataclass
class Family:
    codec: TextCodec
    bos: int | None
    end: int
    opening: str
    """What the assistant's turn begins behind."""


@pytest.fixture(params=["qwen", "llama3", "mistral", "gemma", "gpt2"])
def family(request, byte_tokenizer):
    match request.param:
        case "qwen":
            made = byte_tokenizer(
                ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                CHATML,
                eos_token="<|im_end|>",
                pad_token="<|endoftext|>",
            )
            return Family(TextCodec(made, frozenset({0, 2}), 0), None, 2, "assistant\n")
        case "llama3":
            specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
            made = byte_tokenizer(specials, LLAMA3, bos="<|begin_of_text|>", eos_token="<|eot_id|>")
            return Family(TextCodec(made, frozenset({3}), 3), 0, 3, "\n\n")
        case "mistral":
            made = sentence_piece(
                ["<unk>", "<s>", "</s>"], MISTRAL, leading_space=True, bos="<s>", eos_token="</s>"
            )
            return Family(TextCodec(made, frozenset({2}), 2), 1, 2, "[/INST]")
        case "gemma":
            specials = ["<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"]
            roles = {"eos_token": "<end_of_turn>", "pad_token": "<pad>"}
            made = sentence_piece(specials, GEMMA, leading_space=False, bos="<bos>", **roles)
            return Family(TextCodec(made, frozenset({3, 4}), 0), 1, 3, "model\n")
    return Family(
        TextCodec(byte_tokenizer(["<|endoftext|>"], "", eos_token="<|endoftext|>"), frozenset({0}), 0),
        None,
        0,
        "",
    )


def test_a_prompt_begins_with_the_familys_bos_once_and_goes_on_as_the_template_says(family):
    ids = family.codec.encode_prompt(text=TEXT)
    assert ids.count(family.bos) == (family.bos is not None) and ids[0] != family.end
    assert family.codec.decode(ids) == TEXT
    if not family.opening:
        with pytest.raises(ValueError, match="chat: false"):
            family.codec.encode_prompt(chat=[{"role": "user", "content": TEXT}])
        return
    chat = family.codec.encode_prompt(chat=[{"role": "user", "content": TEXT}])
    assert chat.count(family.bos) == (family.bos is not None), "a template that writes one gets no second"
    assert family.codec.decode(chat).endswith(family.opening)


def test_an_answer_ends_with_the_familys_end_and_its_tokens_are_its_bytes(family):
    ids = family.codec.encode_answer(TEXT)
    assert ids[-1] == family.end and ids.count(family.end) == 1 and family.bos not in ids
    text, lengths = family.codec.decode_with_lengths(ids)
    assert text == TEXT and sum(lengths) == len(TEXT.encode()) and lengths[-1] == 0


def test_what_goes_on_behind_other_ids_adds_its_own_text_alone(family):
    begun = family.codec.encode_prompt(text="1 + 1 =")
    shown = family.codec.decode(begun, skip_special_tokens=False)
    for text in (" 2", "2", "\nnext 3", "Grüße 😀", ""):
        both = [*begun, *family.codec.encode_behind(text)]
        assert family.codec.decode(both, skip_special_tokens=False) == shown + text
