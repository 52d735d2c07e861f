"""Calls as the families' own chat templates write them.

The turns are what the templates that trl 1.16 packs make of two calls of an assistant, behind the prompt.
"""

import pytest
from headrace_servicekit.tool_calls import Call, beside_calls, typed

SCHEMA = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}}
GIVEN = {"a": 1, "b": 'x "y"\n<z> 2', "c": [1, "two"]}
TURNS = {
    "qwen2_5": (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3": (
        "hermes",
        "<think>\n\n</think>\n\nLet me see.\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_6": (
        "qwen3_coder",
        "\n</think>\n\nLet me see.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        'x "y"\n<z> 2\n</parameter>\n<parameter=c>\n[1, "two"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "nemotron_3_nano": (
        "qwen3_coder",
        "</think>Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        'x "y"\n<z> 2\n</parameter>\n<parameter=c>\n[1, "two"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n",
    ),
    "glm4moe": (
        "glm",
        "\n<think></think>\nLet me see.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        '<arg_key>b</arg_key>\n<arg_value>x "y"\n<z> 2</arg_value>\n<arg_key>c</arg_key>\n'
        '<arg_value>[1, "two"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
    ),
}
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}}<|eot_id|>'


@pytest.mark.parametrize("template", TURNS)
def test_what_a_template_writes_is_read_as_it_was_meant(template):
    form, turn = TURNS[template]
    said, calls = beside_calls(form, turn)
    assert said.endswith("Let me see.") and "tool_call" not in said
    assert [typed(call, SCHEMA) for call in calls] == [Call("add", GIVEN), Call("now", {})]


def test_llama_writes_one_call_and_nothing_else():
    """Its template refuses two calls in a turn."""
    assert beside_calls("llama3", LLAMA) == ("", [Call("add", GIVEN)])


@pytest.mark.parametrize(
    ("form", "turn", "words"),
    [
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", "no </tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "not <function=NAME>"),
        ("glm", "<tool_call>add\n<arg_key>a", "no </tool_call>"),
        ("glm", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "no name"),
    ],
)
def test_a_broken_call_says_what_is_wrong(form, turn, words):
    (call,) = beside_calls(form, turn)[1]
    assert words in call.problem and not call.name


def test_a_text_that_is_not_of_its_kind_stays_a_text():
    call = Call("add", {"a": "one", "b": "1", "other": "{"}, texts=True)
    assert typed(call, SCHEMA).arguments == {"a": "one", "b": "1", "other": "{"}
