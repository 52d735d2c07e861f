"""Calls of tools in what a model says, by the form in which its family writes them.

A turn's text comes without special tokens, so that marks which are such tokens (Llama's `<|python_tag|>`, Mistral's
`[TOOL_CALLS]` and `[ARGS]`) may be there or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*```$", re.DOTALL)
_LLAMA_MARKS = re.compile(r"<\|(?:python_tag|eom_id|eot_id)\|>")
_MISTRAL_MARKS = re.compile(r"\[TOOL_CALLS\]|</s>")
_MISTRAL_CALL = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BETWEEN = re.compile(r"[\s;]*")


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; `problem` says why it is none."""

    name: str = ""
    arguments: Any = None
    problem: str = ""
    texts: bool = field(default=False, repr=False)
    """The arguments are texts, and the tool's schema says what each is: see `typed`."""


def hermes_calls(text: str) -> list[Call]:
    """Calls of Hermes, Qwen 2.5 and Qwen 3: JSON objects in <tool_call> tags, among other text.

    >>> hermes_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [Call(name='add', arguments={'a': 1}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        found.append(_call(inner) if end else Call(problem="a <tool_call> has no </tool_call>"))
    return found


def json_calls(text: str) -> list[Call]:
    """Calls of models that say nothing else in the turn: one JSON object with a name, or a list of them.

    The object's arguments may be called `parameters`, as Llama 3 does.

    >>> json_calls('{"name": "add", "parameters": {"a": 1}}'), json_calls("It is 4.")
    ([Call(name='add', arguments={'a': 1}, problem='')], [])
    """
    text = text.strip()
    if fenced := _FENCE.match(text):
        text = fenced[1]
    if text[:1] not in ("{", "["):
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [_call(text)] if '"name"' in text else []
    listed = found if isinstance(found, list) else [found]
    named = all(isinstance(each, dict) and "name" in each for each in listed)
    return [_of_object(each) for each in listed] if named else []


def llama3_calls(text: str) -> list[Call]:
    """Calls of Llama 3.1 to 3.3: JSON objects with `name` and `parameters`, behind each other or with ; between.

    >>> llama3_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}')
    [Call(name='add', arguments={'a': 1}, problem=''), Call(name='now', arguments={}, problem='')]
    """
    text = _LLAMA_MARKS.sub("", text).strip()
    found: list[Call] = []
    place = 0
    while text.startswith("{", place):
        try:
            value, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return [*found, _call(text[place:])] if '"name"' in text[place:] else found
        if not (isinstance(value, dict) and "name" in value):
            return found
        found.append(_of_object(value))
        place = _after(_BETWEEN, text, place)
    return found


def mistral_calls(text: str) -> list[Call]:
    """Calls of Mistral: a list of objects behind [TOOL_CALLS], or in newer models NAME[ARGS]{…} for each call.

    >>> mistral_calls('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]')
    [Call(name='add', arguments={'a': 1}, problem='')]
    >>> mistral_calls('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')
    [Call(name='add', arguments={'a': 1}, problem=''), Call(name='now', arguments={}, problem='')]
    """
    _, mark, after = text.partition("[TOOL_CALLS]")  # other text may stand before it
    text = _MISTRAL_MARKS.sub("", after if mark else text).strip()
    if text.startswith("["):
        return json_calls(text)
    found: list[Call] = []
    place = 0
    while named := _MISTRAL_CALL.match(text, place):
        try:
            value, place = json.JSONDecoder().raw_decode(text, named.end())
        except (ValueError, RecursionError) as error:
            return [*found, Call(problem=f"the arguments of {named[1]} are no JSON ({error})")]
        found.append(Call(named[1], value))
    return found


def qwen3_coder_calls(text: str) -> list[Call]:
    """Calls of Qwen3-Coder, Qwen 3.5 and later and Nemotron 3: a tag for the function and for each argument, as text.

    >>> qwen3_coder_calls("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>")
    [Call(name='add', arguments={'a': '1'}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        named = _FUNCTION.fullmatch(inner.strip())
        if not end:
            found.append(Call(problem="a <tool_call> has no </tool_call>"))
        elif named is None:
            found.append(Call(problem="the call is not <function=NAME>…</function>"))
        else:
            given = {name: _unwrapped(value) for name, value in _PARAMETER.findall(named[2])}
            found.append(Call(named[1], given, texts=True))
    return found


def glm_calls(text: str) -> list[Call]:
    """Calls of GLM-4.5 and later: the function's name, then a tag for each argument's name and its text.

    >>> glm_calls("<tool_call>add\\n<arg_key>a</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>")
    [Call(name='add', arguments={'a': '1'}, problem='')]
    """
    found = []
    for inner, end in _HERMES.findall(text):
        name, mark, rest = inner.partition("<arg_key>")
        if not end or not name.strip() or "<" in name:
            problem = "has no name of a function" if end else "has no </tool_call>"
            found.append(Call(problem=f"a <tool_call> {problem}"))
        else:
            found.append(Call(name.strip(), dict(_ARGUMENT.findall(mark + rest)), texts=True))
    return found


def typed(call: Call, parameters: Mapping[str, Any]) -> Call:
    """A call whose arguments are of the kinds that the JSON schema of its tool's parameters names.

    A text that is none of its kind stays a text: whoever checks the arguments says what is wrong.
    """
    if not call.texts:
        return call
    kinds = parameters.get("properties", {})
    given = {name: _read(text, kinds.get(name, {})) for name, text in call.arguments.items()}
    return Call(call.name, given, call.problem)


def _read(text: str, schema: Mapping[str, Any]) -> Any:
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _unwrapped(text: str) -> str:
    """Without the line breaks that stand behind the opening and before the closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


PARSERS: Mapping[str, Callable[[str], list[Call]]] = {
    "hermes": hermes_calls,
    "json": json_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
    "qwen3_coder": qwen3_coder_calls,
    "glm": glm_calls,
}
TAGGED = frozenset({"hermes", "qwen3_coder", "glm"})
"""Forms whose calls stand in <tool_call> tags."""


def beside_calls(form: str, text: str) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and these.

    >>> beside_calls("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={}, problem='')])
    """
    calls = PARSERS[form](text)
    if not calls:
        return text, []
    if form in TAGGED:
        return _HERMES.sub("", text).strip(), calls
    before, mark, _ = text.partition("[TOOL_CALLS]")
    return before.strip() if form == "mistral" and mark else "", calls


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    matched = pattern.match(text, place)
    return matched.end() if matched else place


def _call(text: str) -> Call:
    try:
        return _of_object(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call(problem=f"the call is no JSON ({error})")


def _of_object(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call(problem='the call is no object with a name: {"name": NAME, "arguments": {…}}')
    return Call(found["name"], found.get("arguments", found.get("parameters", {})))
