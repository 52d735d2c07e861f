"""Calls as the families' own chat templates write them.

The turns are what the templates that trl 1.16 packs make of two calls of an assistant, behind the prompt.
"""

import pytest
from headrace_servicekit.tool_arguments import typed
from headrace_servicekit.tool_calls import Call, beside_calls

NAMES = {"add", "now"}
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
    # As vLLM 0.32's parsers of these families describe them.
    "deepseek_v3": (
        "deepseek",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_1": (
        "deepseek",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
        '{"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v4": (
        "deepseek",
        'Let me see.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">x "y"\n<z> 2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="c" string="false">[1, "two"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ),
    "minimax_m2": (
        "minimax",
        'Let me see.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">'
        'x "y"\n<z> 2</parameter>\n<parameter name="c">[1, "two"]</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "olmo3": (
        "pythonic",
        'Let me see.\n<function_calls>\nadd(a=1, b="x \\"y\\"\\n<z> 2", c=[1, "two"])\nnow()\n</function_calls>',
    ),
}
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": "x \\"y\\"\\n<z> 2", "c": [1, "two"]}}<|eot_id|>'


@pytest.mark.parametrize("template", TURNS)
def test_what_a_template_writes_is_read_as_it_was_meant(template):
    form, turn = TURNS[template]
    said, calls = beside_calls(form, turn, NAMES)
    assert said.endswith("Let me see.") and "call" not in said
    assert [typed(call, SCHEMA) for call in calls] == [Call("add", GIVEN), Call("now", {})]


def test_llama_writes_one_call_and_nothing_else():
    """Its template refuses two calls in a turn."""
    assert beside_calls("llama3", LLAMA, NAMES) == ("", [Call("add", GIVEN)])


@pytest.mark.parametrize("marks", [("", ""), ("<|python_start|>", "<|python_end|>")], ids=["bare", "marked"])
def test_llama_4_writes_a_list_of_pythons_calls(marks):
    turn = f'{marks[0]}[add(a=1, b="x \\"y\\"\\n<z> 2", c=[1, "two"]), now()]{marks[1]}'
    assert beside_calls("pythonic", turn, NAMES) == ("", [Call("add", GIVEN), Call("now", {})])


@pytest.mark.parametrize(
    "text", ["[1, 2]", "[sub(a=1)]", "[add]", "It is [add(a=1)].", "[add(a=1)", "[" * 300 + "]" * 300]
)
def test_a_list_that_is_no_call_of_a_tool_is_an_answer(text):
    assert beside_calls("pythonic", text, NAMES) == (text, [])


def test_values_that_are_no_literals_are_named_and_not_run():
    turn = "<function_calls>add(a=__import__('os').getcwd(), b=true)\nadd(1)\nadd(a=null)</function_calls>"
    first, second, third = beside_calls("pythonic", turn, NAMES)[1]
    assert "no literals" in first.problem and "have no names" in second.problem
    assert third == Call("add", {"a": None})


