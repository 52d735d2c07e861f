"""Calls of tools in what a model says, by the form in which its family writes them.

A turn's text comes without special tokens, so that marks which are such tokens (Llama's `<|python_tag|>`, Mistral's
`[TOOL_CALLS]` and `[ARGS]`) may be there or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
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


PARSERS: Mapping[str, Callable[[str], list[Call]]] = {
    "hermes": hermes_calls,
    "json": json_calls,
    "llama3": llama3_calls,
    "mistral": mistral_calls,
}


def beside_calls(form: str, text: str) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and these.

    >>> beside_calls("hermes", 'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    ('Let me see.', [Call(name='add', arguments={}, problem='')])
    """
    calls = PARSERS[form](text)
    if not calls:
        return text, []
    if form == "hermes":
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
