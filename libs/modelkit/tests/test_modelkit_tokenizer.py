"""Chat templates to ids, by golden lists: a template that changes silently changes what a model learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.tokenizer import TextCodec, load_tokenizer
from headrace_schema.sections.generating import ModelSection

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
    "{%- endif %}{%- for message in messages %}{%- if message['role'] != 'system' %}{{- '<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
CHAT = [{"role": "user", "content": "1+1 "}]
SMOLLM2_IDS = [
    *[
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ],
    *[2, 198, 1, 4093, 198, 44345, 216, 36, 1232, 216, 36, 30, 2720, 318, 351, 805, 260, 1230, 30, 198, 36],
    *[1232, 216, 36, 446, 2, 198, 1, 520, 9531, 198],
]


def ids_of(codec, text):
    """The golden ids of a byte tokenizer, spelled as text with the special tokens' ids in between."""
    ids = []
    for part in text:
        ids += [part] if isinstance(part, int) else codec.tokenizer.encode(part, add_special_tokens=False)
    return ids


def test_smollm2_template(byte_tokenizer):
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    codec = TextCodec(
        byte_tokenizer(specials, SMOLLM2_TEMPLATE, eos_token="<|im_end|>", pad_token="<|im_end|>"),
        frozenset({2}),
        2,
    )
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = [1, system, 2, "\n", 1, "user\n1+1 ", 2, "\n", 1, "assistant\n"]
    assert codec.encode_prompt(chat=CHAT) == ids_of(codec, expected)
    assert codec.pad_id in codec.eos_ids


def test_the_real_smollm2_when_it_is_there():
    directory = Path(__file__).parents[3] / ".headrace" / "models" / "smollm2"
    if not (directory / "tokenizer.json").is_file():
        pytest.skip("needs `python -m headrace_modelkit.presets.smollm2 .headrace/models/smollm2`")
    codec = load_tokenizer(ModelSection(path=str(directory)))
    content = "Calculate 4 + 4. Reply with only the number.\n4 + 4 ="
    assert codec.encode_prompt(chat=[{"role": "user", "content": content}]) == SMOLLM2_IDS
    assert codec.eos_ids == {2} and codec.pad_id == 2


def test_qwen_template_and_prefill(byte_tokenizer):
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    codec = TextCodec(byte_tokenizer(specials, QWEN_TEMPLATE, eos_token="<|im_end|>"), frozenset({0, 2}), 0)
    chat = [{"role": "system", "content": "Add."}, *CHAT]
    expected = [1, "system\nAdd.", 2, "\n", 1, "user\n1+1 ", 2, "\n", 1, "assistant\n1+1 ="]
    assert codec.encode_prompt(chat=chat, prefill="1+1 =") == ids_of(codec, expected)
    assert codec.encode_answer("2") == [*ids_of(codec, ["2"]), 2]


def test_llama_template_begins_with_one_bos(byte_tokenizer):
    specials = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = byte_tokenizer(specials, LLAMA_TEMPLATE, bos="<|begin_of_text|>", eos_token="<|eot_id|>")
    codec = TextCodec(tokenizer, frozenset({1, 4}), 1)
    expected = [0, 2, "user", 3, "\n\n1+1", 4, 2, "assistant", 3, "\n\n"]
    assert codec.encode_prompt(chat=CHAT) == ids_of(codec, expected)
    assert codec.encode_prompt(text="1+1") == ids_of(codec, [0, "1+1"])


def test_a_text_prompt_never_ends_with_an_end_that_the_tokenizer_appends(byte_tokenizer):
    from tokenizers import processors

    tokenizer = byte_tokenizer(["</s>"], "", eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 0)]
    )
    codec = TextCodec(tokenizer, frozenset({0}), 0)
    assert codec.encode_prompt(text="1+", prefill="1") == ids_of(codec, ["1+1"])
    assert codec.encode_prompt(text="1</s>") == ids_of(codec, ["1", 0]), "what the user wrote stays"


def test_without_a_template_the_sentence_names_the_key(byte_tokenizer):
    codec = TextCodec(byte_tokenizer(["</s>"], "", eos_token="</s>"), frozenset({0}), 0)
    with pytest.raises(ValueError, match=r"data\.prompt\.chat: false"):
        codec.encode_prompt(chat=CHAT)
    for both in ({"chat": CHAT, "text": "1"}, {}):
        with pytest.raises(ValueError, match="either"):
            codec.encode_prompt(**both)


def test_all_eos_ids_count_and_sampling_settings_do_not(tiny_directory, tmp_path):
    shutil.copytree(tiny_directory, tmp_path / "model")
    generation = tmp_path / "model" / "generation_config.json"
    generation.write_text(
        json.dumps({"eos_token_id": [1, 5], "do_sample": True, "temperature": 0.1, "top_k": 1})
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "eos_token_id": [7]}))
    codec = load_tokenizer(ModelSection(path=str(tmp_path / "model")))
    assert codec.eos_ids == {1, 5, 7}


def test_a_tokenizer_that_is_missing_is_one_sentence(tiny_directory, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(tiny_directory / "config.json", directory)
    with pytest.raises(ModelNotReadable, match=r"model\.path: .*tokenizer"):
        load_tokenizer(ModelSection(path=str(directory)))


def test_a_tokenizer_of_another_vocabulary_is_one_sentence(tiny_directory, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_directory, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 1}))
    with pytest.raises(ModelNotReadable, match=r"tokenizer of 32 tokens and a model of 31 embeddings; put"):
        load_tokenizer(ModelSection(path=str(model)))


def test_the_character_tokenizer_round_trips(tiny_config):
    codec = load_tokenizer(tiny_config)
    ids = codec.encode_prompt(text="copy 123 =")
    assert len(ids) == 10 and codec.decode(ids) == "copy 123 ="
    assert codec.encode_prompt(chat=[{"role": "user", "content": "copy 123"}], prefill=" =") == ids
    assert codec.encode_answer("1") == [4, 1] and codec.decode([4, 1]) == "1"
    assert codec.encode_prompt(text="Z") == [2]