@pytest.mark.parametrize(
    ("form", "turn", "words"),
    [
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{",
            "no <｜tool▁call▁end｜>",
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{<｜tool▁call▁end｜>",
            "no JSON",
        ),
        ("minimax", '<minimax:tool_call><invoke name="add"><parameter name="a">1', "no </invoke>"),
        ("pythonic", "<function_calls>add(a=</function_calls>", "no Python"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1", "no </tool_call>"),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "not <function=NAME>"),
        ("glm", "<tool_call>add\n<arg_key>a", "no </tool_call>"),
        ("glm", "<tool_call>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "no name"),
    ],
)
def test_a_broken_call_says_what_is_wrong(form, turn, words):
    (call,) = beside_calls(form, turn, NAMES)[1]
    assert words in call.problem and call.name in ("", "add")


def test_a_text_that_is_not_of_its_kind_stays_a_text():
    call = Call("add", {"a": "one", "b": "1", "other": "{"}, texts=True)
    assert typed(call, SCHEMA).arguments == {"a": "one", "b": "1", "other": "{"}


TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
LEFT = [
    TEXT,
    {},
    True,
    {"description": "anything"},
    {"type": ["string", "null"]},
    {"type": ["integer", "string"]},
    {"anyOf": [TEXT, {"type": "null"}], "default": None},
    {"oneOf": [NUMBER, {"anyOf": [{"type": "null"}, TEXT]}]},
    {"allOf": [TEXT, {"minLength": 1}]},
    {"allOf": [{"$ref": "#/$defs/Code"}], "default": "x"},
    {"$ref": "#/$defs/Code"},
    {"$ref": "#/$defs/Either"},
    {"enum": ["89073", "true", "null", "[1]", '{"a": 1}', "1e5"]},
    {"anyOf": [{"const": each} for each in ("89073", "true", "null", "[1]", '{"a": 1}', "1e5")]},
    {"type": "string", "nullable": True},
    {"not": NUMBER},
]
DEFS = {
    "Code": {"type": "string", "title": "Code"},
    "Either": {"anyOf": [NUMBER, {"$ref": "#/$defs/Code"}]},
    "Loop": {"anyOf": [NUMBER, {"$ref": "#/$defs/Loop"}]},
}


@pytest.mark.parametrize("text", ["89073", "true", "null", "[1]", '{"a": 1}', "1e5"])
@pytest.mark.parametrize("schema", LEFT, ids=str)
def test_a_text_that_the_schema_allows_stays_a_text(schema, text):
    call = Call("find", {"zip": text}, texts=True)
    assert typed(call, {"$defs": DEFS, "properties": {"zip": schema}}).arguments == {"zip": text}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (NUMBER, "5", 5),
        ({"type": "boolean"}, "true", True),
        ({"type": "null"}, "null", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [NUMBER, {"type": "null"}]}, "5", 5),
        ({"type": "array", "items": TEXT}, '["5", "6"]', ["5", "6"]),
        ({"type": "object", "additionalProperties": TEXT}, '{"a": "5"}', {"a": "5"}),
        ({"enum": [1, "auto"]}, "1", 1),
        ({"enum": [1, "auto"]}, "auto", "auto"),
        ({"const": 3}, "3", 3),
        ({"allOf": [{}, NUMBER]}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"properties": {}}, '{"a": 1}', {"a": 1}),
        ({"items": TEXT}, "[1]", [1]),
        ({"type": "number"}, "NaN", "NaN"),
        (NUMBER, "five", "five"),
    ],
    ids=str,
)
def test_a_text_that_the_schema_does_not_allow_is_read(schema, text, value):
    call = Call("find", {"zip": text}, texts=True)
    assert typed(call, {"$defs": DEFS, "properties": {"zip": schema}}).arguments == {"zip": value}


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ({}, "5"),
        ({"additionalProperties": TEXT}, "5"),
        ({"additionalProperties": NUMBER}, 5),
        ({"patternProperties": {"^z": NUMBER}}, 5),
        ({"$ref": "#/$defs/Given", "$defs": {"Given": {"properties": {"zip": NUMBER}}}}, 5),
        ({"allOf": [{"properties": {"zip": NUMBER}}]}, 5),
        ({"allOf": [{"properties": {"zip": TEXT}}]}, "5"),
    ],
    ids=str,
)
def test_the_schema_of_an_argument_is_found_where_it_is(parameters, value):
    assert typed(Call("find", {"zip": "5"}, texts=True), parameters).arguments == {"zip": value}


