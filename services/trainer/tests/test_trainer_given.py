"""Rows as ids: what is trained of a conversation, and rows that cannot be read."""

from __future__ import annotations

import pytest
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.openings import GivenAnswer
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.given import GivenReader

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETS = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}")
CHAT = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "22"},
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": "44", "weight": 0},
    {"role": "user", "content": "5"},
]


@pytest.fixture
def reader(tiny_directory):
    """Makes a reader whose tokenizer has a chat template, and its codec."""

    def make(template: str = TEMPLATE, *, all_turns: bool = True):
        section = ModelSection(path=str(tiny_directory), dtype="float32")
        made, codec = GivenReader(section, all_turns=all_turns), load_tokenizer(section)
        codec.tokenizer.chat_template = template
        made._codec = codec
        return made, codec

    return make


def spoken(sample, codec):
    """The text of the trained tokens, turn by turn."""
    ids = [sample.tokens[place] for place in sample.trained]
    return codec.decode(ids, skip_special_tokens=False).split(codec.tokenizer.eos_token)


def test_every_turn_with_its_end_is_trained_but_those_that_weigh_nothing(reader):
    made, codec = reader()
    (sample,) = made.read(GivenAnswer(chat=CHAT, answer="66").model_dump_json(), {}, "row")
    assert spoken(sample, codec) == ["22", "66", ""]
    whole = codec.render([*CHAT, {"role": "assistant", "content": "66"}], {"add_generation_prompt": False})
    assert sample.tokens == codec.encode_rendered(whole)
    (alone,) = reader(all_turns=False)[0].read(
        GivenAnswer(chat=CHAT, answer="66").model_dump_json(), {}, "row"
    )
    assert spoken(alone, codec) == ["66", ""] and alone.tokens == sample.tokens


def test_a_template_that_rewrites_turns_is_refused_and_the_row_is_told(reader):
    made, _ = reader(FORGETS)
    with pytest.raises(Refusal, match=r"row \('5'\): the chat template shows an earlier turn.*turns: last"):
        made.read(GivenAnswer(chat=CHAT, answer="66").model_dump_json(), {}, "row")


def test_a_row_beyond_the_positions_is_told_by_how_it_begins(reader):
    made, _ = reader()
    with pytest.raises(
        Refusal, match=r"row \('7+…'\) has \d+ tokens with its answer, and the model reads \d+"
    ):
        made.read(GivenAnswer(text="7" * 5000, answer="66").model_dump_json(), {}, "row")


CALLING = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content or '' }}{% for c in m.tool_calls %}{{ c.n }}{% endfor %}"
)


def test_an_answer_that_calls_tools_is_trained_as_the_template_writes_it(reader):
    made, codec = reader(CALLING)
    turn = {"role": "assistant", "content": None, "tool_calls": [{"n": "7"}, {"n": "8"}]}
    given = GivenAnswer(chat=CHAT, answer="shown", turn=turn)
    (sample,) = made.read(given.model_dump_json(), {}, "row")
    assert spoken(sample, codec) == ["22", "78", ""]
    (alone,) = reader(CALLING, all_turns=False)[0].read(given.model_dump_json(), {}, "row")
    assert spoken(alone, codec) == ["78", ""] and alone.tokens == sample.tokens


def test_a_text_is_trained_but_for_its_first_token_which_follows_nothing(reader):
    made, codec = reader(None)
    (sample,) = made.read(GivenAnswer(text="", answer="1+2").model_dump_json(), {}, "row")
    assert codec.decode(sample.tokens) == "1+2" and sample.tokens[-1] == codec.tokenizer.eos_token_id
    assert sample.trained == [1, 2, 3]
