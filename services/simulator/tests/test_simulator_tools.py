"""The built-in conversation with tools: calls are read, checked, answered within limits, and told what is wrong."""

from __future__ import annotations

import time

import pytest
from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.tool_calls import PARSERS, hermes_calls, json_calls
from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.conversation.backend import Conversations
from headrace_simulator.backends.conversation.calls import Tool
from headrace_simulator.backends.conversation.tools import calculator

OK = simulator_pb2.OUTCOME_STATUS_OK
TOOLS = '''
import os
import time
from typing import Annotated, Literal

from pydantic import Field


def weather(town: Annotated[str, Field(description="where")], unit: Literal["C", "F"] = "C", days: int = 1) -> dict:
    """Tells the weather.

    Not for the model.
    """
    return {"town": town, "unit": unit, "days": days}


def hang() -> str:
    """Never answers."""
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass


def long() -> str:
    return "x" * 10_000


def raw() -> bytes:
    return b"caf\\xe9 \\xff"


def half() -> str:
    return "\\ud800"


def fails() -> str:
    raise KeyError("no such town")


def leaves() -> str:
    raise SystemExit(3)


def untyped(town):
    return town


def anything(*towns: str):
    return towns
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kit.py").write_text(TOOLS)
    return "kit.py"


def talk(**options):
    return Conversations().converse("tools", options)


def call(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def answers(environment, content):
    messages, reward, done = environment.step({"role": "assistant", "content": content})
    assert reward == 0.0 and done is not bool(messages)
    assert all(message["role"] == "tool" for message in messages)
    return [message["content"] for message in messages]


def test_a_signature_becomes_a_schema(file):
    environment = talk(tools=["calculator", f"{file}:weather"], system="Use tools.")
    messages, tools = environment.reset(0, {"question": "2 * 3?"})
    assert messages == [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "2 * 3?"}]
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "weather"]
    assert tools[1] == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "description": "where"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": "integer", "default": 1},
                },
                "required": ["town"],
                "additionalProperties": False,
            },
        },
    }
    given = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert environment.reset(0, given)[0][1:] == given["messages"]


def test_calls_of_a_turn_are_answered_in_order_and_a_turn_without_any_is_the_last(file):
    environment = talk(tools=["calculator", f"{file}:weather"])
    sums, asks = call("calculator", '{"expression": "(3 + 4) * 12"}'), call("weather", '{"town": "Ulm"}')
    both = f"I see. {sums} and {asks}"
    assert answers(environment, both) == ["84", '{"town": "Ulm", "unit": "C", "days": 1}']
    assert answers(environment, "It is 84.") == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (call("calculater"), "there is no tool 'calculater'; tools: calculator"),
        (call("calculator"), "expression: Field required"),
        (call("calculator", '{"expression": "1", "base": 2}'), "base: Extra inputs are not permitted"),
        (call("calculator", '"1 + 1"'), "arguments: Input should be a valid dictionary"),
        (call("calculator", '{"expression": "1 / 0"}'), "ZeroDivisionError"),
        (call("calculator", '{"expression": "__import__(1)"}'), "only numbers"),
        (call("calculator", "{'expression': 1}"), "the call is no JSON"),
        ("<tool_call>[1]</tool_call>", "no object with a name"),
        ('<tool_call>{"name": "calculator"', "has no </tool_call>"),
    ],
)
def test_a_broken_call_is_a_message_to_the_model(content, words):
    (found,) = answers(talk(), content)
    assert found.startswith("error: ") and words in found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("long", "x" * 4000 + " [6000 characters are left out]"),
        ("raw", "caf� �"),
        ("half", "?"),
        ("fails", "error: fails: KeyError: 'no such town'"),
        ("leaves", "error: leaves: SystemExit: 3"),
    ],
)
def test_whatever_a_tool_does_the_model_reads_bounded_text(file, name, expected):
    assert answers(talk(tools=[f"{file}:{name}"]), call(name)) == [expected]


def test_calls_that_hang_are_stopped_and_the_turn_keeps_its_deadline(file):
    environment = talk(tools=[f"{file}:hang", "calculator"], deadline_s=0.3)
    begun = time.monotonic()
    found = answers(environment, call("hang") + call("hang") + call("calculator", '{"expression": "1"}'))
    assert time.monotonic() - begun < 5
    assert found[:2] == ["error: hang was stopped: the calls of a turn may take 0.3 s"] * 2


def test_a_thousand_calls_are_not_answered():
    found = answers(talk(), call("calculator", '{"expression": "2"}') * 1000)
    assert found == ["2"] * 8 + ["error: 1000 calls in one turn; 8 are answered"]


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"tools": ["calculater"]}, "options_json.tools", "did you mean 'calculator'"),
        (
            {"tools": ["kit.py:untyped"]},
            "options_json.tools",
            "'town' has no type; annotate it, as town: str",
        ),
        ({"tools": ["kit.py:anything"]}, "options_json.tools", "'towns' has no name"),
        ({"tools": ["kit.py:none"]}, "options_json.tools", "there is no function 'none'"),
        ({"tools": []}, "options_json.tools", "one at least"),
        ({"tools": ["calculator", "calculator"]}, "options_json.tools", "names of their own"),
        (
            {"tools": [{"name": "python", "options": {"memory": 1}}]},
            "options_json.tools.python.memory",
            "memory_mib",
        ),
        ({"tools": [{"name": "kit.py:weather", "options": {"a": 1}}]}, "options_json.tools", "no options"),
        ({"parser": "xml"}, "options_json.parser", "hermes"),
        ({"dedline_s": 1}, "options_json.dedline_s", "deadline_s"),
    ],
)
def test_options_that_are_wrong_are_named(file, options, key, words):
    with pytest.raises(BackendError) as caught:
        talk(**options)
    assert caught.value.field == key and words in caught.value.message


def test_families_of_calls_are_read():
    (found,) = json_calls('```json\n{"name": "f", "parameters": {"a": [1]}}\n```')
    assert (found.name, found.arguments) == ("f", {"a": [1]})
    two = json_calls('[{"name": "f", "arguments": {}}, {"name": "g"}]')
    assert [(each.name, each.arguments) for each in two] == [("f", {}), ("g", {})]
    assert json_calls('{"answer": 4}') == [] and json_calls("4") == [] and json_calls("[1, 2]") == []
    assert "no JSON" in json_calls('{"name": "f", "arguments": {')[0].problem
    assert hermes_calls("no call") == []
    thought = '<think>\nMaybe {"name": "f"}\n</think>\n<tool_call>{"name": "f", "arguments": {"a": "<b>"}}</tool_call>'
    assert [each.arguments for each in hermes_calls(thought)] == [{"a": "<b>"}]


ADD = ("add", {"a": 1, "b": [2.5, "x}]"]})
NOW = ("now", {})
ARGUMENTS = '{"a": 1, "b": [2.5, "x}]"]}'


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        # What the families' chat templates make of an assistant's `tool_calls`, with and without special tokens.
        ("hermes", f'\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>', [ADD]),
        ("llama3", f'{{"name": "add", "parameters": {ARGUMENTS}}}', [ADD]),
        ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}<|eom_id|>', [ADD]),
        (
            "llama3",
            f'{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
            [ADD, NOW],
        ),
        ("llama3", "It is 4.", []),
        ("llama3", '{"answer": 4}', []),
        (
            "mistral",
            f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]</s>',
            [ADD],
        ),
        (
            "mistral",
            f'[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
            [ADD, NOW],
        ),
        ("mistral", f"I see.[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}", [ADD]),
        ("mistral", f"add{ARGUMENTS}now{{}}", [ADD, NOW]),
        ("mistral", "It is 4. Or {5}.", []),
    ],
)
def test_each_family_is_read(family, text, calls):
    found = PARSERS[family](text)
    assert [(each.name, each.arguments) for each in found] == calls and not any(
        each.problem for each in found
    )


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3", '{"name": "add", "parameters": {'),
        ("mistral", 'add{"a": '),
        ("mistral", '[{"name": 3}]'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("json", '{"name": ' + "[" * 100_000),
    ],
)
def test_calls_that_are_none_are_named_in_each_family(family, text):
    (found,) = PARSERS[family](text)
    assert found.problem


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(2 ** 3) % 5", "2"),
        ("7 // 2", "3"),
        ("1 / 4", "0.25"),
        (" 2 ** 0.5 ", "1.4142135623730951"),
    ],
)
def test_the_calculator_computes(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression", ["9 ** 9 ** 9", "2 ** 100000", "1 +", "a", "(-1) ** 0.5", "True", "1 if 2 else 3"]
)
def test_the_calculator_refuses_what_is_too_large_or_no_arithmetic(expression):
    begun = time.monotonic()
    with pytest.raises((ValueError, SyntaxError, OverflowError)):
        calculator(expression)
    assert time.monotonic() - begun < 10


def test_results_are_json_where_they_are_no_text():
    def listed(count: int) -> list[int]:
        return [*range(count)]

    assert Tool(listed).begin({"count": 3}, 1.0)(1.0) == "[0, 1, 2]"


async def test_tools_are_called_in_a_child(simulator, tmp_path):
    (tmp_path / "kit.py").write_text(TOOLS)
    options = {"tools": ["calculator", "kit.py:hang"], "deadline_s": 0.5}
    pool = await simulator.open("tools", backend="conversation", options=options, step_timeout_s=20.0)
    first = await pool.reset(options={"question": "12 * 12?"})
    assert "calculator" in first.tools_json and first.messages[0].content == "12 * 12?"
    called = await pool.say(call("calculator", '{"expression": "12 * 12"}') + call("hang"))
    assert called.status == OK and not called.terminated
    assert called.messages[0].content == "144"
    assert "was stopped" in called.messages[1].content
    assert (await pool.say("144")).terminated