def test_annotations_of_python_keep_texts_and_read_the_rest():
    """As pydantic writes them, which makes the schemas of users' own tools."""
    from decimal import Decimal
    from enum import Enum
    from typing import Annotated, Any, Literal, Optional

    from pydantic import Field, create_model

    class Unit(Enum):
        ONE = "1"

    kinds = {
        str | None: "1",
        Optional[Literal["1", "2"]]: "1",  # noqa: UP045
        Any: "1",
        Decimal: "1",
        Unit: "1",
        Unit | None: "1",
        int | str: "1",
        Annotated[str, Field(pattern="^1$")]: "1",
        int | None: 1,
        float: 1,
        Literal[1, 2]: 1,
    }
    model = create_model("Given", **{f"a{at}": (kind, ...) for at, kind in enumerate(kinds)})
    call = Call("find", {f"a{at}": "1" for at in range(len(kinds))}, texts=True)
    assert list(typed(call, model.model_json_schema()).arguments.values()) == list(kinds.values())


ANSWERS = [
    ("json", '{"name": "Ann", "age": 3}'),
    ("json", '```json\n{"name": "Ann", "age": 3}\n```'),
    ("json", '[{"name": "Ann"}, {"name": "Bob"}]'),
    ("json", '[{"name": "add", "arguments": {}}, {"name": "Bob"}]'),
    ("json", '{"name": "Ann", "age": '),
    ("json", '{"name": "add", "age": 3}'),
    ("json", '{"name": "add", "arguments": [1]}'),
    ("json", '{"name": "add", "arguments": "1 + 1"}'),
    ("json", '{"name": ["add"], "arguments": {}}'),
    ("json", '{"person": {"name": "add", "arguments": {'),
    ("llama3", '{"name": "Ann", "parameters": {"a": 1}}'),
    ("llama3", '{"name": "add", "parameters": {}}; {"name": "Ann"}'),
    ("llama3", '{"name": "Ann", "age": '),
    ("mistral", 'Result {"a": 1}'),
    ("mistral", '[{"name": "Ann", "arguments": {}}]'),
    ("mistral", 'Result {"a": '),
]


@pytest.mark.parametrize(("form", "text"), ANSWERS)
def test_json_that_is_an_answer_is_no_call(form, text):
    assert beside_calls(form, text, NAMES) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", '{"name": "add", "arguments": {"a": 1}}'),
        ("json", '```json\n[{"name": "add", "parameters": {"a": 1}}]\n```'),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}'),
        ("mistral", 'add{"a": 1}'),
        ("mistral", '[{"name": "add", "arguments": {"a": 1}}]'),
    ],
)
def test_json_that_names_a_tool_is_a_call_without_marks(form, text):
    assert beside_calls(form, text, NAMES)[1] == [Call("add", {"a": 1})]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "sub"}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "sub"}'),
        ("mistral", '[TOOL_CALLS][{"name": "sub"}]'),
        ("mistral", "[TOOL_CALLS]sub[ARGS]{}"),
    ],
)
def test_behind_a_mark_a_call_counts_whatever_it_names(form, text):
    """The model is told that there is no such tool."""
    assert beside_calls(form, text, NAMES)[1] == [Call("sub", {})]


@pytest.mark.parametrize(
    "text", ['{"name": "add", "arguments": {"a": ', '[{"name": "add", "arguments": {"a": ']
)
def test_a_broken_call_of_a_tool_is_one_without_marks(text):
    (call,) = beside_calls("json", text, NAMES)[1]
    assert call.problem


def test_the_id_that_a_model_gives_its_call_is_kept():
    for text in (
        '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefghi"}]',
        "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}",
    ):
        (call,) = beside_calls("mistral", text, NAMES)[1]
        assert call.id == "abcdefghi"


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "[", "(?P<x"])
def test_patterns_of_names_are_not_tried(pattern):
    """They ran in the event loop of a rollout, over names that a model wrote: forty characters were hours."""
    schema = {"properties": {"n": {"type": "string"}}, "patternProperties": {pattern: NUMBER}}
    read = typed(Call("t", {"a" * 40 + "!": "5", "n": "5"}, texts=True), schema).arguments
    assert read == {"a" * 40 + "!": 5, "n": "5"}
